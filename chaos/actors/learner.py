"""A training script that may be lost at any moment (`job.state`): the job side's own code, and a check of its result.

    learner STEPS FLOATS OWN     0 when all steps are done; 3 when it was replaced, 70 when its state is lost

OWN says how what is a rank's own is kept: all ranks `gather` it, or gather it while it is `long` now and then, or two
neighbours `mirror` it.

What it has learnt is whole numbers that follow from the job and its ranks alone: in each step a rank draws a number of
its own, takes the next sample, and pushes what both and the parameters give. So any difference from an undisturbed run
- a sum with one rank's contribution twice or not at all, a sample that is skipped, a state of the step before, a
random generator that is set back - shows as another number, and each rank looks at all of them in every step. Most
processes hear at some time that their job is to stop, each at another one: in each step all ranks must have the same
answer to whether they stop.

What decides is the code of real ranks: `covey.healing.machine`, `covey.healing.taking_over`,
`covey.healing.own_gather`, `covey.tensors.aggregator.rounds`, `covey.job.job_state`. What is simulated are their
threads and sockets (`covey.simulated.healing_streams`).
"""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from chaos.actors.stopping import Answers, Hears
from chaos.actors.workload import LINGER_S, AgentLink, Say
from covey.core.errors import EXIT_STATE_LOST, RankLeft, StateLost
from covey.core.ids import JobId
from covey.healing.likeness import Likeness
from covey.healing.neighbours import HealedRank
from covey.healing.owns import RANKS_MAX
from covey.job.job_state import JobState, ScriptState
from covey.job.rank_identity import identity
from covey.ports.env import Env
from covey.ports.processes import Command
from covey.simulated.block_streams import BlockStreams, TensorRank
from covey.simulated.healing_streams import HealingStreams, ToldEachStep, begun_on
from covey.tensors.aggregator.rounds import Superseded
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.blocks import Sizes
from covey.tensors.owner.leaving import LEAVE, who
from covey.wire.job import Heals, Stepped

SIZES = Sizes(elsewhere_bytes=64, least_bytes=128, most_bytes=512, aligned=1)
PART_BYTES = 256
"""Bytes of a part, so small that tensors have several owners, Blocks and parts."""
COMPUTE_S = (0.2, 1.2)
"""Least and most seconds of one step."""
SOON_S = 0.02
"""Seconds before its push at which a learner says that it is about to push."""
PRIME, WRAP = 65_521, 4_093
"""Bounds of numbers: what is learnt is below the first, what is pushed below the second; sums of both are exact in
float32."""
GHOSTS = 0.08
"""Chance, in each step of a successor, that a process of its rank that was lost before speaks too."""
LIKE = Likeness({"numpy": "simulated"}, "simulated", "1", "")


class Own:
    """State of a rank's own: a random generator, its place in the data, and something that is long now and then."""

    def __init__(self, rank: int, how: str) -> None:
        self._long = how != "gather"
        self.rank, self.drawn, self.sample, self.notes = rank, (rank * 7_919 + 11) % PRIME, 0, ""

    def draw(self) -> None:
        """Draw the next number, once in each step."""
        self.drawn = (self.drawn * 48_271 + self.sample + 1) % PRIME
        self.sample += 1
        if self._long:
            self.notes = chr(97 + self.drawn % 26) * (400 if self.drawn % 7 == 0 else self.drawn % 200)

    def told(self) -> list[Any]:
        """What the rank has drawn, in values that JSON has."""
        return [self.drawn, self.sample, self.notes]

    def go_on_with(self, told: list[Any]) -> None:
        self.drawn, self.sample, self.notes = told


def gradient(own: Own, w: Array) -> Array:
    """Gradient of one rank, once it has drawn."""
    places = np.arange(len(w), dtype=np.int64)
    found = (own.drawn * (places + 1) + w.astype(np.int64) * (own.rank + 2) + own.sample * 31) % WRAP
    return found.astype(np.float32)


def learnt(w: Array, total: Array) -> Array:
    """Parameters after a step."""
    return ((w.astype(np.int64) * 3 + total.astype(np.int64)) % PRIME).astype(np.float32)


class Undisturbed:
    """A run in which nothing is lost, by one process."""

    def __init__(self, ranks: int, floats: int, own: str) -> None:
        self._owns = [Own(rank, own) for rank in range(ranks)]
        self.w = [np.zeros(floats, np.float32)]
        """Parameters at the beginning of each step."""
        self.total: list[Array] = []
        """Sum of all gradients of each step."""
        self.owns = [[own.told() for own in self._owns]]
        """What each rank has drawn at the beginning of each step, by step and rank."""

    def reach(self, step: int) -> None:
        """Compute up to the beginning of this step, and what is added before it."""
        while len(self.w) <= step:
            for own in self._owns:
                own.draw()
            each = [gradient(own, self.w[-1]) for own in self._owns]
            total: Array = np.add.reduce(each, axis=0, dtype=np.float32)
            self.total.append(total)
            self.w.append(learnt(self.w[-1], total))
            self.owns.append([own.told() for own in self._owns])


class Learners:
    """All learners of a rack, and what they have seen."""

    def __init__(self, wrong: Say) -> None:
        self.wrong = wrong
        self._right: dict[JobId, Undisturbed] = {}
        self.begun: dict[tuple[JobId, int, int], int] = {}
        """Job, grant and rank -> the newest process of it that has the state."""
        self.steps: dict[tuple[JobId, int], int] = {}
        """Job and rank -> the step that it began last."""
        self.about_to_push: dict[tuple[JobId, int], int] = {}
        """Job and rank -> the last step in which it was about to push."""
        self.ended: dict[tuple[JobId, int], Array] = {}
        """Job and rank -> what it had learnt at the end."""
        self.answers = Answers(wrong)
        self.taken_over = self.ghosts = 0

    def differ(self, job: JobId, ranks: int) -> bool:
        """Whether some of the job's ranks have begun a step, and others have not."""
        return len({self.steps.get((job, rank), 0) for rank in range(ranks)}) > 1

    def right(self, job: JobId, ranks: int, floats: int, own: str, step: int) -> Undisturbed:
        found = self._right.get(job) or self._right.setdefault(job, Undisturbed(ranks, floats, own))
        found.reach(step)
        return found

    async def learn(self, env: Env, command: Command) -> int:
        """Run the program `learner`."""
        return await Learner(self, env, command).run()


class Learner:
    """One process of a rank."""

    def __init__(self, seen: Learners, env: Env, command: Command) -> None:
        self._seen, self._env, self._command = seen, env, command
        self.me = me = identity(command.env)
        self._stop, floats, self._how = int(command.argv[1]), int(command.argv[2]), command.argv[3]
        self._agent = agent = AgentLink(env, command)
        self._far = self._streams(me.incarnation, agent.lost, agent.wanted)
        agent.moved = self._far.moved
        self._w, self._total = np.zeros(floats, np.float32), np.zeros(floats, np.float32)
        """Arrays that are written in place, as a script does that is short of memory."""
        self._own = Own(me.rank, self._how)
        self._key = me.job, me.epoch, me.rank
        self._hears = Hears(f"{self._key} {me.incarnation}")

    def _streams(
        self, incarnation: int, lost: Callable[[int, str, int], None], wanted: Callable[[int], None]
    ) -> BlockStreams:
        env, me = self._env, self.me
        return BlockStreams(
            env,
            TensorRank(me.job, me.rank, me.world_size, me.tables, incarnation),
            lost,
            wanted=wanted,
            part_bytes=PART_BYTES,
            sizes=SIZES,
        )

    async def run(self) -> int:
        env, agent = self._env, self._agent
        env.spawn("agent link", agent.run())
        try:
            state, healing = await self._begin()
            for step in state.steps(self._stop):
                took_s = env.rng.uniform(*COMPUTE_S)
                if not await self._step(step, state, healing, took_s):
                    return 4
                self._seen.answers.given(self.me.job, self.me.epoch, self.me.rank, step, state.stopping)
                await agent.send(Stepped(step, took_s, took_s, 0.0, {}))
            self._seen.ended[self.me.job, self.me.rank] = self._w.copy()
            await self._leave(state, healing)
        except Superseded:
            return 3
        except StateLost as lost:
            env.log.info("state lost", why=str(lost))
            return EXIT_STATE_LOST
        return 0

    async def _begin(self) -> tuple[JobState, HealingStreams]:
        env, me = self._env, self.me
        state, healing = await begun_on(
            self._far,
            env.spawn,
            asyncio.get_running_loop().time,
            HealedRank(me.rank, me.world_size, me.incarnation, me.here, me.host),
            ScriptState(lambda: {"w": self._w, "total": self._total}, self._load, self._own.told),
            lambda text: env.log.info("people read", text=text),
            LIKE,
            ToldEachStep(0 if self._how == "mirror" else RANKS_MAX, self._hears.now),
        )
        self._seen.begun[self._key] = max(me.incarnation, self._seen.begun.get(self._key, 0))
        self._seen.taken_over += me.incarnation > 0
        await self._agent.heals(Heals(state.step, modules=("numpy",)))
        return state, healing

    def _load(self, arrays: dict[str, Array], own: Any) -> None:
        self._w[:], self._total[:] = arrays["w"], arrays["total"]
        if own is not None:
            self._own.go_on_with(own)

    async def _step(self, step: int, state: JobState, healing: HealingStreams, took_s: float) -> bool:
        """Do one step; returns whether all was as in an undisturbed run."""
        env, me, seen = self._env, self.me, self._seen
        seen.steps[me.job, me.rank] = step
        right = seen.right(me.job, me.world_size, len(self._w), self._how, step + 1)
        was = self._own.told()
        if self._is_wrong(step, "parameters", self._w, right.w[step]) or self._is_wrong(
            step, "own", was, right.owns[step][me.rank]
        ):
            return False
        self._own.draw()
        if env.rng.random() < 0.3:
            state.drawn()
        await asyncio.sleep(took_s - SOON_S)
        seen.about_to_push[me.job, me.rank] = step
        await asyncio.sleep(SOON_S)
        if me.incarnation and env.rng.random() < GHOSTS:
            env.spawn("of before", self._ghost(self._far.versions()))
        mine = gradient(self._own, self._w)
        await healing.push("g", mine)
        if step % 3 == 0:  # one that is not there in every step
            await healing.push("seldom", np.full(3, me.rank + 1, np.float32))
        found = np.frombuffer(await healing.result("g"), np.float32)
        self._is_heard(step)
        if step % 3 == 0:
            seldom = np.frombuffer(await healing.result("seldom"), np.float32)
            sum_of_all = me.world_size * (me.world_size + 1) // 2
            if self._is_wrong(step, "a tensor used seldom", seldom, np.full(3, sum_of_all, np.float32)):
                return False
        if self._is_wrong(step, "sum", found, right.total[step]):
            return False
        self._total[:] = found
        self._w[:] = learnt(self._w, found)
        return True

    def _is_heard(self, step: int) -> None:
        """Check, once the rank has a result, that no newer process of it has the state by now."""
        me, newest = self.me, self._seen.begun[self._key]
        if newest != me.incarnation:
            self._seen.wrong(f"{me.job} rank {me.rank} process {me.incarnation} is heard in step {step}; {newest} runs")

    def _is_wrong(self, step: int, what: str, found: Any, right: Any) -> bool:
        if np.array_equal(found, right) if isinstance(found, np.ndarray) else found == right:
            return False
        me, few = self.me, slice(0, 4)
        self._seen.wrong(
            f"{me.job} rank {me.rank} process {me.incarnation} step {step}: {what} {found[few]}, expected {right[few]}"
        )
        return True

    async def _ghost(self, rounds: bytes | None) -> None:
        """Speak as a process of this rank that was lost, and runs all the same, to every owner that is connected to
        this one: it pushes wrong numbers in the next of these rounds, which no owner may add."""
        self._seen.ghosts += 1
        streams = self._streams(self.me.incarnation - 1, lambda epoch, why, table: None, lambda table: None)
        for at in self._far.owners:
            streams.moved(at)
        try:
            async with asyncio.timeout(3.0):
                streams.begin_with(rounds or b"\x80")
                for name in ("g", "seldom"):
                    await streams.push_pull(name, np.full(len(self._w) if name == "g" else 3, 1, np.float32).tobytes())
        except (Superseded, TimeoutError):
            pass
        finally:
            streams.close()

    async def _leave(self, state: JobState, healing: HealingStreams) -> None:
        """Leave the job, as `with covey.join()` does at its end."""
        try:
            async with asyncio.timeout(LINGER_S):
                await healing.push(LEAVE, np.zeros(1, np.float32))
                self._far.leave(who(self.me.rank, self.me.host, state.step - 1, False).encode())
                await healing.result(LEAVE)
        except (TimeoutError, RankLeft):
            return
        await self._agent.heals(Heals(state.step, over=True))
        await asyncio.sleep(0.5)
