"""Ranks under their supervisor, as real processes: truthful ends, survival of the agent, no orphans; and the same code
in the simulator, where agents and supervisors are killed at every moment."""

import asyncio
import contextlib
import dataclasses
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.jobs.following import BOOT_S, LAUNCHES_MAX
from agent.jobs.held_ports import PORTS
from agent.jobs.output import LOG_BYTES_MAX, JobsSettings
from agent.jobs.records import Fence, StartRecord
from agent.jobs.records import decoder as record_decoder
from agent.jobs.runner import SupervisedRunner
from agent.jobs.supervision import UNKNOWN, SupervisorConfig, SupervisorState
from agent.jobs.supervisor import supervisor
from agent.ports.processes.procfs import is_alive, start_ticks
from chaos.world.disk import SimFile
from chaos.world.host import SimHost
from chaos.world.world import World
from covey.core.events import Fact
from covey.core.ids import JobId
from covey.ports.disk import Disk
from covey.ports.env import Env
from covey.ports.processes import Command, ProcessId
from covey.wire.checked import load, save, seal
from plugins.base import LogRead, Program, RanksSpec
from plugins.facts import RankEndedHere, RanksEnded, RanksStarted
from tests.agent.here import Here, here, ranks, until
from tests.quiet import quiet

J1 = JobId("j1")


@pytest.fixture
def short() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="covey-", ignore_cleanup_errors=True) as directory:
        yield directory


@pytest.fixture
async def host(short: str) -> AsyncIterator[Here]:
    async with here(short) as found:
        yield found


async def ended(host: Here, spec: RanksSpec) -> RanksEnded:
    runner = host.runner()
    await runner.start_up()
    await runner.start(spec)
    await until(lambda: any(told.job == spec.job for told in host.told(RanksEnded)))
    return next(told for told in host.told(RanksEnded) if told.job == spec.job)


def gone(pid: int) -> bool:
    ticks = start_ticks(pid)
    return ticks is None or not is_alive(ProcessId(pid, ticks))


async def test_a_rank_finds_its_place_in_its_environment_and_its_output_in_its_log(host: Here) -> None:
    runner = host.runner()
    code = "import os\nfor name in sorted(os.environ): print(name, os.environ[name], sep='=')"
    spec = ranks("j1", sys.executable, "-c", code, count=2, OMP_NUM_THREADS="7", WORLD_SIZE="wrong")
    await runner.start(spec)
    await until(lambda: host.told(RanksEnded))
    assert host.told(RanksEnded) == [RanksEnded(J1, 1, {0: 0, 1: 0}, "")]
    read = await runner.read_log(J1, 1, 0, 1 << 20)
    assert read.size == len(read.data)
    seen = dict(line.split("=", 1) for line in read.data.decode().splitlines())
    assert (seen["RANK"], seen["LOCAL_RANK"], seen["WORLD_SIZE"], seen["LOCAL_WORLD_SIZE"]) == ("1", "1", "2", "2")
    assert (seen["NNODES"], seen["NODE_RANK"], seen["GROUP_WORLD_SIZE"], seen["GROUP_RANK"]) == ("2", "1", "1", "0")
    assert (seen["MASTER_ADDR"], seen["MASTER_PORT"]) == ("127.0.0.1", "29500")
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["OMP_NUM_THREADS"], seen["PYTHONUNBUFFERED"]) == ("", "7", "1")
    assert seen["COVEY_TOKEN"] == runner.token(J1, 1) or runner.token(J1, 1) is None
    assert seen["COVEY_JOB_ID"] == "j1"
    assert "HOME" not in seen


async def test_a_rank_makes_files_as_whoever_submitted_it(host: Here) -> None:
    """The agent's own umask under systemd keeps its state from everybody else."""
    before = os.umask(0o077)
    runner = host.runner()
    await runner.start(ranks("j1", "/bin/sh", "-c", "umask", COVEY_UMASK="027"))
    await runner.start(ranks("j2", "/bin/sh", "-c", "umask"))
    await runner.start(ranks("j3", "/bin/sh", "-c", "umask", COVEY_UMASK="rw"))
    await until(lambda: len(host.told(RanksEnded)) == 3)
    os.umask(before)
    assert [(await runner.read_log(JobId(job), 0, 0, 100)).data for job in ("j1", "j2")] == [b"0027\n", b"0077\n"]
    (bad,) = [told for told in host.told(RanksEnded) if told.job == "j3"]
    assert "COVEY_UMASK: invalid literal" in bad.reason


async def test_a_secret_is_in_one_file_for_this_user_alone_and_gone_once_it_is_forgotten(
    host: Here, short: str
) -> None:
    """The secret is a variable of the environment."""

    def files() -> dict[str, int]:
        """The files that hold it, with their modes and those of their directories."""
        found = {}
        for directory, _, names in os.walk(short):
            for path in (os.path.join(directory, name) for name in names):
                if stat.S_ISREG(os.lstat(path).st_mode) and b"sk-planted" in Path(path).read_bytes():
                    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700, directory
                    found[os.path.relpath(path, host.base.state_dir)] = stat.S_IMODE(os.stat(path).st_mode)
        return found

    runner = host.runner()
    await runner.start(ranks("j1", "/bin/sh", "-c", "sleep 0.3", API_KEY="sk-planted"))
    await until(lambda: runner.running())
    assert files() == {"jobs/j1/1.start": 0o600}
    await until(lambda: host.told(RanksEnded))
    runner.forget(J1, 1)
    await until(lambda: not runner.facts())
    assert files() == {}


async def test_exit_codes_and_signals_are_reported_as_they_were(host: Here) -> None:
    assert (await ended(host, ranks("j1", "/bin/sh", "-c", "exit 75"))).codes == {0: 75}
    assert (await ended(host, ranks("j2", "/bin/sh", "-c", "kill -SEGV $$"))).codes == {0: -signal.SIGSEGV}


async def test_ranks_too_quick_to_be_seen_are_told_as_started_all_the_same(host: Here) -> None:
    await ended(host, ranks("j1", "/bin/true", count=2))
    told = [type(fact) for fact in host.facts if not isinstance(fact, RankEndedHere)]
    assert told == [RanksStarted, RanksEnded] and isinstance(host.facts[0], RanksStarted)
    assert set(host.told(RanksStarted)[0].pids) == {0, 1}


async def test_a_command_that_is_not_there_ends_with_127_and_the_reason(host: Here) -> None:
    told = await ended(host, ranks("j1", "/no/such/program", count=2))
    assert told.codes == {0: 127, 1: 127}
    assert "rank 0 cannot start: /no/such/program: No such file" in told.reason
    assert host.told(RanksStarted) == []


async def test_stopping_asks_first_and_kills_after_the_grace(host: Here) -> None:
    runner = host.runner()
    script = "trap 'echo asked' TERM; echo ready; while :; do sleep 0.05; done"
    await runner.start(ranks("j1", "/bin/sh", "-c", script))
    await until(lambda: os.path.exists(runner.log_path(J1, 0)) and os.path.getsize(runner.log_path(J1, 0)))
    await runner.stop(J1, 1, 0.3, "cancelled by alice")
    await until(lambda: host.told(RanksEnded))
    assert host.told(RanksEnded) == [RanksEnded(J1, 1, {0: -signal.SIGKILL}, "cancelled by alice")]
    assert b"asked" in (await runner.read_log(J1, 0, 0, 100)).data
    assert await host.env.disk.read("jobs/j1/1.preempt") == b"cancelled by alice"


def marked(mark: bytes) -> list[str]:
    """The live processes with this in their environment."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if mark in file.read():
                found.append(pid)
    return found


def parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().split()[3])


async def test_no_orphan_outlives_a_job_not_even_one_that_left_its_session(host: Here) -> None:
    script = (
        "setsid -f sleep 600; (setsid sh -c 'trap \"\" TERM; sleep 600' &); ps -eo pid,sid,args > /dev/null; exit 0"
    )
    told = await ended(host, ranks("j1", "/bin/sh", "-c", script, MARK="no-orphans"))
    assert told.codes == {0: 0}
    assert marked(b"MARK=no-orphans") == []


AGENT = """
import asyncio, sys
from tests.agent.here import here, ranks, until
async def main():
    async with here(sys.argv[1]) as host:
        runner = host.runner()
        await runner.start(ranks("j1", "/bin/sh", "-c", sys.argv[2], count=2))
        await until(lambda: runner.running())
        print("running", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


@contextlib.contextmanager
def another_agent(short: str, script: str) -> Iterator["subprocess.Popen[bytes]"]:
    """An agent in a process of its own, once it has ranks running; killed at the end."""
    agent = subprocess.Popen([sys.executable, "-c", AGENT, short, script], stdout=subprocess.PIPE)
    try:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"running\n"
        yield agent
    finally:
        agent.kill()
        agent.communicate()


async def test_ranks_survive_kill_9_of_their_agent_and_are_found_again(short: str) -> None:
    wait = 'while [ ! -e "$0/go" ]; do sleep 0.02; done; exit $((40 + RANK))'
    with another_agent(short, wait.replace("$0", short)):
        pass
    async with here(short) as host:
        runner = host.runner()
        await runner.start_up()
        await until(lambda: host.told(RanksStarted))
        pids = host.told(RanksStarted)[0].pids
        assert runner.running() == {(J1, 1): pids}
        assert all(not gone(pid) for pid in pids.values())
        await runner.start(ranks("j1", "/bin/false", count=2))
        os.close(os.open(f"{short}/go", os.O_CREAT))
        await until(lambda: host.told(RanksEnded))
        assert sorted(host.told(RanksEnded)[0].codes.items()) == [(0, 40), (1, 41)]
        assert all(gone(pid) for pid in pids.values())


async def test_ranks_that_end_while_the_agent_is_away_are_told_until_they_are_accepted(short: str) -> None:
    with another_agent(short, "exec sleep 0.1"):
        pass
    for _ in range(2):
        async with here(short) as host:
            runner = host.runner()
            await runner.start_up()
            await until(partial(host.told, RanksEnded))
            assert sorted(host.told(RanksEnded)[0].codes.items()) == [(0, 0), (1, 0)]
    async with here(short) as host:
        runner = host.runner()
        await runner.start_up()
        await until(lambda: host.told(RanksEnded))
        runner.forget(J1, 1)
        await until(lambda: runner.spec(J1, 1) is None)
        assert sorted(os.listdir(f"{short}/s/jobs/j1")) == ["forgotten", "rank0.log", "rank1.log"]
    async with here(short) as host:
        runner = host.runner()
        await runner.start_up()
        await runner.start(ranks("j1", "/bin/true", count=2))
        assert runner.spec(J1, 1) is None and runner.token(J1, 1) is None, "a forgotten epoch begins no more"
        await quiet()
        assert host.facts == []
        assert runner.running() == {}


async def test_a_job_stopped_after_the_agent_came_back_is_stopped(short: str) -> None:
    with another_agent(short, "exec sleep 600"):
        pass
    async with here(short) as host:
        runner = host.runner()
        await runner.stop(J1, 1, 5.0, "cancelled")
        await until(lambda: host.told(RanksEnded))
        assert sorted(host.told(RanksEnded)[0].codes.items()) == [(0, -15), (1, -15)]


def lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def supervisor_of(rank: int) -> int:
    """The supervisor of a rank: over the rank is its shim, over that its supervisor."""
    found = parent(parent(rank))
    assert found != os.getpid()
    return found


async def test_ranks_of_a_supervisor_that_died_run_on_and_their_ends_are_known(host: Here) -> None:
    runner = host.runner()
    script = f"[ $RANK = 0 ] && exec sleep 0.2; echo on >> {host.base.state_dir}/on; exec sleep 600"
    await runner.start(ranks("j1", "/bin/sh", "-c", script, count=2))
    await until(lambda: host.told(RanksStarted))
    pids = host.told(RanksStarted)[0].pids
    os.kill(supervisor_of(pids[1]), signal.SIGKILL)
    await until(lambda: runner.running().get((J1, 1)) == {1: pids[1]})  # rank 0 ended, whoever looked
    assert not gone(pids[1])
    await runner.stop(J1, 1, 5.0, "enough")
    await until(lambda: host.told(RanksEnded))
    assert host.told(RanksEnded) == [RanksEnded(J1, 1, {0: 0, 1: -signal.SIGTERM}, "enough")]
    assert gone(pids[1]) and lines(f"{host.base.state_dir}/on") == ["on"], "started once"


async def test_a_rank_that_ended_while_its_supervisor_was_dead_does_not_run_again(host: Here) -> None:
    runner = host.runner()
    script = f"echo on >> {host.base.state_dir}/on; sleep 0.3; exit 0"
    await runner.start(ranks("j1", "/bin/sh", "-c", script))
    await until(lambda: host.told(RanksStarted))
    (pid,) = host.told(RanksStarted)[0].pids.values()
    stopped = supervisor_of(pid)
    os.kill(stopped, signal.SIGSTOP)
    await until(lambda: gone(pid))
    os.kill(stopped, signal.SIGKILL)
    await until(lambda: host.told(RanksEnded))
    assert host.told(RanksEnded)[0].codes == {0: 0}
    assert lines(f"{host.base.state_dir}/on") == ["on"]


async def test_a_rank_whose_shim_is_killed_ends_and_counts_as_lost(host: Here) -> None:
    runner = host.runner()
    await runner.start(ranks("j1", "/bin/sh", "-c", "sleep 600 & exec sleep 600", MARK=f"shimless-{os.getpid()}"))
    await until(lambda: host.told(RanksStarted))
    (pid,) = host.told(RanksStarted)[0].pids.values()
    os.kill(parent(pid), signal.SIGKILL)
    await until(lambda: host.told(RanksEnded))
    told = host.told(RanksEnded)[0]
    assert (told.codes, told.lost) == ({0: UNKNOWN}, True) and "shim was killed" in told.reason
    assert gone(pid) and marked(f"MARK=shimless-{os.getpid()}".encode()) == []


async def test_a_newer_epoch_ends_the_older_one_before_it_starts(host: Here) -> None:
    runner = host.runner()
    await runner.start(ranks("j1", "/bin/sh", "-c", "exec sleep 600"))
    await until(lambda: host.told(RanksStarted))
    await runner.start(ranks("j1", "/bin/sh", "-c", "exit 5", epoch=2))
    await runner.start(ranks("j1", "/bin/sh", "-c", "exit 6", epoch=1))
    await until(lambda: len(host.told(RanksEnded)) == 2)
    assert [(told.epoch, told.codes) for told in host.told(RanksEnded)] == [(1, {0: -9}), (2, {0: 5})]


async def test_an_epoch_older_than_a_known_one_is_not_started_though_it_was_never_seen(host: Here) -> None:
    runner = host.runner()
    await runner.start(ranks("j1", "/bin/sh", "-c", "exit 5", epoch=3))
    await runner.start(ranks("j1", "/bin/sh", "-c", "exit 6", epoch=2))
    assert runner.spec(J1, 2) is None and runner.spec(J1, 3) is not None
    await until(lambda: host.told(RanksEnded))
    assert [(told.epoch, told.codes) for told in host.told(RanksEnded)] == [(3, {0: 5})]


async def test_ranks_that_come_back_under_one_epoch_start_again_and_late_ones_do_not(host: Here) -> None:
    """A gang that heals may leave a host and come back under the same grant."""
    runner = host.runner()

    async def starts(since: int) -> bool:
        spec = msgspec.structs.replace(ranks("j1", "/bin/sh", "-c", "echo $COVEY_INCARNATION"), since=since)
        before = len(host.told(RanksEnded))
        await runner.start(spec)
        if not runner.knows(J1, 1):
            return False
        await until(lambda: len(host.told(RanksEnded)) > before)
        assert host.told(RanksEnded)[-1].since == since
        await runner.start(msgspec.structs.replace(spec, since=since + 1))
        assert len(host.told(RanksEnded)) == before + 1, "those of before are not forgotten yet"
        runner.forget(J1, 1)
        await until(lambda: not runner.knows(J1, 1))
        return True

    assert [await starts(since) for since in (0, 0, 2, 1, 2, 3)] == [True, False, True, False, False, True]
    assert (await runner.read_log(J1, 0, 0, 100)).data == b"\n131072\n196608\n"


async def test_a_record_that_outlived_its_forgetting_is_told_to_nobody_and_removed(host: Here) -> None:
    """The agent died between writing what is forgotten and deleting the record."""
    record, state = StartRecord(ranks("j1", "/bin/true"), "token"), SupervisorState(codes={0: 0}, ended=True)
    await save(host.env.disk, "jobs/j1/1.start", record)
    await save(host.env.disk, "jobs/j1/1.state", state)
    await save(host.env.disk, "jobs/j1/forgotten", Fence(1, host.env.clock.wall_s()))
    runner = host.runner()
    await runner.start_up()
    assert runner.spec(J1, 1) is None
    await until(lambda: os.listdir(f"{host.base.state_dir}/jobs/j1") == ["forgotten"])
    assert host.facts == []


async def test_a_reserved_port_is_kept_and_then_free_for_the_job(host: Here) -> None:
    runner = host.runner()
    port = await runner.reserve_port(J1, 1)
    assert port in PORTS
    assert await runner.reserve_port(J1, 1) == port
    assert await runner.reserve_port(J1, 2) != port
    with pytest.raises(OSError):
        host.env.bytes.hold("127.0.0.1", port)
    runner.release_port(J1, 1)

    async def nobody(_stream: object) -> None:
        """Accept nobody."""

    listener = await host.env.bytes.listen(f"127.0.0.1:{port}", nobody)
    assert listener.address == f"127.0.0.1:{port}"
    await listener.close()
    await runner.stop_up()


async def test_a_log_is_read_in_pieces_and_from_its_end(host: Here) -> None:
    runner = host.runner()
    await host.env.disk.append("jobs/j1/rank0.log", b"0123456789")
    assert await runner.read_log(J1, 0, 2, 3) == LogRead(b"234", 2, 10)
    assert await runner.read_log(J1, 0, -4, 100) == LogRead(b"6789", 6, 10)
    assert await runner.read_log(J1, 0, 50, 5) == LogRead(b"", 10, 10)
    assert await runner.read_log(J1, 7, 0, LOG_BYTES_MAX) == LogRead(b"", 0, 0, kept=False)


async def test_a_damaged_record_is_reported_and_the_others_are_found(host: Here) -> None:
    await host.env.disk.replace("jobs/j1/1.start", b"\xff\x00 not a record")
    await host.env.disk.replace("jobs/j1/forgotten", b"not a number")
    runner = host.runner()
    await runner.start_up()
    assert "record cannot be read" in host.lines.text
    assert (await ended(host, ranks("j2", "/bin/true"))).codes == {0: 0}


@settings(max_examples=40, deadline=None)
@given(st.one_of(st.binary(max_size=80), st.integers(0, 1 << 30)))
def test_no_record_however_damaged_keeps_the_runner_from_starting(attack: bytes | int) -> None:
    if isinstance(attack, int):
        rng = random.Random(attack)
        good = bytearray(seal(StartRecord(ranks("j1", "/bin/true"), "token", ProcessId(1 << 22, 1))))
        for _ in range(rng.randint(1, 3)):
            good[rng.randrange(len(good))] = rng.randrange(256)
        attack = bytes(good)

    async def main(env: Env) -> int:
        await env.disk.replace("jobs/j1/1.start", attack)
        await env.disk.replace("jobs/j1/1.state", attack[:20])
        runner = SupervisedRunner(env, facts.append, "10.0.0.1", "/x")
        await runner.start_up()
        await runner.start(ranks("j2", "train"))
        return await asyncio.sleep(3, 0)

    facts: list[Fact] = []
    with World(1) as world:
        rack = SimRack(world, seconds=0.1, code=9)
        rack.host.main = main
        rack.host.start_agent()
        world.run(4)
    assert RanksEnded(JobId("j2"), 1, {0: 9}, "") in facts


# ---- the same code in the simulator ----------------------------------------------------------------------------------


class SimRack:
    """One simulated host whose agent is only a runner. Jobs count how often each rank was started."""

    def __init__(self, world: World, seconds: float, code: int = 0) -> None:
        self.starts: list[tuple[str, str]] = []
        self.facts: list[Fact] = []
        self.seconds, self.code = seconds, code
        world.programs = lambda: {"supervisor": supervisor.PROGRAM}
        world.user_programs["train"] = self._train
        self.host: SimHost = world.add_host("h1")
        self.host.main = self._agent
        self.wanted = ranks("j1", "train", count=3)
        self.forget = False
        self.settings = JobsSettings()
        self.runner: SupervisedRunner | None = None

    def _told(self, fact: Fact) -> None:
        self.facts.append(fact)
        if isinstance(fact, RanksEnded) and self.forget and self.runner is not None:
            self.runner.forget(fact.job, fact.epoch)

    async def _train(self, env: Env, command: Command) -> int:
        self.starts.append((command.env["COVEY_EPOCH"], command.env["RANK"]))
        await asyncio.sleep(self.seconds)
        return self.code + int(command.env["RANK"])

    async def _agent(self, env: Env) -> int:
        socket = f"{env.run_dir}/jobs.sock"
        self.runner = runner = SupervisedRunner(env, self._told, "10.0.0.1", socket, self.settings)
        await runner.start_up()
        assert 0 < await runner.reserve_port(J1, 1) < 65536
        await runner.start(self.wanted)
        await asyncio.Event().wait()
        return 0

    def ends(self) -> list[RanksEnded]:
        return [fact for fact in self.facts if isinstance(fact, RanksEnded)]


@pytest.mark.parametrize("seed", range(20))
def test_whenever_the_agent_is_killed_each_rank_starts_once_and_its_code_arrives(seed: int) -> None:
    with World(seed) as world:
        rack = SimRack(world, seconds=3.0, code=20)
        rack.host.start_agent()
        for _ in range(6):
            world.run(world.now + world.chance.uniform(0.0, 0.8))
            assert rack.host.agent is not None
            rack.host.agent.signal(signal.SIGKILL)
            world.run(world.now + world.chance.uniform(0.0, 0.5))
            rack.host.start_agent()
        assert world.run(world.now + 60, stop=lambda: bool(rack.ends()))
        assert sorted(rack.starts) == [("1", "0"), ("1", "1"), ("1", "2")]
        assert sorted(rack.ends()[-1].codes.items()) == [(0, 20), (1, 21), (2, 22)]


@pytest.mark.parametrize("seed", [*range(20), 111, 123, 153])  # the last: between a rank's start and its number on disk
def test_whenever_a_supervisor_is_killed_no_rank_starts_twice_and_an_end_is_told(seed: int) -> None:
    with World(seed) as world:
        rack = SimRack(world, seconds=600.0)
        rack.host.start_agent()
        world.run(world.chance.uniform(0.05, 0.5))
        for process in rack.host.find("sup-j1-1"):
            process.signal(signal.SIGKILL)
        assert world.run(world.now + 900, stop=lambda: bool(rack.ends()))
        assert len(rack.starts) == len(set(rack.starts))
        assert set(rack.ends()[-1].codes) == {0, 1, 2}
        assert rack.host.find("train") == []


@pytest.mark.parametrize("seed", range(10))
def test_after_a_power_failure_no_rank_of_the_old_epoch_runs_and_its_end_is_told(seed: int) -> None:
    with World(seed) as world:
        rack = SimRack(world, seconds=600.0)
        rack.host.start_agent()
        assert world.run(30, stop=lambda: len(rack.starts) == 3)
        world.run(world.now + world.chance.uniform(0.0, 0.2))
        rack.host.power_off()
        rack.facts.clear()
        world.run(world.now + 1.0)
        rack.host.power_on()
        assert world.run(world.now + 120, stop=lambda: bool(rack.ends()))
        assert rack.host.find("train") == []
        assert len(rack.starts) == 3


def test_a_rank_that_fails_comes_first_and_takes_its_siblings_with_it() -> None:
    with World(1) as world:
        rack = SimRack(world, seconds=600.0)

        async def fails(env: Env, command: Command) -> int:
            await asyncio.sleep(1.0 if command.env["RANK"] == "1" else 600.0)
            return 3

        world.user_programs["train"] = fails
        rack.host.start_agent()
        assert world.run(30, stop=lambda: bool(rack.ends()))
        (end,) = rack.ends()
        assert next(iter(end.codes.items())) == (1, 3)
        assert end.codes == {0: -signal.SIGTERM, 1: 3, 2: -signal.SIGTERM}
        assert end.reason == "rank 1 exited with 3; the job's other ranks on this host were stopped"


def test_a_newer_epoch_does_not_wait_for_one_that_was_written_down_and_never_started() -> None:
    """The agent died between the record of epoch 1 and its supervisor; meanwhile the job was placed anew."""
    with World(21) as world:
        rack = SimRack(world, seconds=1.0, code=30)

        async def agent(env: Env) -> int:
            await env.disk.replace("jobs/j1/1.start", seal(StartRecord(rack.wanted, "token")))
            rack.wanted = msgspec.structs.replace(rack.wanted, epoch=2)
            return await rack._agent(env)

        rack.host.main = agent
        rack.host.start_agent()
        assert world.run(BOOT_S + 10, stop=lambda: bool(rack.ends()))
        assert [(end.epoch, sorted(end.codes.values())) for end in rack.ends()] == [(2, [30, 31, 32])]
        assert {epoch for epoch, _ in rack.starts} == {"2"}
        assert "jobs/j1/1.start" not in rack.host.disk.files, "it is not found again after every restart"


@pytest.mark.parametrize("known", [True, False])
def test_where_no_supervisor_starts_the_ranks_end_in_words_and_nothing_runs_on(known: bool) -> None:
    """This holds also when the supervisor that died had not written down which processes the ranks are."""
    launched: list[float] = []

    async def dies(env: Env, _config: Any) -> None:
        launched.append(env.clock.now_s())
        raise OSError(8, "Exec format error")

    with World(22) as world:
        rack = SimRack(world, seconds=600.0)
        rack.host.start_agent()
        assert world.run(30, stop=lambda: len(rack.starts) == 3)
        (process,) = rack.host.find("sup-j1-1")
        world.programs = lambda: {"supervisor": Program("supervisor", SupervisorConfig, dies)}
        process.signal(signal.SIGKILL)
        if not known:
            rack.host.disk.files["jobs/j1/1.state"].data[:] = seal(SupervisorState())
        assert len(rack.host.find("train")) == 3
        assert world.run(world.now + 120, stop=lambda: bool(rack.ends()))
        (end,) = rack.ends()
        assert end.lost and "its supervisor does not start on h1; see " in end.reason
        assert end.reason.endswith("logs/sup-j1-1.log")
        assert set(end.codes) == {0, 1, 2} and set(end.codes.values()) <= {-signal.SIGKILL, 127}
        assert rack.host.find("train") == [] and len(launched) == LAUNCHES_MAX
        world.run(world.now + 60)
        assert len(launched) == LAUNCHES_MAX, "it is not tried for ever"


# ---- sick disks ------------------------------------------------------------------------------------------------------


class SickDisk:
    """A disk that fails what `refuses(operation, name)` says."""

    def __init__(self, disk: Disk, refuses: Callable[[str, str], bool]) -> None:
        self._disk, self._refuses = disk, refuses

    def __getattr__(self, operation: str) -> Any:
        real = getattr(self._disk, operation)
        if operation in ("path", "kept_free_bytes"):
            return real

        async def tried(name: str = "", *arguments: Any) -> Any:
            if self._refuses(operation, name):
                raise OSError(5, "the disk is sick", name)
            return await (real(name, *arguments) if name else real())

        return tried


def test_ranks_whose_supervisors_id_cannot_be_written_run_to_their_own_end() -> None:
    """The record was durable before; only its second writing, with the supervisor's id, fails."""
    writes: list[str] = []

    def refuses(operation: str, name: str) -> bool:
        if operation == "replace" and name == "jobs/j1/1.start":
            writes.append(name)
            return len(writes) > 1
        return False

    with World(3) as world:
        rack = SimRack(world, seconds=2.0, code=20)

        async def agent(env: Env) -> int:
            sick = dataclasses.replace(env, disk=cast(Disk, SickDisk(env.disk, refuses)))
            return await rack._agent(sick)

        rack.host.main = agent
        rack.host.start_agent()
        assert world.run(30, stop=lambda: bool(rack.ends()))
        assert len(writes) == 2, "it was tried"
        assert sorted(rack.starts) == [("1", "0"), ("1", "1"), ("1", "2")]
        assert sorted(rack.ends()[0].codes.items()) == [(0, 20), (1, 21), (2, 22)]
        assert rack.ends()[0].reason == ""


def test_ranks_whose_state_cannot_be_read_now_do_not_count_as_never_begun() -> None:
    """Their record was deleted, and with it the token: they were not let in by their agent again, for ever."""
    writes: list[str] = []

    def refuses(operation: str, name: str) -> bool:
        if operation == "replace" and name == "jobs/j1/1.start":
            writes.append(name)
        late = operation == "replace" and name == "jobs/j1/1.start" and len(writes) > 1
        return late or (operation == "read" and name == "jobs/j1/1.state" and sick[-1])

    sick = [False]
    with World(3) as world:
        rack = SimRack(world, seconds=60.0)

        async def agent(env: Env) -> int:
            return await rack._agent(dataclasses.replace(env, disk=cast(Disk, SickDisk(env.disk, refuses))))

        async def again(env: Env) -> int:
            disk = cast(Disk, SickDisk(env.disk, refuses))
            there = dataclasses.replace(env, disk=disk)
            rack.runner = SupervisedRunner(there, rack._told, "10.0.0.1", f"{env.run_dir}/jobs.sock")
            await rack.runner.start_up()
            return await asyncio.sleep(1000, 0)

        rack.host.main = agent
        first = rack.host.start_agent()
        assert world.run(30, stop=lambda: len(rack.starts) == 3) and rack.runner is not None
        rack.host.main = again
        token = rack.runner.token(J1, 1)
        first.signal(signal.SIGKILL)
        rack.host.start_agent()
        world.run(world.now + BOOT_S + 5)
        sick.append(True)
        (process,) = rack.host.find("sup-j1-1")
        process.signal(signal.SIGKILL)
        world.run(world.now + 5)
        assert rack.runner.token(J1, 1) == token and len(rack.starts) == 3
        sick.append(False)
        assert world.run(world.now + 100, stop=lambda: bool(rack.ends()))
        assert rack.ends()[-1].codes == {0: 0, 1: 1, 2: 2}


@pytest.mark.parametrize("read", ["names", "read"])
def test_records_that_a_sick_disk_kept_from_being_read_are_read_by_the_next_who_asks(read: str) -> None:
    failures = iter([True])

    def refuses(operation: str, name: str) -> bool:
        return operation == read and name.startswith("jobs/") and next(failures, False)

    async def again(env: Env) -> int:
        sick = dataclasses.replace(env, disk=cast(Disk, SickDisk(env.disk, refuses)))
        runner = SupervisedRunner(sick, rack.facts.append, "10.0.0.1", f"{env.run_dir}/jobs.sock")
        with pytest.raises(OSError, match="sick"):
            await runner.start_up()
        await runner.start(rack.wanted)
        known = await load(env.disk, "jobs/j1/1.start", record_decoder)
        assert known is not None
        tokens.append((known.token, runner.token(J1, 1)))
        return await asyncio.sleep(60, 0)

    tokens: list[tuple[str, str | None]] = []
    with World(4) as world:
        rack = SimRack(world, seconds=5.0)
        rack.host.start_agent()
        assert world.run(30, stop=lambda: len(rack.starts) == 3)
        assert rack.host.agent is not None
        rack.host.agent.signal(signal.SIGKILL)
        rack.facts.clear()
        rack.host.main = again
        rack.host.start_agent()
        assert world.run(world.now + 30, stop=lambda: bool(rack.ends()))
        assert tokens[0][0] == tokens[0][1], "its ranks may join again"
        assert len(rack.starts) == 3, "what runs already is found, not started once more"
        assert rack.ends()[0].codes == {0: 0, 1: 1, 2: 2}


# ---- room on the disk ----


def test_a_host_refuses_while_its_disk_is_nearly_full_and_no_longer() -> None:
    with World(1) as world:
        rack = SimRack(world, seconds=600.0)
        rack.host.start_agent()
        world.run(20)
        assert rack.runner is not None and rack.runner.refusal == ""
        rack.host.disk.filled_bytes = rack.host.disk.capacity_bytes - (1 << 20)
        world.run(30)
        assert rack.runner.refusal == "less than 1 GiB is free in /var/lib/covey/h1/jobs of h1"
        rack.runner.reconfigure(JobsSettings(disk_free_min="64 KiB"))
        world.run(world.now + 30)
        assert rack.runner.refusal == "", "by a reload"
        rack.runner.reconfigure(JobsSettings())
        world.run(world.now + 30)
        assert rack.runner.refusal
        rack.host.disk.filled_bytes = 0
        world.run(world.now + 30)
        assert rack.runner.refusal == ""


def test_output_of_an_ended_job_goes_in_time_and_its_fence_after_a_day() -> None:
    with World(1) as world:
        rack = SimRack(world, seconds=1.0)
        rack.settings = JobsSettings(keep_ended_for="1 h")
        rack.forget = True
        rack.host.start_agent()
        for name in ("jobs/j1/rank0.log", "jobs/j1/rank0.log.000000000001000"):
            rack.host.disk.files[name] = SimFile(data=bytearray(b"said"), durable=bytearray(b"said"))
        assert world.run(60, stop=lambda: bool(rack.ends()))
        world.run(world.now + 3_500)
        assert {"jobs/j1/rank0.log", "jobs/j1/forgotten"} <= rack.host.disk.files.keys()
        world.run(world.now + 200)
        assert [name for name in rack.host.disk.files if name.startswith("jobs/")] == ["jobs/j1/forgotten"]
        world.run(world.now + 86_400)
        assert [name for name in rack.host.disk.files if name.startswith("jobs/")] == []
