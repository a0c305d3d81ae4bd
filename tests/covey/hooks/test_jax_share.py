"""Real JAX scripts under the pages of a shared device, with PyTorch in the same process and without, judged by what the
kernel counts."""

import asyncio
import importlib.util
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from covey.kernel.pages import GATES, RankLimits
from plugins.facts import JobHooked, RankShares
from tests.covey.agents import J1, Agent, lease
from tests.covey.hooks.flag_lags import flag_follows
from tests.covey.hooks.jax_jobs import NEEDS_JAX, TRAIN
from tests.covey.hooks.torch_jobs import HEAD, TorchRank, gate_folder, running

pytestmark = NEEDS_JAX
JAX = f"""
import os, sys, time
size = 160
{TRAIN}
def call():
    global weights
    weights = train(weights, batch)
    return weights
"""
WAITS = "while True: jax.block_until_ready(call())"
RUNS_AHEAD = "while True: call()"


async def used(rank: TorchRank, seconds: float) -> float:
    """Processor time of all threads of the rank, as a share of the time."""
    cpu_ns, began_ns = all_cpu_ns(rank), time.monotonic_ns()
    await asyncio.sleep(seconds)
    return (all_cpu_ns(rank) - cpu_ns) / (time.monotonic_ns() - began_ns)


async def ran(rank: TorchRank, seconds: float) -> float:
    """Processor time of all its threads, as a share of the time in which its busiest thread did not wait for a core."""
    before, began_ns = schedule(rank), time.monotonic_ns()
    await asyncio.sleep(seconds)
    took_ns, found = time.monotonic_ns() - began_ns, []
    for id, (cpu_ns, queued_ns) in schedule(rank).items():
        ran_ns, waited_ns = before.get(id, (0, 0))
        found.append((cpu_ns - ran_ns, queued_ns - waited_ns))
    cpu_ns = sum(ns for ns, _ in found)
    return cpu_ns / max(cpu_ns, took_ns - max(found)[1])


def all_cpu_ns(rank: TorchRank) -> int:
    return sum(cpu_ns for cpu_ns, _ in schedule(rank).values())


def schedule(rank: TorchRank) -> dict[str, tuple[int, int]]:
    """For each thread: how long it ran, and how long it waited for a core, in ns."""
    tasks = Path(f"/proc/{rank.process.pid}/task").glob("*/schedstat")
    told = {task.parent.name: task.read_text().split() for task in tasks}
    return {id: (int(words[0]), int(words[1])) for id, words in told.items()}


PINNED = "import os\nos.sched_setaffinity(0, {max(os.sched_getaffinity(0))})\n"


@pytest.mark.long
@pytest.mark.parametrize(
    "script", [pytest.param(WAITS, id="waits", marks=pytest.mark.long), pytest.param(RUNS_AHEAD, id="runs-ahead")]
)
async def test_a_jax_rank_gets_the_share_that_its_agent_says(agent: Agent, script: str) -> None:
    """The rank is stopped between its calls, also when it queues many of them; it gets the whole time once no limit is
    in force any more. Reference: §3.1.2."""
    async with running(agent, script, head=PINNED + JAX) as rank:
        told = next(fact for fact in agent.facts if isinstance(fact, JobHooked))
        assert told.to.endswith("gate per jitted call, memory limit at start only") and told.problem == ""
        report = await rank.batches()
        assert GATES[report.gate] == "jitted call" and report.fixed
        assert await ran(rank, 1.0) > 0.65
        for epoch, share in enumerate([0.4, 0.1, 0.0], 1):
            await rank.obeyed(RankLimits(epoch, idle=1.0, busy=share, lease_ns=lease(), failsafe=0.5))
            assert await used(rank, 1.5) <= share * 1.3 + 0.08
        rank.obey(RankLimits(9, idle=0.1, busy=0.1, failsafe=0.5, lease_ns=lease(0.2)))
        await asyncio.sleep(0.3)
        assert await used(rank, 1.0) <= 0.65, "after the lease the failsafe holds"
        await rank.obeyed(RankLimits(10))
        assert max([await ran(rank, 1.0) for _ in range(3)]) > 0.65


async def test_a_smaller_memory_limit_is_not_obeyed_and_its_rates_are(agent: Agent) -> None:
    async with running(agent, WAITS, head=JAX, COVEY_GPU_MEMORY=str(1 << 30)) as rank:
        await rank.obeyed(RankLimits(1, memory_bytes=2 << 30))
        assert (await rank.batches()).stable_bytes == 1 << 30
        await rank.obeyed(RankLimits(2, memory_bytes=1 << 30))
        rank.obey(RankLimits(3, idle=0.0, busy=0.0, lease_ns=lease(), memory_bytes=1 << 29))
        await asyncio.sleep(0.3)
        assert await used(rank, 1.0) < 0.1
        assert rank.acked() == 2
        await rank.obeyed(RankLimits(4, memory_bytes=3 << 29))


TELLS = """
for _ in range(50): jax.block_until_ready(call())
phases = []
for at in range(90):
    for _ in range(4): jax.block_until_ready(call())
    phases.append((False, time.monotonic_ns()))
    time.sleep(0.015)
    phases.append((True, time.monotonic_ns()))
"""


async def test_the_flag_follows_what_the_device_has_of_jitted_calls(agent: Agent, tmp_path: Path) -> None:
    """The flag is lowered when the newest result is there and the script sleeps, and raised after that."""
    lags_ms = await flag_follows(agent, "time.sleep(1)\n" + TELLS, tmp_path, within_ms=6, head=JAX)
    assert max(lags_ms[-1]) < 6, lags_ms


@pytest.mark.long
async def test_time_without_work_is_reported_of_jitted_calls_too(agent: Agent) -> None:
    async with running(agent, "while True: jax.block_until_ready(call()); time.sleep(0.04)", head=JAX) as rank:
        await rank.obeyed(RankLimits(1, guaranteed=True))
        await asyncio.sleep(1.0)
        await rank.batches()
        await asyncio.sleep(1.0)
        report = await rank.batches()
        shares = [batch.idle_ns / batch.step_ns for batch in report.batches]
        assert report.says_idle and 0.5 < statistics.median(shares) <= 1, shares


BOTH = """
while True:
    for _ in range(5): step()
    jax.block_until_ready(call())
"""


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch here: make check TORCH=1")
@pytest.mark.parametrize(
    "head",
    [pytest.param(HEAD + JAX, id="torch-first"), pytest.param(JAX + HEAD, id="jax-first", marks=pytest.mark.long)],
)
async def test_torch_and_jax_in_one_process_go_by_one_page_and_count_once(agent: Agent, head: str) -> None:
    async with running(agent, BOTH, head=PINNED + head, COVEY_GATE=str(gate_folder())) as rank:
        assert not [fact for fact in agent.facts if isinstance(fact, RankShares)], "its pages came once"
        assert len(agent.socket.peers(J1)) == 1
        told = [fact.to for fact in agent.facts if isinstance(fact, JobHooked)][-1]
        assert "gate per operator" in told and "gate per jitted call, memory limit at start only" in told
        await rank.batches()
        await asyncio.sleep(0.3)
        report = await rank.batches()
        numbers = [batch.number for batch in report.batches]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "each is told once"
        assert GATES[report.gate] == "operator" and report.fixed
        await rank.obeyed(RankLimits(1, idle=0.0, busy=0.2, lease_ns=lease()))
        assert await used(rank, 2.0) <= 0.32
        await rank.obeyed(RankLimits(2, idle=0.0, busy=0.0, lease_ns=lease()))
        assert await used(rank, 1.0) <= 0.1
        await rank.obeyed(RankLimits(3))
        assert max([await ran(rank, 1.0) for _ in range(3)]) > 0.65


FORKS = """
import os, jax
from covey.hooks.frameworks.jax_share import JittedWork
from covey.hooks.limits.sharing import ShareControl
work = JittedWork(ShareControl(), None, None)
with work._lock:
    child = os.fork()
    if child == 0:
        work.waits(True)
        os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def test_a_child_that_was_forked_while_the_flag_was_looked_at_does_not_wait_for_it() -> None:
    assert subprocess.run([sys.executable, "-c", FORKS], timeout=60, check=False).returncode == 0
