"""Ranks under their supervisor, as real processes: truthful ends, survival of the agent, no orphans."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from agent.jobs.held_ports import PORTS
from agent.jobs.output import LOG_BYTES_MAX
from agent.jobs.records import Fence, StartRecord
from agent.jobs.supervision import UNKNOWN, SupervisorState
from agent.ports.processes.procfs import is_alive, start_ticks
from covey.core.ids import JobId
from covey.ports.processes import ProcessId
from covey.wire.checked import save
from plugins.base import LogRead, RanksSpec
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
    assert seen["PYTHONFAULTHANDLER"] == "1"
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
    assert host.told(RanksStarted) == [] and told.unstarted == "job", "the host did not fail it"


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
