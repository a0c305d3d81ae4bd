"""What processes of an elastic job send one another so that data Blocks move with ranks.

Questions and answers go through the owner of the job's tensors, as messages between ranks do (TELL), and may be lost:

    who carries a rank now   QUESTION(ranks)          ->  the process that carried it, or each that may have
                         <-  ANSWER(address, Blocks)

Blocks go over a TCP connection of their own, which both ends prove to belong to the job (`covey.wire.handshake`; the
secret is that of the job's first table, which agents give to its ranks alone):

    HELLO(job, rank, epoch)  ->
                         <-  CHALLENGE
    PROOF                    ->
    GET(set, Block)          ->
                         <-  HEAD(status, sizes), contents, CRC-32, then pieces, each with its CRC-32
    DONE(set, Block)         ->  it is whole, and has a place here: the giver may forget it
"""

import enum
import struct
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import msgspec

from covey.healing.state_pieces import Item
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.tensor_wire import key_of
from covey.wire.handshake import NONCE_BYTES
from covey.wire.headers import WireError

BLOCKS_MAX = 1 << 16
"""Most Blocks of all sets of a job: an answer, which is one message, names those that a process holds."""
SETS_MAX = 16
"""Most sets of Blocks of a job."""
BLOCK_BYTES_MAX = 1 << 40
ARRAYS_MAX = 1 << 12
"""Most arrays of a Block."""
CONTENTS_BYTES_MAX = 256 << 10
"""Most bytes that say what the arrays of a Block are."""
PIECE_BYTES = 1 << 20
"""Bytes of a Block that have a checksum of their own."""
MAGIC = b"coveybl1"
_HELLO = struct.Struct(f"<8sIIQ{NONCE_BYTES}s")
_REQUEST = struct.Struct("<BxxxII")
_HEAD = struct.Struct("<BxxxIQ")
SUM = struct.Struct("<I")
"""A checksum on the wire."""
HELLO_BYTES, REQUEST_BYTES, HEAD_BYTES = _HELLO.size, _REQUEST.size, _HEAD.size
BlockArrays = Mapping[str, Array]
"""The arrays of one Block, by name; the only one of a Block without names has the name ""."""


class AboutBlocks(enum.IntEnum):
    """Kinds of messages between ranks, beside those of `covey.healing.state_pieces.About`."""

    QUESTION = 64
    ANSWER = 65


class DeclaredBlocks(msgspec.Struct, frozen=True):
    """A set of Blocks, as a script declares it with `job.data`."""

    name: Annotated[str, msgspec.Meta(max_length=64)]
    blocks: Annotated[int, msgspec.Meta(ge=1, le=BLOCKS_MAX)]
    bytes_max: Annotated[int, msgspec.Meta(ge=1, le=BLOCK_BYTES_MAX)]
    """Most bytes of one Block."""
    code: Annotated[str, msgspec.Meta(max_length=32)] = ""
    """Digest of the code of `load`; empty: it has none that could be compared."""

    @property
    def key(self) -> int:
        """Number of the set on the wire."""
        return key_of(self.name)


class BlocksWanted(msgspec.Struct, frozen=True):
    """Question: who holds the Blocks of these ranks?"""

    ask: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    """Number of the question; its answer repeats it."""
    ranks: Annotated[tuple[int, ...], msgspec.Meta(max_length=1 << 12)]


class BlocksHeld(msgspec.Struct, frozen=True):
    """Answer: what Blocks of the ranks in question the process that answers holds."""

    ask: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    address: Annotated[str, msgspec.Meta(max_length=80)] = ""
    """TCP `ip:port` where it gives them; empty: it gives none."""
    sets: Annotated[tuple[DeclaredBlocks, ...], msgspec.Meta(max_length=SETS_MAX)] = ()
    """All sets that its script has declared."""
    held: Annotated[dict[str, tuple[int, ...]], msgspec.Meta(max_length=SETS_MAX)] = {}
    """Numbers of Blocks, by set."""


encode_blocks = msgspec.msgpack.Encoder().encode
wanted_decoder: msgspec.msgpack.Decoder[BlocksWanted] = msgspec.msgpack.Decoder(BlocksWanted)
held_decoder: msgspec.msgpack.Decoder[BlocksHeld] = msgspec.msgpack.Decoder(BlocksHeld)
_contents_decoder: msgspec.msgpack.Decoder[tuple[Item, ...]] = msgspec.msgpack.Decoder(tuple[Item, ...])


class BlockHello(NamedTuple):
    job: int
    """Hash of the job's name."""
    rank: int
    epoch: int
    """Epoch of the secret that both ends prove to know."""
    nonce: bytes


class BlockOp(enum.IntEnum):
    GET = 1
    DONE = 2


class BlockRequest(NamedTuple):
    op: BlockOp
    key: int
    block: int


class BlockHead(NamedTuple):
    is_here: bool
    contents_bytes: int
    block_bytes: int


def pack_hello(hello: BlockHello) -> bytes:
    return _HELLO.pack(MAGIC, *hello)


def unpack_hello(data: bytes | bytearray) -> BlockHello:
    """The hello. WireError when it is none."""
    if len(data) != HELLO_BYTES:
        raise WireError(f"a hello of {len(data)} bytes")
    magic, *rest = _HELLO.unpack(data)
    if magic != MAGIC:
        raise WireError("it speaks another protocol")
    return BlockHello(*rest)


def pack_request(request: BlockRequest) -> bytes:
    return _REQUEST.pack(*request)


def unpack_request(data: bytes | bytearray) -> BlockRequest:
    """The request. WireError when it is none."""
    if len(data) != REQUEST_BYTES:
        raise WireError(f"a request of {len(data)} bytes")
    op, key, block = _REQUEST.unpack(data)
    if op not in (BlockOp.GET, BlockOp.DONE):
        raise WireError(f"unknown request {op}")
    return BlockRequest(BlockOp(op), key, block)


def pack_head(head: BlockHead) -> bytes:
    return _HEAD.pack(*head)


def unpack_head(data: bytes | bytearray, bytes_max: int) -> BlockHead:
    """The head of a Block of at most `bytes_max` bytes. WireError when it is none, or announces more."""
    if len(data) != HEAD_BYTES:
        raise WireError(f"a head of {len(data)} bytes")
    is_here, contents_bytes, block_bytes = _HEAD.unpack(data)
    if is_here > 1 or contents_bytes > CONTENTS_BYTES_MAX or block_bytes > bytes_max:
        raise WireError(f"a Block of {block_bytes} bytes, described by {contents_bytes}")
    return BlockHead(bool(is_here), contents_bytes, block_bytes)


def items_of(data: bytes | bytearray) -> tuple[Item, ...]:
    """What the arrays of a Block are. WireError when it cannot be read."""
    try:
        found = _contents_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"the contents of a Block cannot be read: {error}") from error
    if len(found) > ARRAYS_MAX or len({item.name for item in found}) != len(found):
        raise WireError(f"a Block of {len(found)} arrays, some with one name")
    return found
