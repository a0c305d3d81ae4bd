"""Frames between a volume's process and a slab process, over TCP: fixed little-endian headers, then pages.

    volume -> slab   HELLO, once: who I am, which slab, under which epoch, and its secret
    slab -> volume   WELCOME: yes with the slab's size, or no
    volume -> slab   REQUEST, then for a write: `pages` versions of u64, then the pages; for a discard: versions
    slab -> volume   REPLY in the order of the requests, then for a read: versions, pages;
                     for VERSIONS: versions

Every page has a version, given by the volume and growing with each write. A slab keeps the newest version it was sent
and forgets the rest, so the order in which two writes arrive does not matter, and whoever asks after a crash learns
what is there. Version 0: never written.
"""

import struct
from array import array
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from plugins.memory.messages import SECRET_BYTES

MAGIC = b"coveysl1"
_HELLO = struct.Struct(f"<8s64s64sIQ{SECRET_BYTES}s")
_WELCOME = struct.Struct("<8sBxxxIQ")
_REQUEST = struct.Struct("<BxxxIIQ")
_REPLY = struct.Struct("<BxxxIQ")
HELLO_BYTES, WELCOME_BYTES, REQUEST_BYTES, REPLY_BYTES = _HELLO.size, _WELCOME.size, _REQUEST.size, _REPLY.size

if TYPE_CHECKING:
    Versions = array[int]
else:
    Versions = array  # Python 3.11 cannot subscript it
VERSION_BYTES = 8
VERSIONS_MAX = 1 << 15
"""Versions asked for at once."""


class WireError(ConnectionError):
    """The peer sent something else; the connection is of no more use."""


class Op(IntEnum):
    READ = 1
    WRITE = 2
    VERSIONS = 3
    DISCARD = 4


class Status(IntEnum):
    OK = 0
    STALE = 1
    """No such slab, another epoch or secret, or taken back since."""
    BAD = 2
    """The request is out of range; the connection ends."""


class Hello(NamedTuple):
    borrower: str
    volume: str
    slab: int
    epoch: int
    secret: bytes


class Welcome(NamedTuple):
    status: Status
    page_bytes: int
    slab_bytes: int


class Request(NamedTuple):
    op: Op
    page: int
    """First page, counted from the start of the slab."""
    pages: int
    tag: int


class Reply(NamedTuple):
    status: Status
    pages: int
    tag: int


def pack_hello(hello: Hello) -> bytes:
    borrower, volume = hello.borrower.encode(), hello.volume.encode()
    return _HELLO.pack(MAGIC, borrower, volume, hello.slab, hello.epoch, hello.secret)


def hello(data: bytes | bytearray) -> Hello:
    """WireError when it is none."""
    if len(data) != HELLO_BYTES:
        raise WireError(f"a hello of {len(data)} bytes instead of {HELLO_BYTES}")
    magic, borrower, volume, index, epoch, secret = _HELLO.unpack(data)
    if magic != MAGIC:
        raise WireError("not a slab connection")
    return Hello(_name(borrower), _name(volume), index, epoch, secret)


def _name(field: bytes) -> str:
    try:
        return field.rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError as error:
        raise WireError("a name that is no ASCII") from error


def pack_welcome(welcome: Welcome) -> bytes:
    return _WELCOME.pack(MAGIC, welcome.status, welcome.page_bytes, welcome.slab_bytes)


def welcome(data: bytes | bytearray) -> Welcome:
    """WireError when it is none."""
    if len(data) != WELCOME_BYTES:
        raise WireError(f"a welcome of {len(data)} bytes instead of {WELCOME_BYTES}")
    magic, status, page_bytes, slab_bytes = _WELCOME.unpack(data)
    if magic != MAGIC:
        raise WireError("the other end is no slab process")
    return Welcome(_status(status), page_bytes, slab_bytes)


def pack_request(request: Request) -> bytes:
    return _REQUEST.pack(request.op, request.page, request.pages, request.tag)


def request(data: bytes | bytearray, pages: int, pages_max: int) -> Request:
    """A request to a slab of `pages` pages, at most `pages_max` of them at once (`VERSIONS_MAX` for versions).
    WireError when it is out of range."""
    if len(data) != REQUEST_BYTES:
        raise WireError(f"a request of {len(data)} bytes instead of {REQUEST_BYTES}")
    code, page, count, tag = _REQUEST.unpack(data)
    try:
        op = Op(code)
    except ValueError as error:
        raise WireError(f"no operation has the number {code}") from error
    limit = VERSIONS_MAX if op is Op.VERSIONS else pages_max
    if not 1 <= count <= limit or page + count > pages:
        raise WireError(f"{op.name} of {count} pages at {page}; the slab has {pages}, a request at most {limit}")
    return Request(op, page, count, tag)


def pack_reply(reply: Reply) -> bytes:
    return _REPLY.pack(reply.status, reply.pages, reply.tag)


def reply(data: bytes | bytearray) -> Reply:
    """WireError when it is none."""
    if len(data) != REPLY_BYTES:
        raise WireError(f"a reply of {len(data)} bytes instead of {REPLY_BYTES}")
    status, count, tag = _REPLY.unpack(data)
    return Reply(_status(status), count, tag)


def _status(code: int) -> Status:
    try:
        return Status(code)
    except ValueError as error:
        raise WireError(f"no status has the number {code}") from error
