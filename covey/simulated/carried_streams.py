"""The ranks that one process of an elastic job carries, on asyncio and `covey.ports`: what `covey.job.carrying` does
with threads.

It is for programs that run on the ports, such as ranks in the simulator. Which ranks come and go, in which incarnation,
and until when all of them wait, `covey.job.carrying_machine` decides for both.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from covey.healing.likeness import Likeness
from covey.healing.machine import HealingMachine
from covey.healing.neighbours import HealedRank
from covey.healing.own_gather import OwnGather
from covey.healing.taking_over import ASK_S, FIRST_ASK_S
from covey.job.carrying import CarriedScript
from covey.job.carrying_machine import CarryingMachine, still_needed
from covey.job.job_state import JobState, ScriptState, StopsAndSaves
from covey.simulated.block_streams import BlockStreams
from covey.simulated.healing_streams import HealingStreams, Spawn
from covey.tensors.aggregator.rounds import Superseded
from covey.tensors.numbers.arrays import Array
from covey.tensors.owner.leaving import LEAVE
from covey.wire.job import Carries

LEFT = np.zeros(1, np.float32)


@dataclass(frozen=True, eq=False)
class CarriedStream:
    """A rank that a process carries."""

    rank: int
    far: BlockStreams
    healing: HealingStreams
    open: dict[str, None]
    """Names of the tensors with a round that was not waited for."""
    config: int = 0
    """The configuration in which it came here."""


class Runs(NamedTuple):
    """What the process runs on."""

    spawn: Spawn
    now_s: Callable[[], float]
    people: Callable[[str], None]
    make: Callable[[int, int], BlockStreams]
    """Makes the connections of a rank in an incarnation."""
    like: Likeness | None = None
    wants: Callable[[], bool] = lambda: False
    """Whether this process has heard that the job is to stop."""


class _OthersNow(Exception):
    """The agent has said that this process carries other ranks."""


class CarriedStreams:
    """The ranks that one process carries."""

    def __init__(self, me: HealedRank, script: CarriedScript, runs: Runs) -> None:
        """`me`: the rank by which the process is named."""
        self._me, self._script, self._runs = me, script, runs
        self._machine = CarryingMachine(me.rank, me.incarnation, script.own)
        self._changed = asyncio.Event()
        self._gone: Mapping[int, str] = {}
        """Ranks that have ended, and a sentence for people on each."""
        self.members = {me.rank: self._joined(me, 0)}
        self._new: dict[int, CarriedStream] = {}
        """Ranks as which this process has joined, and which have nothing yet."""
        self._joins = False
        """Whether the first rank takes its state over."""
        self._state: Mapping[str, Array] = {}

    # ---- from the agent ----

    def told(self, carries: Carries) -> None:
        moved = self._machine.told(carries)
        if moved is not None:
            for rank, member in self.members.items():
                member.healing.carried_elsewhere(moved)
                if rank in self._machine.ours:
                    member.healing.machine.carried_here(self._machine.came(rank))
            if self._joins:
                self._join_newest()
            self._wake()

    def gone(self, ranks: Mapping[int, str]) -> None:
        """The agent says that these ranks have ended; the values say so in words."""
        self._gone = ranks
        for member in [*self.members.values(), *self._new.values()]:
            member.healing.gone(ranks)
        self._wake()

    # ---- the job's state ----

    async def begun(self, script: ScriptState) -> JobState:
        """The state of the script, once all is here that a successor needs. StateLost where that ends the process."""
        while self._machine.newest is None:
            await self._changed.wait()
        self._joins = True
        self._join_newest()
        if self._me.incarnation:
            found = await self.lead.healing.recover(script.own is not None, script.get())
            script.load(found.arrays, None)
            self.lead.far.begin_with(found.rounds)
        gather = _gather(self.lead.healing.machine)
        return JobState(self.lead.healing, script, self, StopsAndSaves(stops=lambda: gather.stops))

    def begin(self, state: Mapping[str, Array]) -> None:
        self._state = state
        self._machine.own_is(self._me.rank, _gather(self.lead.healing.machine).owns.each[self._me.rank])
        self._joins = False
        self._carry_newest()

    def end(self, state: Mapping[str, Array]) -> None:
        self._state = state
        for member in self.members.values():
            member.healing.end(state)

    # ---- from the script ----

    @property
    def lead(self) -> CarriedStream:
        """The rank by which the process is named."""
        return self.members[self._me.rank]

    async def each(self, compute: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """Compute a step as each rank that is carried here, until all that was pushed has come back: what the loop over
        `job.carried` does. Superseded when the first rank is another process's by now."""
        pushed = set[CarriedStream]()
        await self._let_others_catch_up()
        while True:
            while left := [member for member in self.members.values() if member not in pushed]:
                pushed.add(left[0])
                await self._as(left[0].rank, compute)
            with suppress(_OthersNow):
                await self._settle()
                return
            self._carry_newest()

    async def push(self, name: str, data: Array) -> None:
        """Begin the part of the rank that was entered in the tensor's next round."""
        member = self.members[self._machine.entered if self._machine.entered is not None else -1]
        member.open[name] = None
        await member.healing.push(name, data)

    async def result(self, name: str) -> bytes:
        """The result of this tensor's round, after `each`."""
        return await self.lead.far.result(name)

    async def leave(self, words: Callable[[int], bytes]) -> None:
        """Leave the job as all ranks that are carried here, once all others do. `words`: on a rank, for people."""
        began = set[CarriedStream]()
        while True:
            for member in [member for member in self.members.values() if member not in began]:
                began.add(member)
                member.open[LEAVE] = None
                await member.healing.push(LEAVE, LEFT)
                member.far.leave(words(member.rank))
            with suppress(_OthersNow):
                await self._settle()
                return
            self._carry_newest()

    def close(self) -> None:
        for member in [*self.members.values(), *self._new.values()]:
            self._close(member)

    # ---- inside ----

    async def _as(self, rank: int, compute: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        self._script.enter(rank, self._machine.enter(rank))
        await compute(rank)
        self._machine.exit(rank, True)

    def _carry_newest(self) -> None:
        """Adopt the ranks that the newest configuration adds."""
        for rank in self._machine.to_adopt(self.members):
            member = self._new.pop(rank, None) or self._made(rank, self._machine.config)
            self._begin_with(member)
            self.members[rank] = member
        while self._new:
            self._close(self._new.popitem()[1])

    def _join_newest(self) -> None:
        newest = self._machine.newest
        if newest is None:
            return
        ends, begins = self._machine.to_join(self.members, {rank: new.config for rank, new in self._new.items()})
        for rank in ends:
            self._close(self._new.pop(rank))
        for rank in begins:
            self._new[rank] = self._made(rank, newest.config)

    def _made(self, rank: int, config: int) -> CarriedStream:
        """This process as that rank, which has nothing yet."""
        return self._joined(self._me._replace(rank=rank, incarnation=self._machine.incarnation(config)), config)

    def _joined(self, me: HealedRank, config: int) -> CarriedStream:
        runs, rank = self._runs, me.rank
        far = runs.make(rank, me.incarnation)
        gather = OwnGather(rank, me.world_size, me.step, far, runs.wants)

        def own() -> Any:
            return self._machine.own_of(rank)

        healing = HealingStreams(far, runs.spawn, runs.now_s, me, runs.people, own, runs.like, gather)
        far.changed = healing.changed = self._wake
        healing.gone(self._gone)
        return CarriedStream(rank, far, healing, {}, config)

    def _begin_with(self, member: CarriedStream) -> None:
        """Let this rank go on from the beginning of the step in which the first rank is."""
        first = self.lead.healing.machine
        owns = _gather(first).owns
        self._machine.own_is(member.rank, owns.each[member.rank])
        member.healing.machine.goes_on_from(first, owns)
        if first.rounds_before:
            member.far.begin_with(first.rounds_before)
        member.healing.begin(self._state)

    async def _let_others_catch_up(self) -> None:
        while True:
            self._carry_newest()
            with suppress(_OthersNow):
                if not self._late():
                    return
                async with self._waiting():
                    pause_s = FIRST_ASK_S
                    while late := self._late():
                        for member in late:
                            member.healing.ask_late()
                        with suppress(TimeoutError):
                            async with asyncio.timeout(pause_s):
                                await self._caught_up()
                        pause_s = min(2 * pause_s, ASK_S)

    async def _caught_up(self) -> None:
        """Wait until no successor is a step behind, whatever others say meanwhile."""
        while self._late():
            self._look()
            await self._changed.wait()

    def _late(self) -> list[CarriedStream]:
        return [member for member in self.members.values() if member.healing.machine.is_ahead]

    async def _settle(self) -> None:
        """Wait until all that was pushed has come back, to every rank that is carried here; ranks that another process
        carries by now go. _OthersNow when others are to be carried here."""
        async with self._waiting():
            while True:
                self._let_go()
                changed = self._changed
                if self._arrived():
                    return
                if self._machine.others_now:
                    raise _OthersNow
                await changed.wait()

    @asynccontextmanager
    async def _waiting(self) -> AsyncIterator[None]:
        """All ranks wait inside, and then as long as a successor needs what one of them holds."""
        waits = [member.healing for member in self.members.values()]
        for each in waits:
            each.waits()
        try:
            yield
            while True:
                changed = self._changed
                if not still_needed(waits):
                    break
                self._look()
                await changed.wait()
            waits.clear()
        finally:
            for each in waits:
                each.machine.gave_up()

    def _look(self) -> None:
        self._let_go()
        if self._machine.others_now:
            raise _OthersNow

    def _let_go(self) -> None:
        """Drop the ranks that another process carries by now. Superseded when the first one is among them; _OthersNow
        when one is to be carried here again."""
        if self.lead.far.is_superseded:
            raise Superseded(f"another process carries rank {self._me.rank}")
        gone = {rank: member for rank, member in self.members.items() if member.far.is_superseded}
        for rank, member in gone.items():
            del self.members[rank]
            self._close(member)
        if self._machine.lets_go({rank: member.config for rank, member in gone.items()}):
            raise _OthersNow

    def _arrived(self) -> bool:
        """Whether all rounds of all ranks are complete. Rows with each rank's own state come first, and may have to be
        pushed again."""
        late = [member for member in self.members.values() if not member.healing.rows_came()]
        if late:
            return False
        each = [(member, name) for member in self.members.values() for name in member.open]
        if not all(member.far.is_here(name) for member, name in each):
            return False
        for member in self.members.values():
            member.open.clear()
        return True

    def _close(self, member: CarriedStream) -> None:
        member.healing.close()
        member.far.close()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _gather(machine: HealingMachine) -> OwnGather:
    assert machine.gather is not None, "all ranks of an elastic job gather each rank's own state"
    return machine.gather
