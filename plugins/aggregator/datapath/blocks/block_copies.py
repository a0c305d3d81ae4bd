"""Copies Blocks from the owner that hands them over to the next one: the protocol, without sockets (AutoPS §4.5.2.2).

    owner before            next owner                                  ranks
      PING, bytes       -->  is there memory for them?
                        <--  PONG: not yet, yes
      no round is under way: it sends ranks away                          | --OPEN--> the version that they hold
      OPEN of each Block  -->  all ranks hold this version?               |
      STATE, in parts     -->  into the Block's state                     | compute, forward and backward
        ...                    the last part: the Block can be added to   |
                          <--  COPIED                          <--PUSH--  | kept until then

The owner before sends nothing that may still change: its Blocks rest from when it sends ranks away, so what goes is
the version that they hold. At most `COPIES_MAX` Blocks are on their way; the first that it learnt of, which are mostly
those that ranks push first, go first. A Block that cannot be brought so (either side dies, a rank holds another
version, there is no room, a side is silent) is asked of ranks, as after a crash: the copy is one more that holds it.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from covey.tensors.numbers.tensor_wire import (
    FAULT_BYTES_MAX,
    FLOAT32,
    OWNER,
    TYPES,
    Declared,
    Frame,
    Header,
    Payload,
    TensorOp,
    TensorWireError,
    frame,
    pack_declared,
    unpack_declared,
)
from covey.tensors.owner.sums import StateTransfer, TensorSum

COPIES_MAX = 4
"""Most Blocks that one owner has on their way to another at once."""
MEGABYTE = 20
"""Bits of a megabyte: PING has in `round` how many of these the tensors have."""


class TakesCopies(Protocol):
    """A job at its next owner, as far as these copies see it (`job_sums`)."""

    hash: int
    epoch: int
    tensors: dict[int, TensorSum]

    @property
    def is_ready(self) -> bool: ...
    def expect(self, state_bytes: int) -> None: ...
    def declare(self, key: int, declared: Declared) -> TensorSum | str: ...
    def heard(self, key: int, tensor: TensorSum, actions: Sequence[StateTransfer]) -> None: ...


class OutgoingCopies:
    """The copies of one job's Blocks at the earlier owner. The Blocks must not change any more."""

    def __init__(self, job: int, epoch: int, tensors: Mapping[int, TensorSum]) -> None:
        """`epoch`: the epoch of the next owner."""
        self._job, self._epoch = job, epoch
        self._tensors = {key: tensor for key, tensor in tensors.items() if tensor.may_be_copied}
        self._waiting = deque(self._tensors)
        self._on_way: set[int] = set()
        self.copied = self.refused = 0
        """Number of Blocks that the next owner has, and of those that it refused."""
        self.sent_bytes = 0

    def announced(self) -> Iterator[Frame]:
        """Frames that are sent first."""
        for key, tensor in self._tensors.items():
            yield self._frame(TensorOp.OPEN, key, tensor, pack_declared(tensor.declared))
        yield frame(TensorOp.COPIES, self._job, self._epoch, rank=OWNER)

    def next(self) -> Iterator[Frame] | None:
        """Frames of the next Block's state; None: an answer comes first, or all have gone."""
        if not self._waiting or len(self._on_way) >= COPIES_MAX:
            return None
        key = self._waiting.popleft()
        self._on_way.add(key)
        return self._state(key, self._tensors[key])

    def heard(self, header: Header) -> None:
        """Take in an answer. TensorWireError when it is no answer to what was sent."""
        if header.key not in self._on_way and header.key not in self._waiting:
            raise TensorWireError(f"{header.op.name} about a Block that is not on its way")
        match header.op:
            case TensorOp.COPIED if header.key in self._on_way:
                self.copied += 1
            case TensorOp.FAULT:
                self.refused += 1
            case _:
                raise TensorWireError(f"unexpected {header.op.name} from the next owner")
        self._on_way.discard(header.key)
        if header.key in self._waiting:
            self._waiting.remove(header.key)

    @property
    def is_over(self) -> bool:
        """Every Block was answered."""
        return not self._waiting and not self._on_way

    def _state(self, key: int, tensor: TensorSum) -> Iterator[Frame]:
        _, array, _ = tensor.lend()
        try:
            view = memoryview(array.view("u1").data)
            for part in range(tensor.declared.state_parts):
                start, end = tensor.declared.state_span(part)
                yield self._frame(TensorOp.STATE, key, tensor, view[start:end], part)
                self.sent_bytes += end - start
        finally:
            tensor.give_back(array)

    def _frame(self, op: TensorOp, key: int, tensor: TensorSum, payload: Payload, part: int = 0) -> Frame:
        type, version = TYPES[tensor.declared.type][0] if op is TensorOp.STATE else FLOAT32, tensor.version
        assert version is not None
        of: Any = {"key": key, "part": part, "rank": OWNER, "round": version, "type": type}
        return frame(op, self._job, self._epoch, payload=payload, **of)


class IncomingCopies:
    """The copies of one job's Blocks at its next owner, over one connection of the earlier owner."""

    def __init__(self, job: TakesCopies) -> None:
        self._job = job
        self._versions: dict[int, int] = {}
        """Version of each Block that is to come, or has come."""
        self._next: dict[int, int] = {}
        """Number of the part that comes next, of each Block that is to come."""
        self._refused: set[int] = set()
        self.announces = True
        """The earlier owner has not said yet which Blocks it brings."""
        self.copied, self.received_bytes = 0, 0
        self._scratch = bytearray()
        for tensor in job.tensors.values():
            tensor.await_copy()

    @property
    def awaited(self) -> int:
        """Number of Blocks that were announced, and are not complete."""
        return len(self._next)

    def destination(self, header: Header) -> memoryview:
        """Memory for the payload of this frame. TensorWireError when it may not come now."""
        match header.op:
            case TensorOp.STATE if header.key in self._refused:
                return self._aside(header.length)
            case TensorOp.STATE:
                return self._part(header)
            case TensorOp.OPEN if self.announces and header.key not in self._versions and not header.flags:
                return memoryview(bytearray(header.length))
            case TensorOp.COPIES if self.announces:
                return memoryview(bytearray())
            case TensorOp.PING:
                return memoryview(bytearray())
            case _:
                raise TensorWireError(f"unexpected {header.op.name} from an owner")

    def heard(self, header: Header, payload: Payload) -> Sequence[Frame]:
        """Frames that answer this one. TensorWireError, Violation."""
        match header.op:
            case TensorOp.OPEN:
                return self._opened(header, unpack_declared(payload))
            case TensorOp.COPIES:
                self._announced()
            case TensorOp.STATE if header.key not in self._refused:
                return self._came(header)
            case TensorOp.PING:
                self._job.expect(header.round << MEGABYTE)
                return (self._answer(TensorOp.PONG, header, ready=self._job.is_ready),)
            case _:
                pass
        return ()

    def ended(self) -> None:
        """Nothing more comes: ask ranks for Blocks that are not complete. Violation."""
        self.announces = False
        for key in list(self._job.tensors):
            self._give_up(key)

    def _opened(self, header: Header, declared: Declared) -> Sequence[Frame]:
        tensor = self._job.declare(header.key, declared)
        self._versions[header.key] = header.round
        if isinstance(tensor, str):
            self._refused.add(header.key)
            return (self._answer(TensorOp.FAULT, header, tensor),)
        self._next[header.key] = 0
        if tensor.copy is not None:
            tensor.copy.version = header.round
            self._job.heard(header.key, tensor, tensor.go_on())
        return ()

    def _announced(self) -> None:
        self.announces = False
        for key in sorted(self._job.tensors.keys() - self._next.keys()):
            self._give_up(key)

    def _give_up(self, key: int) -> None:
        """Give up the copy of this Block unless it is complete."""
        tensor = self._job.tensors[key]
        if tensor.copy is not None and not tensor.copy.is_whole:
            tensor.copy = None
            self._job.heard(key, tensor, tensor.go_on())

    def _part(self, header: Header) -> memoryview:
        part, tensor = self._next.get(header.key), self._job.tensors.get(header.key)
        if self.announces or part is None or tensor is None or header.round != self._versions[header.key]:
            raise TensorWireError(f"version {header.round} of a Block that was not said to come")
        declared = tensor.declared
        start, end = declared.state_span(part)
        expected = part, end - start, TYPES[declared.type][0]
        if (header.part, header.length, header.type) != expected:
            raise TensorWireError(f"part {header.part} of {header.length} bytes and type {header.type}, not {expected}")
        return self._aside(header.length) if tensor.copy is None else tensor.memory_of(part)

    def _came(self, header: Header) -> Sequence[Frame]:
        tensor = self._job.tensors[header.key]
        self.received_bytes += header.length
        self._next[header.key] += 1
        if tensor.copy is not None:
            tensor.copy.parts_left -= 1
            self._job.heard(header.key, tensor, tensor.go_on() if tensor.copy.is_whole else ())
        if self._next[header.key] < tensor.declared.state_parts:
            return ()
        del self._next[header.key]
        self.copied += 1
        return (self._answer(TensorOp.COPIED, header),)

    def _answer(self, op: TensorOp, header: Header, why: str = "", ready: bool = False) -> Frame:
        job, round = self._job, int(ready) if op is TensorOp.PONG else header.round
        payload = why.encode()[:FAULT_BYTES_MAX]
        return frame(op, job.hash, job.epoch, key=header.key, rank=OWNER, round=round, payload=payload)

    def _aside(self, size: int) -> memoryview:
        """Memory for bytes that are not needed."""
        if len(self._scratch) < size:
            self._scratch = bytearray(size)
        return memoryview(self._scratch)[:size]
