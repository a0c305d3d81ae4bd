"""The protocol of NBD clients and a volume's process (the protocol page of the NBD project): fixed newstyle.

    server -> client   GREETING           client -> server   flags
    client -> server   OPTION, its data   server -> client   OPTION_REPLY, its data; until GO or EXPORT_NAME is accepted
    client -> server   REQUEST, for a write its data
    server -> client   SIMPLE or, once agreed, CHUNK replies, in any order, each with the cookie of its request

All numbers are big-endian. Nothing here touches a connection.
"""

import struct
from enum import IntEnum, IntFlag
from typing import Final

from covey.wire.headers import WireError

_GREETING = struct.Struct(">8sQH")
_OPTION = struct.Struct(">QII")
_OPTION_REPLY = struct.Struct(">QIII")
_REQUEST: Final = struct.Struct(">IHHQQI")
_SIMPLE: Final = struct.Struct(">IIQ")
_CHUNK: Final = struct.Struct(">IHHQI")
_EXPORT = struct.Struct(">HQH")
_SIZES = struct.Struct(">HIII")
_OLD_EXPORT = struct.Struct(">QH")
_EXTENT = struct.Struct(">II")
_I_HAVE_OPTIONS = 0x49484156454F5054
_REPLY_MAGIC = 0x3E889045565A9
_REQUEST_MAGIC: Final = 0x25609513
_SIMPLE_MAGIC: Final = 0x67446698
_CHUNK_MAGIC: Final = 0x668E33EF
FLAGS_BYTES, OPTION_BYTES, REQUEST_BYTES = 4, _OPTION.size, _REQUEST.size
OPTION_DATA_MAX = 8192
"""Most bytes that an option may bring along."""
QUERIES_MAX = 64
"""Most contexts that one option may ask for."""
EXTENTS_MAX = 8192
"""Extents in one answer about what is allocated; the client asks again for the rest."""
ALLOCATION = "base:allocation"
"""The only context; its number is `ALLOCATION_ID`."""
ALLOCATION_ID = 1
LENGTH_MAX: Final = 32 << 20
"""Bytes of the longest read or write: what the protocol lets a client expect."""
FIXED_NEWSTYLE, NO_ZEROES = 1, 2


class NbdOption(IntEnum):
    EXPORT_NAME = 1
    ABORT = 2
    LIST = 3
    INFO = 6
    GO = 7
    STRUCTURED_REPLY = 8
    LIST_META_CONTEXT = 9
    SET_META_CONTEXT = 10


class NbdAnswer(IntEnum):
    ACK = 1
    SERVER = 2
    INFO = 3
    META_CONTEXT = 4
    ERR_UNSUP = 0x80000001
    ERR_INVALID = 0x80000003
    ERR_UNKNOWN = 0x80000006


class NbdExportFlag(IntFlag):
    HAS_FLAGS = 1
    SEND_FLUSH = 4
    SEND_FUA = 8
    SEND_TRIM = 32
    SEND_WRITE_ZEROES = 64
    SEND_DF = 128
    MULTI_CONN = 256
    SEND_FAST_ZERO = 2048


EXPORT_FLAGS = (
    NbdExportFlag.HAS_FLAGS | NbdExportFlag.SEND_FLUSH | NbdExportFlag.SEND_FUA
    | NbdExportFlag.SEND_TRIM | NbdExportFlag.SEND_WRITE_ZEROES | NbdExportFlag.MULTI_CONN
    | NbdExportFlag.SEND_FAST_ZERO
)  # fmt: skip
"""Flags of an export; `SEND_DF` is added for clients that agreed on structured replies."""


class NbdCommand(IntEnum):
    READ = 0
    WRITE = 1
    DISCONNECT = 2
    FLUSH = 3
    TRIM = 4
    WRITE_ZEROES = 6
    BLOCK_STATUS = 7


class NbdError(IntEnum):
    OK = 0
    EPERM = 1
    EIO = 5
    EINVAL = 22
    ENOSPC = 28
    ENOTSUP = 95


FUA: Final = 1
NO_HOLE: Final = 2
DF: Final = 4
REQ_ONE: Final = 8
FAST_ZERO: Final = 16
FLAGS = {
    NbdCommand.READ: FUA | DF,
    NbdCommand.WRITE_ZEROES: FUA | NO_HOLE | FAST_ZERO,
    NbdCommand.BLOCK_STATUS: FUA | REQ_ONE,
}
"""Command -> flags that its request may carry; other commands may carry FUA alone."""
HOLE, ZERO = 1, 2
"""Flags of an extent: it takes no room; it reads as zeros."""
_COMMANDS: Final = {command.value: command for command in NbdCommand}
READ: Final = NbdCommand.READ
WRITE: Final = NbdCommand.WRITE
DISCONNECT: Final = NbdCommand.DISCONNECT
FLUSH: Final = NbdCommand.FLUSH
TRIM: Final = NbdCommand.TRIM
BLOCK_STATUS: Final = NbdCommand.BLOCK_STATUS
"""Members of `NbdCommand` as plain names: in Python 3.11 a look-up in the enumeration is a call of a Python
function."""
_INFO_EXPORT, _INFO_BLOCK_SIZE = 0, 3
_CHUNK_NONE: Final = 0
_CHUNK_OFFSET_DATA: Final = 1
_CHUNK_HOLE: Final = 2
_CHUNK_STATUS: Final = 5
_CHUNK_ERROR: Final = (1 << 15) + 1
_CHUNK_DONE: Final = 1
Extents = list[tuple[int, int]]
"""Extents one after another: length in bytes, and flags (`HOLE`, `ZERO`)."""


class NbdRequest:
    """A request. `command` None: one that we do not know, which brings nothing along. A plain class for the reason that
    `slabwire.SlabRequest` has."""

    __slots__ = ("command", "cookie", "flags", "length", "offset")

    def __init__(self, command: NbdCommand | None, flags: int, cookie: int, offset: int, length: int) -> None:
        self.command, self.flags, self.cookie = command, flags, cookie
        self.offset, self.length = offset, length


def greeting() -> bytes:
    return _GREETING.pack(b"NBDMAGIC", _I_HAVE_OPTIONS, FIXED_NEWSTYLE | NO_ZEROES)


def client_flags(data: bytes) -> int:
    """WireError for flags that we do not know, and for a client older than fixed newstyle."""
    flags = int.from_bytes(data, "big")
    if flags & ~(FIXED_NEWSTYLE | NO_ZEROES) or not flags & FIXED_NEWSTYLE:
        raise WireError(f"an NBD client with flags {flags:#x}")
    return flags


def option(data: bytes) -> tuple[int, int]:
    """An option's number and how many bytes follow. WireError when it is none, or they are too many."""
    magic, number, length = _OPTION.unpack(data)
    if magic != _I_HAVE_OPTIONS or length > OPTION_DATA_MAX:
        raise WireError(f"no option, or one with {length} bytes")
    return number, length


def wanted_export(data: bytes) -> str | None:
    """The name in the data of INFO or GO; None when they are malformed."""
    if len(data) < 6:
        return None
    length = int.from_bytes(data[:4], "big")
    if len(data) < length + 6 or len(data) != length + 6 + 2 * int.from_bytes(data[4 + length : 6 + length], "big"):
        return None
    try:
        return data[4 : 4 + length].decode()
    except UnicodeDecodeError:
        return None


def wanted_contexts(data: bytes) -> tuple[str, list[str]] | None:
    """Export and queries in the data of LIST_META_CONTEXT or SET_META_CONTEXT; None when they are malformed."""
    texts: list[str] = []
    at, left = 0, 1
    while left:
        length = int.from_bytes(data[at : at + 4], "big")
        if at + 4 + length > len(data):
            return None
        try:
            texts.append(data[at + 4 : at + 4 + length].decode())
        except UnicodeDecodeError:
            return None
        at, left = at + 4 + length, left - 1
        if len(texts) == 1:
            if at + 4 > len(data):
                return None
            left, at = int.from_bytes(data[at : at + 4], "big"), at + 4
            if left > QUERIES_MAX:
                return None
    return (texts[0], texts[1:]) if at == len(data) else None


def meta_context(id: int) -> bytes:
    return id.to_bytes(4, "big") + ALLOCATION.encode()


def option_reply(number: int, answer: NbdAnswer, data: bytes = b"") -> bytes:
    return _OPTION_REPLY.pack(_REPLY_MAGIC, number, answer, len(data)) + data


def export_flags(structured: bool) -> int:
    return EXPORT_FLAGS | NbdExportFlag.SEND_DF if structured else EXPORT_FLAGS


def export_info(size_bytes: int, structured: bool) -> bytes:
    return _EXPORT.pack(_INFO_EXPORT, size_bytes, export_flags(structured))


def block_sizes(preferred: int) -> bytes:
    """Block sizes for INFO: any byte may be read or written; whole pages cost least."""
    return _SIZES.pack(_INFO_BLOCK_SIZE, 1, preferred, LENGTH_MAX)


def old_export(size_bytes: int, zeroes: bool, structured: bool) -> bytes:
    """Answer to EXPORT_NAME."""
    return _OLD_EXPORT.pack(size_bytes, export_flags(structured)) + bytes(124 if zeroes else 0)


def request(data: bytes | memoryview) -> NbdRequest:
    """Parse a request. WireError when it is none."""
    magic, flags, number, cookie, offset, length = _REQUEST.unpack(data)
    if magic != _REQUEST_MAGIC:
        raise WireError("no NBD request")
    return NbdRequest(_COMMANDS.get(number), flags, cookie, offset, length)


def simple(cookie: int, error: int) -> bytes:
    return _SIMPLE.pack(_SIMPLE_MAGIC, error, cookie)


def data_chunk(cookie: int, offset: int, length: int) -> bytes:
    """Header of the only chunk of a read; the data follow."""
    head = _CHUNK.pack(_CHUNK_MAGIC, _CHUNK_DONE, _CHUNK_OFFSET_DATA, cookie, length + 8)
    return head + offset.to_bytes(8, "big")


def hole_chunk(cookie: int, offset: int, length: int) -> bytes:
    """The only chunk of a read of zeros alone."""
    head = _CHUNK.pack(_CHUNK_MAGIC, _CHUNK_DONE, _CHUNK_HOLE, cookie, 12)
    return head + offset.to_bytes(8, "big") + length.to_bytes(4, "big")


def status_chunk(cookie: int, extents: Extents) -> bytes:
    """A chunk that says which bytes are allocated, from the start of the request on."""
    body = ALLOCATION_ID.to_bytes(4, "big") + b"".join([_EXTENT.pack(*extent) for extent in extents])
    return _CHUNK.pack(_CHUNK_MAGIC, _CHUNK_DONE, _CHUNK_STATUS, cookie, len(body)) + body


def done_chunk(cookie: int) -> bytes:
    return _CHUNK.pack(_CHUNK_MAGIC, _CHUNK_DONE, _CHUNK_NONE, cookie, 0)


def error_chunk(cookie: int, error: int, why: str) -> bytes:
    text = why.encode(errors="replace")[:400]
    body = error.to_bytes(4, "big") + len(text).to_bytes(2, "big") + text
    return _CHUNK.pack(_CHUNK_MAGIC, _CHUNK_DONE, _CHUNK_ERROR, cookie, len(body)) + body
