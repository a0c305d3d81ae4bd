"""Messages between a `RemoteArray` and the pager of its volume, on `arr-NAME.sock` (SOCK_SEQPACKET).

    array -> pager   OpenArray, with four descriptors: the userfaultfd, the memory, the lifeline, standard error
    pager -> array   ArrayOpened, or ArrayRefused and the end
    array -> pager   AskArray, answered by ArrayDone with its id, in any order
    pager -> array   ArrayResumed: a pager that died was replaced; the array repeats what was not answered

One message is one msgpack Struct. Anything else ends the connection and that array.
"""

import struct
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

VERSION = 1
MESSAGE_BYTES_MAX = 4096
DESCRIPTORS = 4
CHUNK_MIN, CHUNK_MAX = 4096, 1 << 20
"""Least and most bytes of a chunk; its size is a power of two."""
CHUNKS_MAX = 1 << 22
"""Most chunks of one array: 256 GiB in chunks of 64 KiB. Each costs the pager a byte, and more while it is local."""

Size = Annotated[int, Meta(ge=0, le=1 << 47)]
Id = Annotated[int, Meta(ge=0, le=(1 << 62))]
Text = Annotated[str, Meta(max_length=600)]
Asked = Literal["prefetch", "pin", "unpin", "drop", "save", "flush", "sequential", "random", "normal", "counts"]
T = TypeVar("T")


class ArrayFrame(msgspec.Struct, frozen=True, tag=True):
    """One message; the tag is the class name."""


class OpenArray(ArrayFrame, frozen=True):
    """Answer faults of this memory. All sizes are in bytes."""

    version: int
    offset: Size
    """Position of the array's first byte in the volume, a multiple of the volume's page."""
    size: Size
    """Size of the memory, a multiple of the volume's page and of the machine's."""
    chunk: Size
    budget: Size
    """Most bytes that are local at once."""
    address: Size
    """Address of the memory in the process that opens the array."""
    writable: bool


class AskArray(ArrayFrame, frozen=True):
    """Do `what` with the chunks from `first` up to, and without, `end`. `save` is answered when everything is at the
    volume, `flush` when everything is on disk."""

    id: Id
    what: Asked
    first: Size = 0
    end: Size = 0


class ArrayOpened(ArrayFrame, frozen=True):
    budget: Size
    """Most bytes that are local at once, as the pager decided."""


class ArrayRefused(ArrayFrame, frozen=True):
    what: Text
    why: Text
    next: Text


class ArrayResumed(ArrayFrame, frozen=True):
    """A pager that died was replaced: repeat what was not answered."""


class ArrayDone(ArrayFrame, frozen=True):
    id: Id
    why: Text = ""
    """Why it was not done; empty: it is done."""
    counts: dict[str, int] = {}
    """Counts of events since the array was opened; only in the answer to `counts`."""


to_pager: msgspec.msgpack.Decoder[OpenArray | AskArray] = msgspec.msgpack.Decoder(OpenArray | AskArray)
to_array: msgspec.msgpack.Decoder[ArrayOpened | ArrayRefused | ArrayResumed | ArrayDone] = msgspec.msgpack.Decoder(
    ArrayOpened | ArrayRefused | ArrayResumed | ArrayDone
)
_encoder = msgspec.msgpack.Encoder()


class ArrayWireError(ConnectionError):
    """The peer sent something else; the connection cannot be used any more."""


def pack(frame: ArrayFrame) -> bytes:
    return _encoder.encode(frame)


def unpack(data: bytes, decoder: "msgspec.msgpack.Decoder[T]") -> T:
    """The Struct in a message. ArrayWireError when there is none."""
    if not 0 < len(data) <= MESSAGE_BYTES_MAX:
        raise ArrayWireError(f"a message of {len(data)} bytes")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ArrayWireError(f"malformed message: {error}") from error


def wrong(asked: OpenArray, volume_bytes: int, page_bytes: int, machine_page: int) -> str:
    """Why an array of this shape is impossible; empty when it is possible."""
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
