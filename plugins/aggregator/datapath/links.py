"""One job at its aggregator under one epoch, and the connections of its workers.

A connection has a reader (the task the listener gives it) and a writer of its own, so a worker that reads slowly holds
up nobody: what is given to it is a tensor's state, taken when its turn comes, never a copy in a queue. Anything that is
not a proper frame ends the connection and is counted; the worker connects again and says where it stands.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from covey.ports import ByteStream, Env
from covey.splicing import LEAST_BYTES, PageStream
from covey.tensorwire import (
    FAULT_BYTES_MAX,
    HEADER_BYTES,
    HOLLOW,
    TYPES,
    WANT,
    Declared,
    Frame,
    Header,
    Payload,
    TensorOp,
    TensorWireError,
    frame,
    is_lasting,
    job_hash,
    parse,
    unpack_opening,
    unpack_rate,
    verify,
)
from plugins.aggregator.datapath.addition_queue import AdditionQueue
from plugins.aggregator.datapath.control import Serve
from plugins.aggregator.datapath.memory import Arena, Buffers, Memory, MemoryInAdvance
from plugins.aggregator.datapath.rounds_under_way import RoundsUnderWay
from plugins.aggregator.datapath.sums import StateTransfer, TensorSum
from plugins.aggregator.policy.urgency import LAST_S, ON_TRIAL, due

TENSORS_MAX = 1 << 16
"""Tensors of one job at one aggregator."""
QUEUE_MAX = 1 << 18
"""Answers waiting for one worker; one that asks for more without reading is cut off."""

TOLD_BYTES_MAX = 16 << 20
"""What ranks have told a rank and it has not read yet; more is dropped, and they tell it again."""
BLAME_S = 2.0
"""How long a worker that made a mistake may take to hear of it, seconds."""
SMALL_BYTES = 4096
"""Payloads that are copied, and written together with frames before and after them."""
READ_BYTES = 1 << 16
"""What a socket hands over at a time, about."""


def weight(size: int) -> int:
    """What a frame costs to read or write, in wake-ups: one, and one more for each further piece of its payload."""
    return 1 + size // READ_BYTES


class Counters:
    """What one aggregating process has done, for metrics."""

    def __init__(self) -> None:
        self.bad_frames = 0
        self.refused = 0
        """Hellos of unknown jobs, of other epochs or without the secret."""
        self.busy_s = 0.0
        """Seconds of a core spent on checking, adding and framing."""
        self.moved = 0
        """What frames weigh, of all jobs (`weight`)."""


class SharedByJobs(NamedTuple):
    """What all jobs of one process have in common."""

    memory: Memory
    counters: Counters
    buffers: Buffers
    additions: AdditionQueue


class JobSums:
    """The tensors of one job under one epoch."""

    def __init__(self, env: Env, order: Serve, shared: SharedByJobs) -> None:
        self.env, self.job, self.epoch = env, order.job, order.epoch
        self.workers, self.secret = order.workers, order.secret
        self.hash = job_hash(order.job)
        self.tensors: dict[int, TensorSum] = {}
        self.counters, self.buffers = shared.counters, shared.buffers
        self._memory, self._held = shared.memory, 0
        self._arena = Arena(min(2 * order.size_bytes, shared.memory.free))
        self._in_advance = MemoryInAdvance(env, f"aggd gets memory ready for {order.job}")
        self._in_advance.add(self._arena.touch())
        self.links: dict[int, WorkerLink] = {}
        self.newest: dict[int, int] = {}
        """Of each rank, the newest process that was connected: its incarnation."""
        self.received_bytes = self.sent_bytes = 0
        self.busy_s = 0.0
        """Seconds of a core spent on this job's checksums, additions and headers."""
        self.carried_s = 0.0
        """Its part of the process's other work: reading, writing, waking up."""
        self.moved = self.accounted = 0
        """What its frames weigh so far, and what they weighed when the other work was divided last."""
        self.over = False
        """No longer served here."""
        self.may_take_us: int | None = 0
        """An iteration, as of `SetPace`."""
        self.additions = shared.additions
        self.rounds_here = RoundsUnderWay(env.clock)

    @property
    def rounds(self) -> int:
        return sum(tensor.rounds for tensor in self.tensors.values())

    @property
    def not_finite(self) -> int:
        return sum(tensor.not_finite for tensor in self.tensors.values())

    @property
    def waits(self) -> tuple[list[int], float]:
        """Ranks whose part of the round that has been under way for longest is missing, and for how many seconds."""
        longest = self.rounds_here.longest()
        tensor = self.tensors.get(longest[0]) if longest is not None else None
        return ([], 0.0) if longest is None or tensor is None else (tensor.missing(), longest[1])

    @property
    def iterations(self) -> int:
        """Rounds of its most frequent tensor."""
        return max((tensor.rounds for tensor in self.tensors.values()), default=0)

    @property
    def largest_bytes(self) -> int:
        return max((tensor.declared.tensor_bytes for tensor in self.tensors.values()), default=0)

    @property
    def size_bytes(self) -> int:
        """Of its tensors, without moments of optimizers: what travels."""
        return sum(tensor.declared.size_bytes for tensor in self.tensors.values())

    @property
    def state_bytes(self) -> int:
        return sum(tensor.declared.state_bytes for tensor in self.tensors.values())

    def worked(self, began_s: float) -> None:
        """Count the core's time since `began_s`, in which nothing else ran."""
        took_s = self.env.clock.cpu_s() - began_s
        self.busy_s += took_s
        self.counters.busy_s += took_s

    def carried(self, size: int) -> None:
        """A frame with `size` bytes of payload came or went."""
        weighs = weight(size)
        self.moved += weighs
        self.counters.moved += weighs

    def declare(self, key: int, declared: Declared) -> TensorSum | str:
        """The tensor of this key, or why it cannot be summed."""
        known = self.tensors.get(key)
        if known is not None:
            if known.declared == declared:
                return known
            return f"this rank declares {declared.words}, another rank declared {known.declared.words}"
        size = 2 * declared.state_bytes
        if len(self.tensors) >= TENSORS_MAX:
            return f"a job may have {TENSORS_MAX} tensors at one aggregator"
        if not self._memory.take(size):
            return (
                f"{declared.state_bytes} bytes do not fit: the aggregator holds {self._memory.used} of "
                f"{self._memory.bytes_max} bytes (memory_bytes_max in [aggregator] of its agent.toml)"
            )
        self._held += size
        tensor = self.tensors[key] = self._sum_of(declared)
        self._in_advance.add(tensor.touch())
        return tensor

    def _sum_of(self, declared: Declared) -> TensorSum:
        return TensorSum(declared, self.workers, self.buffers.give, self._arena)

    def join(self, link: "WorkerLink") -> None:
        """This connection speaks for its rank now; an older one of the same rank is closed."""
        old = self.links.get(link.rank)
        if old is not None:
            self.leave(old)
            old.close()
        self.links[link.rank] = link
        self.rounds_here.come(link.rank)

    def leave(self, link: "WorkerLink") -> None:
        if self.links.get(link.rank) is not link:
            return
        del self.links[link.rank]
        self.rounds_here.leave(link.rank)
        for key, tensor in self.tensors.items():
            self.do(key, tensor, tensor.gone(link.rank))

    def do(self, key: int, tensor: TensorSum, actions: Sequence[StateTransfer]) -> None:
        for action in actions:
            link = self.links.get(action.rank)
            if link is None:
                continue  # it opens and pushes again when it is back
            if action.what == "ask":
                link.send(TensorOp.ASK, key=key)
            else:
                link.give(key, tensor)

    def tell(self, rank: int, header: Header, payload: bytearray) -> None:
        """What a rank tells another one, which hears it if it is connected."""
        link = self.links.get(header.part)
        if link is not None:
            link.told(rank, header, payload)

    @property
    def due_s(self) -> float:
        """When the sums of its present iteration are due (`policy.urgency`)."""
        now_s = self.env.clock.now_s()
        if not self.may_take_us:
            return ON_TRIAL if self.may_take_us == 0 else now_s + LAST_S
        return due(self.rounds_here.iteration_s, self.may_take_us / 1e6, now_s)

    def heard(self, key: int, tensor: TensorSum, actions: Sequence[StateTransfer]) -> None:
        """A worker said something of this tensor: do that, and what can be added now."""
        self.do(key, tensor, actions)
        self.rounds_here.follow(key, tensor.under_way)
        self.additions.put(self, key, tensor)

    def add_part(self, key: int) -> None:
        """One addition of this tensor."""
        tensor, began_s = self.tensors[key], self.env.clock.cpu_s()
        finite = not tensor.not_finite
        actions = tensor.work()
        self.worked(began_s)
        if finite and tensor.not_finite:
            name, round = tensor.declared.name, tensor.version
            self.env.log.warning("sum is not finite", job=self.job, tensor=name, after_round=round)
        self.rounds_here.follow(key, tensor.under_way)
        self.do(key, tensor, actions)

    def broken(self, key: int, error: Exception) -> None:
        """An addition of this tensor failed, and what it was to add is lost: it begins without state, as in a process
        that was started anew, and its workers connect again and push once more."""
        declared = self.tensors[key].declared
        self.env.log.error("addition failed", job=self.job, tensor=declared.name, why=repr(error), exc_info=error)
        self.tensors[key] = self._sum_of(declared)
        for link in list(self.links.values()):
            link.close()

    def end(self, epoch: int) -> None:
        """Close everything; workers are told that `epoch` is the one served now (0: none)."""
        self.over = True
        self._in_advance.stop()
        for _, link in sorted(self.links.items()):
            link.send(TensorOp.STALE, epoch=epoch)
            link.finish()
        self.links.clear()
        self._memory.used -= self._held
        self._held = 0
        self.tensors.clear()


class _Told(NamedTuple):
    """A frame that passes on what another rank said."""

    head: bytes
    payload: Payload


class WorkerLink:
    """One worker's connection after its hello was accepted."""

    def __init__(self, job: JobSums, rank: int, stream: ByteStream) -> None:
        self.job, self.rank = job, rank
        self._stream = stream
        self._near = stream.uid >= 0
        """It is on this host, at a unix socket."""
        self._queue: asyncio.Queue[Frame | tuple[int, TensorSum] | None] = asyncio.Queue()
        self._told_bytes = 0
        self._small = bytearray()
        """Frames that are written with what follows."""
        self._closed = False
        self._written = asyncio.Event()
        self._refused: set[int] = set()
        """Tensors that will not be summed; pushes of them are on their way until the worker hears so."""
        self._key = 0
        """The tensor of the frame heard last."""

    # ---- out ----

    def send(
        self, op: TensorOp, *, key: int = 0, epoch: int | None = None, payload: bytes = b"", round: int = 0
    ) -> None:
        of = self.job.epoch if epoch is None else epoch
        self._put(frame(op, self.job.hash, of, key=key, payload=payload, round=round))

    def give(self, key: int, tensor: TensorSum) -> None:
        if self._put((key, tensor)):
            self.job.rounds_here.owe()

    def told(self, rank: int, header: Header, payload: bytearray) -> None:
        if self._told_bytes + len(payload) > TOLD_BYTES_MAX:
            return
        job, head = self.job, header.key
        said = frame(TensorOp.TOLD, job.hash, job.epoch, key=head, rank=rank, round=header.round, payload=payload)
        if self._put(_Told(*said)):
            self._told_bytes += len(payload)

    def finish(self) -> None:
        """Close once everything that was said so far is sent."""
        self._queue.put_nowait(None)

    def close(self) -> None:
        self._closed = True
        self._queue.put_nowait(None)
        self._stream.close()

    def _put(self, item: Frame | tuple[int, TensorSum]) -> bool:
        """Whether it will be sent, if the worker listens."""
        if self._queue.qsize() >= QUEUE_MAX:
            self.close()
        if self._closed:
            return False
        self._queue.put_nowait(item)
        return True

    async def write_out(self) -> None:
        """Until `close` or `finish`; run as a task."""
        try:
            while (item := await self._next()) is not None:
                if isinstance(item[1], TensorSum):
                    await self._pay(item[0], item[1])
                else:
                    await self._write(*item)
                    self._told_bytes -= len(item[1]) if isinstance(item, _Told) else 0
            await self._write_small()
        except ConnectionError:
            pass  # the reader ends the same way, and tidies up
        finally:
            self._closed = True
            while not self._queue.empty():
                if (item := self._queue.get_nowait()) is not None and isinstance(item[1], TensorSum):
                    self.job.rounds_here.paid(item[0])
            self._written.set()
            self._stream.close()

    async def _next(self) -> Frame | tuple[int, TensorSum] | None:
        """What is written next; what is small is written once nothing else is there."""
        if self._small and self._queue.empty():
            await self._write_small()
        return await self._queue.get()

    async def _write(self, head: bytes, payload: Payload) -> None:
        """Soon, if it is small; it is copied then."""
        if len(payload) <= SMALL_BYTES and len(self._small) < READ_BYTES:
            self._small += head
            self._small += payload
            return
        small, self._small = self._small, bytearray()
        stream = self._stream
        if self._near and len(payload) >= LEAST_BYTES and is_lasting(head) and isinstance(stream, PageStream):
            await stream.lend(bytes(small + head), memoryview(payload))
        else:
            await stream.write(small, head, payload)

    async def _write_small(self) -> None:
        small, self._small = self._small, bytearray()
        if small:
            await self._stream.write(small)

    async def _pay(self, key: int, tensor: TensorSum) -> None:
        try:
            await self._send_state(key, tensor)
        finally:
            self.job.rounds_here.paid(key)

    async def blame(self, why: str) -> None:
        """Tell the worker what it did wrong, if it listens, and end."""
        self.send(TensorOp.FAULT, key=self._key, payload=why.encode()[:FAULT_BYTES_MAX])
        self.finish()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BLAME_S):
                await self._written.wait()

    async def _send_state(self, key: int, tensor: TensorSum) -> None:
        lent = tensor.lend_to(self.rank)
        if lent is None:
            return
        version, array, heads = lent
        job = self.job
        try:
            view = memoryview(array.view("u1").data)
            for part in range(tensor.parts_for(self.rank)):
                start, end = tensor.declared.state_span(part)
                payload = view[start:end]
                kept = ~part if self._near else part  # unlike checksums
                head = heads.get(kept)
                if head is None:
                    began_s, of = job.env.clock.cpu_s(), {"key": key, "part": part, "round": version}
                    of["type"] = TYPES[tensor.declared.type][0]
                    head, _ = frame(TensorOp.RESULT, job.hash, job.epoch, payload=payload, near=self._near, **of)
                    heads[kept] = head
                    job.worked(began_s)
                await self._write(head, payload)
                job.sent_bytes += end - start
                job.carried(end - start)
        finally:
            tensor.give_back(array)

    # ---- in ----

    async def read_in(self) -> None:
        """Until the connection ends: always by an exception. TensorWireError, Violation: it was this worker's fault."""
        head = bytearray(HEADER_BYTES)
        while True:
            await self._stream.read_into(memoryview(head))
            header = parse(head)
            if header.job != self.job.hash or header.epoch != self.job.epoch or header.rank != self.rank:
                raise TensorWireError("a frame for another job, epoch or rank than this connection was opened for")
            self._expect(header)
            payload = self.job.buffers.take(header.length)
            if header.length:
                await self._stream.read_into(memoryview(payload))
            self.job.carried(header.length)
            began_s = self.job.env.clock.cpu_s()
            verify(head, payload, self._near)
            self.job.worked(began_s)
            if self.job.over or self._closed:
                raise ConnectionAbortedError("served here no more")
            self._key = header.key
            self._heard(header, payload)

    def _expect(self, header: Header) -> None:
        """What can be wrong with a frame is found before its payload is allocated."""
        match header.op:
            case TensorOp.PUSH if header.key in self._refused:
                pass
            case TensorOp.PUSH:
                piece = self._tensor(header).piece(self.rank, header.part)
                if header.type != piece.type:
                    raise TensorWireError(f"type {header.type} in a push of type {piece.type}")
                if header.length != piece.size:
                    raise TensorWireError(f"a piece of {header.length} bytes, not {piece.size}")
            case TensorOp.STATE:
                declared = self._tensor(header).declared
                if header.type != TYPES[declared.type][0]:
                    raise TensorWireError(f"type {header.type} in a tensor of {declared.type}")
                if header.part >= declared.state_parts:
                    raise TensorWireError(f"part {header.part} of a tensor with {declared.state_parts}")
                start, end = declared.state_span(header.part)
                if header.length != end - start:
                    raise TensorWireError(f"a part of {header.length} bytes, not {end - start}")
            case TensorOp.RATE | TensorOp.KEPT if header.key not in self._refused:
                self._tensor(header)
            case TensorOp.OPEN | TensorOp.PING | TensorOp.RATE | TensorOp.KEPT | TensorOp.TELL:
                pass
            case _:
                raise TensorWireError(f"a worker does not say {header.op.name} here")

    def _heard(self, header: Header, payload: bytearray) -> None:
        match header.op:
            case TensorOp.OPEN:
                self._open(header, payload)
            case TensorOp.PUSH | TensorOp.RATE | TensorOp.KEPT if header.key in self._refused:
                pass
            case TensorOp.RATE:
                self._tensor(header).learn(self.rank, header.round, unpack_rate(payload))
            case TensorOp.KEPT:
                tensor = self._tensor(header)
                self.job.do(header.key, tensor, tensor.kept(self.rank, header.round))
                self.job.rounds_here.follow(header.key, tensor.under_way)
            case TensorOp.TELL:
                self.job.tell(self.rank, header, payload)
            case TensorOp.PUSH:
                self.job.received_bytes += header.length
                tensor = self._tensor(header)
                self.job.heard(header.key, tensor, tensor.push(self.rank, header.round, header.part, payload))
            case TensorOp.STATE:
                self.job.received_bytes += header.length
                tensor = self._tensor(header)
                self.job.heard(header.key, tensor, tensor.state_part(self.rank, header.round, header.part, payload))
            case _:
                self.send(TensorOp.PONG)

    def _open(self, header: Header, payload: bytearray) -> None:
        declared, ranks = unpack_opening(header.flags, payload)
        tensor = self.job.declare(header.key, declared)
        if isinstance(tensor, str):
            self._refused.add(header.key)
            self.send(TensorOp.FAULT, key=header.key, payload=tensor.encode()[:FAULT_BYTES_MAX])
            return
        want, hollow = bool(header.flags & WANT), bool(header.flags & HOLLOW)
        self.job.heard(header.key, tensor, tensor.open(self.rank, header.round, want, ranks, hollow))

    def _tensor(self, header: Header) -> TensorSum:
        tensor = self.job.tensors.get(header.key)
        if tensor is None:
            raise TensorWireError(f"{header.op.name} of a tensor that this worker never opened")
        return tensor
