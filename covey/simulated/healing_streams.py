"""The healing of a rank on asyncio and `covey.ports`: the machine of `covey.healing.healing`, without threads.

It is for programs that run on the ports, such as ranks in the simulator. `begun_on` replaces the `job.state` of
scripts, `HealingStreams.push` and `result` their `job.tensors`, for sums of float32 only.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple

from covey.healing.likeness import Likeness
from covey.healing.machine import HealingMachine, Own, Says
from covey.healing.neighbours import HealedRank
from covey.healing.own_gather import OwnGather
from covey.healing.owns import RANKS_MAX
from covey.healing.stepwise import Found, Stepwise
from covey.healing.taking_over import WITHIN_S, Recovered
from covey.job.job_state import JobState, ScriptState, StopsAndSaves
from covey.simulated.block_streams import BlockStreams
from covey.tensors.aggregator.rounds import ToldByRank
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.tensor_wire import Declared

Spawn = Callable[[str, Coroutine[Any, Any, Any]], object]


class HealingStreams:
    """The healing of one rank."""

    def __init__(
        self,
        far: BlockStreams,
        spawn: Spawn,
        now_s: Callable[[], float],
        me: HealedRank,
        people: Callable[[str], None],
        own: Own,
        like: Likeness | None = None,
        gather: OwnGather | None = None,
    ) -> None:
        """`own` returns this rank's own state, as in `job.state`; the rest is as in `covey.healing.healing`."""
        self._far, self._spawn, self._people, self._own = far, spawn, people, own
        self._changed = asyncio.Event()
        self.changed: Callable[[], None] = lambda: None
        """Called whenever a wait may be over."""
        self.machine = HealingMachine(me, now_s, self._say_on, like, gather)
        far.heal(self._told)

    # ---- as `covey.healing.healing` ----

    @property
    def step(self) -> int:
        return self.machine.step

    def begin(self, state: Mapping[str, Array]) -> None:
        self._tell(self.machine.begin(state, self._far.versions()))

    def end(self, state: Mapping[str, Array]) -> None:
        self._tell(self.machine.end(state, self._far.versions()))

    def drawn(self, own: Own) -> None:
        self._spawn("own drawn", self._run(self.machine.drawn(own)))

    def moved(self, own: Own) -> None:
        self._spawn("own moved", self._run(self.machine.moved(own)))

    async def recover(self, has_own: bool, known: Mapping[str, Array], within_s: float = WITHIN_S) -> Recovered:
        return await self._run(self.machine.recover(has_own, known, within_s=within_s))

    def ask_late(self) -> None:
        self._tell(self.machine.ask_late())

    def waits(self) -> None:
        self._tell(self.machine.waits())

    def is_free(self, within_s: float) -> bool:
        return self.machine.is_free()

    def carried_elsewhere(self, ranks: Mapping[int, int]) -> None:
        self.machine.carried_elsewhere(ranks)
        self._wake()

    def gone(self, ranks: Mapping[int, str]) -> None:
        self.machine.gone(ranks)
        self._wake()

    def rows_came(self) -> bool:
        """Take rows with each rank's own state that are here, and push longer ones where they are too short. Whether
        none is waited for any more."""
        gather = self.machine.gather
        while gather is not None and (name := gather.awaited) is not None:
            if not self._far.is_here(name):
                return False
            if gather.came(self._far.newest(name)):
                gather.push_again()
        return True

    def close(self) -> None:
        self.machine.close()
        self._wake()

    # ---- as `covey.job.tensors` ----

    async def push(self, name: str, data: Array) -> None:
        """Begin a tensor's next round. `data` always has one shape, and must not change until its result is here."""
        far = self._far
        if not far.is_declared(name):
            far.declare(Declared(name, "grad", data.shape, far.part_bytes, far.order), data)
        await self._run(self.machine.before_push(self._own))
        far.push_soon(name, data)

    async def result(self, name: str) -> bytes:
        """The result of the round that was begun last."""
        self._tell(self.machine.waits())
        found = await self._far.result(name)
        await self._gathered()
        await self._run(self.machine.waited())
        return found

    # ---- inside ----

    async def _gathered(self) -> None:
        """Wait until every rank's own state is here. Not for two tasks at a time."""
        gather = self.machine.gather
        while gather is not None and (name := gather.awaited) is not None:
            if gather.came(await self._far.result(name)):
                gather.push_again()

    def _told(self, told: ToldByRank) -> None:
        says, words, is_awaited = self.machine.told(told)
        if is_awaited:
            self._wake()
        self._tell(says)
        if words:
            self._people(words)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self.changed()

    def _tell(self, says: Says) -> None:
        for said in says:
            self._far.tell(said)

    def _say_on(self) -> None:
        self._spawn("says what it holds", self._run(self.machine.saying()))

    async def _run(self, steps: Stepwise[Found]) -> Found:
        """Run a generator of the machine to its end."""
        gave: object = None
        try:
            while True:
                try:
                    pause = steps.send(gave)
                except StopIteration as end:
                    found: Found = end.value
                    return found
                self._tell(pause.says)
                if pause.words:
                    self._people(pause.words)
                gave = pause.work() if pause.work is not None else None
                await self._until(pause.until, pause.most_s)
        finally:
            steps.close()

    async def _until(self, reached: Callable[[], bool], most_s: float | None) -> None:
        if reached():
            return
        try:
            async with asyncio.timeout(most_s):
                while not reached():
                    await self._changed.wait()
        except TimeoutError:
            pass


class ToldEachStep(NamedTuple):
    """What ranks tell one another in each step."""

    owns_max: int = RANKS_MAX
    """With more ranks, neighbours keep what is each rank's own."""
    wants: Callable[[], bool] = lambda: False
    """Whether this rank has heard that the job is to stop."""


async def begun_on(
    far: BlockStreams,
    spawn: Spawn,
    now_s: Callable[[], float],
    me: HealedRank,
    script: ScriptState,
    people: Callable[[str], None],
    like: Likeness | None = None,
    told: ToldEachStep = ToldEachStep(),
) -> tuple[JobState, HealingStreams]:
    """The state of a script, as of `covey.job.job_state.begun`. StateLost where that ends the process."""
    gather = None
    if me.world_size > 1:
        gather = OwnGather(me.rank, me.world_size, me.step, far, told.wants, me.world_size <= told.owns_max)
        gather.begins(0, bool(me.incarnation), False)
    healing = HealingStreams(far, spawn, now_s, me, people, script.own, like, gather)
    if me.incarnation:
        found = await healing.recover(script.own is not None, script.get())
        script.load(found.arrays, found.own)
        far.begin_with(found.rounds)
    stop = StopsAndSaves(stops=told.wants if gather is None else lambda: gather.stops)
    return JobState(healing, script, stop=stop), healing
