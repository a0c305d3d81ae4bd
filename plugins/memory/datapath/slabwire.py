"""What a volume's process and a slab process say to one another, over TCP: `covey.headers`, and versions of pages.

    volume -> slab   HELLO, once: who I am, which slab, under which epoch, and a nonce
    slab -> volume   CHALLENGE, then volume -> slab PROOF (`covey.handshake`), then slab -> volume WELCOME: yes or no
    volume -> slab   REQUEST, then for a write: `pages` versions of u64, then the pages; for a discard: versions
    slab -> volume   REPLY in the order of the requests, then for a read: versions, pages;
                     for VERSIONS: versions

Every page has a version, given by the volume and growing with each write. A slab keeps the newest version it was sent
and forgets the rest, so the order in which two writes arrive does not matter, and whoever asks after a crash learns
what is there. Version 0: never written.
"""

import struct
from array import array
from typing import TYPE_CHECKING, NamedTuple

from covey import headers
from covey.handshake import NONCE_BYTES
from covey.headers import Op, WireError
from plugins.memory.policy.settings import REQUEST_PAGES_MAX

MAGIC = b"coveysl3"
"""The last byte is the version of the protocol. Version 2 sent the secret of the slab itself."""
_HELLO = struct.Struct(f"<8s64s64sIQ{NONCE_BYTES}s")
HELLO_BYTES = _HELLO.size

if TYPE_CHECKING:
    Versions = array[int]
else:
    Versions = array  # Python 3.11 cannot subscript it
VERSION_BYTES = 8
VERSIONS_MAX = 1 << 15
"""Versions asked for at once."""
OPERATIONS = {
    Op.READ: REQUEST_PAGES_MAX,
    Op.WRITE: REQUEST_PAGES_MAX,
    Op.DISCARD: REQUEST_PAGES_MAX,
    Op.VERSIONS: VERSIONS_MAX,
}
"""What a slab does, and of how many pages at once."""


class OtherSlabVersion(WireError):
    """A hello of this protocol in another version."""


class SlabHello(NamedTuple):
    borrower: str
    volume: str
    slab: int
    epoch: int
    nonce: bytes


def pack_hello(hello: SlabHello) -> bytes:
    borrower, volume = hello.borrower.encode(), hello.volume.encode()
    return _HELLO.pack(MAGIC, borrower, volume, hello.slab, hello.epoch, hello.nonce)


def hello(data: bytes | bytearray) -> SlabHello:
    """WireError when it is none."""
    headers.expect("hello", data, HELLO_BYTES)
    magic, borrower, volume, index, epoch, nonce = _HELLO.unpack(data)
    if magic[:-1] == MAGIC[:-1] and magic != MAGIC:
        theirs, ours = magic[-1:].decode("ascii", "replace"), MAGIC[-1:].decode()
        raise OtherSlabVersion(f"it speaks version {theirs} of the slab protocol, this process {ours}")
    if magic != MAGIC:
        raise WireError("not a slab connection")
    return SlabHello(_name(borrower), _name(volume), index, epoch, nonce)


def _name(field: bytes) -> str:
    try:
        return field.rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError as error:
        raise WireError("a name that is no ASCII") from error
