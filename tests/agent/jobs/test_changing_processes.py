"""Processes of an elastic job come and go on a host whose others keep running: under a supervisor in the simulator, and
as real processes under a runner."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import groupby

import msgspec
import pytest

from agent.jobs.records import decoder as record_decoder
from agent.jobs.runner import SupervisedRunner
from agent.jobs.successors import NEVER
from agent.jobs.supervision import (
    HealRank,
    JoinRanks,
    LeaveRanks,
    RankHealing,
    RanksStatus,
    RankStart,
    Renewed,
    SupervisorConfig,
    SupervisorState,
    decoder,
)
from agent.jobs.supervisor.supervisor import SIBLINGS_S
from agent.ports.processes.procfs import is_alive, start_ticks
from covey.core.ids import JobId
from covey.ports.env import Env
from covey.ports.processes import ProcessId
from covey.ports.streams import ByteStream
from covey.wire import checked
from covey.wire.frames import pack, read_frame
from plugins.base import RankLease, RankSpec, RanksSpec
from plugins.facts import RankEndedHere, RankReplaced, RanksEnded, RanksHeal, RanksStarted
from tests.agent.here import Here, here, ranks, until
from tests.agent.jobs.test_successors import Ranks, joiner, last_word, meet, play

J1 = JobId("j1")
LEAVES = LeaveRanks(1, (1,))


# ---- a supervisor, in the simulator ----


async def said(stream: ByteStream, holds: Callable[[SupervisorState], object]) -> SupervisorState:
    """The first state that the supervisor tells of which this holds."""
    while True:
        heard = await read_frame(stream, decoder)
        assert isinstance(heard, RanksStatus)
        if holds(heard.state):
            return heard.state


def is_over(changed: int) -> Callable[[SupervisorState], bool]:
    return lambda state: state.changed == changed


def running(played: Ranks) -> list[str]:
    """The ranks whose processes live."""
    host = played.host
    return sorted(
        host.commands[pid].env["RANK"] for pid, each in host.processes.items() if each.alive and pid in host.commands
    )


def kill_supervisors(played: Ranks) -> None:
    for process in [*played.host.find("sup"), *played.host.find("again")]:
        process.end(-9)


def without(told: SupervisorConfig, rank: int, changed: int = 1) -> SupervisorConfig:
    here = tuple(start for start in told.ranks if start.rank != rank)
    return msgspec.structs.replace(told, ranks=here, changed=changed)


def test_a_rank_that_leaves_is_killed_and_its_sibling_runs_to_its_end() -> None:
    """It may be lost, too, and has no successor all the same."""

    async def story(env: Env, played: Ranks) -> None:
        stream = await meet(env, played.config())
        await stream.write(pack(HealRank(1, 0)))
        await said(stream, lambda state: 1 in state.pids and 1 in state.healing)
        await stream.write(pack(LEAVES))
        left = await said(stream, lambda state: state.changed)
        assert running(played) == ["0"] and (set(left.pids), left.codes, left.leaving) == ({0}, {}, ())
        last = await last_word(stream)
        assert (dict(last.codes), last.reason, last.lost) == ({0: 0}, "", False)

    assert play([(500.0, 0)] * 2, story).started == {"0": ["0"], "1": ["0"]}


def test_a_failure_of_a_rank_that_leaves_stops_no_sibling() -> None:
    async def story(env: Env, played: Ranks) -> None:
        stream = await meet(env, played.config())
        await said(stream, lambda state: state.codes.get(1) == 7)
        await asyncio.sleep(SIBLINGS_S / 2)
        await stream.write(pack(LEAVES))
        last = await last_word(stream)
        assert (dict(last.codes), last.reason, last.lost) == ({0: 0}, "", False)

    play([(1.0, 7)], story)


@pytest.mark.parametrize("leaves_s", [0.0, 0.9, 1.0, 1.005, 1.01, 1.02, 1.04, 1.1, 3.0])
def test_nothing_of_a_rank_that_leaves_runs_once_that_is_told(leaves_s: float) -> None:
    """Whether it is starting, running, or being started again: its GPUs are another job's from then on."""

    async def story(env: Env, played: Ranks) -> None:
        stream = await meet(env, played.config())
        await stream.write(pack(HealRank(1, 0)))
        await asyncio.sleep(leaves_s)
        await stream.write(pack(LEAVES))
        await said(stream, lambda state: state.changed == 1)
        assert running(played) == ["0"]
        last = await last_word(stream)
        assert dict(last.codes) == {0: 0} and running(played) == []

    play([(1.0, -9), (500.0, 0), (500.0, 0)], story, seed=int(1 + 1000 * leaves_s))


@pytest.mark.parametrize("after_ms", [0, 2, 4, 8, 16, 32])
def test_a_rank_that_leaves_while_it_is_started_again_is_gone_once_that_is_told(after_ms: int) -> None:
    async def story(env: Env, played: Ranks) -> None:
        stream = await meet(env, played.config())
        await stream.write(pack(HealRank(1, 0)))
        await said(stream, lambda state: 1 in state.healing and state.healing[1].losses)
        await asyncio.sleep(after_ms / 1000)
        await stream.write(pack(LEAVES))
        await said(stream, lambda state: state.changed == 1)
        begun = len(played.host.commands)
        assert running(played) == ["0"]
        assert dict((await last_word(stream)).codes) == {0: 0}
        assert len(played.host.commands) == begun, "none begins any more"

    play([(1.0, -9), (500.0, 0)], story, seed=1 + after_ms)


@pytest.mark.parametrize("kill_s", [0.0, 0.01, 0.03, 0.1, 2.0])
@pytest.mark.parametrize("told", [True, False])
def test_a_rank_that_left_is_gone_whenever_the_supervisor_dies(kill_s: float, told: bool) -> None:
    """The record has it no more by then, whether or not the supervisor before had heard of that."""

    async def story(env: Env, played: Ranks) -> None:
        stream = await meet(env, played.config())
        await said(stream, lambda state: len(state.pids) == 2)
        if told:
            await stream.write(pack(LEAVES))
        await asyncio.sleep(kill_s)
        kill_supervisors(played)
        await asyncio.sleep(0.5)
        now = without(played.config(), 1)
        await env.processes.start_program("supervisor", "again", now)
        stream = await meet(env, now)
        await said(stream, lambda state: state.changed == 1)
        assert running(played) == ["0"]
        await stream.write(pack(LEAVES))
        last = await last_word(stream)
        assert (dict(last.codes), last.lost, last.leaving) == ({0: 0}, False, ())

    played = play([(500.0, 0)], story, seed=int(1 + 100 * kill_s))
    assert played.started == {"0": ["0"], "1": ["0"]}


def test_one_that_comes_again_after_it_left_is_another_process_with_a_higher_number() -> None:
    async def story(env: Env, played: Ranks) -> None:
        stream = await meet(env, played.config())
        await said(stream, lambda state: len(state.pids) == 2)
        for changed, number in ((1, 65536), (3, 131072)):
            await stream.write(pack(LeaveRanks(changed, (1,))))
            await said(stream, is_over(changed))
            again = joiner(1)
            env_of = again.command.env | {"COVEY_INCARNATION": str(number)}
            again = RankStart(1, msgspec.structs.replace(again.command, env=env_of))
            await stream.write(pack(JoinRanks((again,), replaces=True)) + pack(LeaveRanks(changed + 1, ())))
            await said(stream, lambda state: 1 in state.pids)
        played.last = await last_word(stream)  # type: ignore[attr-defined]

    played = play([(500.0, 0), (500.0, 0), (20.0, 0)], story)
    first, second, third = map(int, played.started["1"])
    assert first == 0 and 65536 < second < 131072 < third
    assert (played.last.codes, played.last.changed) == ({1: 0, 0: 0}, 4)  # type: ignore[attr-defined]
    assert len([run for run in played.host.runs if run.startswith("/1.1")]) == 3, "none has the files of another one"


def test_a_successor_runs_with_the_newest_command_of_its_rank() -> None:
    """The one with which it was started has the GPUs of processes that left since."""

    async def story(env: Env, played: Ranks) -> None:
        stream = await meet(env, played.config())
        await stream.write(pack(HealRank(1, 0)))
        await said(stream, lambda state: len(state.pids) == 2)
        newest = [RankStart(rank, joiner(rank).command) for rank in (0, 1)]
        await stream.write(pack(JoinRanks(tuple(newest), replaces=True)))
        last = await last_word(stream)
        assert last.codes == {1: 0, 0: 0}

    assert play([(2.0, -9), (1.0, 0)], story).started == {"0": ["0"], "1": ["0", "65537"]}


def test_a_place_may_be_exchanged_for_another_one_whole() -> None:
    """New processes are there before others leave, since a supervisor without ranks ends."""

    async def story(env: Env, played: Ranks) -> None:
        stream = await meet(env, played.config())
        await said(stream, lambda state: len(state.pids) == 2)
        await stream.write(pack(JoinRanks((joiner(2),), replaces=True)) + pack(LeaveRanks(1, (0, 1))))
        await said(stream, lambda state: state.changed == 1 and 2 in state.pids)
        assert running(played) == ["2"]
        last = await last_word(stream)
        assert (dict(last.codes), last.lost) == ({2: 0}, False)

    play([(500.0, 0)], story)


def test_a_rank_that_leaves_while_its_host_is_not_confirmed_is_killed() -> None:
    async def story(env: Env, played: Ranks) -> None:
        stream = await meet(env, played.config())
        await stream.write(pack(Renewed(RankLease(env.clock.boot_s(), 900.0, 1.0, pause_s=2.0))))
        for rank in (0, 1):
            await stream.write(pack(HealRank(rank, 0)))
        await asyncio.sleep(3.0)
        await stream.write(pack(JoinRanks((joiner(2),), replaces=True)) + pack(LeaveRanks(1, (1,))))
        await said(stream, lambda state: state.changed == 1)
        await stream.write(pack(LeaveRanks(2, (2,))))
        await asyncio.sleep(3.0)
        assert running(played) == ["0"]
        await stream.write(pack(Renewed(RankLease(env.clock.boot_s(), 900.0, 1.0, pause_s=800.0))))
        await said(stream, lambda state: state.changed == 2)
        last = await last_word(stream)
        assert dict(last.codes) == {0: 0}

    assert "2" not in play([(500.0, 0)], story).started


def test_what_is_left_of_a_rank_is_its_number() -> None:
    async def story(env: Env, played: Ranks) -> None:
        stream = await meet(env, played.config())
        await stream.write(pack(HealRank(1, 7)))
        await said(stream, lambda state: 1 in state.healing and len(state.pids) == 2)
        await stream.write(pack(LEAVES))
        left = await said(stream, lambda state: state.changed)
        assert left.healing == {1: RankHealing(0, 0, 1, has_had_state=False)}
        await last_word(stream)

    play([(500.0, 0)], story)


# ---- a runner, and real processes ----

SCRIPT = 'setsid -f sleep 600; until [ -e "$GO" ]; do sleep 0.02; done'
"""A process that runs until there is a file, beside another one in a session of its own."""
PLACES: list[tuple[int, tuple[int, ...]]] = [(0, (0, 1)), (1, (0, 1, 5)), (1, (0,)), (3, (0, 5)), (3, (0, 5))]
"""The places of the job here in each of its configurations, in turn: since when, and with which processes."""


def place(short: str, config: int) -> RanksSpec:
    since, names = PLACES[config]
    spec = ranks("j1", "/bin/sh", "-c", SCRIPT, GO=f"{short}/go", MARK=short)
    here, carried = (
        (RankSpec(rank, at, ()) for at, rank in enumerate(names)),
        {rank: (rank, 8 + config) for rank in names},
    )
    return msgspec.structs.replace(spec, ranks=tuple(here), world_size=16, since=since, config=config, carried=carried)


def let_end(short: str) -> None:
    """Let every process of the job end with 0."""
    open(f"{short}/go", "w").close()


def living(short: str) -> dict[int, list[dict[str, str]]]:
    """The environments of the live processes of each rank, shims and what they started included."""
    found: dict[int, list[dict[str, str]]] = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                parts = [each.partition("=") for each in file.read().decode(errors="replace").split("\0")]
        except OSError:
            continue
        env, ticks = {name: value for name, _, value in parts}, start_ticks(pid)
        if env.get("MARK") == short and ticks is not None and is_alive(ProcessId(pid, ticks)):
            found.setdefault(int(env["RANK"]), []).append(env)
    return found


def of_folder(directory: str) -> list[int]:
    """The live processes that were started for this folder, or in it."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        ticks = start_ticks(pid)
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                is_its = directory.encode() in file.read() or os.readlink(f"/proc/{pid}/cwd").startswith(directory)
        except OSError:
            continue
        if is_its and ticks is not None and is_alive(ProcessId(pid, ticks)) and pid != os.getpid():
            found.append(pid)
    return found


@asynccontextmanager
async def agent(short: str) -> AsyncIterator[tuple[Here, SupervisedRunner]]:
    """One life of an agent: what it started lives on."""
    async with here(short) as host:
        runner = host.runner()
        await runner.start_up()
        yield host, runner


async def supervisor_of(host: Here) -> int:
    record = checked.unseal(await host.env.disk.read("jobs/j1/1.start") or b"", record_decoder)
    assert record.supervisor is not None
    return record.supervisor.pid


def holds(short: str, runner: SupervisedRunner, config: int) -> bool:
    """Whether exactly the processes of this configuration run, and the runner says so."""
    names = set(PLACES[config][1])
    known = runner.spec(J1, 1)
    told = set(runner.running().get((J1, 1), {})) == names and not runner.leaving(J1, 1)
    return told and known is not None and known.config == config and living(short).keys() == names


async def arranged(short: str, runner: SupervisedRunner, config: int) -> None:
    """Ask for this configuration again and again, as the scheduler does, until it is there."""
    async with asyncio.timeout(30):
        while not holds(short, runner, config):
            await runner.start(place(short, config))
            await asyncio.sleep(0.01)


@pytest.fixture
def short() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="covey-", ignore_cleanup_errors=True) as directory:
        yield directory
        while pids := of_folder(directory):  # of a test that failed: a supervisor starts what is killed again
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


@pytest.mark.parametrize("killed", ["nobody", "agent", "supervisor", "both"])
async def test_the_processes_of_each_configuration_run_whoever_dies_before_it(short: str, killed: str) -> None:
    """Processes that stay are never started again; those that left are gone with all that they started."""
    life = agent(short)
    host, runner = await life.__aenter__()
    await runner.start(place(short, 0))
    await until(lambda: holds(short, runner, 0))
    first = runner.running()[J1, 1][0]
    for config in range(1, len(PLACES)):
        pid = await supervisor_of(host)
        if killed in ("agent", "both"):
            await life.__aexit__(None, None, None)
            life = agent(short)
            host, runner = await life.__aenter__()
        if killed in ("supervisor", "both"):
            os.kill(pid, signal.SIGKILL)
        await arranged(short, runner, config)
        assert runner.running()[J1, 1][0] == first
        numbers = {int(env.get("COVEY_INCARNATION", "0")) >> 16 for env in living(short).get(5, [])}
        assert numbers == ({PLACES[config][0]} if 5 in PLACES[config][1] else set())
    assert "COVEY_INCARNATION" not in living(short)[0][0]
    let_end(short)
    await until(lambda: host.told(RanksEnded))
    assert host.told(RanksEnded) == [RanksEnded(J1, 1, {0: 0, 5: 0}, "", False, 3)]
    assert not living(short) and not [fact for fact in host.told(RankEndedHere) if fact.code]
    runner.forget(J1, 1)
    await until(lambda: not runner.facts())
    await life.__aexit__(None, None, None)


async def test_a_supervisor_hears_of_a_change_when_it_is_reached_again(short: str) -> None:
    """The agent wrote the change down while its supervisor did not answer, and died; so did the next one."""
    async with agent(short) as (host, runner):
        await runner.start(place(short, 1))
        await until(lambda: holds(short, runner, 1))
        pid = await supervisor_of(host)
        os.kill(pid, signal.SIGSTOP)
    try:
        async with agent(short) as (_, runner):
            await runner.start(place(short, 2))
            assert runner.leaving(J1, 1) and not runner.running()
    finally:
        os.kill(pid, signal.SIGCONT)
    async with agent(short) as (host, runner):
        await until(lambda: holds(short, runner, 2))
        assert await supervisor_of(host) == pid
        (told,) = host.told(RanksStarted)
        assert told.pids.keys() == {0}, "those that left are not told as started"
        let_end(short)
        await until(lambda: host.told(RanksEnded))
        assert host.told(RanksEnded)[0].codes == {0: 0}


@pytest.mark.parametrize("until_it", ["joins", "has the state", "began long ago"])
async def test_a_process_that_joins_leaves_the_cores_to_its_siblings_at_first(
    short: str, until_it: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with agent(short) as (_, runner):
        await runner.start(place(short, 0))
        await until(lambda: holds(short, runner, 0))
        await runner.start(place(short, 1))
        await until(lambda: holds(short, runner, 1))
        pids = runner.running()[J1, 1]
        nice = {rank: os.getpriority(os.PRIO_PROCESS, pid) for rank, pid in pids.items()}
        assert nice[5] == nice[0] + 19 == nice[1] + 19
        if until_it == "joins":
            runner.joins(J1, 1, 5)
        elif until_it == "has the state":
            await runner.heals(J1, 1, 5, 7, pids[5])
        else:
            monkeypatch.setattr("agent.jobs.runner.HELD_S", 0.01)
            runner._told(RanksStarted(J1, 1, dict(pids)))
        await until(lambda: os.getpriority(os.PRIO_PROCESS, pids[5]) == nice[0])
        let_end(short)


class LettingGo:
    """A runner whose processes are let go by a port that only notes it, after `held_s`."""

    def __init__(self, runner: SupervisedRunner, monkeypatch: pytest.MonkeyPatch, held_s: float) -> None:
        self.pids: list[int] = []
        monkeypatch.setattr("agent.jobs.runner.HELD_S", held_s)
        monkeypatch.setattr(runner._env.processes, "let_go", self._noted)

    async def _noted(self, pid: int) -> bool:
        self.pids.append(pid)
        return True


async def test_a_successor_that_begins_held_back_is_let_go_by_time_too(
    short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with agent(short) as (host, runner):
        await runner.start(place(short, 0))
        await until(lambda: holds(short, runner, 0))
        await runner.start(place(short, 1))
        await until(lambda: holds(short, runner, 1))
        lets_go = LettingGo(runner, monkeypatch, 0.01)
        lost = runner.running()[J1, 1][5]
        os.kill(lost, signal.SIGKILL)
        await until(lambda: host.told(RankReplaced))
        await until(lambda: runner.running()[J1, 1][5] in lets_go.pids)
        assert lost not in lets_go.pids
        let_end(short)


async def test_a_process_that_is_gone_by_then_is_not_let_go(short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pid may be another process's by then."""
    async with agent(short) as (host, runner):
        await runner.start(place(short, 0))
        await until(lambda: holds(short, runner, 0))
        lets_go = LettingGo(runner, monkeypatch, 2.0)
        await runner.start(place(short, 1))
        await until(lambda: holds(short, runner, 1))
        lost = runner.running()[J1, 1][5]
        os.kill(lost, signal.SIGKILL)
        await until(lambda: host.told(RankReplaced))
        await until(lambda: runner.running()[J1, 1][5] in lets_go.pids)
        assert lost not in lets_go.pids
        let_end(short)


async def test_a_process_that_is_lost_has_the_state_no_more_until_its_successor_says_so(short: str) -> None:
    async with agent(short) as (host, runner):
        await runner.start(place(short, 0))
        await until(lambda: holds(short, runner, 0))
        for rank in (0, 1):
            await runner.heals(J1, 1, rank, 3, runner.running()[J1, 1][rank])
        await until(lambda: told_of_state(host)[-1:] == [(0, 1)])
        os.kill(runner.running()[J1, 1][1], signal.SIGKILL)
        await until(lambda: host.told(RankReplaced))
        await until(lambda: told_of_state(host)[-1] == (0,))
        await runner.heals(J1, 1, 1, 5, runner.running()[J1, 1][1])
        await until(lambda: told_of_state(host)[-1] == (0, 1))
        assert [have for have, _ in groupby(told_of_state(host))] == [(0,), (0, 1), (0,), (0, 1)]
        let_end(short)


async def test_a_process_that_is_lost_has_not_the_state_though_its_supervisor_is_silent(short: str) -> None:
    """Others end only while one that stays has it (`Runner.have_state`)."""
    async with agent(short) as (host, runner):
        assert runner.have_state(J1, 1) == ()
        await runner.start(place(short, 0))
        await until(lambda: holds(short, runner, 0))
        await runner.heals(J1, 1, 0, 3)
        assert runner.have_state(J1, 1) == (0,)
        await runner.heals(J1, 1, 1, 3)
        pid = await supervisor_of(host)
        os.kill(pid, signal.SIGSTOP)
        try:
            os.kill(runner.running()[J1, 1][1], signal.SIGKILL)
            await until(lambda: runner.have_state(J1, 1) == (0,))
            assert told_of_state(host)[-1] == (0, 1), "nobody has said yet that it is gone"
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: host.told(RankReplaced))
        assert runner.have_state(J1, 1) == (0,), "its successor is yet to get the state"
        await runner.stop(J1, 1, 0.0, "enough")
        assert runner.have_state(J1, 1) == ()
        await until(lambda: host.told(RanksEnded))


async def test_a_process_that_is_through_gives_nobody_the_state_any_more(short: str) -> None:
    """Else a job grows by processes that find nobody who gives it to them."""
    async with agent(short) as (host, runner):
        await runner.start(place(short, 0))
        await until(lambda: holds(short, runner, 0))
        for rank in (0, 1):
            await runner.heals(J1, 1, rank, 3)
        await runner.heals(J1, 1, 1, NEVER)
        assert told_of_state(host)[-1] == (0,)
        await until(lambda: runner._epochs[J1, 1].state.healing.get(1) == RankHealing(NEVER))
        assert told_of_state(host)[-1] == runner.have_state(J1, 1) == (0,)
        let_end(short)


def told_of_state(host: Here) -> list[tuple[int, ...]]:
    """Who has the state, each time that it was told."""
    return [told.have for told in host.told(RanksHeal)]


async def begun_and_left(short: str) -> int:
    """Let an agent start processes that say that they have the state, and leave; returns the pid of their supervisor,
    which is stopped."""
    async with agent(short) as (host, runner):
        await runner.start(place(short, 0))
        await until(lambda: holds(short, runner, 0))
        for rank in (0, 1):
            await runner.heals(J1, 1, rank, 3, runner.running()[J1, 1][rank])
        await until(lambda: host.told(RanksHeal) and host.told(RanksHeal)[-1].may_be_lost)
        assert told_of_state(host)[-1] == (0, 1)
        pid = await supervisor_of(host)
        os.kill(pid, signal.SIGSTOP)
        return pid


async def test_what_processes_say_before_their_supervisor_answers_is_not_forgotten(short: str) -> None:
    """They say it once per connection."""
    pid = await begun_and_left(short)
    try:
        async with agent(short) as (host, runner):
            for rank in (0, 1):
                await runner.heals(J1, 1, rank, 3)
            os.kill(pid, signal.SIGCONT)
            await until(lambda: host.told(RanksHeal))
            assert host.told(RanksHeal) == [RanksHeal(J1, 1, 0, True, (0, 1))]
            let_end(short)
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_who_is_gone_before_its_supervisor_answers_counts_no_more(short: str) -> None:
    """Its successor may be what the supervisor tells of."""
    pid = await begun_and_left(short)
    try:
        async with agent(short) as (_, runner):
            for rank in (0, 1):
                await runner.heals(J1, 1, rank, 3)
            runner.leaves(J1, 1, 1)
            os.kill(pid, signal.SIGCONT)
            await until(lambda: runner.running())
            await runner.heals(J1, 1, 1, 2)  # an older step: no word of who has the state
            runner.leaves(J1, 1, 0)  # it is known which process that was
            assert runner._epochs[J1, 1].said_to_have.keys() == {0}
            let_end(short)
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("they_come", [True, False])
async def test_a_new_agent_does_not_say_at_once_that_nobody_has_the_state(
    short: str, they_come: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log goes on with what the agent before said."""
    monkeypatch.setattr("agent.jobs.following.JOIN_AGAIN_S", 60.0 if they_come else 0.3)
    pid = await begun_and_left(short)
    os.kill(pid, signal.SIGCONT)
    async with agent(short) as (host, runner):
        await until(lambda: runner.running())
        await runner.heals(J1, 1, 0, 3)
        assert not host.told(RanksHeal)
        if they_come:
            await runner.heals(J1, 1, 1, 3)
        await until(lambda: host.told(RanksHeal))
        assert told_of_state(host) == [(0, 1) if they_come else (0,)]
        let_end(short)


async def test_a_process_that_joined_and_is_lost_has_a_successor_with_a_higher_number(short: str) -> None:
    async with agent(short) as (host, runner):
        carries: list[tuple[int, ...]] = []
        runner.on_carries = lambda job, epoch: carries.append(
            runner.spec(job, epoch).carried[0]  # type: ignore[union-attr]
        )
        await runner.start(place(short, 0))
        await until(lambda: holds(short, runner, 0))
        await runner.start(place(short, 1))
        await until(lambda: holds(short, runner, 1))
        os.kill(runner.running()[J1, 1][5], signal.SIGKILL)
        await until(lambda: host.told(RankReplaced))
        await until(lambda: {env["COVEY_INCARNATION"] for env in living(short)[5]} == {str((1 << 16) + 2)})
        assert len(host.told(RanksStarted)) == 2
        await runner.start(place(short, 2))
        await until(lambda: holds(short, runner, 2))
        assert carries == [(0, 9), (0, 10)]
        assert host.told(RanksStarted)[-1].pids.keys() == {0}, "told once nothing of the others runs"
        await runner.stop(J1, 1, 0.0, "enough")
        await until(lambda: host.told(RanksEnded))
        assert host.told(RanksEnded)[0].codes.keys() == {0}


async def test_what_others_carry_is_written_down_and_its_supervisor_is_not_asked(short: str) -> None:
    async with agent(short) as (host, runner):
        await runner.start(place(short, 3))
        await until(lambda: holds(short, runner, 3))
        os.kill(pid := await supervisor_of(host), signal.SIGSTOP)
        try:
            await runner.start(place(short, 4))
            assert holds(short, runner, 4)
        finally:
            os.kill(pid, signal.SIGCONT)
    async with agent(short) as (_, runner):
        await until(lambda: holds(short, runner, 4))
        await runner.start(place(short, 2))
        assert [rank.rank for rank in (await runner.kept())[0].ranks] == [0, 5], "an earlier configuration"
        await runner.stop(J1, 1, 0.0, "enough")
        await until(lambda: not living(short))


async def test_another_process_of_the_same_name_begins_once_the_one_before_has_ended(short: str) -> None:
    """This host's copy of the log was late: it saw neither the end of the one nor the beginning of the other."""
    async with agent(short) as (host, runner):
        await runner.start(place(short, 0))
        await until(lambda: holds(short, runner, 0))
        before = runner.running()[J1, 1]
        other = (RankSpec(0, 0, ()), RankSpec(1, 1, ("other",)))
        spec = msgspec.structs.replace(place(short, 3), ranks=other)
        await runner.start(spec)
        assert runner.spec(J1, 1) is not None and [rank.rank for rank in runner.spec(J1, 1).ranks] == [0]  # type: ignore[union-attr]
        await until(lambda: not runner.leaving(J1, 1) and living(short).keys() == {0})
        await runner.start(spec)
        await until(lambda: runner.running()[J1, 1].keys() == {0, 1})
        now = runner.running()[J1, 1]
        assert now[0] == before[0] and now[1] != before[1]
        assert {int(env["COVEY_INCARNATION"]) >> 16 for env in living(short)[1]} == {3}
        await runner.stop(J1, 1, 0.0, "enough")
        await until(lambda: host.told(RanksEnded))


async def test_one_that_is_alone_ends_when_another_process_has_its_name(short: str) -> None:
    async with agent(short) as (host, runner):
        await runner.start(place(short, 2))
        await until(lambda: holds(short, runner, 2))
        other = msgspec.structs.replace(place(short, 3), ranks=(RankSpec(0, 0, ("other",)),))
        await runner.start(other)
        await until(lambda: host.told(RanksEnded))
        assert (host.told(RanksEnded)[0].codes, living(short)) == ({0: -signal.SIGKILL}, {})
        assert "exchanged for another one" in host.told(RanksEnded)[0].reason
