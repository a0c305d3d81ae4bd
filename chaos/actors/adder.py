"""AddVector as an elastic job (`submit --workers 2..8`): in each step each rank adds `DELTA` to every element.

    adder STEPS FLOATS     0 when all steps are done; 3 when another process took its place, 70 when its state is lost

However many processes carry the ranks, and whatever becomes of them, every element is DELTA x STEPS x ranks in the end.
Each rank draws a number besides, in every step, which all ranks see in the sum of rows with one place for each rank:
so a rank that was added twice, or not at all, or that draws again what it had drawn before it changed hands, is told
apart by its rank and step.

What decides is the code of real processes: `covey.job.carrying_machine`, `covey.healing.machine`,
`covey.healing.own_gather`, `covey.tensors.aggregator.rounds`, `covey.job.job_state`. What is simulated are their
threads and sockets (`covey.simulated.carried_streams`).
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from chaos.actors.learner import LIKE, PART_BYTES, SIZES, Own
from chaos.actors.stopping import Answers, Hears
from chaos.actors.workload import LINGER_S, AgentLink, Say
from covey.core.errors import EXIT_STATE_LOST, OthersDone, RankLeft, StateLost
from covey.core.ids import JobId
from covey.healing.neighbours import HealedRank
from covey.job.carrying import CarriedScript
from covey.job.job_state import ScriptState
from covey.job.rank_identity import identity
from covey.ports.env import Env
from covey.ports.processes import Command
from covey.simulated.block_streams import BlockStreams, TensorRank
from covey.simulated.carried_streams import CarriedStreams, Runs
from covey.tensors.aggregator.rounds import Superseded
from covey.tensors.numbers.arrays import Array
from covey.tensors.owner.leaving import who
from covey.wire.job import AggregatorAt, GoneRank, Heals, Stepped

DELTA = 3.0
COMPUTE_S = (0.1, 0.5)
"""Least and most seconds of a step, shared among the ranks that a process carries."""


class Adders:
    """All adders of a rack, and what they have seen."""

    def __init__(self, wrong: Say) -> None:
        self.wrong = wrong
        self.begun: dict[tuple[JobId, int, int], int] = {}
        """Job, grant and first rank of a process -> the newest incarnation of it that has the state."""
        self.steps: dict[JobId, int] = {}
        """Job -> the newest step that some process began."""
        self.ended: dict[tuple[JobId, int], Array] = {}
        """Job and first rank -> the vector at the end."""
        self.too_late: set[tuple[JobId, int]] = set()
        """Job and first rank of processes that began when the others were done."""
        self.answers = Answers(wrong)
        self.adopted = self.taken_over = 0
        """Number of ranks that processes adopted while they ran, and of processes that took the state over."""
        self._drawn: dict[int, list[list[Any]]] = {}

    def right(self, rank: int, step: int) -> list[Any]:
        """What the rank has drawn at the beginning of this step."""
        known = self._drawn.setdefault(rank, [Own(rank, "gather").told()])
        while len(known) <= step:
            own = Own(rank, "gather")
            own.go_on_with(known[-1])
            own.draw()
            known.append(own.told())
        return known[step]

    async def add(self, env: Env, command: Command) -> int:
        """Run the program `adder`."""
        return await Adder(self, env, command).run()


class Adder:
    """One process."""

    def __init__(self, seen: Adders, env: Env, command: Command) -> None:
        self._seen, self._env = seen, env
        self.me = me = identity(command.env)
        self._stop = int(command.argv[1])
        self._vector = np.zeros(int(command.argv[2]), np.float32)
        self._agent = AgentLink(env, command)
        self._own = Own(me.rank, "gather")
        self._all: list[BlockStreams] = []
        healed = HealedRank(me.rank, me.world_size, me.incarnation, me.here, me.host)
        hears = Hears(f"{me.job} {me.epoch} {me.rank} {me.incarnation}")
        now_s = asyncio.get_running_loop().time
        runs = Runs(env.spawn, now_s, self._people, self._streams, LIKE, hears.now)
        self.carried = CarriedStreams(healed, CarriedScript(lambda: self._own.told(), self._enter), runs)
        self._agent.moved, self._agent.carries, self._agent.gone = self._moved, self.carried.told, self._gone
        self._step, self._took_s = 0, 0.0

    async def run(self) -> int:
        env, seen, me = self._env, self._seen, self.me
        env.spawn("agent link", self._agent.run())
        key = me.job, me.epoch, me.rank
        try:
            state = await self.carried.begun(ScriptState(lambda: {"vector": self._vector}, self._load, self._own.told))
            seen.begun[key] = max(me.incarnation, seen.begun.get(key, 0))
            seen.taken_over += me.incarnation > 0
            await self._agent.heals(Heals(state.step, modules=("numpy",)))
            for step in state.steps(self._stop):
                if not await self._one(step):
                    return 4
                self._seen.answers.given(me.job, me.epoch, me.rank, step, state.stopping)
            seen.ended[me.job, me.rank] = self._vector.copy()
            await self._leave(state.step)
        except Superseded:
            return 3
        except OthersDone as done:
            if not me.rank:
                return EXIT_STATE_LOST
            env.log.info("others are done", why=str(done))
            seen.too_late.add((me.job, me.rank))
        except StateLost as lost:
            env.log.info("state lost", why=str(lost))
            return EXIT_STATE_LOST
        return 0

    async def _one(self, step: int) -> bool:
        """Do one step; returns whether all was as it must be."""
        seen, me, ranks = self._seen, self.me, self.me.world_size
        seen.steps[me.job] = max(step, seen.steps.get(me.job, 0))
        self._step, self._took_s = step, self._env.rng.uniform(*COMPUTE_S)
        before = len(self.carried.members)
        await self.carried.each(self._compute)
        seen.adopted += max(0, len(self.carried.members) - before)
        added = np.frombuffer(await self.carried.result("add"), np.float32)
        drawn = np.frombuffer(await self.carried.result("drawn"), np.float32)
        newest = [seen.right(rank, step + 1)[0] for rank in range(ranks)]
        whole = np.full(len(self._vector), DELTA * step * ranks, np.float32)
        if (
            self._is_wrong("ranks drew", drawn, np.array(newest, np.float32))
            or self._is_wrong("all added", added, np.full(len(self._vector), DELTA * ranks, np.float32))
            or self._is_wrong("before it was", self._vector, whole)
        ):
            return False
        self._vector += added
        await self._agent.send(Stepped(step, self._took_s, self._took_s, 0.0, {}))
        return True

    async def _compute(self, rank: int) -> None:
        """Compute this step as a rank that this process carries."""
        found, right = self._own.told(), self._seen.right(rank, self._step)
        if found != right:
            self._seen.wrong(f"{self._told()}: rank {rank} begins with {found}, expected {right}")
        self._own.draw()
        await asyncio.sleep(self._took_s / max(1, len(self.carried.members)))
        await self.carried.push("add", np.full(len(self._vector), DELTA, np.float32))
        row = np.zeros(self.me.world_size, np.float32)
        row[rank] = self._own.drawn
        await self.carried.push("drawn", row)

    # ---- what the carried ranks need ----

    def _enter(self, rank: int, own: Any) -> None:
        self._own = Own(rank, "gather")
        if own is not None:
            self._own.go_on_with(own)

    def _load(self, arrays: dict[str, Array], own: Any) -> None:
        self._vector[:] = arrays["vector"]

    def _streams(self, rank: int, incarnation: int) -> BlockStreams:
        env, me, agent = self._env, self.me, self._agent
        made = BlockStreams(
            env,
            TensorRank(me.job, rank, me.world_size, me.tables, incarnation),
            agent.lost,
            wanted=agent.wanted,
            part_bytes=PART_BYTES,
            sizes=SIZES,
        )
        if self._all:
            made.begin_as(self._all[0])
        self._all.append(made)
        for at in agent.owners.all():
            made.moved(at)
        return made

    def _moved(self, at: AggregatorAt) -> None:
        for streams in self._all:
            streams.moved(at)

    def _gone(self, ranks: Mapping[int, GoneRank]) -> None:
        self.carried.gone({rank: who(rank, gone.host, gone.step, True) for rank, gone in ranks.items()})

    def _people(self, text: str) -> None:
        self._env.log.info("people read", text=text)

    # ---- its end, and what it sees ----

    async def _leave(self, step: int) -> None:
        """Leave the job, as `with covey.join()` does at its end."""
        try:
            async with asyncio.timeout(LINGER_S):
                await self.carried.leave(lambda rank: who(rank, self.me.host, step - 1, False).encode())
        except (TimeoutError, RankLeft):
            return
        await self._agent.heals(Heals(step, over=True))
        await asyncio.sleep(0.5)

    def _is_wrong(self, what: str, found: Array, right: Array) -> bool:
        if np.array_equal(found, right):
            return False
        self._seen.wrong(f"{self._told()}: {what} {found[:8]}, expected {right[:8]}")
        return True

    def _told(self) -> str:
        return f"{self.me.job} process {self.me.rank} of {self.me.incarnation:#x} step {self._step}"
