"""The memory of one slab: pages and their versions, in one mapping that outlives the process which serves it.

    [head: which slab it is, and whether it counts][versions, u64 each][pages]

A slab process may be killed between any two instructions, and the next one takes up what is here (`slab_keeper`). So
this memory never says what is not so:

- The head is written whole before it counts, and one word, `LIVE`, makes it count. A slab that is freed loses that
  word first: whatever else is left of it, nobody takes it up.
- A page that is being written has no version (0: never written). The new one is set after the last byte. So a page that
  was cut off in the middle is one that this host does not have; its borrower has it, since a write stands in its own
  ring before it is sent.

Only the processor's own order is needed: what a killed process stored before the instruction at which it was stopped
is there, in order, and nothing after it.
"""

import contextlib
import struct
import zlib
from array import array

import msgspec

from covey.ports.pages import Pages, SharedRing

HEAD_BYTES = 4096
"""Bytes of the head: a page of the machine, so that versions and pages begin at a page too."""
MAGIC = b"coveyslb"
LIVE, REACHED = 1, 2
_HEAD = struct.Struct("<8sQII")
"""Head: magic, live or not, and length and checksum of the record behind it."""
_LIVE_AT = 8
VERSION_BYTES = 8


class SlabHead(msgspec.Struct, frozen=True):
    """Record of a slab."""

    borrower: str
    volume: str
    index: int
    epoch: int
    secret: bytes
    page_bytes: int
    slab_bytes: int


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(SlabHead)


def _data_at(pages: int) -> int:
    return HEAD_BYTES + -(-pages * VERSION_BYTES // HEAD_BYTES) * HEAD_BYTES


def memory_bytes(slab_bytes: int, page_bytes: int) -> int:
    """Bytes of the whole mapping of a slab."""
    return _data_at(slab_bytes // page_bytes) + slab_bytes


class SlabPages:
    """A view of a slab that counts. `pages` and `versions` cover exactly its pages and their versions."""

    def __init__(self, shared: SharedRing, record: SlabHead) -> None:
        self.shared, self.record = shared, record
        count = record.slab_bytes // record.page_bytes
        at = _data_at(count)
        self.versions = shared.view[HEAD_BYTES : HEAD_BYTES + count * VERSION_BYTES].cast("Q")
        self.pages = shared.view[at : at + record.slab_bytes]

    @classmethod
    def make(cls, pages: Pages, record: SlabHead) -> "SlabPages":
        """Make a slab of zeros. OSError when there is no memory for it."""
        shared = pages.make_ring(memory_bytes(record.slab_bytes, record.page_bytes), sparse=True)
        body = _encode(record)
        shared.view[_HEAD.size : _HEAD.size + len(body)] = body
        _HEAD.pack_into(shared.view, 0, MAGIC, 0, len(body), zlib.crc32(body))
        shared.view[_LIVE_AT] = LIVE
        return cls(shared, record)

    @classmethod
    def take_up(cls, shared: SharedRing) -> "SlabPages | None":
        """Take up the slab that an earlier process left; None: it does not count, or is no slab of this version."""
        magic, live, length, crc = _HEAD.unpack_from(shared.view)
        body = bytes(shared.view[_HEAD.size : _HEAD.size + min(length, HEAD_BYTES)])
        if magic != MAGIC or live != LIVE or len(body) != length or zlib.crc32(body) != crc:
            return None
        try:
            record = _decoder.decode(body)
        except msgspec.DecodeError:
            return None
        whole = record.page_bytes > 0 and len(shared.view) == memory_bytes(record.slab_bytes, record.page_bytes)
        return cls(shared, record) if whole else None

    def live_word(self) -> memoryview:
        """One byte, which is `LIVE` as long as the slab counts. Its holder releases it before `let_go`."""
        return self.shared.view[_LIVE_AT : _LIVE_AT + 1]

    @property
    def size(self) -> int:
        """Bytes of the mapping."""
        return len(self.shared.view)

    def touched(self) -> int:
        """Number of pages that have a version."""
        versions = array("Q")
        versions.frombytes(self.versions.tobytes())
        return len(versions) - versions.count(0)

    def end(self) -> None:
        """Mark that the slab does not count any more."""
        self.shared.view[_LIVE_AT] = 0

    def free(self, mapped: bool = False) -> None:
        """End the slab and release it here. `mapped`: another process may have it mapped; its memory is freed all the
        same."""
        self.end()
        if mapped:
            with contextlib.suppress(OSError):  # it keeps the memory until it hears that the slab is gone
                self.shared.empty()
        self.let_go()

    def reached_by_a_device(self) -> None:
        """Note that a device reaches the slab, which therefore ends with this process: a device writes pages and
        versions past it, and a page that was cut off in the middle keeps its older version."""
        self.shared.view[_LIVE_AT] = REACHED

    def let_go(self) -> None:
        """Release the view here; another process may still use the memory."""
        self.versions.release()
        self.pages.release()
        self.shared.close()
