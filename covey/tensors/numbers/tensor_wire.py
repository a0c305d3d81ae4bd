"""Frames of the tensor path: a worker of a job on one side, the aggregating process (`aggd`) on the other, over TCP.

Every frame is a header of 40 bytes and a payload whose greatest length its operation fixes, so a receiver knows the
most that it will ever allocate. A frame that violates this is a `TensorWireError`, and the connection is closed: the
next frame's start cannot be found. The checksum decides whether a network card has changed a bit, so it covers what
crosses one:

    TCP                                 header and payload
    unix socket of this host (`near`)   the header; of numbers, and what ranks tell one another, nothing else, since
                                        they never leave the host's memory
    memory that both see (PLACED)       the header: there is no payload
    by reference, in one process        nothing (`covey.tensors.direct.local_link`)

    worker                                aggd
      HELLO(job, epoch, rank, incarnation, nonce) ->
                                       <- CHALLENGE, or STALE(epoch it serves)
      PROOF ->
      PAIR(its queue pair) ->                 where both ends said in HELLO and CHALLENGE that they may use RDMA
                                       <- PAIRED(that of the owner, or why there is none)
      PAIR(it works, or why not) ->           from now on large parts of numbers go over the pair, their headers here
                                              (`covey.tensors.rdma`)
                                       <- WELCOME, or STALE(epoch, and the rank's newest incarnation if this is older)
      OPEN(key, version held)         ->      once per tensor, again on every connection
                                       <- ASK(key)              when aggd has no state of it
      STATE(key, version, part) ...   ->
      RATE(key, round)                ->      learning rate, where the aggregator updates parameters
                                              (`covey.tensors.numbers.updates`)
      PUSH(key, round, piece) ...     ->      the worker's contribution, or the sums of its host
                                              (`covey.tensors.numbers.spoken`)
                                       <- MEMORY(key, bytes)    with a descriptor, to a worker of this host
      PLACED(key, round, piece) ...   ->      as PUSH; its numbers lie in that memory
                                       <- RESULT(key, round, part) ...
      KEPT(key, round)                ->      the keeper has the moments too: others may have the result
      TELL(rank, about what)          ->      to another rank, as TOLD, if it is connected (`covey.healing.healing`)
                                       <- TOLD(rank, about what)
      LEAVES(who, in words)           ->      it pushes no tensor any more but the last one
      (`covey.tensors.owner.leaving`)
                                       <- FAULT(key, round 1) to ranks that wait for it; round 0: it is not added
      PING                            ->
                                       <- PONG

An owner that hands its Blocks over brings them to the next one on a connection of its own, whose HELLO says `OWNER` in
the place of a rank, under the next one's epoch and secret:

    owner before                      next owner
      PING(megabytes)                 ->      until no round is under way
                                       <- PONG(there is memory for them)
      OPEN(key, version)              ->      of every Block that it brings, then
      COPIES                          ->      others come from ranks
      STATE(key, version, part) ...   ->      one Block after the other
                                       <- COPIED(key, version), or FAULT(key)

An epoch orders assignments of a job to aggregators: the grant of the job in the upper half, then a ballot that only one
coordinator can use (ballot modulo world size is a rank on its host), so equal epochs are the same assignment.

Both ends prove that they know the secret of the assignment, and neither sends it (`covey.wire.handshake`).
"""

import enum
import hashlib
import math
import struct
from typing import Annotated, Literal, NamedTuple

import msgspec

from covey.core.ids import JobId
from covey.tensors.numbers.sum_order import Node, Order
from covey.tensors.numbers.updates import Update, check_rate
from covey.wire.checksum import crc32
from covey.wire.handshake import CHALLENGE_BYTES, NONCE_BYTES, PROOF_BYTES
from covey.wire.sums import RANKS_MAX as RANKS_MAX
from covey.wire.sums import SECRET_BYTES as SECRET_BYTES

VERSION = 1
"""Version of the frames. A frame of another version is refused, whatever it says."""
PART_BYTES_MAX = 1 << 20
"""Most bytes of a tensor part in one frame."""
PART_BYTES = 1 << 20
"""Bytes of a part that workers use. Measured with four ranks and 25 MB: 256 KiB 43 ms, 512 KiB 35.5, 1 MiB 33."""
OPEN_BYTES_MAX = 4096
FAULT_BYTES_MAX = 1024
PARTS_MAX = 0xFFFF
BLOCKS_MAX = 1 << 20
"""Most Blocks of one tensor."""
Elements = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
OWNER = RANKS_MAX
"""Number in the place of a rank when an owner hands its Blocks over. No rank has this number."""
Type = Literal["float32", "float64", "float16", "bfloat16"]
"""Type of the elements of a tensor (`covey.tensors.numbers.types`)."""
TYPES: dict[Type, tuple[int, int]] = {"float32": (1, 4), "float64": (2, 8), "float16": (3, 2), "bfloat16": (4, 2)}
"""Number of each type in a header, and bytes of an element. A frame without elements says float32."""
FLOAT32 = TYPES["float32"][0]
_TYPE_NUMBERS = frozenset(number for number, _ in TYPES.values())
ADDED_AS: dict[Type, Type] = {"float32": "float32", "float64": "float64", "float16": "float32", "bfloat16": "float32"}
"""Type in which a sum is kept until it is rounded (`covey.tensors.numbers.types`)."""
WANT = 1
"""Flag of OPEN: the worker wants the agreed state once there is one."""
SPEAKS = 2
"""Flag of OPEN: the worker pushes for all ranks of its host (`covey.tensors.numbers.spoken`); its payload begins with
which ranks."""
IN_VAIN = 1
"""Value of FAULT's round when the round needs a rank that has left."""
PAIRS = 1
"""Value of part in HELLO and CHALLENGE when that end may use RDMA, and in PAIR and PAIRED when it does."""
HOLLOW = 4
"""Flag of OPEN: the worker took over from a lost one, and has no copy of the result of the version that it states."""
PLACES = 8
"""Flag of OPEN: the worker can put what it pushes into memory that the aggregator shares with it."""

_HEADER = struct.Struct("<BBBBQIHHIQII")
HEADER_BYTES = _HEADER.size
_COVERED = HEADER_BYTES - 4
_OP_AT = 1
"""Offset of the operation's byte in a header."""
_RANKS = struct.Struct("<HH")
_RATE = struct.Struct("<d")
_SIZE = struct.Struct("<Q")

Payload = bytes | bytearray | memoryview
Frame = tuple[bytes, Payload]
"""Header and payload, sent one after the other."""


class TensorWireError(ConnectionError):
    """The peer sent something that is not a frame of the tensor path, or a frame that may not come now."""


class TensorOp(enum.IntEnum):
    HELLO = 1
    OPEN = 2
    PUSH = 3
    STATE = 4
    PING = 5
    PROOF = 6
    RATE = 7
    KEPT = 8
    TELL = 9
    COPIES = 10
    LEAVES = 11
    PLACED = 12
    PAIR = 13
    WELCOME = 16
    RESULT = 17
    ASK = 18
    STALE = 19
    PONG = 20
    FAULT = 21
    CHALLENGE = 22
    TOLD = 23
    COPIED = 24
    MEMORY = 25
    PAIRED = 26


_LENGTH_MAX = {
    TensorOp.HELLO: NONCE_BYTES,
    TensorOp.PROOF: PROOF_BYTES,
    TensorOp.OPEN: OPEN_BYTES_MAX + _RANKS.size,
    TensorOp.PUSH: PART_BYTES_MAX,
    TensorOp.STATE: PART_BYTES_MAX,
    TensorOp.PING: 0,
    TensorOp.RATE: _RATE.size,
    TensorOp.KEPT: 0,
    TensorOp.TELL: PART_BYTES_MAX,
    TensorOp.LEAVES: FAULT_BYTES_MAX,
    TensorOp.PAIR: FAULT_BYTES_MAX,
    TensorOp.WELCOME: 0,
    TensorOp.RESULT: PART_BYTES_MAX,
    TensorOp.ASK: 0,
    TensorOp.STALE: 0,
    TensorOp.PONG: 0,
    TensorOp.FAULT: FAULT_BYTES_MAX,
    TensorOp.CHALLENGE: CHALLENGE_BYTES,
    TensorOp.TOLD: PART_BYTES_MAX,
    TensorOp.COPIES: 0,
    TensorOp.COPIED: 0,
    TensorOp.PLACED: 0,
    TensorOp.MEMORY: _SIZE.size,
    TensorOp.PAIRED: FAULT_BYTES_MAX,
}
_OPS = {int(op): op for op in TensorOp}
_NUMBERS = frozenset((TensorOp.PUSH, TensorOp.STATE, TensorOp.RESULT))
_LARGE = frozenset((TensorOp.PUSH, TensorOp.STATE, TensorOp.RESULT, TensorOp.TELL, TensorOp.TOLD))
_LASTING = frozenset((TensorOp.PUSH, TensorOp.RESULT))
_WITH_TYPE = frozenset((TensorOp.OPEN, TensorOp.PUSH, TensorOp.PLACED, TensorOp.STATE, TensorOp.RESULT))


class Header(NamedTuple):
    op: TensorOp
    flags: int
    job: int
    key: int
    part: int
    rank: int
    round: int
    """Round of PUSH, RATE, RESULT, KEPT; in OPEN, STATE, ASK and COPIED the version of the state, which is the last
    complete round; in TELL and TOLD a step."""
    epoch: int
    length: int
    crc: int
    type: int = FLOAT32
    """Number of the elements' type (`TYPES`)."""


def job_hash(job: JobId) -> int:
    """64 bits that identify a job in a header."""
    return int.from_bytes(hashlib.blake2b(job.encode(), digest_size=8).digest(), "little")


def key_of(name: str) -> int:
    """32 bits that identify a tensor within its job. Both ends compare the full declaration, so a collision is reported
    as an error, and two tensors are never added into each other."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")


def frame(
    op: TensorOp,
    job: int,
    epoch: int,
    *,
    key: int = 0,
    part: int = 0,
    rank: int = 0,
    round: int = 0,
    flags: int = 0,
    type: int = FLOAT32,
    payload: Payload = b"",
    near: bool = False,
) -> Frame:
    head = _HEADER.pack(VERSION, op, flags, type, job, key, part, rank, round, epoch, len(payload), 0)[:_COVERED]
    return head + _checksum(head, payload, near).to_bytes(4, "little"), payload


def parse(data: Payload) -> Header:
    """The header in 40 bytes. TensorWireError when its version, operation, type, flags or length is impossible."""
    if len(data) != HEADER_BYTES:
        raise TensorWireError(f"a header has {HEADER_BYTES} bytes, not {len(data)}")
    version, number, flags, type_, job, key, part, rank, round_, epoch, length, crc = _HEADER.unpack(data)
    if version != VERSION:
        raise TensorWireError(f"version {version} of the tensor protocol is not supported; this is version {VERSION}")
    op = _OPS.get(number)
    if op is None:
        raise TensorWireError(f"unknown operation {number}")
    if type_ not in _TYPE_NUMBERS or (type_ != FLOAT32 and op not in _WITH_TYPE):
        raise TensorWireError(f"unknown type {type_} of {op.name}")
    if flags & ~(WANT | SPEAKS | HOLLOW | PLACES) or (flags and op is not TensorOp.OPEN):
        raise TensorWireError(f"unknown flags {flags:#x} of {op.name}")
    if length > _LENGTH_MAX[op]:
        raise TensorWireError(f"{op.name} announced {length} bytes; at most {_LENGTH_MAX[op]} are accepted")
    return Header(op, flags, job, key, part, rank, round_, epoch, length, crc, type_)


def verify(head: Payload, payload: Payload, near: bool = False) -> None:
    """TensorWireError when the bytes are not those that were sent."""
    crc = _checksum(memoryview(head)[:_COVERED], payload, near)
    if crc != int.from_bytes(memoryview(head)[_COVERED:], "little"):
        raise TensorWireError("checksum of a frame does not match")


def is_placed(head: Payload) -> bool:
    """Whether the numbers of this frame lie in shared memory, so that the other end may begin with them."""
    return head[_OP_AT] == TensorOp.PLACED


def op_of(head: Payload) -> int:
    """The number of the operation in a header."""
    return head[_OP_AT]


def has_numbers(op: int) -> bool:
    """Whether the payload of frames of this operation is numbers of a tensor."""
    return op in _NUMBERS


def is_lasting(head: Payload) -> bool:
    """Whether the payload of this frame does not change until the other end has read it: what was pushed stays until
    its result is here, and a result until the round after the next one, for which its rank has to push."""
    return head[_OP_AT] in _LASTING


def _checksum(head: Payload, payload: Payload, near: bool) -> int:
    of_head = crc32(head)
    return of_head if near and head[_OP_AT] in _LARGE else crc32(payload, of_head)


def block_label(name: str, block: int) -> str:
    """The name of a Block, from which its key is made: for the first Block, that of the tensor."""
    return f"{name}\0{block}" if block else name


Kind = Literal["model", "grad"]
"""model: a round's result is the parameters plus the sum. grad: the result is the sum, and no parameters are kept."""


class Declared(msgspec.Struct, frozen=True):
    """The declaration of a tensor, equal on every rank; the payload of OPEN."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    kind: Kind
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 40)], ...], msgspec.Meta(max_length=8)]
    part_bytes: Annotated[int, msgspec.Meta(ge=4, le=PART_BYTES_MAX, multiple_of=4)] = PART_BYTES
    """Bytes of a part; a whole number of elements."""
    order: Order = "rank"
    """Order in which the contributions of a round are added."""
    block: Annotated[int, msgspec.Meta(ge=0, le=BLOCKS_MAX)] = 0
    """Number of this Block of the tensor (`covey.tensors.numbers.blocks`)."""
    elements: tuple[Elements, Elements] | None = None
    """First element of the Block, and the one after its last; None: the tensor is one Block."""
    type: Type = "float32"
    mean: bool = False
    """Whether the sum is divided by the number of ranks."""
    update: Update | None = None
    """Optimizer that updates a model's parameters with the sum; None: the sum is added to them."""
    steps: Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)] = 0
    """Steps that the optimizer made before this job; its moments, if any, are then given with rank 0's parameters."""
    keeper: Annotated[int, msgspec.Meta(ge=0, le=RANKS_MAX)] = 0
    """The rank that has the moments too."""

    @property
    def element_bytes(self) -> int:
        return TYPES[self.type][1]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.element_bytes * math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of this Block."""
        return (
            self.tensor_bytes if self.elements is None else self.element_bytes * (self.elements[1] - self.elements[0])
        )

    @property
    def moments(self) -> int:
        """How many numbers are kept for each parameter."""
        return 0 if self.update is None else self.update.moments

    @property
    def moment_bytes(self) -> int:
        """Bytes of one moment of this Block, in the type in which numbers are added."""
        return self.size_bytes // self.element_bytes * TYPES[ADDED_AS[self.type]][1]

    @property
    def state_bytes(self) -> int:
        """Bytes of this Block and its moments."""
        return self.size_bytes + self.moments * self.moment_bytes

    @property
    def label(self) -> str:
        """Name of this Block, unique in the job."""
        return block_label(self.name, self.block)

    @property
    def words(self) -> str:
        """The declaration in words, for people."""
        how = f"in parts of {self.part_bytes} bytes, added by {self.order}{', divided' if self.mean else ''}"
        update = f", updated by {self.update} from step {self.steps} on" if self.update is not None else ""
        return f"{self.kind} {self.name!r} of {self.type} and shape {self.shape} {how}{update}"

    @property
    def parts(self) -> int:
        """Number of parts of the Block, at least one: an empty tensor travels as one empty part."""
        return max(1, -(-self.size_bytes // self.part_bytes))

    @property
    def moment_parts(self) -> int:
        """Number of parts of one moment."""
        return max(1, -(-self.moment_bytes // self.part_bytes))

    @property
    def state_parts(self) -> int:
        """Number of parts of the Block and its moments, which follow it."""
        return self.parts + self.moments * self.moment_parts

    def asked_parts(self, version: int) -> int:
        """Number of parts of the state that an aggregator asks a rank for: without moments while these are zero."""
        return self.state_parts if version or self.steps else self.parts

    def span(self, part: int) -> tuple[int, int]:
        """First byte of a part of the Block, and the byte after its last."""
        return part * self.part_bytes, min((part + 1) * self.part_bytes, self.size_bytes)

    def state_piece(self, part: int) -> tuple[int, int, int]:
        """For a part of the state: the Block (0) or number of its moment (from 1), and the span of bytes there."""
        if part < self.parts:
            return 0, *self.span(part)
        which, part = divmod(part - self.parts, self.moment_parts)
        return 1 + which, part * self.part_bytes, min((part + 1) * self.part_bytes, self.moment_bytes)

    def state_span(self, part: int) -> tuple[int, int]:
        """Span of bytes of a part in the whole state: the Block, then its moments one after the other."""
        which, first, end = self.state_piece(part)
        before = self.size_bytes + (which - 1) * self.moment_bytes if which else 0
        return before + first, before + end


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Declared)


def pack_declared(declared: Declared) -> bytes:
    """The declaration as bytes. ValueError when it is too long."""
    data = _encoder.encode(declared)
    try:
        unpack_declared(data)
    except TensorWireError as error:
        raise ValueError(str(error)) from error
    return data


def unpack_declared(data: Payload) -> Declared:
    if len(data) > OPEN_BYTES_MAX:
        raise TensorWireError(
            f"the declaration of a tensor has {len(data)} bytes; at most {OPEN_BYTES_MAX} are accepted"
        )
    try:
        declared = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise TensorWireError(f"malformed declaration of a tensor: {error}") from error
    if declared.part_bytes % declared.element_bytes:
        raise TensorWireError(f"a part of {declared.name!r} would have {declared.part_bytes} bytes of {declared.type}")
    cut = declared.elements
    if cut is not None and not cut[0] <= cut[1] <= math.prod(declared.shape):
        raise TensorWireError(f"Block {declared.block} of {declared.name!r} is no part of {declared.shape}")
    if declared.state_parts > PARTS_MAX:
        raise TensorWireError(
            f"tensor {declared.name!r} has {declared.state_parts} parts; at most {PARTS_MAX} are possible"
        )
    if declared.update is not None and declared.kind != "model":
        raise TensorWireError(f"{declared.name!r}, a {declared.kind} of {declared.type}, cannot be updated by a rule")
    return declared


def pack_rate(rate: float) -> bytes:
    """The payload of RATE."""
    return _RATE.pack(rate)


def unpack_rate(data: Payload) -> float:
    if len(data) != _RATE.size:
        raise TensorWireError(f"a learning rate has {_RATE.size} bytes, not {len(data)}")
    try:
        return check_rate(*_RATE.unpack(data))
    except ValueError as error:
        raise TensorWireError(str(error)) from error


def pack_size(size: int) -> bytes:
    """The payload of MEMORY."""
    return _SIZE.pack(size)


def unpack_size(data: Payload) -> int:
    if len(data) != _SIZE.size:
        raise TensorWireError(f"a size has {_SIZE.size} bytes, not {len(data)}")
    size: int = _SIZE.unpack(data)[0]
    return size


def pack_opening(packed: bytes, ranks: Node | None) -> bytes:
    """The payload of OPEN. `packed`: the declaration; `ranks`: for whom the worker speaks; None: itself alone."""
    return packed if ranks is None else _RANKS.pack(*ranks) + packed


def unpack_opening(flags: int, data: Payload) -> tuple[Declared, Node | None]:
    """The declaration in an OPEN, and the ranks for which the worker speaks, if not for itself alone."""
    if not flags & SPEAKS:
        return unpack_declared(data), None
    if len(data) < _RANKS.size:
        raise TensorWireError("OPEN does not name the ranks")
    first, end = _RANKS.unpack_from(data)
    return unpack_declared(memoryview(data)[_RANKS.size :]), (first, end)


# ---- epochs ----------------------------------------------------------------------------------------------------------


def grant_of(epoch: int) -> int:
    """The grant under which an assignment was made."""
    return epoch >> 32


def ballot_of(epoch: int) -> int:
    return epoch & 0xFFFFFFFF


def epoch_text(epoch: int) -> str:
    """The epoch for people: `2.5` is grant 2, ballot 5."""
    return f"{grant_of(epoch)}.{ballot_of(epoch)}"
