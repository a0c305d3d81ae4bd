"""Small durable files with a checksum and a version: read back as they were written, or refused with a reason.

    file   "COVEYREC" | version u16 | length u32 | crc32(version, length, body) u32 | body

The body is one msgpack value of a Struct. The checksum detects a change by a disk, a file system or a person; it does
not detect an older copy, which the caller must handle. The caller also decides about a damaged file: `Damaged` says
what is wrong, and is never taken for an empty file. The log has frames and checksums of its own (`agent.raft.disk`),
pages and their index as well (`plugins.memory.policy.log_records`).
"""

import struct
import zlib
from typing import TypeVar

import msgspec

from covey.core.version import VERSION
from covey.ports.disk import Disk

_MAGIC = b"COVEYREC"
_HEAD = struct.Struct(">8sHII")

S = TypeVar("S")
_encode = msgspec.msgpack.Encoder().encode


class StateRefused(Exception):
    """A durable file of this host cannot be trusted, and to continue without it would lose or repeat work. One line
    what, one line why, one line what to do next."""

    status = 3
    """Exit status of an agent that ends with this error: a restart does not help."""

    def __init__(self, what: str, why: str, next: str) -> None:
        super().__init__(f"{what}: {why}; next: {next}")
        self.what, self.why, self.next = what, why, next


class OtherFormat(StateRefused):
    """A durable file of this host is intact, but in a format that this version does not read (docs/compatibility.md).
    Nothing is written, so the version that wrote it can continue with it."""


class Damaged(ValueError):
    """The file does not hold what was written."""


def other_format(name: str, found: int, reads: int) -> tuple[str, str, str]:
    """The three lines (what, why, next) for a file in a format that this version does not read."""
    step = "start the version that wrote the file; docs/compatibility.md lists the versions that can follow one another"
    return f"{name} has format {found}", f"Covey {VERSION} reads and writes format {reads} of it", step


def seal(value: msgspec.Struct, version: int = 1) -> bytes:
    """The bytes of a file that holds `value`."""
    body = _encode(value)
    return _HEAD.pack(_MAGIC, version, len(body), _crc(version, body)) + body


def unseal(
    data: bytes, decoder: "msgspec.msgpack.Decoder[S]", version: int = 1, name: str = "a file of this host"
) -> S:
    """The value that `seal` wrote. Damaged when the bytes are anything else, OtherFormat when they have another
    version. `name`: name of the file, for people."""
    if len(data) < _HEAD.size:
        raise Damaged(f"it has {len(data)} bytes, fewer than its header needs")
    magic, found, length, crc = _HEAD.unpack_from(data)
    body = memoryview(data)[_HEAD.size :]
    if magic != _MAGIC:
        raise Damaged("it does not begin like a file of Covey")
    if len(body) != length:
        raise Damaged(f"it has {len(body)} bytes after its header instead of {length}")
    if _crc(found, body) != crc:
        raise Damaged("its checksum is wrong")
    if found != version:
        raise OtherFormat(*other_format(name, found, version))
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Damaged(f"its content is invalid: {error}") from error


def _crc(version: int, body: bytes | memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(struct.pack(">HI", version, len(body))))


async def load(disk: Disk, name: str, decoder: "msgspec.msgpack.Decoder[S]", version: int = 1) -> S | None:
    """The value in the file; None when there is none. Damaged and OtherFormat (which name the file), OSError."""
    data = await disk.read(name)
    if data is None:
        return None
    try:
        return unseal(data, decoder, version, disk.path(name))
    except Damaged as error:
        raise Damaged(f"{disk.path(name)} is damaged: {error}") from error


async def save(disk: Disk, name: str, value: msgspec.Struct, version: int = 1) -> None:
    """Replace the file: after a crash it is the old one or the new one, whole; durable on return. OSError."""
    await disk.replace(name, seal(value, version))
