"""The supervisor by itself, in the simulator: its socket, its disk, and what it does when either is gone. (With agents,
and with real processes, see test_runner.py.)"""

import asyncio
import functools
import inspect
import random
import signal
from collections.abc import Callable, Coroutine
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.jobs.supervision import (
    CANNOT_START,
    DISK_RETRY_S,
    EXTENSION_MAX_S,
    UNKNOWN,
    Extend,
    ForgetRanks,
    JoinRanks,
    RanksStatus,
    RankStart,
    StopRanks,
    SupervisorConfig,
    SupervisorState,
    decoder,
    joining_frames,
    read_state,
)
from agent.jobs.supervisor import supervisor
from agent.jobs.supervisor.supervisor import NOTICE_S
from chaos.world.host import SimHost
from chaos.world.world import World
from covey.core.ids import JobId
from covey.ports.env import Env
from covey.ports.processes import Command, ProcessId
from covey.ports.streams import ByteStream
from covey.wire.checked import seal
from covey.wire.frames import FrameError, pack, read_frame, unpack
from tests.families import examples

J1 = JobId("j1")


def config(host: SimHost, count: int = 2, program: str = "train") -> SupervisorConfig:
    return SupervisorConfig(
        job=J1,
        epoch=1,
        ranks=tuple(
            RankStart(rank, Command(argv=(program,), cwd="/", env={"RANK": str(rank)}, output="/log", run=f"/1.{rank}"))
            for rank in range(count)
        ),
        grace_s=5.0,
        state="jobs/j1/1.state",
        preempt="jobs/j1/1.preempt",
        socket=f"unix:{host.run_dir}/sup.sock",
    )


class Story:
    """One simulated host on which a test starts supervisors and talks to them."""

    def __init__(self, world: World, ranks_s: float = 600.0) -> None:
        self.world = world
        self.starts = 0
        self.asked: list[str] = []
        self.ranks_s = ranks_s
        world.programs = lambda: {"supervisor": supervisor.PROGRAM}
        world.user_programs["train"] = self._train
        world.user_programs["stubborn"] = self._stubborn
        self.host = world.add_host("h1")
        self.failed: list[str] = []

    async def _train(self, env: Env, command: Command) -> int:
        self.starts += 1
        await asyncio.sleep(self.ranks_s)
        return 7

    async def _stubborn(self, env: Env, command: Command) -> int:
        self.starts += 1
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                self.asked.append(command.env["RANK"])

    def play(self, talk: Callable[[Env, SupervisorConfig], Coroutine[Any, Any, None]], program: str = "train") -> None:
        """`talk` runs as the agent, after one supervisor was started."""
        done: list[bool] = []

        async def agent(env: Env) -> int:
            await env.processes.start_program("supervisor", "sup", config(self.host, program=program))
            await talk(env, config(self.host, program=program))
            done.append(True)
            return 0

        self.host.main = agent
        self.host.start_agent()
        assert self.world.run(2000, stop=lambda: bool(done))


def played(seed: int, program: str = "train", ranks_s: float = 600.0) -> Callable[..., Callable[..., None]]:
    """This test runs as the agent, after one supervisor was started, in the world of this seed."""

    def made(talk: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        @functools.wraps(talk)
        def test(**fixtures: Any) -> None:
            with World(seed) as world:
                story = Story(world, ranks_s)
                story.play(lambda env, told: talk(env, told, story, **fixtures), program)

        asked = inspect.signature(talk)
        test.__signature__ = asked.replace(parameters=list(asked.parameters.values())[3:])  # type: ignore[attr-defined]
        return cast(Callable[..., None], test)

    return made


async def meet(env: Env, told: SupervisorConfig) -> ByteStream:
    for _ in range(200):
        try:
            return await env.bytes.connect(told.socket)
        except ConnectionError:
            await asyncio.sleep(0.05)
    raise AssertionError("no supervisor answers")


async def status(stream: ByteStream, wanted: Callable[[SupervisorState], bool]) -> SupervisorState:
    while True:
        heard = await read_frame(stream, decoder)
        assert isinstance(heard, RanksStatus)
        if wanted(heard.state):
            return heard.state


def running(state: SupervisorState) -> bool:
    return len(state.pids) == 2


async def stored(env: Env, told: SupervisorConfig) -> SupervisorState | None:
    return read_state(await env.disk.read(told.state))


@played(3, ranks_s=1.0)
async def test_what_it_says_is_on_disk_first_and_it_ends_after_the_last_word(
    env: Env, told: SupervisorConfig, story: Story
) -> None:
    stream = await meet(env, told)
    while True:
        heard = await read_frame(stream, decoder)
        assert isinstance(heard, RanksStatus)
        on_disk = await stored(env, told)
        if heard.state.pids:
            assert on_disk is not None
            assert on_disk.pids.keys() >= heard.state.pids.keys()
            assert on_disk.codes.keys() >= heard.state.codes.keys()
        if heard.state.ended:
            break
    assert heard.state.codes == {0: 7, 1: 7}
    await asyncio.sleep(5)
    assert story.host.find("sup") == []
    with pytest.raises(ConnectionError):
        await env.bytes.connect(told.socket)


def test_who_connects_while_a_rank_is_being_written_down_hears_of_it_only_afterwards() -> None:
    early: list[int] = []

    async def talk(env: Env, told: SupervisorConfig) -> None:
        (await meet(env, told)).close()
        while len(early) < 40:
            stream = await env.bytes.connect(told.socket)
            heard = await read_frame(stream, decoder)
            assert isinstance(heard, RanksStatus)
            on_disk = await stored(env, told) or SupervisorState()
            assert on_disk.pids.keys() >= heard.state.pids.keys()
            assert not (heard.state.ended or heard.state.lost), "an agent would take them for ended"
            early.append(len(heard.state.pids))
            stream.close()
            if running(heard.state):
                break
            await asyncio.sleep(0.02)

    with World(5) as world:
        story = Story(world)
        story.host.disk.slow = 60.0
        story.play(talk)
        assert early[-1] == 2 and 0 in early and len(early) > 5


@played(4)
async def test_a_second_supervisor_leaves_the_first_one_alone(env: Env, told: SupervisorConfig, story: Story) -> None:
    await status(await meet(env, told), running)
    second = await env.processes.start_program("supervisor", "second", told)
    assert await second.wait() == 0
    assert await stored(env, told) is not None
    assert story.starts == 2
    assert len(story.host.find("train")) == 2


@played(5, ranks_s=1.0)
async def test_after_the_end_a_supervisor_started_again_does_nothing(
    env: Env, told: SupervisorConfig, story: Story
) -> None:
    await status(await meet(env, told), lambda state: state.ended)
    before = await env.disk.read(told.state)
    await asyncio.sleep(5)
    assert await (await env.processes.start_program("supervisor", "second", told)).wait() == 0
    assert await env.disk.read(told.state) == before
    assert story.starts == 2


@played(6, program="stubborn")
async def test_who_ignores_sigterm_is_killed_after_the_grace_and_another_stop_only_hurries(
    env: Env, told: SupervisorConfig, story: Story
) -> None:
    stream = await meet(env, told)
    await status(stream, running)
    began_s = env.clock.now_s()
    await stream.write(pack(StopRanks(60.0, "first")))
    await asyncio.sleep(1)
    assert sorted(story.asked) == ["0", "1"]
    assert await env.disk.read(told.preempt) == b"first"
    await stream.write(pack(StopRanks(2.0, "second")))
    await stream.write(pack(StopRanks(600.0, "third")))
    ended = await status(stream, lambda state: state.ended)
    assert 2.9 < env.clock.now_s() - began_s < 4.0
    assert (sorted(ended.codes.items()), ended.reason) == ([(0, -9), (1, -9)], "first")


@pytest.mark.parametrize(
    ("grace_s", "frames", "killed_s"),
    [
        (5.0, [Extend(20.0)], 25.0),
        (5.0, [Extend(20.0), Extend(20.0)], 25.0),
        (5.0, [Extend(1e9)], 5.0 + EXTENSION_MAX_S),
        (5.0, [Extend(float("nan")), Extend(-3.0)], 5.0),
        (5.0, [Extend(20.0), StopRanks(5.0, "said again after a restart of the agent")], 25.0),
        (5.0, [Extend(20.0), StopRanks(2.0, "now in a hurry")], 3.0),
        (5.0, [StopRanks(5.0, "the lease is over", firm=True), Extend(20.0)], 5.0),
        (5.0, [Extend(20.0), StopRanks(5.0, "the lease is over", firm=True), Extend(20.0)], 6.0),
    ],
)
@played(20, program="stubborn")
async def test_ranks_get_more_time_once_within_bounds_and_only_as_long_as_nobody_is_firm(
    env: Env, told: SupervisorConfig, story: Story, grace_s: float, frames: list[StopRanks | Extend], killed_s: float
) -> None:
    stream = await meet(env, told)
    await status(stream, running)
    began_s = env.clock.now_s()
    await stream.write(pack(Extend(500.0)))  # before anybody was asked to stop: nothing
    await stream.write(pack(StopRanks(grace_s, "first")))
    await asyncio.sleep(1)
    for frame in frames:
        await stream.write(pack(frame))
    ended = await status(stream, lambda state: state.ended)
    assert killed_s <= env.clock.now_s() - began_s < killed_s + 0.5
    assert ended.reason == "first"


def test_the_notice_is_there_before_any_signal_and_a_hanging_disk_delays_no_signal() -> None:
    seen: list[tuple[bool, bool]] = []

    async def careful(env: Env, command: Command) -> int:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            on_disk = await stored(env, config(story.host))
            seen.append((await env.disk.read("jobs/j1/1.preempt") == b"why", bool(on_disk and on_disk.ending)))
        return 0

    async def talk(env: Env, told: SupervisorConfig) -> None:
        stream = await meet(env, told)
        await status(stream, running)
        if slow:
            story.host.disk.slow = 1e6
        began_s = env.clock.now_s()
        await stream.write(pack(StopRanks(60.0, "why")))
        if slow:
            await asyncio.sleep(2 * NOTICE_S)
            assert sorted(story.asked) == ["0", "1"]
            story.host.disk.slow = 1.0
            return
        await status(stream, lambda state: state.ended)
        assert env.clock.now_s() - began_s < 1.0
        assert seen == [(True, True)] * 2

    for slow in (False, True):
        with World(21) as world:
            story = Story(world)
            world.user_programs["careful"] = careful
            story.play(talk, program="stubborn" if slow else "careful")


def test_a_stop_that_comes_before_the_ranks_do_is_obeyed() -> None:
    async def talk(env: Env, told: SupervisorConfig) -> None:
        stream = await meet(env, told)
        await stream.write(pack(StopRanks(0.0, "too late")))
        ended = await status(stream, lambda state: state.ended)
        assert set(ended.codes) == {0, 1}
        assert all(code < 0 for code in ended.codes.values())
        assert story.host.find("train") == []

    for seed in range(10):
        with World(seed) as world:
            story = Story(world)
            story.play(talk)


@played(17)
async def test_a_stop_between_two_ranks_starts_no_further_one(env: Env, told: SupervisorConfig, story: Story) -> None:
    told = ranked(told, *(command("train", RANK=str(rank)) for rank in range(30)))
    await env.processes.start_program("supervisor", "many", told)
    stream = await meet(env, told)
    await status(stream, lambda state: bool(state.pids))
    await stream.write(pack(StopRanks(60.0, "changed my mind")))
    ended = await status(stream, lambda state: state.ended)
    assert 1 <= len(ended.pids) < 30 and story.starts <= len(ended.pids) + 2, "the two of another supervisor"
    assert ended.codes == dict.fromkeys(range(30), -signal.SIGTERM)
    assert ended.reason == "changed my mind"


@pytest.mark.parametrize("twice", [False, True])
@played(18, program="stubborn")
async def test_a_supervisor_told_to_end_gives_its_ranks_their_grace_unless_told_twice(
    env: Env, told: SupervisorConfig, story: Story, twice: bool
) -> None:
    stream = await meet(env, told)
    await status(stream, running)
    (process,) = story.host.find("sup")
    began_s = env.clock.now_s()
    process.signal(signal.SIGTERM)
    await asyncio.sleep(told.grace_s - 1)
    assert sorted(story.asked) == ["0", "1"] and len(story.host.find("stubborn")) == 2
    if twice:
        process.signal(signal.SIGTERM)
    ended = await status(stream, lambda state: state.ended)
    passed_s = env.clock.now_s() - began_s
    assert passed_s < told.grace_s - 0.5 if twice else told.grace_s <= passed_s < told.grace_s + 1
    assert ended.codes == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    assert ended.reason == "their supervisor was told to end"


@played(19)
async def test_siblings_of_a_rank_that_was_killed_are_stopped_and_told_by_what(
    env: Env, told: SupervisorConfig, story: Story
) -> None:
    stream = await meet(env, told)
    state = await status(stream, running)
    began_s = env.clock.now_s()
    story.host.processes[state.pids[1].pid].signal(signal.SIGKILL)
    ended = await status(stream, lambda state: state.ended)
    assert supervisor.SIBLINGS_S <= env.clock.now_s() - began_s < supervisor.SIBLINGS_S + 1
    assert list(ended.codes.items()) == [(1, -signal.SIGKILL), (0, -signal.SIGTERM)], "in the order they ended"
    assert ended.reason == "rank 1 was killed by signal 9; the job's other ranks on this host were stopped"


@played(8, ranks_s=3.0)
async def test_a_sick_disk_loses_no_code_while_the_supervisor_lives(
    env: Env, told: SupervisorConfig, story: Story
) -> None:
    stream = await meet(env, told)
    await status(stream, running)
    story.host.disk.sick = 1.0
    assert (await status(stream, lambda state: state.ended)).codes == {0: 7, 1: 7}
    stream.close()
    await asyncio.sleep(3 * DISK_RETRY_S)
    late = await meet(env, told)
    assert (await status(late, lambda state: state.ended)).codes == {0: 7, 1: 7}
    story.host.disk.sick = 0.0
    await asyncio.sleep(3 * DISK_RETRY_S)
    assert story.host.find("sup") == []
    on_disk = await stored(env, told)
    assert on_disk is not None
    assert (on_disk.ended, on_disk.codes) == (True, {0: 7, 1: 7})


@played(9, ranks_s=1.0)
async def test_a_sick_disk_may_be_forgotten(env: Env, told: SupervisorConfig, story: Story) -> None:
    stream = await meet(env, told)
    await status(stream, running)
    story.host.disk.sick = 1.0
    await status(stream, lambda state: state.ended)
    await stream.write(pack(ForgetRanks()))
    await asyncio.sleep(3 * DISK_RETRY_S)
    assert story.host.find("sup") == []


def test_a_disk_that_is_sick_for_a_moment_delays_the_start_and_no_more() -> None:
    async def talk(env: Env, told: SupervisorConfig) -> None:
        stream = await meet(env, told)
        await asyncio.sleep(1.5 * DISK_RETRY_S)
        assert story.starts == 0
        story.host.disk.sick = 0.0
        assert running(await status(stream, running)) and story.starts == 2

    with World(15) as world:
        story = Story(world)
        story.host.disk.sick = 1.0
        story.play(talk)


def test_ranks_of_a_dead_supervisor_do_not_run_on_where_its_record_cannot_be_read() -> None:
    async def talk(env: Env, told: SupervisorConfig) -> None:
        told = ranked(told, command("train", **MARKED))
        await env.processes.start(command("left", **MARKED))
        story.host.disk.sick = 1.0
        await env.processes.start_program("supervisor", "second", told)
        ended = await status(await meet(env, told), lambda state: state.ended)
        assert ended.codes == {0: CANNOT_START} and "cannot be read" in ended.reason
        assert story.host.find("left") == []

    with World(16) as world:
        story = Story(world)
        world.user_programs["left"] = story._train
        story.play(talk)


@pytest.mark.parametrize("fails", ["read", "written"])
def test_nothing_starts_on_a_disk_that_cannot_hold_the_record(fails: str) -> None:
    async def talk(env: Env, told: SupervisorConfig) -> None:
        stream = await meet(env, told)
        ended = await status(stream, lambda state: state.ended)
        assert ended.codes == {0: CANNOT_START, 1: CANNOT_START}
        assert f"state directory cannot be {fails}" in ended.reason
        story.host.disk.sick, story.host.disk.capacity_bytes = 0.0, 1 << 40
        await asyncio.sleep(3 * DISK_RETRY_S)
        assert story.starts == 0, "what was said to have ended does not begin when the disk is well again"
        assert story.host.find("sup") == []

    with World(10) as world:
        story = Story(world)
        story.host.disk.sick = 1.0 if fails == "read" else 0.0
        story.host.disk.capacity_bytes = 0 if fails == "written" else 1 << 40
        story.play(talk)


def killed(story: Story, name: str = "sup") -> None:
    for process in story.host.find(name):
        process.signal(signal.SIGKILL)


@played(11, ranks_s=30.0)
async def test_ranks_run_on_under_the_next_supervisor_which_knows_how_they_end(
    env: Env, told: SupervisorConfig, story: Story
) -> None:
    began = await status(await meet(env, told), running)
    for _ in range(3):
        killed(story)
        await asyncio.sleep(env.rng.uniform(0.0, 5.0))
        await env.processes.start_program("supervisor", "sup", told)
        again = await meet(env, told)
        assert (await status(again, running)).pids == began.pids
    ended = await status(again, lambda state: state.ended)
    assert (ended.codes, ended.reason, ended.lost) == ({0: 7, 1: 7}, "", False)
    assert story.starts == 2


@played(11)
async def test_what_ended_under_no_supervisor_is_known_and_its_siblings_are_stopped(
    env: Env, told: SupervisorConfig, story: Story
) -> None:
    state = await status(await meet(env, told), running)
    killed(story)
    story.host.processes[state.pids[1].pid].signal(signal.SIGKILL)
    await asyncio.sleep(1)
    await env.processes.start_program("supervisor", "sup", told)
    ended = await status(await meet(env, told), lambda state: state.ended)
    assert ended.codes == {1: -signal.SIGKILL, 0: -signal.SIGTERM} and not ended.lost
    assert ended.reason == "rank 1 was killed by signal 9; the job's other ranks on this host were stopped"
    assert story.starts == 2


@played(11)
async def test_siblings_of_a_rank_that_failed_before_its_supervisor_died_are_stopped(
    env: Env, told: SupervisorConfig, story: Story
) -> None:
    stream = await meet(env, told)
    state = await status(stream, running)
    story.host.processes[state.pids[1].pid].signal(signal.SIGKILL)
    await status(stream, lambda state: 1 in state.codes)
    killed(story)
    await env.processes.start_program("supervisor", "sup", told)
    ended = await status(await meet(env, told), lambda state: state.ended)
    assert list(ended.codes.items()) == [(1, -signal.SIGKILL), (0, -signal.SIGTERM)]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_rank_that_ended_with_0_never_runs_again_even_with_a_damaged_state_file(damaged: bool) -> None:
    async def quick(_env: Env, _command: Command) -> int:
        story.starts += 1
        return 0

    async def talk(env: Env, told: SupervisorConfig) -> None:
        await meet(env, told)
        await asyncio.sleep(1)
        killed(story)
        assert story.host.find("sup") == []
        await env.disk.replace(told.state, b"rot" if damaged else msgspec.msgpack.encode(SupervisorState()))
        await env.processes.start_program("supervisor", "sup", told)
        ended = await status(await meet(env, told), lambda state: state.ended)
        assert (ended.codes, ended.lost, story.starts) == ({0: 0, 1: 0}, False, 2)

    with World(13) as world:
        story = Story(world)
        world.user_programs["quick"] = quick
        story.play(talk, program="quick")


@played(22, program="stubborn")
async def test_a_stop_goes_on_under_the_next_supervisor_and_nobody_is_asked_twice(
    env: Env, told: SupervisorConfig, story: Story
) -> None:
    stream = await meet(env, told)
    await status(stream, running)
    began_s = env.clock.now_s()
    await stream.write(pack(StopRanks(20.0, "preempted")))
    await status(stream, lambda state: state.signalled)
    killed(story)
    await env.processes.start_program("supervisor", "sup", told)
    ended = await status(await meet(env, told), lambda state: state.ended)
    assert 20.0 <= env.clock.now_s() - began_s < 21.0
    assert (ended.codes, ended.reason, ended.lost) == ({0: -9, 1: -9}, "preempted", False)
    assert sorted(story.asked) == ["0", "1"]


def test_after_a_restart_of_the_machine_nobody_knows_how_its_ranks_ended() -> None:
    async def talk(env: Env, told: SupervisorConfig) -> None:
        await status(await meet(env, told), running)

    async def afterwards(env: Env) -> int:
        told = config(story.host)
        await env.processes.start_program("supervisor", "sup", told)
        ended = await status(await meet(env, told), lambda state: state.ended)
        assert ended.codes == {0: UNKNOWN, 1: UNKNOWN} and ended.lost and "this machine was restarted" in ended.reason
        done.append(True)
        return 0

    done: list[bool] = []
    with World(23) as world:
        story = Story(world)
        story.play(talk)
        story.host.power_off()
        story.host.main = afterwards
        story.host.power_on()
        assert world.run(world.now + 60, stop=lambda: bool(done))
        assert story.starts == 2


def ranked(told: SupervisorConfig, *commands: Command) -> SupervisorConfig:
    """The configuration with these commands instead."""
    starts = tuple(
        RankStart(rank, msgspec.structs.replace(command, run=f"/2.{rank}")) for rank, command in enumerate(commands)
    )
    return msgspec.structs.replace(told, ranks=starts, socket=f"{told.socket}2", state="jobs/j1/2.state")


def command(program: str, **env: str) -> Command:
    return Command(argv=(program,), cwd="/", env=env, output="/log")


@played(12)
async def test_a_rank_that_cannot_start_keeps_the_others_from_running_alone(
    env: Env, told: SupervisorConfig, story: Story
) -> None:
    told = ranked(told, command("train", RANK="0"), command("missing"), command("train", RANK="2"))
    await env.processes.start_program("supervisor", "broken", told)
    ended = await status(await meet(env, told), lambda state: state.ended)
    assert ended.codes == {0: -signal.SIGKILL, 1: CANNOT_START, 2: CANNOT_START}
    assert ended.reason.startswith("rank 1 cannot start: ")


def test_what_ended_before_its_siblings_is_said_at_once_and_outlives_the_supervisor() -> None:
    async def quick(_env: Env, _command: Command) -> int:
        return 0

    async def talk(env: Env, told: SupervisorConfig) -> None:
        told = ranked(told, command("quick", RANK="0"), command("train", RANK="1"))
        await env.processes.start_program("supervisor", "mixed", told)
        early = await status(await meet(env, told), lambda state: 0 in state.codes)
        assert early.codes == {0: 0} and not early.ended
        killed(story, "mixed")
        await env.processes.start_program("supervisor", "mixed", told)
        ended = await status(await meet(env, told), lambda state: state.ended)
        assert ended.codes == {0: 0, 1: 7} and not ended.lost

    with World(13) as world:
        story = Story(world, ranks_s=5.0)
        world.user_programs["quick"] = quick
        story.play(talk)


MARKED = {"COVEY_JOB_ID": "j1", "COVEY_EPOCH": "1", "COVEY_TOKEN": "t"}


@pytest.mark.parametrize("marks", [MARKED, {"COVEY_JOB_ID": "j1"}, {}], ids=["marked", "half", "none"])
def test_taking_over_ends_a_rank_that_nobody_wrote_down_and_nothing_else(marks: dict[str, str]) -> None:
    """The supervisor was killed between the start of a rank and writing its number down."""

    async def talk(env: Env, told: SupervisorConfig) -> None:
        told = ranked(told, command("train", **marks))
        for others in (MARKED | {"COVEY_TOKEN": "u"}, MARKED | {"COVEY_EPOCH": "2"}, {"COVEY_JOB_ID": "j1"}, {}):
            await env.processes.start(command("sleeper", **others))
        unknown = await env.processes.start(command("sleeper", **MARKED))
        await env.disk.replace(told.state, msgspec.msgpack.encode(SupervisorState()))
        await env.processes.start_program("supervisor", "second", told)
        ended = await status(await meet(env, told), lambda state: state.ended)
        assert ended.codes == {0: UNKNOWN} and ended.lost
        assert len(story.host.find("sleeper")) == (4 if marks == MARKED else 5)
        assert (env.processes.find(unknown.id) is None) == (marks == MARKED)

    with World(14) as world:
        story = Story(world)
        world.user_programs["sleeper"] = story._train
        story.play(talk)


@pytest.mark.parametrize("seed", range(10))
def test_garbage_on_the_control_socket_harms_nothing(seed: int) -> None:
    async def talk(env: Env, told: SupervisorConfig) -> None:
        rng = random.Random(seed)
        for _ in range(20):
            hostile = await meet(env, told)
            good = pack(RanksStatus(J1, 1, SupervisorState())) if rng.random() < 0.3 else pack(ForgetRanks())
            await hostile.write(
                rng.choice([rng.randbytes(rng.randint(1, 60)), good[: rng.randint(1, len(good))], good])
            )
            hostile.close()
        stream = await meet(env, told)
        await status(stream, running)
        assert len(story.host.find("train")) == 2

    with World(seed) as world:
        story = Story(world)
        story.play(talk)


@given(st.one_of(st.binary(max_size=100), st.integers(0, 1 << 30)))
@settings(max_examples=examples(200))
def test_a_damaged_state_file_or_frame_is_never_a_crash(attack: bytes | int) -> None:
    if isinstance(attack, int):
        rng = random.Random(attack)
        good = bytearray(seal(SupervisorState(pids={0: ProcessId(5, 6)}, codes={0: 3}, reason="r")))
        for _ in range(rng.randint(1, 3)):
            good[rng.randrange(len(good))] = rng.randrange(256)
        attack = bytes(good[: rng.randint(0, len(good))]) if rng.random() < 0.3 else bytes(good)
    state = read_state(attack)
    assert state is None or isinstance(state, SupervisorState)
    try:
        frame = unpack(attack, decoder)
    except FrameError:
        return
    assert isinstance(frame, RanksStatus | StopRanks | Extend | ForgetRanks)


@pytest.mark.parametrize(("ranks", "frames"), [(1, 1), (8, 1), (64, 7), (0, 1)])
def test_ranks_that_join_come_in_as_many_frames_as_they_need(ranks: int, frames: int) -> None:
    """64 ranks with an environment of 100 KB each are six times what a frame holds."""
    env = {"MODULES": "x" * 100_000}
    starts = [RankStart(n, Command(argv=("train",), cwd="/", env=env, output="/log")) for n in range(ranks)]
    made = joining_frames(starts)
    heard = [unpack(frame[4:], decoder) for frame in made]
    assert [rank for frame in heard if isinstance(frame, JoinRanks) for rank in frame.ranks] == starts
    assert len(made) == frames
