"""Frames on a stream between two processes of one host: u32 little-endian length, then msgpack of one Struct.

Frames are used on the agent's unix sockets: by job processes that join, and by the agent to control its programs. A
frame longer than `FRAME_BYTES_MAX` is refused before anything is allocated.
"""

import struct
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from covey.ports.streams import ByteStream

FRAME_BYTES_MAX = 1 << 20
"""Most bytes of a control frame. Bulk bytes never travel in frames."""

PART_BYTES = 64 << 10
"""Memory is allocated at most this many bytes ahead of the bytes received, however long the announced frame is."""

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")


class FrameError(ConnectionError):
    """The peer sent something that is not a frame; the connection cannot be used any more."""


def pack(message: msgspec.Struct) -> bytes:
    """The bytes of one frame. ValueError when they are too many."""
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {len(body)} bytes is over the limit of {FRAME_BYTES_MAX}")
    return _LENGTH.pack(len(body)) + body


def body_size(header: bytes | bytearray | memoryview) -> int:
    """The length that a 4-byte header announces. FrameError when it is over the limit."""
    size = int(_LENGTH.unpack(header)[0])
    if size > FRAME_BYTES_MAX:
        raise FrameError(f"the peer announced a frame of {size} bytes; at most {FRAME_BYTES_MAX} are accepted")
    return size


def unpack(body: bytes | bytearray | memoryview, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """The Struct in a frame's body. FrameError when the body is malformed."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FrameError(f"malformed frame: {error}") from error


def whole(incoming: bytearray, decoder: msgspec.msgpack.Decoder[T]) -> Iterator[T]:
    """Each Struct whose frame arrived whole; its bytes are removed from `incoming`. FrameError when malformed."""
    while len(incoming) >= _LENGTH.size:
        end = _LENGTH.size + body_size(incoming[: _LENGTH.size])
        if len(incoming) < end:
            return
        found = unpack(bytes(incoming[_LENGTH.size : end]), decoder)
        del incoming[:end]
        yield found


async def read_frame(stream: ByteStream, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """The next frame's Struct. ConnectionError at the end of the stream, FrameError when the frame is malformed."""
    header = bytearray(_LENGTH.size)
    await stream.read_into(memoryview(header))
    parts: list[bytearray] = []
    left = body_size(header)
    while left:
        parts.append(bytearray(min(left, PART_BYTES)))
        await stream.read_into(memoryview(parts[-1]))
        left -= len(parts[-1])
    return unpack(parts[0] if len(parts) == 1 else b"".join(parts), decoder)


async def write_frame(stream: ByteStream, message: msgspec.Struct) -> None:
    await stream.write(pack(message))
