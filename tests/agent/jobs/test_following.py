"""What an agent makes of what it hears of one epoch's ranks, which run as another user, and of changes of them."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from agent.jobs.epoch import Epoch, allowed_with
from agent.jobs.following import Following
from agent.jobs.launching import Launching
from agent.jobs.records import StartRecord, decoder, file_of
from agent.jobs.runner import SupervisedRunner
from agent.jobs.supervision import RankHealing, StopRanks, SupervisorState
from covey.core.events import Fact
from covey.core.ids import JobId
from covey.ports.env import Env
from covey.ports.processes import ProcessId
from covey.ports.starter import MemoryPeak, NobodyElse
from covey.wire import checked
from plugins.base import RankSpec, RanksSpec
from plugins.facts import MemoryKilled, RanksEnded
from tests.agent.here import here, ranks, until

KEY = (JobId("j1"), 1)
FIRST, SECOND = ProcessId(10, 1), ProcessId(11, 1)
BEGAN = SupervisorState(pids={0: FIRST})
AGAIN = SupervisorState(pids={0: SECOND}, healing={0: RankHealing(0, incarnation=1)})
ENDED = msgspec.structs.replace(AGAIN, codes={0: 1}, ended=True)


class Kernel(NobodyElse):
    """The starter of a host whose kernel has killed so many processes."""

    killed = 0

    async def memory_peak(self, job: JobId, epoch: int) -> MemoryPeak | None:
        await asyncio.sleep(0)
        return MemoryPeak(9, self.killed, 9)


class Heard:
    """An epoch that runs, and what was told of it."""

    def __init__(self, found: bool = False) -> None:
        self.kernel, self.told, self.spawned = Kernel(0), list[Fact](), list[str]()

        def spawn(name: str, work: Coroutine[Any, Any, None]) -> None:
            self.spawned.append(name)
            work.close()

        env: Any = SimpleNamespace(
            starter=self.kernel,
            log=SimpleNamespace(info=lambda *what, **more: None),
            spawn=spawn,
        )
        launching = cast(Launching, SimpleNamespace())
        self.following = Following(cast(Env, env), launching, self.told.append, lambda job, epoch: None)
        spec = msgspec.structs.replace(ranks("j1", "train"), user="alice", uid=1001)
        self.epoch = Epoch(StartRecord(spec, "token"), found)
        self.epoch.launched = not found

    async def hears(self, *states: SupervisorState) -> None:
        for state in states:
            await self.following._heard(KEY, self.epoch, state)

    def oom(self) -> MemoryKilled | None:
        (ended,) = [fact for fact in self.told if isinstance(fact, RanksEnded)]
        return ended.oom


@pytest.mark.parametrize(("later", "oom"), [(0, None), (2, MemoryKilled(2, 9, 9))])
async def test_what_was_killed_before_a_rank_began_again_is_not_why_it_ended(later: int, oom: object) -> None:
    """The kernel counts for the epoch, which may last for weeks."""
    heard = Heard()
    await heard.hears(BEGAN)
    heard.kernel.killed = 1
    await heard.hears(AGAIN)
    heard.kernel.killed += later
    await heard.hears(ENDED)
    assert heard.oom() == oom


async def test_what_was_killed_before_another_agent_came_is_not_why_it_ended() -> None:
    heard = Heard(found=True)
    heard.epoch.found = False  # the scheduler asked for these ranks again before their supervisor was heard
    heard.kernel.killed = 1
    await heard.hears(AGAIN)
    assert heard.spawned == ["limits of j1.1"], "the other agent may have ended before it set them"
    await heard.hears(ENDED)
    assert heard.oom() is None


async def test_an_end_that_two_find_at_once_is_told_once() -> None:
    heard = Heard()
    heard.kernel.killed = 1
    end = heard.following._end
    await asyncio.gather(end(KEY, heard.epoch, ENDED), end(KEY, heard.epoch, ENDED))
    assert heard.oom() == MemoryKilled(1, 9, 9)


def test_limits_hold_for_those_who_leave_too() -> None:
    epoch = Heard().epoch
    before = (RankSpec(0, 0, ("g0",)), RankSpec(1, 1, ("g1",)))
    spec = msgspec.structs.replace(epoch.record.spec, ranks=before)
    epoch.record = msgspec.structs.replace(epoch.record, spec=spec)
    coming = (RankSpec(0, 0, ("g0",)), RankSpec(1, 1, ("g2",)))
    allowed = allowed_with(epoch, msgspec.structs.replace(spec, ranks=coming)).ranks
    assert [rank.gpus for rank in allowed] == [("g0",), ("g1",), ("g2",)]
    epoch.allowed, epoch.record = allowed, msgspec.structs.replace(epoch.record, spec=spec)
    assert allowed_with(epoch, msgspec.structs.replace(spec, ranks=before[:1])).ranks == allowed


# ---- changes ----

ONE = msgspec.structs.replace(ranks("j1", "train"), spares=0)
TWO = msgspec.structs.replace(ONE, ranks=(*ONE.ranks, RankSpec(1, 1, ())), since=1)
NEWER = ProcessId(12, 1)


@pytest.fixture
def short() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="cv") as directory:
        yield directory


@asynccontextmanager
async def changing(
    short: str, monkeypatch: pytest.MonkeyPatch, limits: Callable[[Epoch, RanksSpec], Awaitable[None]]
) -> AsyncIterator[tuple[SupervisedRunner, Epoch]]:
    """A runner with an epoch of one rank. `limits`: what happens while its limits are set."""
    async with here(short) as host:
        runner, epoch = host.runner(), Epoch(StartRecord(ONE, "token"), False)
        await runner.kept()
        runner._epochs[KEY] = epoch
        monkeypatch.setattr("agent.jobs.runner.limit_again", lambda env, spec: limits(epoch, spec))
        yield runner, epoch


@pytest.mark.parametrize("config", [0, 1])
@pytest.mark.parametrize("ended", [True, False])
async def test_nobody_joins_ranks_that_end_while_their_limits_are_set(
    short: str, monkeypatch: pytest.MonkeyPatch, config: int, ended: bool
) -> None:
    async def limits(epoch: Epoch, spec: RanksSpec) -> None:
        epoch.ended, epoch.stop = ended, None if ended else StopRanks(0.0, "over")

    async with changing(short, monkeypatch, limits) as (runner, epoch):
        await runner.start(msgspec.structs.replace(TWO, config=config))
        assert epoch.record.spec == ONE


@pytest.mark.parametrize("config", [0, 1])
async def test_ranks_join_under_the_supervisor_that_began_meanwhile(
    short: str, monkeypatch: pytest.MonkeyPatch, config: int
) -> None:
    async def limits(epoch: Epoch, spec: RanksSpec) -> None:
        epoch.record = msgspec.structs.replace(epoch.record, supervisor=NEWER)

    async with changing(short, monkeypatch, limits) as (runner, epoch):
        await runner.start(msgspec.structs.replace(TWO, config=config))
        written = checked.unseal(await runner._env.disk.read(file_of(KEY, "start")) or b"", decoder, name="")
        assert written == epoch.record
        assert (len(written.spec.ranks), written.supervisor) == (2, NEWER)


async def test_the_newest_of_two_changes_stays(short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def limits(epoch: Epoch, spec: RanksSpec) -> None:
        await asyncio.sleep(0.05 if spec.config == 1 else 0.0)

    async with changing(short, monkeypatch, limits) as (runner, epoch):
        three = msgspec.structs.replace(TWO, config=2, ranks=(*TWO.ranks, RankSpec(2, 2, ())))
        await asyncio.gather(runner.start(msgspec.structs.replace(TWO, config=1)), runner.start(three))
        assert epoch.record.spec == three


async def test_ranks_that_leave_keep_their_limits_while_others_come(
    short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited: list[list[int]] = []

    async def limits(epoch: Epoch, spec: RanksSpec) -> None:
        limited.append([rank.rank for rank in spec.ranks])

    async def start_program(env: Env, spec: RanksSpec, *program: object) -> ProcessId:
        await limits(epoch, spec)
        return NEWER

    monkeypatch.setattr("agent.jobs.following.start_program", start_program)
    async with changing(short, monkeypatch, limits) as (runner, epoch):
        await runner.start(msgspec.structs.replace(TWO, config=1))
        await runner.start(msgspec.structs.replace(ONE, config=2))
        third = RankSpec(2, 2, ())
        await runner.start(msgspec.structs.replace(ONE, config=3, ranks=(*ONE.ranks, third)))
        await runner._following._launch(KEY, epoch)
        assert epoch.record.spec.ranks == (*ONE.ranks, third)
        assert limited == [[0, 1], [0, 1, 2], [0, 1, 2]]


async def test_spares_begin_by_the_newest_record_and_their_job_is_live(
    short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[RanksSpec] = []

    async def start_program(env: Env, spec: RanksSpec, program: str, instance: str, config: msgspec.Struct) -> None:
        begun.append(spec)

    monkeypatch.setattr("agent.jobs.kept_spares.start_program", start_program)
    async with here(short) as host:
        runner = host.runner()
        await runner.keep_spares(msgspec.structs.replace(ONE, spares=1), ("json",))
        runner._spares.keep(StartRecord(TWO, "token"), ("json",), 1)
        assert runner._live() == {KEY[0]}
        await until(lambda: begun)
        runner.end_spares(*KEY)
        assert (begun[0], runner._live()) == (TWO, set())
