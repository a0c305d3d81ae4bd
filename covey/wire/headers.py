"""Headers of requests for pages: process to volume (unix socket), and volume to a slab on another host (TCP).

    client -> server   HELLO, once: each protocol has its own (`covey.remote`, `plugins.memory.datapath.wire.slabwire`)
    server -> client   WELCOME: yes with the sizes, or no
    client -> server   REQUEST, then the pages of its operation, if any
    server -> client   REPLY with the request's tag, then the result of its operation

Headers have a fixed size and are little-endian. A malformed header or a value out of range is a `WireError`: the
connection is closed.
"""

import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

MAGIC = b"coveypg1"
_WELCOME = struct.Struct("<8sBxxxIQ")
_REQUEST = struct.Struct("<BxxxIQQ")
_REPLY = struct.Struct("<BxxxIQ")
WELCOME_BYTES, REQUEST_BYTES, REPLY_BYTES = _WELCOME.size, _REQUEST.size, _REPLY.size


REASON_BYTES_MAX = 1024
"""Most bytes of the text that follows a FAILED reply."""


class WireError(ConnectionError):
    """The peer sent something else; the connection cannot be used any more."""


class OtherProtocolVersion(WireError):
    """The peer speaks another version of the protocol."""


class Op(IntEnum):
    READ = 1
    WRITE = 2
    FLUSH = 3
    """Make everything durable; carries no pages."""
    DISCARD = 4
    """The pages read as zeros from now on."""
    VERSIONS = 5
    FETCH = 6
    """A READ whose reply has no pages when none of them was ever written: they are zeros."""


class Status(IntEnum):
    OK = 0
    REFUSED = 1
    """A wrong token or secret, or a slab that is not here, or not under this epoch."""
    BAD = 2
    """The request is out of range; the connection ends."""
    FAILED = 3
    """The request could not be done now. The reason follows: as many bytes of UTF-8 as the reply has pages."""
    VERSION = 4
    """The hello has another version of its protocol; the connection ends."""
    OTHER_USER = 5
    """The volume belongs to another user, whose uid the welcome has in the place of its size."""


_STATUSES = {status.value: status for status in Status}
_OPS = {op.value: op for op in Op}


class Welcome(NamedTuple):
    status: Status
    page_bytes: int
    size_bytes: int
    """Size of the volume or the slab, in bytes."""


class Request(NamedTuple):
    op: Op
    page: int
    """Number of the first page, counted from the start of the volume or slab."""
    pages: int
    """Number of pages; 0 for a flush."""
    tag: int


class Reply(NamedTuple):
    status: Status
    pages: int
    tag: int


def pack_welcome(welcome: Welcome) -> bytes:
    return _WELCOME.pack(MAGIC, welcome.status, welcome.page_bytes, welcome.size_bytes)


def welcome(data: bytes | bytearray) -> Welcome:
    """The parsed welcome. WireError when the bytes are none."""
    expect("welcome", data, WELCOME_BYTES)
    magic, status, page_bytes, size_bytes = _WELCOME.unpack(data)
    if magic != MAGIC:
        raise WireError("the other end does not serve pages")
    return Welcome(_status(status), page_bytes, size_bytes)


def pack_request(request: Request) -> bytes:
    return _REQUEST.pack(request.op, request.pages, request.page, request.tag)


def request(data: bytes | bytearray, pages: int, pages_max: Mapping[Op, int]) -> Request:
    """A request to something that has `pages` pages. `pages_max`: the operations that it knows, and how many pages a
    request of each may cover at most; 0: the operation is not about certain pages. WireError when the request is out of
    range."""
    expect("request", data, REQUEST_BYTES)
    code, count, page, tag = _REQUEST.unpack(data)
    limit = pages_max.get(code)
    if limit is None:
        raise WireError(f"unknown operation {code}")
    op = _OPS[code]
    if limit and (not 1 <= count <= limit or page + count > pages):
        raise WireError(f"{op.name} of {count} pages at {page}; there are {pages}, a request has at most {limit}")
    return Request(op, page, count, tag)


def pack_reply(reply: Reply) -> bytes:
    return _REPLY.pack(reply.status, reply.pages, reply.tag)


def pack_failed(tag: int, why: str) -> bytes:
    """The bytes of a FAILED reply with its reason."""
    text = why.encode(errors="replace")[:REASON_BYTES_MAX]
    return _REPLY.pack(Status.FAILED, len(text), tag) + text


def reason_bytes(reply: Reply) -> int:
    """Number of bytes of the reason that follows this reply. WireError when they are too many."""
    if reply.status is not Status.FAILED:
        return 0
    if reply.pages > REASON_BYTES_MAX:
        raise WireError(f"a reason of {reply.pages} bytes")
    return reply.pages


def reply(data: bytes | bytearray) -> Reply:
    """The parsed reply. WireError when the bytes are none."""
    expect("reply", data, REPLY_BYTES)
    status, count, tag = _REPLY.unpack(data)
    return Reply(_status(status), count, tag)


def expect(what: str, data: bytes | bytearray | memoryview, size: int) -> None:
    """WireError when `data` has another size."""
    if len(data) != size:
        raise WireError(f"a {what} of {len(data)} bytes instead of {size}")


def _status(code: int) -> Status:
    status = _STATUSES.get(code)
    if status is None:
        raise WireError(f"unknown status {code}")
    return status
