"""Entries of a volume's index: which version of a page lies in which place, and whether the entry itself is whole.

An entry is 24 bytes: version, number of the batch that wrote it, checksum of the page, checksum of the entry. Pages are
looked after in *leaves* of `LEAF_PAGES`: a leaf is read when its first page is used, as arrays and with no step in
Python for a page, and costs memory only if one of its pages was ever written.
"""

import struct
import zlib
from array import array
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from covey.wire.checksum import crc32

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ENTRY = struct.Struct("<QQII")
_SIGNED = struct.Struct("<QQIQ")
ENTRY_BYTES = _ENTRY.size
LEAF_PAGES = 4096
"""Pages that are loaded at once: 0.2 MB of index, half a millisecond."""
_LAYOUT = np.dtype([("version", "<u8"), ("batch", "<u8"), ("checksum", "<u4"), ("signature", "<u4")])


class PageEntry(NamedTuple):
    version: int
    batch: int
    checksum: int
    """Of the page."""


class Leaf:
    """What is known of a run of pages: 13 bytes each."""

    __slots__ = ("checksum", "place", "version")

    def __init__(self, pages: int) -> None:
        self.version = array("Q", bytes(8 * pages))
        """Newest version on disk; 0: never written."""
        self.checksum = array("I", bytes(4 * pages))
        self.place = bytearray(b"\1" * pages)
        """Which place holds the newest version; the first write goes to place 0."""


class Loaded(NamedTuple):
    leaf: Leaf
    unmarked: list[int]
    """Pages, counted from the first of the leaf, whose newest entry is of a batch that nothing says is durable."""


def load(first: int, data: tuple[bytes, bytes], marks: "Marks") -> Loaded | None:
    """A leaf from its entries in the first places and in the second; None when no page of it was ever written. Entries
    that are no entries (torn, never written) count as never written. Of two entries with one version that of the later
    batch counts: the other place is where the next content goes, and may hold half of it."""
    if not any(data[0]) and not any(data[1]):
        return None
    one, two = (_whole(part, first, place) for place, part in enumerate(data))
    second = (two["version"] > one["version"]) | ((two["version"] == one["version"]) & (two["batch"] > one["batch"]))
    newest = np.where(second, two, one)
    written = newest["version"] > 0
    if not written.any():
        return None
    leaf = Leaf(len(newest))
    leaf.version[:] = array("Q", newest["version"].tobytes())
    leaf.checksum[:] = array("I", newest["checksum"].tobytes())
    leaf.place[:] = np.where(written, second, 1).astype(np.uint8).tobytes()
    return Loaded(leaf, np.flatnonzero(written & ~marks.covered(newest["batch"])).tolist())


def _whole(data: bytes, first: int, place: int) -> "NDArray[Any]":
    """Entries, those that are none as zeros."""
    entries = np.frombuffer(data, _LAYOUT).copy()
    used = np.flatnonzero(entries["version"])
    numbers = (2 * (first + used) + place).astype("<u8")
    signed = np.empty((len(used), _SIGNED.size), np.uint8)
    signed[:, :20] = np.frombuffer(data, np.uint8).reshape(-1, ENTRY_BYTES)[used, :20]
    signed[:, 20:] = numbers.view(np.uint8).reshape(-1, 8)
    kept = used[_crc32_of_rows(signed) == entries["signature"][used]]
    whole = np.zeros_like(entries)
    whole[kept] = entries[kept]
    return whole


@cache
def _crc_tables() -> "tuple[int, NDArray[np.uint32]]":
    """CRC32 is linear over exclusive or: each byte of a row adds its own part to the checksum of zeros."""
    zeros = bytes(_SIGNED.size)
    base = zlib.crc32(zeros)
    table = np.empty((_SIGNED.size, 256), np.uint32)
    for at in range(_SIGNED.size):
        for value in range(256):
            table[at, value] = zlib.crc32(zeros[:at] + bytes((value,)) + zeros[at + 1 :]) ^ base
    return base, table


def _crc32_of_rows(rows: "NDArray[np.uint8]") -> "NDArray[np.uint32]":
    """zlib.crc32 of each row of `_SIGNED.size` bytes, shape (rows,)."""
    base, table = _crc_tables()
    found = np.full(len(rows), base, np.uint32)
    for at in range(rows.shape[1]):
        found ^= table[at][rows[:, at]]
    return found


def packed(entry: PageEntry, page: int, place: int) -> bytes:
    return _ENTRY.pack(*entry, crc32(_SIGNED.pack(*entry, 2 * page + place)))


def packed_many(
    versions: Sequence[int], batch: int, checksums: Sequence[int], pages: Sequence[int], places: Sequence[int]
) -> bytes:
    """`packed` of each, one after another; all of one batch."""
    entries = np.empty(len(pages), _LAYOUT)
    entries["version"], entries["batch"], entries["checksum"] = versions, batch, checksums
    signed = np.empty((len(pages), _SIGNED.size), np.uint8)
    signed[:, :20] = entries.view(np.uint8).reshape(-1, ENTRY_BYTES)[:, :20]
    numbers = 2 * np.array(pages, "<u8") + np.array(places, "<u8")
    signed[:, 20:] = numbers.view(np.uint8).reshape(-1, 8)
    entries["signature"] = _crc32_of_rows(signed)
    return entries.tobytes()


def parsed(data: bytes, page: int, place: int) -> PageEntry:
    """Version 0 when it is no entry of this page and place, or of a page never written."""
    version, batch, checksum, signature = _ENTRY.unpack(data)
    entry = PageEntry(version, batch, checksum)
    whole = version and signature == crc32(_SIGNED.pack(*entry, 2 * page + place))
    return entry if whole else PageEntry(0, 0, 0)


# ---- what is durable -------------------------------------------------------------------------------------------------

BATCH_BITS = 40
"""Lower bits of a batch's number, which counts; those above are the life of the process that wrote it."""
BLOCK_BYTES = 4096
_HEAD = struct.Struct("<8sQI")
_PAIR = struct.Struct("<QQ")
_MARK = struct.Struct("<QQ")
MARK_BYTES = _MARK.size
_MAGIC = b"coveymk2"
LIVES_MAX = (BLOCK_BYTES - _HEAD.size) // _PAIR.size


class Marks:
    """Up to which batch of each process that ever wrote this volume everything is durable. Batches of a life that is
    not known, or too long ago to be listed, count as doubtful for ever: their pages are checked when they are loaded.
    """

    def __init__(self) -> None:
        self.life = 0
        """The newest that is known; an index of the first version has life 0 only."""
        self.of: dict[int, int] = {}
        """Life -> the last batch that is durable."""

    def covered(self, batches: "NDArray[np.uint64]") -> "NDArray[np.bool_]":
        """Which of these are known to be durable, same shape."""
        known = np.zeros(batches.shape, bool)
        lives = batches >> np.uint64(BATCH_BITS)
        for life in np.unique(lives).tolist():
            known |= (lives == life) & (batches <= np.uint64(self.of.get(life, 0)))
        return known

    def packed(self) -> bytes:
        """A block."""
        pairs = sorted(self.of.items())[-LIVES_MAX:]
        body = b"".join(_PAIR.pack(*pair) for pair in pairs)
        head = _HEAD.pack(_MAGIC, self.life, len(pairs))
        return (head + body + crc32(head + body).to_bytes(4, "little")).ljust(BLOCK_BYTES, b"\0")

    def take(self, block: bytes) -> None:
        """Of two blocks, taken one after the other, the later counts. One that is none changes nothing."""
        magic, life, count = _HEAD.unpack_from(block)
        end = _HEAD.size + count * _PAIR.size
        if magic != _MAGIC or count > LIVES_MAX or end + 4 > len(block) or life < self.life:
            return
        if crc32(block[:end]) == int.from_bytes(block[end : end + 4], "little"):
            self.life = life
            self.of = dict(_PAIR.iter_unpack(block[_HEAD.size : end]))


def pack_mark(batch: int) -> bytes:
    return _MARK.pack(batch, crc32(_SIGNED.pack(batch, 0, 0, 0)))


def mark(data: bytes) -> int:
    """The batch up to which its life's are durable; 0 when it is no mark."""
    batch, signature = _MARK.unpack(data)
    return batch if signature == crc32(_SIGNED.pack(batch, 0, 0, 0)) else 0
