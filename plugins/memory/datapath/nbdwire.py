"""What an NBD client and a volume's process say to one another (the protocol page of the NBD project): fixed newstyle.

    server -> client   GREETING           client -> server   flags
    client -> server   OPTION, its data   server -> client   OPTION_REPLY, its data; until GO or EXPORT_NAME is accepted
    client -> server   REQUEST, for a write its data
    server -> client   SIMPLE or, once agreed, CHUNK replies, in any order, each with the cookie of its request

All numbers are big-endian. Nothing here touches a connection.
"""

import struct
from enum import IntEnum, IntFlag
from typing import NamedTuple

from covey.headers import WireError

_GREETING = struct.Struct(">8sQH")
_OPTION = struct.Struct(">QII")
_OPTION_REPLY = struct.Struct(">QIII")
_REQUEST = struct.Struct(">IHHQQI")
_SIMPLE = struct.Struct(">IIQ")
_CHUNK = struct.Struct(">IHHQI")
_EXPORT = struct.Struct(">HQH")
_SIZES = struct.Struct(">HIII")
_OLD_EXPORT = struct.Struct(">QH")
_I_HAVE_OPTIONS = 0x49484156454F5054
_REPLY_MAGIC = 0x3E889045565A9
_REQUEST_MAGIC, _SIMPLE_MAGIC, _CHUNK_MAGIC = 0x25609513, 0x67446698, 0x668E33EF
FLAGS_BYTES, OPTION_BYTES, REQUEST_BYTES = 4, _OPTION.size, _REQUEST.size
OPTION_DATA_MAX = 8192
"""Longest that an option may bring along."""
LENGTH_MAX = 32 << 20
"""Longest read or write, bytes: what the protocol lets a client expect."""
FIXED_NEWSTYLE, NO_ZEROES = 1, 2


class NbdOption(IntEnum):
    EXPORT_NAME = 1
    ABORT = 2
    LIST = 3
    INFO = 6
    GO = 7
    STRUCTURED_REPLY = 8


class NbdAnswer(IntEnum):
    ACK = 1
    SERVER = 2
    INFO = 3
    ERR_UNSUP = 0x80000001
    ERR_INVALID = 0x80000003
    ERR_UNKNOWN = 0x80000006


class NbdExportFlag(IntFlag):
    HAS_FLAGS = 1
    SEND_FLUSH = 4
    SEND_FUA = 8
    SEND_TRIM = 32
    SEND_WRITE_ZEROES = 64
    MULTI_CONN = 256


EXPORT_FLAGS = (
    NbdExportFlag.HAS_FLAGS | NbdExportFlag.SEND_FLUSH | NbdExportFlag.SEND_FUA
    | NbdExportFlag.SEND_TRIM | NbdExportFlag.SEND_WRITE_ZEROES | NbdExportFlag.MULTI_CONN
)  # fmt: skip


class NbdCommand(IntEnum):
    READ = 0
    WRITE = 1
    DISCONNECT = 2
    FLUSH = 3
    TRIM = 4
    WRITE_ZEROES = 6


class NbdError(IntEnum):
    OK = 0
    EPERM = 1
    EIO = 5
    EINVAL = 22
    ENOSPC = 28


FUA, DF = 1, 4
_COMMANDS = {command.value: command for command in NbdCommand}
_INFO_EXPORT, _INFO_BLOCK_SIZE = 0, 3
_CHUNK_NONE, _CHUNK_OFFSET_DATA, _CHUNK_ERROR, _CHUNK_DONE = 0, 1, (1 << 15) + 1, 1


class NbdRequest(NamedTuple):
    command: NbdCommand | None
    """None: one that we do not know; it brings nothing along."""
    flags: int
    cookie: int
    offset: int
    length: int


def greeting() -> bytes:
    return _GREETING.pack(b"NBDMAGIC", _I_HAVE_OPTIONS, FIXED_NEWSTYLE | NO_ZEROES)


def client_flags(data: bytes) -> int:
    """WireError for flags that we do not know, and for a client of before fixed newstyle."""
    flags = int.from_bytes(data, "big")
    if flags & ~(FIXED_NEWSTYLE | NO_ZEROES) or not flags & FIXED_NEWSTYLE:
        raise WireError(f"an NBD client with flags {flags:#x}")
    return flags


def option(data: bytes) -> tuple[int, int]:
    """Its number and how many bytes follow. WireError when it is none, or they are too many."""
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


def option_reply(number: int, answer: NbdAnswer, data: bytes = b"") -> bytes:
    return _OPTION_REPLY.pack(_REPLY_MAGIC, number, answer, len(data)) + data


def export_info(size_bytes: int) -> bytes:
    return _EXPORT.pack(_INFO_EXPORT, size_bytes, EXPORT_FLAGS)


def block_sizes(preferred: int) -> bytes:
    """Any byte may be read or written; whole pages are what costs least."""
    return _SIZES.pack(_INFO_BLOCK_SIZE, 1, preferred, LENGTH_MAX)


def old_export(size_bytes: int, zeroes: bool) -> bytes:
    """The answer to EXPORT_NAME."""
    return _OLD_EXPORT.pack(size_bytes, EXPORT_FLAGS) + bytes(124 if zeroes else 0)


def request(data: bytes | memoryview) -> NbdRequest:
    """WireError when it is none."""
    magic, flags, number, cookie, offset, length = _REQUEST.unpack(data)
    if magic != _REQUEST_MAGIC:
        raise WireError("no NBD request")
    return NbdRequest(_COMMANDS.get(number), flags, cookie, offset, length)


def simple(cookie: int, error: int) -> bytes:
    return _SIMPLE.pack(_SIMPLE_MAGIC, error, cookie)


def data_chunk(cookie: int, offset: int, length: int) -> bytes:
    """The only chunk of a read; the data follow."""
    head = _CHUNK.pack(_CHUNK_MAGIC, _CHUNK_DONE, _CHUNK_OFFSET_DATA, cookie, length + 8)
    return head + offset.to_bytes(8, "big")


def done_chunk(cookie: int) -> bytes:
    return _CHUNK.pack(_CHUNK_MAGIC, _CHUNK_DONE, _CHUNK_NONE, cookie, 0)


def error_chunk(cookie: int, error: int, why: str) -> bytes:
    text = why.encode(errors="replace")[:400]
    body = error.to_bytes(4, "big") + len(text).to_bytes(2, "big") + text
    return _CHUNK.pack(_CHUNK_MAGIC, _CHUNK_DONE, _CHUNK_ERROR, cookie, len(body)) + body
