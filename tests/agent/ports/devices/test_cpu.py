"""Devices made of cores: which processes are whose, what binds them, and that none stays suspended."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from agent.ports.devices.cpu import CpuDevices
from agent.ports.devices.guards import suspend_guard, suspensions
from agent.ports.devices.rank_trees import RankTrees, queueing_s
from agent.ports.devices.settings import CpuDevice, usable_cores
from agent.ports.probes import RealProbes
from agent.ports.processes import procfs
from agent.ports.processes.shims import DetachedProcess
from plugins.base import RankSpec
from plugins.facts import RanksEnded, RanksStarted
from tests.agent.here import here, ranks, until
from tests.agent.ports.devices.rigs import BUSY, CpuRig

CORES = sorted(usable_cores())


@pytest.fixture
def rig() -> Iterator[CpuRig]:
    made = CpuRig()
    try:
        yield made
    finally:
        made.over()


def state(pid: int) -> str:
    fields = procfs.stat(pid)
    return "gone" if fields is None else fields[0]


def tree_of(rig: CpuRig, pid: int) -> set[int]:
    (tree,) = (one for one in rig.devices._trees.read() if one.pid == pid)
    return {row.pid for row in tree.rows}


FAMILY = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(20)"])                          # a worker
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(20)"], start_new_session=True)  # one that left
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(20)"], env={})                  # without a mark
time.sleep(20)
"""


async def test_all_that_a_rank_starts_belongs_to_it(rig: CpuRig) -> None:
    pid = await rig.start("CPU-h1-0", FAMILY)
    await until(lambda: len(tree_of(rig, pid)) == 4)
    sample = await rig.devices.sample("CPU-h1-0")
    assert [process.pid for process in sample.processes] == [pid], "one rank, told by the pid that the runner knows"
    assert await rig.devices.suspend(pid)
    await until(lambda: {state(one) for one in tree_of(rig, pid)} == {"T"})
    assert await rig.devices.resume(pid)
    await until(lambda: "T" not in {state(one) for one in tree_of(rig, pid)})
    for one in tree_of(rig, pid):
        os.kill(one, signal.SIGKILL)


LEAVES = """
import os, sys, time
if os.fork() == 0:
    if os.fork() == 0:
        end = time.process_time() + 0.5
        while time.process_time() < end: pass
    os._exit(0)
os.wait()
time.sleep(30)
"""


async def test_time_of_what_left_the_rank_is_counted_by_its_shim() -> None:
    with tempfile.TemporaryDirectory(prefix="covey-", ignore_cleanup_errors=True) as directory:
        async with here(directory) as host:
            socket = f"{host.env.run_dir}/jobs.sock"
            devices = CpuDevices("h1", [CpuDevice(str(CORES[0]), "1 GiB")], socket)
            host.env = replace(host.env, probes=RealProbes(devices))
            runner = host.runner()
            await runner.start_up()
            spec = ranks("j1", sys.executable, "-S", "-c", LEAVES, grace_s=0.1)
            await runner.start(msgspec.structs.replace(spec, ranks=(RankSpec(0, 0, ("CPU-h1-0",)),)))
            trees = RankTrees(socket)
            await until(lambda: any(tree.cpu_s > 0.4 and len(tree.rows) == 1 for tree in trees.read()))
            (tree,) = trees.read()
            assert sum(row.own_s + row.waited_for_s for row in tree.rows) < 0.4, "the rank itself did little"
            assert [tree.pid] == list(runner.running()[spec.job, 1].values()), "one rank, by the runner's pid"
            await runner.stop(spec.job, 1, 0.0, "the test is over")
            await until(lambda: host.told(RanksEnded))
            runner.forget(spec.job, 1)


async def test_ranks_of_another_agent_on_this_machine_are_not_ours(rig: CpuRig) -> None:
    pid = await rig.start("CPU-h1-0", BUSY)
    other = CpuDevices("h1", [CpuDevice(str(CORES[0]), "2 GiB")], "/run/other/jobs.sock")
    assert [process.pid for process in (await rig.devices.sample("CPU-h1-0")).processes] == [pid]
    assert (await other.sample("CPU-h1-0")).processes == ()
    assert await other.suspend(pid) is False and state(pid) != "T"


BURN = """
import subprocess, sys, time
for _ in range(8):
    subprocess.run([sys.executable, "-S", "-c", "for i in range(5_000_000): pass"])
time.sleep(20)
"""


async def test_time_of_children_that_ended_stays_counted(rig: CpuRig) -> None:
    pid = await rig.start("CPU-h1-0", BURN)
    seen: list[float] = []
    end_s = time.monotonic() + 30.0
    while len(seen) < 12 or seen[-1] <= 0.3:
        assert time.monotonic() < end_s, seen
        (tree,) = RankTrees(f"/run/{os.getpid()}/jobs.sock").read()
        assert tree.pid == pid
        seen.append(tree.cpu_s)
        await asyncio.sleep(0.1)
    assert all(later >= earlier - 0.03 for earlier, later in pairwise(seen)), "it never falls, but for its rounding"


async def test_a_suspension_ends_with_its_lease(rig: CpuRig) -> None:
    rig.devices._suspensions._lease_s = 2.0
    pid = await rig.start("CPU-h1-0", BUSY)
    assert await rig.devices.suspend(pid) and state(pid) == "T"
    for _ in range(5):
        await asyncio.sleep(0.6)
        assert state(pid) == "T", "it was said again in time"
        assert await rig.devices.suspend(pid)
    await until(lambda: state(pid) != "T")


SUSPENDER = """
import asyncio, sys
from agent.ports.devices.cpu import CpuDevices
from agent.ports.devices.settings import CpuDevice
async def main():
    devices = CpuDevices("h1", [CpuDevice(sys.argv[1], "1 GiB")], sys.argv[2])
    print(await devices.suspend(int(sys.argv[3])), flush=True)
    await asyncio.sleep(30)
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_rank_goes_on_when_the_agent_that_suspended_it_dies(rig: CpuRig, number: int) -> None:
    pid = await rig.start("CPU-h1-0", BUSY)
    socket = f"/run/{os.getpid()}/jobs.sock"
    agent = DetachedProcess(
        [sys.executable, "-c", SUSPENDER, str(CORES[0]), socket, str(pid)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[4],
    )
    assert agent.stdout is not None
    assert await asyncio.to_thread(agent.stdout.readline) == b"True\n"
    assert state(pid) == "T"
    agent.send_signal(number)
    agent.wait()
    agent.stdout.close()
    await until(lambda: state(pid) != "T")


async def test_a_guard_that_dies_is_replaced_and_told_all_that_is_held(rig: CpuRig) -> None:
    first, second = await rig.start("CPU-h1-0", BUSY), await rig.start("CPU-h1-0", BUSY)
    held = rig.devices._suspensions
    held._lease_s = 1.0
    assert await rig.devices.suspend(first)
    assert held._guard is not None
    before = held._guard.pid
    held._guard.kill()
    held._guard.wait()
    assert await rig.devices.suspend(second)
    assert held._guard.pid != before
    await until(lambda: state(first) != "T" and state(second) != "T")


async def test_nothing_is_stopped_without_a_guard(rig: CpuRig, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = await rig.start("CPU-h1-0", BUSY)

    def no_guard(_script: str) -> DetachedProcess:
        raise OSError("no processes left")

    monkeypatch.setattr(suspensions, "GuardProcess", no_guard)
    with pytest.raises(OSError, match="no processes left"):
        await rig.devices.suspend(pid)
    assert state(pid) != "T"


async def test_waiting_for_a_core_is_counted_by_the_kernel(rig: CpuRig) -> None:
    pids = [await rig.start("CPU-h1-0", BUSY) for _ in range(2)]
    for pid in pids:
        os.sched_setaffinity(pid, {CORES[0]})
    before = sum(map(queueing_s, pids))
    began_s = time.monotonic()
    await asyncio.sleep(1.0)
    waited_s = sum(map(queueing_s, pids)) - before
    assert waited_s > 0.3 * (time.monotonic() - began_s), "two on one core: each waits while the other runs"
    with pytest.raises(OSError):
        queueing_s(1 << 22)


async def test_some_cores_gone_drains_a_device_and_all_gone_loses_it() -> None:
    there = [0, 1]
    devices = CpuDevices("h1", [CpuDevice("0-1", "1 GiB")], "", lambda: there)
    assert (await devices.health("CPU-h1-0")).condition == "ok"
    there.remove(1)
    assert (await devices.events())[0][1].condition == "drain"
    there.remove(0)
    assert [health.condition for _, health in await devices.events()] == ["lost"]
    there += [0, 1]
    assert [health.condition for _, health in await devices.events()] == ["ok"]


def output(path: str) -> str:
    return Path(path).read_text().strip()


WHERE = "import os; print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'], os.environ['COVEY_GPUS'])"


async def test_a_rank_runs_on_the_cores_of_its_devices_alone() -> None:
    with tempfile.TemporaryDirectory(prefix="covey-", ignore_cleanup_errors=True) as directory:
        async with here(directory) as host:
            listed = [CpuDevice(str(core), "1 GiB") for core in CORES[:2]]
            devices = CpuDevices("h1", listed, f"{host.env.run_dir}/jobs.sock")
            host.env = replace(host.env, probes=RealProbes(devices))
            runner = host.runner()
            await runner.start_up()
            made = []
            for number, gpus in enumerate([("CPU-h1-0",), tuple(f"CPU-h1-{n}" for n in range(len(listed))), ()]):
                spec = ranks(f"j{number + 1}", sys.executable, "-c", WHERE)
                spec = msgspec.structs.replace(spec, ranks=(RankSpec(0, 0, gpus),))
                made.append(gpus)
                await runner.start(spec)
            await until(lambda: len(host.told(RanksEnded)) == 3)
            said = [output(runner.log_path(spec.job, 0)) for spec in await runner.kept()]
            alone, both, none = said
            assert alone == f"[{CORES[0]}] 1 CPU-h1-0"
            assert both == f"{CORES[:2]} {len(listed)} {','.join(made[1])}"
            assert none == f"{CORES} 1"
            assert len(host.told(RanksStarted)) == 3
            for spec in await runner.kept():
                runner.forget(spec.job, spec.epoch)


def test_the_guard_leaves_a_pid_that_is_used_again_alone() -> None:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        started = int(suspend_guard.fields(process.pid)[19])
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        suspend_guard.go_on((process.pid, started + 1))
        assert suspend_guard.fields(process.pid)[0] == "T", "it is another process, which somebody else stopped"
        suspend_guard.go_on((process.pid, started))
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)
    finally:
        process.kill()
        process.wait()
