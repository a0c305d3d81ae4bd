"""A rank that is lost is started again alone: by its supervisor in the simulator, and as real processes."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from agent.jobs.successors import LOSSES_IN_A_STEP_MAX, NEVER, after_loss, command_of, healing_said, may_be_lost
from agent.jobs.supervision import (
    CANNOT_START,
    EndStuck,
    HealRank,
    JoinRanks,
    KeepStacks,
    RankHealing,
    RanksStatus,
    RankStart,
    Renewed,
    StopRanks,
    SupervisorConfig,
    SupervisorState,
    decoder,
    read_state,
)
from agent.jobs.supervisor import supervisor
from chaos.world.host import SimHost
from chaos.world.world import World
from covey.core.ids import JobId
from covey.ports.env import Env
from covey.ports.processes import Command
from covey.ports.streams import ByteStream
from covey.wire.frames import pack, read_frame
from plugins.base import RankLease
from plugins.facts import RankReplaced, RanksEnded
from tests.agent.here import here, ranks, until

J1 = JobId("j1")
START = RankStart(1, Command(argv=("train",), cwd="/", env={"RANK": "1"}, output="/log", run="/1.1"))


# ---- when, and as what ----


def test_each_process_of_a_rank_has_its_number_and_files_of_its_own() -> None:
    assert command_of(START, 0) == START.command
    then = command_of(START, 2)
    assert (then.env, then.run) == ({"RANK": "1", "COVEY_INCARNATION": "2"}, "/1.1.2")


@pytest.mark.parametrize("elastic", [True, False])
def test_a_successor_for_which_others_wait_is_not_held_back(elastic: bool) -> None:
    env = {"COVEY_ELASTIC": "1"} if elastic else {}
    start = RankStart(1, msgspec.structs.replace(START.command, env=env, held_back=True))
    assert command_of(start, 1, had_state=True).held_back is not elastic
    assert command_of(start, 1).held_back


def test_who_did_not_say_that_it_may_be_lost_has_no_successor() -> None:
    assert after_loss(None, -9) is None


@pytest.mark.parametrize("code", [0, 70, 75, None])
def test_who_is_done_asks_to_run_again_or_ended_unseen_has_none(code: int | None) -> None:
    assert after_loss(RankHealing(3), code) is None


def test_one_that_is_lost_again_and_again_in_one_step_has_none_in_the_end() -> None:
    healing, successors = RankHealing(7), 0
    while (then := after_loss(healing, -9)) is not None:
        healing, successors = healing_said(then, 7), successors + 1
    assert successors == LOSSES_IN_A_STEP_MAX == healing.incarnation


def test_what_came_here_may_be_lost_again_with_its_host_once_it_has_had_the_state() -> None:
    """It has a successor before that, too; but ranks that have the state must not all move away meanwhile."""
    came = RankHealing(0, has_had_state=False)
    lost = after_loss(came, -9)
    assert lost == RankHealing(0, 1, 1, has_had_state=False)
    for healing in (came, lost):
        assert not may_be_lost([1], SupervisorState(healing={1: healing}))
        assert may_be_lost([1], SupervisorState(healing={1: healing_said(healing, 0)}))


def test_one_that_gets_on_is_started_again_for_ever() -> None:
    healing = RankHealing(0)
    for step in range(1, 100):
        then = after_loss(healing, -9)
        assert then is not None and then.incarnation == step
        healing = healing_said(then, step)
    assert healing == RankHealing(99, 0, 99)


# ---- a supervisor, in the simulator ----


class Ranks:
    """Two ranks on one simulated host; `ends`: what each process of rank 1 does, in turn."""

    def __init__(self, world: World, ends: list[tuple[float, int]]) -> None:
        self.ends, self.started = ends, dict[str, list[str]]()
        world.programs = lambda: {"supervisor": supervisor.PROGRAM}
        world.user_programs["train"] = self._train
        self.host: SimHost = world.add_host("h1")
        self.world = world

    async def _train(self, env: Env, command: Command) -> int:
        rank = command.env["RANK"]
        self.started.setdefault(rank, []).append(command.env.get("COVEY_INCARNATION", "0"))
        after_s, code = self.ends[len(self.started["1"]) - 1] if rank == "1" else (60.0, 0)
        await asyncio.sleep(after_s)
        return code

    def config(self) -> SupervisorConfig:
        starts = tuple(
            RankStart(rank, Command(argv=("train",), cwd="/", env={"RANK": str(rank)}, output="/log", run=f"/1.{rank}"))
            for rank in range(2)
        )
        return SupervisorConfig(
            job=J1,
            epoch=1,
            ranks=starts,
            grace_s=5.0,
            state="jobs/j1/1.state",
            preempt="jobs/j1/1.preempt",
            socket=f"unix:{self.host.run_dir}/sup.sock",
        )

    def play(self, story: Any) -> None:
        done: list[bool] = []

        async def agent(env: Env) -> int:
            await env.processes.start_program("supervisor", "sup", self.config())
            await story(env, self)
            done.append(True)
            return 0

        self.host.main = agent
        self.host.start_agent()
        assert self.world.run(2000, stop=lambda: bool(done))


async def meet(env: Env, told: SupervisorConfig) -> ByteStream:
    for _ in range(200):
        try:
            return await env.bytes.connect(told.socket)
        except ConnectionError:
            await asyncio.sleep(0.05)
    raise AssertionError("no supervisor answers")


async def last_word(stream: ByteStream) -> SupervisorState:
    while True:
        heard = await read_frame(stream, decoder)
        assert isinstance(heard, RanksStatus)
        if heard.state.ended:
            return heard.state


def play(ends: list[tuple[float, int]], story: Any, seed: int = 1) -> Ranks:
    with World(seed) as world:
        played = Ranks(world, ends)
        played.play(story)
        return played


def healed(step: int = 0) -> Any:
    """Let the agent say that rank 1 may be lost, and hear the end."""

    async def story(env: Env, played: Ranks) -> None:
        stream = await meet(env, played.config())
        await stream.write(pack(HealRank(1, step)))
        played.last = await last_word(stream)  # type: ignore[attr-defined]

    return story


def test_a_rank_that_is_lost_is_started_again_alone_and_its_sibling_goes_on() -> None:
    played = play([(1.0, -9), (2.0, 1), (3.0, 0)], healed())
    assert played.started == {"0": ["0"], "1": ["0", "1", "2"]}
    last: SupervisorState = played.last  # type: ignore[attr-defined]
    assert (dict(last.codes), last.reason, last.lost) == ({0: 0, 1: 0}, "", False)
    assert last.healing == {1: RankHealing(0, 2, 2)}


class Come(Ranks):
    """Two ranks that take over from processes on another host."""

    def config(self) -> SupervisorConfig:
        told = super().config()
        env = {"COVEY_INCARNATION": "65536"}
        commands = [msgspec.structs.replace(each.command, env=each.command.env | env) for each in told.ranks]
        return msgspec.structs.replace(told, ranks=tuple(map(RankStart, range(2), commands)))


def test_one_that_took_over_elsewhere_and_is_lost_at_once_has_a_successor() -> None:
    async def story(env: Env, played: Ranks) -> None:
        last = await last_word(await meet(env, played.config()))
        assert dict(last.codes) == {0: 0, 1: 0}

    with World(1) as world:
        played = Come(world, [(1.0, -9), (2.0, -9), (3.0, 0)])
        played.play(story)
    assert played.started == {"0": ["65536"], "1": ["65536", "65537", "65538"]}


def test_a_rank_that_wants_its_job_to_run_again_takes_its_sibling_along() -> None:
    played = play([(1.0, -9), (1.0, 75)], healed())
    last: SupervisorState = played.last  # type: ignore[attr-defined]
    assert last.codes[1] == 75 and last.codes[0] == -15


def test_a_rank_that_is_lost_too_often_in_one_step_ends_as_others_do() -> None:
    played = play([(1.0, -9)] * 20, healed())
    last: SupervisorState = played.last  # type: ignore[attr-defined]
    assert len(played.started["1"]) == 1 + LOSSES_IN_A_STEP_MAX
    assert (last.codes[1], last.codes[0]) == (-9, -15)


def test_a_rank_that_is_lost_while_it_is_asked_to_end_is_not_started_again() -> None:
    async def story(env: Env, played: Ranks) -> None:
        stream = await meet(env, played.config())
        await stream.write(pack(HealRank(1, 0)))
        await asyncio.sleep(0.5)
        await stream.write(pack(StopRanks(30.0, "cancelled")))
        await last_word(stream)

    assert play([(1.0, -9)], story).started["1"] == ["0"]


class PartOfAGang(Ranks):
    """Two ranks of three; the third is on another host."""

    def config(self) -> SupervisorConfig:
        told = super().config()
        commands = [
            msgspec.structs.replace(each.command, env=each.command.env | {"WORLD_SIZE": "3"}) for each in told.ranks
        ]
        return msgspec.structs.replace(told, ranks=tuple(map(RankStart, range(2), commands)))


@pytest.mark.parametrize(
    ("gang", "runs_s", "has_state", "code"),
    [
        (PartOfAGang, 2.0, False, 75),
        (PartOfAGang, 2.0, True, -15),
        (PartOfAGang, 60.0, False, -15),
        (Ranks, 2.0, False, -15),
    ],
)
def test_a_stop_does_not_end_a_successor_without_state_for_which_others_wait(
    gang: type[Ranks], runs_s: float, has_state: bool, code: int
) -> None:
    """It gets SIGTERM once it has the state, once no other process of the job runs, and late in the grace of 5 s."""

    async def story(env: Env, played: Ranks) -> None:
        stream = await meet(env, played.config())
        await stream.write(pack(HealRank(1, 0)))
        await asyncio.sleep(1.5)
        await stream.write(pack(StopRanks(5.0, "preempted")))
        await asyncio.sleep(0.3)
        if has_state:
            await stream.write(pack(HealRank(1, 0)))
        last = await last_word(stream)
        assert dict(last.codes) == {0: -15, 1: code}

    with World(1) as world:
        gang(world, [(1.0, -9), (runs_s, 75)]).play(story)


def stuck(rank: int, after: int = 0) -> Any:
    """Let the agent say after a second that the others wait for a rank in vain; `after`: the pid is of another process
    by then."""

    async def story(env: Env, played: Ranks) -> None:
        stream = await meet(env, played.config())
        await stream.write(pack(HealRank(1, 0)))
        await asyncio.sleep(1.0)
        state: SupervisorState = read_state(await env.disk.read("jobs/j1/1.state")) or SupervisorState()
        await stream.write(pack(KeepStacks()))
        await stream.write(pack(EndStuck(rank, state.pids[rank].pid + after, "the others waited 10 min for it")))
        played.last = await last_word(stream)  # type: ignore[attr-defined]

    return story


def test_a_rank_that_is_stuck_is_ended_and_has_a_successor() -> None:
    played = play([(1000.0, 0), (1.0, 0)], stuck(1))
    last: SupervisorState = played.last  # type: ignore[attr-defined]
    assert played.started["1"] == ["0", "1"] and (last.codes[1], last.reason) == (0, "")


def test_one_that_has_none_takes_the_job_along_and_says_why() -> None:
    last: SupervisorState = play([(5.0, 0)], stuck(0)).last  # type: ignore[attr-defined]
    assert (last.codes[0], last.reason) == (
        -9,
        "the others waited 10 min for it; the job's other ranks on this host were stopped",
    )


def test_a_successor_is_not_ended_for_the_process_before_it() -> None:
    played = play([(5.0, 0)], stuck(1, after=1000))
    assert played.started["1"] == ["0"]


def test_a_supervisor_that_takes_over_finds_the_successor_and_starts_the_next_one() -> None:
    async def story(env: Env, played: Ranks) -> None:
        stream = await meet(env, played.config())
        await stream.write(pack(HealRank(1, 0)))
        await asyncio.sleep(3.0)
        assert len(played.started["1"]) == 2
        for process in played.host.find("sup"):
            process.end(-9)
        await asyncio.sleep(0.5)
        await env.processes.start_program("supervisor", "again", played.config())
        last = await last_word(await meet(env, played.config()))
        assert (dict(last.codes), last.lost) == ({0: 0, 1: 0}, False)

    assert play([(1.0, -9), (8.0, -9), (1.0, 0)], story).started == {"0": ["0"], "1": ["0", "1", "2"]}


@pytest.mark.parametrize("kill_s", [0.0, 0.02, 0.05, 0.1, 0.2, 0.5])
def test_a_supervisor_that_dies_beside_a_successor_gives_its_number_to_no_other(kill_s: float) -> None:
    async def story(env: Env, played: Ranks) -> None:
        stream = await meet(env, played.config())
        await stream.write(pack(HealRank(1, 0)))
        await asyncio.sleep(0.9 + kill_s)
        for process in played.host.find("sup"):
            process.end(-9)
        await asyncio.sleep(0.5)
        await env.processes.start_program("supervisor", "again", played.config())
        last = await last_word(await meet(env, played.config()))
        assert (last.codes[1], last.lost) == (0, False)

    numbers = play([(1.0, -9), *[(2.0, 0)] * 5], story, seed=int(1 + 100 * kill_s)).started["1"]
    assert len(numbers) == len(set(numbers)), "no two processes of a rank have one number"


# ---- ranks that come from another host, in the simulator ----


def joiner(rank: int) -> RankStart:
    env = {"RANK": str(rank), "COVEY_INCARNATION": "65536"}
    return RankStart(rank, Command(argv=("train",), cwd="/", env=env, output="/log", run=f"/1.{rank}"))


def joins(after_s: float, *then: Any) -> Any:
    """Let the agent say, twice, that rank 2 comes here too; then the rest, and it hears the end."""

    async def story(env: Env, played: Ranks) -> None:
        stream = await meet(env, played.config())
        await asyncio.sleep(after_s)
        for frame in (JoinRanks((joiner(2),)), JoinRanks((joiner(2),)), *then):
            await stream.write(pack(frame))
        played.last = await last_word(stream)  # type: ignore[attr-defined]

    return story


def test_a_rank_that_joins_others_runs_once_and_all_are_waited_for() -> None:
    played = play([(1.0, 0)], joins(30.0))
    last: SupervisorState = played.last  # type: ignore[attr-defined]
    assert played.started == {"0": ["0"], "1": ["0"], "2": ["65537"]}
    assert (dict(last.codes), last.lost, played.world.now > 89.0) == ({1: 0, 0: 0, 2: 0}, False, True)


def test_a_rank_that_joins_before_the_first_ones_run_is_not_forgotten() -> None:
    played = play([(1.0, 0)], joins(0.0))
    assert sorted(played.last.codes.items()) == [(0, 0), (1, 0), (2, 0)]  # type: ignore[attr-defined]


def test_a_rank_that_joins_ranks_that_are_asked_to_end_does_not_start() -> None:
    async def story(env: Env, played: Ranks) -> None:
        stream = await meet(env, played.config())
        await asyncio.sleep(1.0)
        await stream.write(pack(StopRanks(5.0, "cancelled")))
        await stream.write(pack(JoinRanks((joiner(2),))))
        last = await last_word(stream)
        assert (last.codes[2], last.reason, last.lost) == (CANNOT_START, "cancelled", False)

    assert "2" not in play([(60.0, 0)], story).started


@pytest.mark.parametrize("kill_s", [0.0, 0.01, 0.03, 0.1, 2.0])
def test_a_rank_that_joins_runs_once_whenever_the_supervisor_dies(kill_s: float) -> None:
    """The record has the rank by then (`agent.jobs.following`), and so has the next supervisor."""

    async def story(env: Env, played: Ranks) -> None:
        stream = await meet(env, played.config())
        await asyncio.sleep(1.0)
        await stream.write(pack(JoinRanks((joiner(2),))))
        await asyncio.sleep(kill_s)
        for process in played.host.find("sup"):
            process.end(-9)
        await asyncio.sleep(0.5)
        told = played.config()
        told = msgspec.structs.replace(told, ranks=(*told.ranks, joiner(2)), joined=(2,))
        await env.processes.start_program("supervisor", "again", told)
        stream = await meet(env, told)
        await stream.write(pack(JoinRanks((joiner(2),))))
        last = await last_word(stream)
        assert ({**last.codes}, last.lost) == ({0: 0, 1: 0, 2: 0}, False)

    numbers = play([(30.0, 0)], story, seed=int(1 + 100 * kill_s)).started["2"]
    assert len(numbers) == len(set(numbers)) <= 2, "each process has a number of its own"


def test_none_is_started_by_a_supervisor_that_nobody_confirms() -> None:
    """After a power failure another host may run the rank by now."""

    async def story(env: Env, played: Ranks) -> None:
        stream = await meet(env, played.config())
        for rank in (0, 1):
            await stream.write(pack(HealRank(rank, 0)))
        await asyncio.sleep(0.5)
        for process in played.host.find("sup"):
            process.end(-9)
        await asyncio.sleep(1.0)
        unconfirmed = RankLease(env.clock.boot_s(), 100.0, 1.0, pause_s=0.0)
        again = msgspec.structs.replace(played.config(), lease=unconfirmed)
        await env.processes.start_program("supervisor", "again", again)
        stream = await meet(env, again)
        await asyncio.sleep(5.0)
        assert played.started["1"] == ["0"]
        await stream.write(pack(Renewed(RankLease(env.clock.boot_s(), 500.0, 1.0, pause_s=400.0))))
        played.last = await last_word(stream)  # type: ignore[attr-defined]

    played = play([(1.0, -9), (2.0, 0)], story)
    assert played.started["1"] == ["0", "1"]
    assert played.last.codes == {0: 0, 1: 0}  # type: ignore[attr-defined]


# ---- real processes ----


def on_this_host(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


def test_what_a_lost_process_left_running_is_gone_before_its_successor_starts() -> None:
    script = (
        'import os, subprocess, sys, time\n'
        'n = os.environ.get("COVEY_INCARNATION", "0")\n'
        'if n == "0":\n'
        '    subprocess.Popen(["sleep", "600"], start_new_session=True)\n'
        '    print("left", flush=True); time.sleep(600)\n'
        "left = 0\n"
        'for p in filter(str.isdigit, os.listdir("/proc")):\n'
        "    try:\n"
        '        mine = b"MARK=heal-rest" in open(f"/proc/{p}/environ", "rb").read()\n'
        '        left += mine and open(f"/proc/{p}/comm").read() == "sleep\\n"\n'
        "    except OSError: pass\n"
        'print("successor", n, left, flush=True)\n'
    )  # fmt: skip

    async def story() -> None:
        with tempfile.TemporaryDirectory(prefix="covey-", ignore_cleanup_errors=True) as short:
            async with here(short) as host:
                runner = host.runner()
                await runner.start(ranks("j1", sys.executable, "-c", script, MARK="heal-rest"))
                await until(lambda: runner.running() and os.path.getsize(runner.log_path(J1, 0)))
                await runner.heals(J1, 1, 0, 0)
                await asyncio.sleep(0.3)
                lost = runner.running()[J1, 1][0]
                os.kill(lost, signal.SIGKILL)
                await until(lambda: host.told(RanksEnded))
                assert host.told(RanksEnded) == [RanksEnded(J1, 1, {0: 0}, "")]
                (replaced,) = host.told(RankReplaced)
                assert (replaced.rank, replaced.incarnation) == (0, 1) and replaced.pid != lost
                said = (await runner.read_log(J1, 0, 0, 1 << 16)).data.decode()
                assert "successor 1 0" in said, said

    on_this_host(story())


def test_one_whose_script_is_through_is_not_started_again() -> None:
    """A process that is started again would ask the other ranks for their state, and they have ended."""
    assert after_loss(healing_said(RankHealing(7, 0, 2), NEVER), -9) is None
