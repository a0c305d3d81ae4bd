"""Processes of an elastic job come and go on a host whose others keep running: under a supervisor in the simulator, and
as real processes under a runner."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from agent.jobs.runner import SupervisedRunner
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
from covey.wire.frames import pack, read_frame
from plugins.base import RankLease, RankSpec, RanksSpec
from plugins.facts import RankEndedHere, RankReplaced, RanksEnded, RanksStarted
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
        await stream.write(pack(LEAVES))
        await said(stream, lambda state: state.changed == 1)
        assert running(played) == ["0"]
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
            await said(stream, lambda state, changed=changed: state.changed == changed)
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
    """Those that come are there before the others leave: a supervisor without ranks ends."""

    async def story(env: Env, played: Ranks) -> None:
        stream = await meet(env, played.config())
        await said(stream, lambda state: len(state.pids) == 2)
        await stream.write(pack(JoinRanks((joiner(2),), replaces=True)) + pack(LeaveRanks(1, (0, 1))))
        await said(stream, lambda state: state.changed == 1 and 2 in state.pids)
        assert running(played) == ["2"]
        last = await last_word(stream)
        assert (dict(last.codes), last.lost) == ({2: 0}, False)

    play([(500.0, 0)], story)


def test_a_rank_that_leaves_while_nobody_confirms_its_host_is_killed_and_never_started() -> None:
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
