"""One job at its aggregator under one epoch: its tensors, and what was spent for them."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

from covey.ports.env import Env
from covey.ports.pages import SharedPage
from covey.tensors.numbers.blocks import job_of
from covey.tensors.numbers.tensor_wire import (
    FAULT_BYTES_MAX,
    IN_VAIN,
    Declared,
    Header,
    Payload,
    TensorOp,
    job_hash,
    key_of,
)
from covey.tensors.owner.leaving import LEAVE, in_vain
from covey.tensors.owner.memory import Arena, Buffers, Memory, MemoryInAdvance, Source
from covey.tensors.owner.part_additions import PartAddition
from covey.tensors.owner.ranks_away import LOOK_S, RanksAwayHere
from covey.tensors.owner.sums import StateTransfer, TensorSum, held_bytes, refusal
from covey.wire.sums import Serve
from plugins.aggregator.datapath.blocks.block_copies import IncomingCopies
from plugins.aggregator.datapath.blocks.state_carrier import StateCarrier
from plugins.aggregator.datapath.lanes.addition_queue import AdditionQueue
from plugins.aggregator.datapath.lanes.lanes import Lanes
from plugins.aggregator.datapath.lanes.wire import LaneDone
from plugins.aggregator.datapath.rounds_under_way import RoundsUnderWay
from plugins.aggregator.policy.urgency import LAST_S, ON_TRIAL, due

GIVE_BACK_S = 1.0
"""Seconds after which the memory of a job that is over is unmapped."""
READ_BYTES = 1 << 16
"""Bytes that a socket hands over at a time, about."""


class RankLink(Protocol):
    """The connection of one rank (`links`)."""

    rank: int

    def send(
        self, op: TensorOp, *, key: int = 0, epoch: int | None = None, payload: bytes = b"", round: int = 0
    ) -> None: ...
    def give(self, key: int, tensor: TensorSum) -> None: ...
    def told(self, rank: int, header: Header, payload: Payload) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


def weight(size: int) -> int:
    """Cost of reading or writing a frame, in wake-ups: one, and one more for each further piece of its payload."""
    return 1 + size // READ_BYTES


class Counters:
    """Counters of one aggregating process, for metrics."""

    def __init__(self) -> None:
        self.bad_frames = 0
        self.refused = 0
        """Count of hellos of unknown jobs, of other epochs or without the secret."""
        self.busy_s = 0.0
        """Seconds of a core spent on checking, adding and framing."""
        self.moved = 0
        """Weight of the frames of all jobs (`weight`)."""
        self.copied = self.copies_failed = 0
        """Counters of copies, as in `Now`."""


class SharedByJobs(NamedTuple):
    """The parts that all jobs of one process share."""

    memory: Memory
    counters: Counters
    buffers: Buffers
    additions: AdditionQueue
    source: Source | None = None
    """Source of memory for sums and states, if lanes are to see it."""
    for_pushes: Memory = Memory(0)
    """Counts the memory that is shared with ranks of this host, for what they push: it takes none from tensors."""


class JobSums:
    """The tensors of one job under one epoch."""

    def __init__(self, env: Env, order: Serve, shared: SharedByJobs) -> None:
        self.env, self.job, self.epoch = env, order.job, order.epoch
        self.workers, self.secret = order.workers, order.secret
        self.hash = job_hash(order.job)
        self.tensors: dict[int, TensorSum] = {}
        self.counters, self.buffers = shared.counters, shared.buffers
        self._memory, self._held = shared.memory, 0
        self._for_pushes = Memory(0) if shared.source is not None else shared.for_pushes
        self._arena = Arena(min(2 * order.size_bytes, shared.memory.free), shared.source)
        self._in_advance = MemoryInAdvance(env, f"aggd gets memory ready for {order.job}")
        self._in_advance.add(self._arena.touch())
        early = (order.workers - 1) * order.size_bytes  # what may come before the last rank pushes
        self._in_advance.add(self.buffers.ready(min(early, shared.memory.free)))
        self.links: dict[int, RankLink] = {}
        self.newest: dict[int, int] = {}
        """Rank -> incarnation of the newest process that was connected."""
        self.received_bytes = self.sent_bytes = 0
        self.busy_s = 0.0
        """Seconds of a core spent on this job's checksums, additions and headers."""
        self.carried_s = 0.0
        """Seconds of a core: its part of the process's other work, which is reading, writing, waking up."""
        self.moved = self.accounted = 0
        """Weight of its frames so far, and at the last accounting."""
        self.over = self._looks = False
        """The job is no longer served here; rounds are looked at, since a rank has left."""
        self.before: IncomingCopies | None = None
        """The copies that its earlier owner brings, while that is connected."""
        self.may_take_us: int | None = 0
        """Microseconds that an iteration may take, as in `SetPace`."""
        self.away = RanksAwayHere()
        self.additions = shared.additions
        self.rounds_here = RoundsUnderWay(env.clock)

    @property
    def is_ready(self) -> bool:
        """Is memory for its rounds prepared?"""
        return self._in_advance.is_over

    def expect(self, state_bytes: int) -> None:
        """The earlier owner says that the job's tensors have `state_bytes` bytes, moments included."""
        if self._arena.grow(min(2 * state_bytes, self._memory.free)):
            self._in_advance.add(self._arena.touch())

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
        """Bytes of its tensors without moments of optimizers: what is sent each round."""
        return sum(tensor.declared.size_bytes for tensor in self.tensors.values())

    @property
    def state_bytes(self) -> int:
        return sum(tensor.declared.state_bytes for tensor in self.tensors.values())

    def push_memory(self, size: int) -> SharedPage | None:
        """Memory in which a rank of this host places what it pushes, until `give_push_memory`; None: there is none, or
        lanes add, which see other memory alone."""
        if not self._for_pushes.take(size):
            return None
        try:
            return self.env.pages.make_handed(size)
        except OSError as error:
            self._for_pushes.used -= size
            self.env.log.warning("no memory is shared with a rank of this host", job=self.job, why=str(error))
            return None

    def give_push_memory(self, size: int) -> None:
        """Memory of `push_memory` is used by no rank any more."""
        self._for_pushes.used -= size

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
        why = refusal(known.declared if known is not None else None, declared, len(self.tensors), self._memory)
        if why:
            return why
        if known is not None:
            return known
        self._held += held_bytes(declared)
        tensor = self.tensors[key] = self._sum_of(declared)
        if self.before is not None and self.before.announces:
            tensor.await_copy()
        self._in_advance.add(tensor.touch())
        return tensor

    def _sum_of(self, declared: Declared) -> TensorSum:
        return TensorSum(declared, self.workers, self.buffers.give, self._arena, self.buffers.take)

    def join(self, link: RankLink) -> None:
        """Let this connection speak for its rank; an older one of the same rank is closed."""
        old = self.links.get(link.rank)
        if old is not None:
            self.leave(old)
            old.close()
        self.links[link.rank] = link
        self.rounds_here.come(link.rank)

    def leave(self, link: RankLink) -> None:
        if self.links.get(link.rank) is not link:
            return
        del self.links[link.rank]
        self.away.leaving.pop(link.rank, None)
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

    def tell(self, rank: int, header: Header, payload: Payload) -> None:
        """Pass on what a rank tells another one, if that is connected."""
        link = self.links.get(header.part)
        if link is not None:
            link.told(rank, header, payload)

    def look_from_now_on(self) -> None:
        """Look at rounds from now on: a rank has left, for which they may wait in vain."""
        if not self._looks:
            self._looks = True
            self.env.spawn(f"ranks of {self.job} that left", self._look_on())

    async def _look_on(self) -> None:
        while self.away.has_left and not self.over:
            await asyncio.sleep(LOOK_S)
            self.look_for_who_left()
        self._looks = False

    def look_for_who_left(self) -> None:
        """Tell each rank that waits for a rank that has left, in a round which the latter has not pushed."""
        under_way = {key: tensor.said() for key, tensor in self.tensors.items() if tensor.under_way}
        for key, rank, who in self.away.look(under_way, key_of(LEAVE), self.env.clock.now_s()):
            link = self.links.get(rank)
            if link is not None:
                why = in_vain(who, job_of(self.job))
                link.send(TensorOp.FAULT, key=key, payload=why.encode()[:FAULT_BYTES_MAX], round=IN_VAIN)

    @property
    def due_s(self) -> float:
        """Time at which the sums of its present iteration are due (`policy.urgency`)."""
        now_s = self.env.clock.now_s()
        if not self.may_take_us:
            return ON_TRIAL if self.may_take_us == 0 else now_s + LAST_S
        return due(self.rounds_here.iteration_s, self.may_take_us / 1e6, now_s)

    def heard(self, key: int, tensor: TensorSum, actions: Sequence[StateTransfer]) -> None:
        """A worker said something about this tensor: perform the actions, and what can be added now."""
        if tensor.is_lost:
            self.env.log.warning("sum is lost, and added again", job=self.job, tensor=tensor.declared.name)
            self._begin_anew(key)
            return
        self.do(key, tensor, actions)
        self.rounds_here.follow(key, tensor.under_way)
        self.additions.put(self, key, tensor)

    def add_part(self, key: int) -> None:
        """Do one addition of this tensor."""
        tensor, began_s = self.tensors[key], self.env.clock.cpu_s()
        addition = tensor.begin()
        count = addition.run()
        self.worked(began_s)
        self._ended(key, tensor, addition, count)

    def hand_part(self, key: int, lanes: Lanes) -> None:
        """Let a lane do one addition of this tensor, if it can; else do it here."""
        tensor, began_s = self.tensors[key], self.env.clock.cpu_s()
        addition = tensor.begin()
        if lanes.take(addition, partial(self._from_lane, key, tensor, addition)):
            self.worked(began_s)
            return
        count = addition.run()
        self.worked(began_s)
        self._ended(key, tensor, addition, count)

    def _from_lane(self, key: int, tensor: TensorSum, addition: PartAddition, done: LaneDone) -> None:
        self.busy_s += done.cpu_s
        if self.over or self.tensors.get(key) is not tensor:
            return  # its tensor began anew, or is summed elsewhere
        if done.why:
            self.broken(key, RuntimeError(done.why))
            return
        self._ended(key, tensor, addition, done.not_finite)
        self.additions.put(self, key, tensor)

    def _ended(self, key: int, tensor: TensorSum, addition: PartAddition, not_finite: int) -> None:
        finite = not tensor.not_finite
        actions = tensor.end(addition, not_finite)
        if finite and tensor.not_finite:
            name, round = tensor.declared.name, tensor.version
            self.env.log.warning("sum is not finite", job=self.job, tensor=name, after_round=round)
        self.rounds_here.follow(key, tensor.under_way)
        self.do(key, tensor, actions)

    def broken(self, key: int, error: Exception) -> None:
        """An addition of this tensor failed, and its contributions are lost: it begins without state, as in a process
        that was started anew, and its workers connect again and push once more."""
        name = self.tensors[key].declared.name
        self.env.log.error("addition failed", job=self.job, tensor=name, why=repr(error), exc_info=error)
        self._begin_anew(key)

    def _begin_anew(self, key: int) -> None:
        """Let a tensor begin without state. All workers connect again, and push once more."""
        self.tensors[key] = self._sum_of(self.tensors[key].declared)
        for link in list(self.links.values()):
            link.close()

    def end(self, epoch: int, carrier: StateCarrier | None = None) -> None:
        """Close everything; workers are told that `epoch` is the one served now (0: none). `carrier`: brings the state
        to the next owner."""
        self.over = True
        self._in_advance.stop()
        for _, link in sorted(self.links.items()):
            link.send(TensorOp.STALE, epoch=epoch)
            link.finish()
        self.links.clear()
        self._memory.used -= self._held
        self._held = 0
        tensors, self.tensors = self.tensors, {}
        if carrier is not None:
            carrier.begin(tensors)
        self.env.spawn(f"aggd gives memory of {self.job} back", self._give_back(list(tensors.values()), carrier))

    async def _give_back(self, left: list[TensorSum], carrier: StateCarrier | None) -> None:
        """Free the memory once ranks have heard where to go: freeing a gigabyte takes up to seconds, in which no rank
        would be told."""
        await asyncio.sleep(GIVE_BACK_S)
        if carrier is not None:
            await carrier.over.wait()
        while left:
            left.pop().let_go()
            await asyncio.sleep(0)
