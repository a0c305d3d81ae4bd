"""Push and pull of named tensors: what a training script calls `job.tensors` (the AutoPS Agent, §4.3.1).

    with covey.join() as job:
        w = job.tensors.model("w", w0)              # every rank gets rank 0's initial value
        w = job.tensors.push_pull("w", delta)       # parameters + sum of all ranks' deltas
        g = job.tensors.push_pull("grad", g)        # a name never given to `model`: just the sum
        w = job.tensors.model("v", v0, update=covey.Adam())     # push gradients: each round is an optimizer's step
        h = job.tensors.push("grad", g, out=g)      # the same in two halves: this begins the round
        ...                                         # compute, push other names
        g = h.wait()                                # and this ends it

Every rank calls the same rounds in the same order per tensor; a round's result is the floating point sum of exactly one
contribution per rank, in a fixed order of additions (`covey.tensors.numbers.sum_order`), in whatever order they arrive
and however often the aggregator is replaced. Rounds of different names may be under way at once, from several threads.
Types are float32, float64, float16 and bfloat16; the last two are added in float32 and rounded once
(`covey.tensors.numbers.types`).

When all ranks of the job are on one host, they need no aggregator: they add in memory that they share. Otherwise, or
when a rank cannot share memory, tensors go to an aggregator by TCP. The bits are the same.

Calls block until every rank has pushed; after 30 s they write to stderr which ranks or processes they wait for.

    script --push--> all ranks here, and memory for it?  yes: covey.tensors.same_host.shared_rounds
                                                         no:  covey.tensors.aggregator.block_rounds
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TextIO

import numpy as np

from covey.core.errors import RankLeft as RankLeft
from covey.core.errors import TensorError as TensorError
from covey.core.ids import JobId
from covey.core.patience import Patience
from covey.healing.healing import Healing
from covey.job.given_rounds import GivenRound
from covey.job.heartbeats import CallTimes
from covey.kernel.this_process import OfOneProcess
from covey.ports.verbs import Verbs
from covey.saves.saver import Saves
from covey.tensors.aggregator.block_rounds import BlockRounds
from covey.tensors.aggregator.host_rounds import HostParts, HostTensor
from covey.tensors.aggregator.rounds import Superseded, ToldByRank
from covey.tensors.direct.owner import DirectOwner
from covey.tensors.numbers.arrays import Array, check_out, checked
from covey.tensors.numbers.handle import TensorHandle as TensorHandle
from covey.tensors.numbers.moments import NAME as MOMENTS
from covey.tensors.numbers.moments import Moments, gathered
from covey.tensors.numbers.sum_order import ORDERS, Node, Order
from covey.tensors.numbers.tensor_wire import PART_BYTES, Declared, Type
from covey.tensors.numbers.types import NUMBERS
from covey.tensors.numbers.updates import Update
from covey.tensors.owner.leaving import LEAVE, GoneRanks, in_vain
from covey.tensors.rdma.rdma_here import RdmaHere
from covey.tensors.same_host.memory import MemoryFault, MemoryRefused, TensorMemory
from covey.tensors.same_host.shared_rounds import SharedRounds, SharedTensor
from covey.tensors.turns.holder import ProcessTurns
from covey.verbs.pyverbs_port import PyVerbs
from covey.wire.job import AggregatorAt, GoneRank, SumsOrder
from covey.wire.sums import Now

BARRIER = "covey/barrier"
LEAVE_S = 60.0
"""Seconds that a rank that is done waits for the others. Longer than any takeover; it runs out only when an aggregator
dies after it told some ranks, but not all, that every rank is done."""


class TensorClient(OfOneProcess):
    """One rank's tensors. Made by `covey.join()`. All methods may be called from any thread; a name has one round at a
    time, and different names have rounds at once. In a forked child, calls raise OtherProcess: the ranks' shared memory
    came along, and a push there would go into the parent's round."""

    _kind = "the tensors of a job"
    _instead = "push and pull in the process that called covey.join(); give workers arrays, and take arrays from them"

    def __init__(
        self,
        job: JobId,
        rank: int,
        world_size: int,
        lost: Callable[[int, str, int], None],
        *,
        tables: int = 1,
        incarnation: int = 0,
        wanted: Callable[[int], None] = lambda table: None,
        undecided: bool = False,
        shared: Callable[[int, int], None] = lambda largest_bytes, total_bytes: None,
        part_bytes: int = PART_BYTES,
        patience_s: float = 30.0,
        say: TextIO | None = None,
        host: str = "",
        in_vain: Callable[[str], None] = lambda why: None,
        beside: "TensorClient | None" = None,
        verbs: Verbs | None = None,
        turns: ProcessTurns | None = None,
    ) -> None:
        """`lost(epoch, why, table)` is called from a link thread each time the address of that epoch cannot be used.
        `tables`: number of tables of the job (`covey.tensors.numbers.blocks`); `incarnation`: that of this rank;
        `wanted` is called with a table whose owner is needed. `undecided`: the first tensors wait for `memory_is`.
        `shared` is called with the bytes of the largest tensor in shared memory and of all together, `in_vain` when
        this rank waits for one that has left. `host`: this rank's host. `beside`: another rank in this process
        (`covey.job.carrying`), which owns tables for both, and at whose owners this one begins. `verbs`: its RDMA;
        None: what it has. `turns`: those of this process, beside other jobs."""
        self.rank, self.world_size = rank, world_size
        self.calls = CallTimes()
        self.turns = ProcessTurns() if turns is None else turns
        """The turns of this process, which takes none unless its job shares its host."""
        self.newest_step: Callable[[], int | None] = lambda: None
        """Returns the newest step that the script did, for other ranks once this one has left."""
        self._gone, self._say_in_vain = GoneRanks(host), in_vain
        self._job, self.patience_s, self._say = job, patience_s, say
        self._changed = threading.Condition()
        """Guards the fields below; notified when any of them changes."""
        self._ways: dict[str, SharedTensor | None] = {}  # a tensor in shared memory, or None: through an aggregator
        self._open: dict[str, GivenRound] = {}
        """Tensors with a round that was not waited for yet, and what was pushed, which must not change until then."""
        self._undecided = undecided
        """Whether the agent has not said yet if the ranks share memory."""
        self._shared: SharedRounds | None = None
        self._tell_shared = shared
        """Called with the bytes of the largest tensor in shared memory, and of all together."""
        self._healing: Healing | None = None
        self.about_blocks: Callable[[ToldByRank], bool] = lambda told: False
        """Called with messages of other ranks once there is a state; returns whether one is about data Blocks."""
        self.early: set[str] = set()
        """Names that may be pushed before there is a state: their results are kept (`covey.healing.kept_rounds`)."""
        self._listens: Callable[[ToldByRank], bool] = lambda told: False
        self.saves = Saves(self, self._ways)
        """Saves models (`save`)."""
        self.own_later = False
        """Whether what is pushed now leaves before this rank's own state, which may still change in this step. Set by
        the thread that computes."""
        self._own: Callable[[], object] | None = None
        self._largest_bytes = self._shared_bytes = 0
        """Bytes of the largest tensor in shared memory, and of all of them."""
        self._closed = self.left = False
        self._rdma = RdmaHere(PyVerbs() if verbs is None else verbs)
        self.owner = DirectOwner(job, rank, self.tell, self._rdma)
        """The tables that this rank owns."""
        self._far = BlockRounds(
            job,
            rank,
            world_size,
            lost,
            tables=tables,
            incarnation=incarnation,
            wanted=wanted,
            heard=self._far_heard,
            part_bytes=part_bytes,
            local=lambda at: (beside or self).owner.local(at, rank, incarnation),
            rdma=self._rdma,
            turns=self.turns,
        )
        if beside is not None:
            self._far.begin_as(beside._far)

    # ---- from the script ----

    @property
    def order(self) -> Order:
        """Order of additions in a round (`covey.tensors.numbers.sum_order`): "tree", or "rank" as a plain loop adds.
        Set it before the first tensor, to the same value on every rank; otherwise ValueError."""
        return self._far.order

    @order.setter
    def order(self, order: Order) -> None:
        """ValueError once there are tensors, or when no order has that name."""
        self._check_process("the order of additions was not set")
        if order not in ORDERS:
            raise ValueError(f"tensors are added by {' or '.join(ORDERS)}, not {order!r}")
        with self._changed:
            if self._ways:
                raise ValueError("there are tensors already; set the order of their additions before the first one")
            self._far.order = order

    def model(
        self,
        name: str,
        initial: Array,
        *,
        mean: bool = False,
        update: Update | None = None,
        moments: Moments | None = None,
        type: Type | None = None,
    ) -> Array:
        """Declare parameters that are kept where they are added. Returns rank 0's `initial` on every rank, as a new
        array of that type and shape; `mean` and `type` as in `push_pull`. With an `update` (`covey.SGD`, `covey.Adam`)
        ranks push gradients, and each round is one step of the optimizer, with the bits that
        `covey.tensors.numbers.update_steps` says; `moments`: the optimizer continues from these of rank 0. Blocks until
        all ranks called it. Errors as of `push_pull`; ValueError when `moments` are those of another optimizer."""
        given = checked(name, initial, type)
        self._check_process(f"model {name!r} was not declared")
        if self._healing is not None:
            raise ValueError(f"model {name!r} cannot be taken over from a rank that is lost (job.state); push sums")
        given, moments = self.saves.begins_with(name, given, update, moments)
        if self.turns.on:
            self.turns.computed()
        with self.calls.timed():
            self._begin(name, GivenRound(given, "model", mean, None, update, moments), True)
            self.saves.declared()
            try:
                result = self._wait(name).view(given.dtype)
            finally:
                self._ended(name)
        if self.turns.on:
            self.turns.computes()
        return result

    def push(
        self,
        name: str,
        array: Array,
        *,
        out: Array | None = None,
        mean: bool = False,
        type: Type | None = None,
        rate: float | None = None,
    ) -> TensorHandle:
        """Begin this tensor's next round and return: `push(...).wait()` is `push_pull`. `array` is read until `wait`
        returns and must not change; only `wait` writes to `out`, which may be the same array and must have its shape
        and type and be contiguous. Does not wait for other ranks or the network; only the first tensor waits until all
        ranks have joined their agents. Errors as of `push_pull`."""
        return self._push(name, GivenRound(checked(name, array, type), mean=mean, rate=rate), out, False)

    def push_pull(
        self,
        name: str,
        array: Array,
        *,
        out: Array | None = None,
        mean: bool = False,
        type: Type | None = None,
        rate: float | None = None,
    ) -> Array:
        """The result of this tensor's next round: the sum of all ranks' arrays, with `mean` divided by the number of
        ranks, and added to the parameters of `model` where there are any. It has the same type and shape, in `out` (see
        `push`) or a new array. `type="bfloat16"`: the array holds the bits as uint16 or int16. `rate`: the learning
        rate of this round, the same on every rank; None: the declared one. Blocks until every rank has pushed.

        ValueError when shape, type or `mean` differ from earlier calls or the last round of this name was not waited
        for, TypeError when Covey does not add the array's type, TensorError when the aggregator refuses the tensor,
        Superseded when this run of the job is over.
        """
        handle = self._push(name, GivenRound(checked(name, array, type), mean=mean, rate=rate), out, True)
        try:
            return handle.wait()
        finally:
            self._ended(name)

    def moments(self, name: str) -> Moments:
        """The moments of a model that has an optimizer, for a checkpoint: what `model` takes as `moments`. Every rank
        calls it, between the same two rounds, for one tensor after the other in the same order, and every rank gets all
        of them. ValueError when there is no such tensor or it has a round under way; other errors as of `push_pull`."""
        self._check_process(f"the moments of tensor {name!r} were not gathered")
        way, declared = self._ways.get(name), self._declared(name)
        if declared is None or declared.update is None:
            raise ValueError(f"tensor {name!r} is no model with an optimizer")
        if name in self._open or not (self._far.has_result(name) if way is None else way.rests):
            raise ValueError(f"tensor {name!r} has a round under way")
        steps, kept = (way.steps, way.kept()) if way is not None else (self._far.steps(name), self._far.kept(name))
        like = np.empty(declared.shape, NUMBERS[declared.type].wide)
        alone = way is not None and way.whole_job

        def add(mine: Array) -> Array:
            return mine if alone else self.push_pull(f"{MOMENTS}.{mine.dtype.name}", mine, out=mine)

        return Moments(steps, gathered(like, declared.moments, kept, add))

    def save(self, path: "str | os.PathLike[str] | None" = None, *, every: int | None = None) -> int:
        """Save all models that have an `update`, with their moments, after each `every` steps and when `agentctl
        checkpoint` asks, while ranks go on (`covey.saves.saver`). `path`: a file, the same for all ranks; None:
        model.json in the job's folder (COVEY_CHECKPOINT_DIR). Returns the number of steps that were saved there before,
        0 for none: each `model` then begins with its values and moments of that step. Every rank calls it before the
        first model. CoveyError when what is there cannot be used or nothing be written there, ValueError when there are
        models already."""
        self._check_process("nothing is saved")
        return self.saves.begin(path, every)

    @property
    def not_finite(self) -> int:
        """How many numbers were NaN or infinite in the sums that this rank has added in memory that ranks share."""
        return sum(way.not_finite for way in list(self._ways.values()) if way is not None)

    def heal(
        self, make: Callable[[BlockRounds], Healing], own: Callable[[], object] | None
    ) -> tuple[Healing, BlockRounds]:
        """Set up `job.state`: this rank may be lost, or took over. ValueError when there are tensors already."""
        self._check_process("job.state was not begun")
        with self._changed:
            if self._ways.keys() - self.early:
                raise ValueError("there are tensors already; call job.state before the first one")
            self._healing, self._own = healing, _ = make(self._far), own
            if self._closed:
                healing.close()
        healing.gone(self._gone.words(self._job))

        def told(told: ToldByRank) -> None:
            if not self.about_blocks(told) and not self._listens(told):
                healing.told(told)

        self._far.heal(told, healing.close)
        return healing, self._far

    def listen(self, told: Callable[[ToldByRank], bool] | None = None) -> None:
        """From now on `told` is called, by link threads, with messages of other ranks, also before there is a state. It
        returns whether one was for it. None: as before, and those about saves are heard."""
        self._listens = told = told or self._listens

        def alone(said: ToldByRank) -> None:
            if not self.saves.told(said):
                told(said)

        if self._healing is None:
            self._far.heal(alone)

    @property
    def incarnation(self) -> int:
        """The number of this process among those of its rank; 0: the first."""
        return self._far.incarnation

    def has_result(self, name: str) -> bool:
        """Whether this tensor has no round under way, and nothing of it is being sent."""
        self._check_process(f"the round of tensor {name!r} cannot be looked at")
        with self._changed:
            way = self._ways[name]
        return self._far.has_result(name) if way is None else way.advance_unless_busy()

    def finish(self, name: str, out: Array | None) -> Array:
        """Wait for the end of the round that is under way, and return its result; for the handle of the round."""
        if self.turns.on:
            self.turns.computed()
        with self.calls.timed():
            result = self._wait(name, out=out)
        self._ended(name)
        if self.turns.on:
            self.turns.computes()
        return result

    def in_background(self) -> None:
        """From now on the script computes while this thread waits here: its time is not counted in `communicate_s`."""
        self.calls.in_background()
        self.turns.in_background()

    @property
    def communicate_s(self) -> float:
        """Seconds the script has spent in calls here."""
        return self.calls.communicate_s

    def reaches(self) -> bool:
        """Whether the aggregators that this rank needs are connected."""
        return self._far.connected or all(way is not None and way.whole_job for way in list(self._ways.values()))

    def barrier(self) -> None:
        """Block until every rank called it. Errors as of `push_pull`."""
        self.push_pull(BARRIER, np.zeros(1, np.float32))

    def leave(self, linger_s: float = LEAVE_S) -> bool:
        """The last call of a script that ended well: blocks until every rank has made it, so that no rank ends while
        another may still need its copy of a last result. False when that took longer than `linger_s` seconds, or a rank
        has ended without it. Ranks that wait for another tensor are told that this rank pushes none any more. A second
        call is harmless: `with covey.join()` makes it too."""
        self._check_process("the job was not left")
        self.turns.computed()
        with self.calls.timed(waits=False):
            if LEAVE in self._ways:
                return self.has_result(LEAVE)
            try:
                self.begin_to_leave(linger_s)
                self._wait(LEAVE, linger_s)
            except (TimeoutError, RankLeft):
                return False
            self.left = True
            return True

    # ---- for the process of an elastic job, which carries several ranks (`covey.job.carrying`) ----

    @property
    def far(self) -> BlockRounds:
        """This rank's rounds at the owners of tables."""
        return self._far

    @property
    def open_rounds(self) -> list[str]:
        """Names of the tensors with a round that was not waited for."""
        with self._changed:
            return list(self._open)

    @property
    def may_be_awaited(self) -> bool:
        """Whether other ranks may wait for this one: there are tensors, and not all ranks are done."""
        return bool(self._ways) and not self.left

    @property
    def is_superseded(self) -> bool:
        """Whether another process runs as this rank by now."""
        return isinstance(self._far.fatal, Superseded)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def settled(self, name: str) -> None:
        """The result of this tensor's round is here, and nobody waits for it."""
        self.calls.rounds += 1
        self._ended(name)

    def begin_to_leave(self, give_up_s: float | None = None) -> None:
        """Begin what `leave` waits for. TimeoutError after `give_up_s` seconds."""
        self._begin(LEAVE, GivenRound(checked(LEAVE, np.zeros(1, np.float32))), True, give_up_s)
        self._gone.leave(self.rank, self.newest_step(), self._far, self._shared)

    def wake(self) -> None:
        """Let threads that wait look again whether they are to wait."""
        self._far.wake()

    def obey(self, order: SumsOrder) -> Now:
        """Obey an order to this rank as an owner of tables. Returns what it owns then: nothing where it could not."""
        with contextlib.suppress(OSError):
            return self.owner.perform(order.order, order.ip, order.memory_bytes_max, order.rdma)
        return self.owner.now()

    # ---- its end ----

    def close(self) -> bool:
        """Drop the connection and end the thread; blocked calls raise TensorError. A second call is harmless. Does
        nothing in a forked child: what is open is the parent's. Returns whether this rank has owned tables that need no
        owner any more, since all ranks are done."""
        if self.is_elsewhere:
            return False
        self.saves.close()
        with self._changed:
            self._closed, shared = True, self._shared
            self._changed.notify_all()
        if shared is not None:
            shared.close()
        if self._healing is not None:
            self._healing.close()
        self._far.close()
        owned = bool(self.owner.now().jobs)
        self.owner.close(self.left)
        return owned and self.left

    def abandon(self) -> None:
        """Give up in a forked child what other ranks connect to: it is the parent's."""
        self.owner.abandon()
        self._rdma.abandon()

    # ---- from what adds among ranks of one host (covey.frameworks.torch.gpu_sums) ----

    def neighbours(self) -> Node | None:
        """Ranks with which this one shares memory, from the first up to, and without, the second; None: with none.
        Waits until the agent has said."""
        self._until_decided(Patience(self, "", None))
        return None if self._shared is None else self._shared.memory.members

    def host_parts(self, name: str) -> HostParts | None:
        """How the ranks of this host divide the tensor for `push_sums`, alike on all of them. None: it had no round yet
        in which a rank could refuse, or they do not add it in shared memory for other hosts."""
        way = self._ways.get(name)
        return way.parts if isinstance(way, HostTensor) and way.taken else None

    def push_sums(self, name: str, sums: Sequence[Array]) -> Callable[[], list[Array]]:
        """Begin the next round of a tensor that has `host_parts`, with sums as in `HostTensor.begin_sums`, as all ranks
        of this host do. Returns what waits for the result of the elements that this rank speaks for. Errors as of
        `push_pull`."""
        self._check_process(f"tensor {name!r} was not pushed")
        way, shared = self._ways.get(name), self._shared
        assert isinstance(way, HostTensor) and shared is not None, "it has host_parts"
        with self.calls.timed():
            self.raise_if_over()
            way.begin_sums(sums)
            shared.begun(way, False)

        def wait() -> list[Array]:
            taken: list[list[Array]] = []
            with self.calls.timed():
                self._come(name, None, lambda found: taken.append(way.take_sums()))
            self.calls.rounds += 1
            return taken[0]

        return wait

    # ---- from the agent ----

    def moved(self, at: AggregatorAt) -> None:
        """Push and pull at this aggregator from now on, unless one of a higher epoch is already known."""
        self._far.moved(at)
        if self._far.fatal is None:
            return
        with self._changed:  # waiting threads check at once
            self._changed.notify_all()
            shared = self._shared
        if shared is not None:
            shared.memory.ring()

    def memory_is(self, memory: TensorMemory | None, why: str = "") -> None:
        """The agent's answer: `memory` is shared with all other ranks, or there is none. `why`: a rank cannot share it,
        so no rank does from now on."""
        with self._changed:
            if self._undecided:
                self._shared, self._undecided = None, False
                if memory is not None:
                    make = SharedTensor if memory.whole_job else partial(HostTensor, far=self._far)
                    self._shared = SharedRounds(memory, self._over_tcp, make)
                self._changed.notify_all()
            shared = self._shared
        if why:
            self.tell(f"uses no memory that ranks share: {why}")
            if shared is not None:
                shared.memory.refuse()

    def gone(self, ranks: Mapping[int, GoneRank]) -> None:
        """The agent says that these ranks have ended, and push nothing more."""
        with self._changed:
            self._gone.ended.update(ranks)
            self._changed.notify_all()
        self._far_heard()
        if self._healing is not None:
            self._healing.gone(self._gone.words(self._job))

    # ---- from a link thread ----

    def _far_heard(self) -> None:
        if (shared := self._shared) is not None:
            shared.memory.ring_here()

    # ---- script side ----

    def _push(self, name: str, given: GivenRound, out: Array | None, blocks: bool) -> TensorHandle:
        if out is not None:
            check_out(name, out, given.array)
        if blocks and self.turns.on:
            self.turns.computed()
        with self.calls.timed():
            self._begin(name, given, blocks)
        return TensorHandle(self, name, given.array, out)

    def _begin(self, name: str, given: GivenRound, blocks: bool, give_up_s: float | None = None) -> None:
        """Begin a tensor's next round; a new model's is about its initial value. TimeoutError after `give_up_s`
        seconds."""
        self._check_process(f"tensor {name!r} was not pushed")
        data = given.array.data
        self.saves.before_push(name)
        with self._changed:
            if name in self._open:
                raise ValueError(f"tensor {name!r} has a round that was not waited for; call wait() of its handle")
            self._open[name] = given
        with contextlib.ExitStack() as undo:
            undo.callback(self._ended, name)
            moments = given.moments_of(name)
            way = self._way(name, given, give_up_s)
            declared = way.declared if way is not None else self._far.known[name].declared
            rate = given.rate_in(declared)
            self.raise_if_over()
            if self._healing is not None:
                self._healing.before_push(self._own, self.own_later)
            if way is not None and self._shared is not None:
                try:
                    self._shared.begin(way, data, blocks, rate, moments)
                except MemoryRefused:
                    self._over_tcp(way)
            elif given.kind == "grad":
                self._far.push(name, data, blocks, rate)
            undo.pop_all()

    def _declared(self, name: str) -> Declared | None:
        """The declaration of this tensor, if there is one."""
        way = self._ways.get(name)
        cut = self._far.known.get(name)
        return way.declared if way is not None else cut.declared if cut is not None else None

    def _ended(self, name: str) -> None:
        with self._changed:
            self._open.pop(name, None)

    def _way(self, name: str, given: GivenRound, give_up_s: float | None) -> SharedTensor | None:
        """The way of a tensor (shared memory, or None for an aggregator); a new tensor is declared."""
        if name in self._ways:
            way = self._ways[name]
            given.check(self._far.known[name].declared if way is None else way.declared)
            return way
        self._until_decided(Patience(self, name, give_up_s))
        declared = given.declared(name, self._far.part_bytes, self._far.order)
        way = self._share(declared)
        if way is None:
            self._far.declare(declared, given.array.data, given.moments_of(name))
        with self._changed:  # other threads of the script may declare tensors now
            self._ways[name] = way
            if way is not None:
                size = declared.size_bytes
                self._largest_bytes, self._shared_bytes = max(self._largest_bytes, size), self._shared_bytes + size
            sizes = self._largest_bytes, self._shared_bytes
        if way is not None and way.whole_job:
            self._tell_shared(*sizes)
        return way

    def _until_decided(self, patience: Patience) -> None:
        with self._changed:
            while self._undecided:
                patience.look()
                self._changed.wait(patience.left_s)

    def _share(self, declared: Declared) -> SharedTensor | None:
        if self._shared is None:
            return None
        try:
            return self._shared.tensor(declared)
        except MemoryFault as fault:
            raise TensorError(f"tensor {declared.name!r}: {fault}") from fault
        except MemoryRefused as refused:
            self.tell(f"pushes tensor {declared.name!r} over TCP: {refused}")
            return None

    def _over_tcp(self, way: SharedTensor) -> None:
        """Move a tensor to TCP: a rank refused the shared memory after this rank had begun the first round."""
        name, kind = way.declared.name, way.declared.kind
        self.tell(f"pushes tensor {name!r} over TCP: another rank cannot share memory for it")
        given = self._open.get(name)
        if given is None:
            raise TensorError(f"tensor {name!r} is in a round that the script gave up; it cannot be pushed elsewhere")
        self._far.declare(way.declared, given.array.data, given.moments_of(name))
        if kind == "grad":
            self._far.push(name, given.array.data, False)
        with self._changed:
            self._ways[name] = None
            sizes = [each.declared.size_bytes for each in self._ways.values() if each is not None]
            self._largest_bytes, self._shared_bytes = max(sizes, default=0), sum(sizes)
            self._changed.notify_all()

    def _wait(self, name: str, give_up_s: float | None = None, out: Array | None = None) -> Array:
        """The tensor's result. TimeoutError after `give_up_s` seconds."""
        self._check_process(f"tensor {name!r} was not pulled")
        with contextlib.nullcontext() if self._healing is None else self._healing.waiting():
            found: Array = self._come(name, give_up_s, lambda way: way.take(out), out)
        self.calls.rounds += 1
        return found

    def _come(
        self, name: str, give_up_s: float | None, take: Callable[[SharedTensor], Any], out: Array | None = None
    ) -> Any:
        """What `take` returns of a tensor in shared memory, once its result is there; another's result, in `out`."""
        patience = Patience(self, name, give_up_s)
        try:
            if self._healing is not None:
                self._far.until(name, patience)  # a thread that waits for the last tensor is woken once
                self._healing.gathered(lambda own: self._far.wait(own, Patience(self, own, give_up_s), None))
            while (way := self._ways[name]) is not None and self._shared is not None:
                if self._shared.wait(way, patience.look):
                    if way.fault:
                        raise (RankLeft if way.in_vain else ValueError)(way.fault)
                    found = take(way)
                    for text in way.remarks():
                        self.tell(text)
                    return found
            return self._far.wait(name, patience, out)
        except ValueError as error:
            raise TensorError(f"tensor {name!r}: {error}") from error
        except RankLeft as error:
            if name != LEAVE:
                self._say_in_vain("; ".join(f"tensor {name!r}: {error}".splitlines()))
            raise RankLeft(f"tensor {name!r}: {error}") from error

    def raise_in_vain(self, name: str) -> None:
        """RankLeft when a rank of this host has left whose part of this tensor is missing."""
        way, shared = self._ways.get(name), self._shared
        left = self._gone.of(self._gone.ended, here=True) if self._undecided else ""
        if way is not None and shared is not None:
            left = self._gone.awaited(way, shared.memory)
        if left:
            self._far.leave(left.encode())  # other hosts wait for the sums that this rank sends for its host
            raise RankLeft(in_vain(left, self._job))

    def why(self, name: str) -> str:
        """What this tensor waits for, for people."""
        if self._undecided:
            return "the agent has not said yet whether the ranks share memory: not all have joined"
        way = self._ways.get(name)
        return self._far.why(name) if way is None else way.why()

    def tell(self, text: str) -> None:
        """Write one line about this rank to stderr, for people."""
        with contextlib.suppress(OSError, ValueError):
            print(f"covey: rank {self.rank} of {self._job} {text}", file=self._say or sys.stderr, flush=True)

    def raise_if_over(self) -> None:
        """Raise the error when tensors are not added any more: this run of the job is over, or the client is closed."""
        if self._far.fatal is not None:
            raise self._far.fatal
        if self._closed:
            raise TensorError("the tensor client is closed")
