"""What a `RemoteArray` and the pager of its volume say to one another, on `arr-NAME.sock` (SOCK_SEQPACKET).

    array -> pager   OpenArray, with four descriptors: the userfaultfd, the memory, the lifeline, standard error
    pager -> array   ArrayOpened, or ArrayRefused and the end
    array -> pager   AskArray, answered by ArrayDone with its id, in any order
    pager -> array   ArrayResumed: a pager that died was replaced, and what is not answered is to be asked again

One message is one msgpack Struct. A message that is none ends the connection and that array.
"""

import struct
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

VERSION = 1
MESSAGE_BYTES_MAX = 4096
DESCRIPTORS = 4
CHUNK_MIN, CHUNK_MAX = 4096, 1 << 20
"""Bytes of a chunk, a power of two."""
CHUNKS_MAX = 1 << 22
"""Of one array: 256 GiB in chunks of 64 KiB. Each costs the pager a byte, and some more while it is here."""

Size = Annotated[int, Meta(ge=0, le=1 << 47)]
Id = Annotated[int, Meta(ge=0, le=(1 << 62))]
Text = Annotated[str, Meta(max_length=600)]
Asked = Literal["prefetch", "pin", "unpin", "drop", "save", "flush", "sequential", "random", "normal", "counts"]
T = TypeVar("T")


class ArrayFrame(msgspec.Struct, frozen=True, tag=True):
    """One message; the tag is the class name."""


class OpenArray(ArrayFrame, frozen=True):
    """Answer faults of this memory. All sizes in bytes."""

    version: int
    offset: Size
    """Of its first byte in the volume, a multiple of its page."""
    size: Size
    """Of the memory, a multiple of the volume's page and of the machine's."""
    chunk: Size
    budget: Size
    """Most that is local at once."""
    address: Size
    """Where the memory lies in the process that opens."""
    writable: bool


class AskArray(ArrayFrame, frozen=True):
    """`what` is to be done about chunks `first` to `end`. `flush`: everything is on disk; `save`: everything is at the
    volume."""

    id: Id
    what: Asked
    first: Size = 0
    end: Size = 0


class ArrayOpened(ArrayFrame, frozen=True):
    budget: Size
    """That holds, in bytes."""


class ArrayRefused(ArrayFrame, frozen=True):
    what: Text
    why: Text
    next: Text


class ArrayResumed(ArrayFrame, frozen=True):
    """See above."""


class ArrayDone(ArrayFrame, frozen=True):
    id: Id
    why: Text = ""
    """Why not; empty: it is done."""
    counts: dict[str, int] = {}
    """Of `counts`: what happened since the array was opened."""


to_pager: msgspec.msgpack.Decoder[OpenArray | AskArray] = msgspec.msgpack.Decoder(OpenArray | AskArray)
to_array: msgspec.msgpack.Decoder[ArrayOpened | ArrayRefused | ArrayResumed | ArrayDone] = msgspec.msgpack.Decoder(
    ArrayOpened | ArrayRefused | ArrayResumed | ArrayDone
)
_encoder = msgspec.msgpack.Encoder()


class ArrayWireError(ConnectionError):
    """The peer sent something else; the connection is of no more use."""


def pack(frame: ArrayFrame) -> bytes:
    return _encoder.encode(frame)


def unpack(data: bytes, decoder: "msgspec.msgpack.Decoder[T]") -> T:
    """ArrayWireError when it is none."""
    if not 0 < len(data) <= MESSAGE_BYTES_MAX:
        raise ArrayWireError(f"a message of {len(data)} bytes")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ArrayWireError(f"malformed message: {error}") from error


def wrong(asked: OpenArray, volume_bytes: int, page_bytes: int, machine_page: int) -> str:
    """Why an array of this shape cannot be; empty: it can."""
    step = max(page_bytes, machine_page)
    if asked.version != VERSION:
        return f"it speaks version {asked.version} of the array protocol, this pager {VERSION}"
    if asked.chunk & (asked.chunk - 1) or not max(step, CHUNK_MIN) <= asked.chunk <= CHUNK_MAX:
        return f"chunks of {asked.chunk} bytes; a power of two from {max(step, CHUNK_MIN)} to {CHUNK_MAX} is possible"
    if asked.address % machine_page or asked.offset % page_bytes or asked.size % step or not asked.size:
        return f"its memory, its size or its offset in the volume is not a multiple of a page ({step} bytes)"
    if asked.offset + asked.size > volume_bytes:
        return f"{asked.size} bytes at {asked.offset} lie outside the volume, which has {volume_bytes}"
    if asked.size > CHUNKS_MAX * asked.chunk:
        return f"more than {CHUNKS_MAX} chunks; choose larger ones"
    return ""


LOCK = struct.Struct("=hhxxxxqqixxxx")
"""`struct flock` for locks that belong to an open file (F_OFD_SETLK)."""
F_OFD_SETLK = 37
