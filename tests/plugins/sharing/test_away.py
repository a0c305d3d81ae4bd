"""A guaranteed script that leaves its device for a while, and returns: two real PyTorch scripts on one core."""

import asyncio
import signal
import statistics
import sys
import time
from pathlib import Path

import pytest

from covey.core.ids import JobId
from tests.agent.here import until
from tests.covey.hooks.torch_jobs import HEAD, NEEDS_TORCH, SATURATED
from tests.plugins.sharing.live_host import LiveHost, live_host

pytestmark = NEEDS_TORCH
AWAY_S = 2.2
LEAVES = f"import signal\nsignal.signal(signal.SIGUSR1, lambda *_: time.sleep({AWAY_S}))\n"
"""Line of the script that waits within a mini-batch, in its own thread, and uses nothing meanwhile."""


@pytest.mark.long
async def test_the_other_has_the_device_while_it_is_away_and_is_cut_when_it_returns() -> None:
    """Both happen within a second. Reference: AntMan §5.1, figure 12."""
    async with live_host() as host:
        await host.come("o", "opportunistic", (sys.executable, "-c", HEAD + SATURATED))
        await until(lambda: has_reported(host, "o"), 100)
        await host.come("g", "guaranteed", (sys.executable, "-c", HEAD + LEAVES + SATURATED))
        await running(host)
        rounds = [await away_and_back(host) for _ in range(3)]
        away, back = (statistics.median(each) for each in zip(*rounds, strict=True))
        assert away > 0.6 and back < away / 3, rounds


async def running(host: LiveHost) -> None:
    """Wait until the other job runs beside the guaranteed one. The AssertionError says how far they came."""
    end_s = time.monotonic() + 60
    while host.state() != "run":
        assert time.monotonic() < end_s, (host.state(), host.notes)
        await asyncio.sleep(0.05)


async def away_and_back(host: LiveHost) -> tuple[float, float]:
    """Share that the other ran in the second second of both phases, of the time in which it was not in the run
    queue."""
    began_s = time.monotonic()
    host.processes[JobId("g")].send_signal(signal.SIGUSR1)
    await asyncio.sleep(0.9)
    away = await ran(host, began_s + AWAY_S - 0.1)
    await asyncio.sleep(1.0)
    return away, await ran(host, time.monotonic() + 0.8)


async def ran(host: LiveHost, until_s: float) -> float:
    (cpu_ns, queued_ns), began_s = scheduled(host), time.monotonic()
    await asyncio.sleep(until_s - began_s)
    now, took_ns = scheduled(host), (time.monotonic() - began_s) * 1e9
    return (now[0] - cpu_ns) / max(now[0] - cpu_ns, took_ns - (now[1] - queued_ns))


def scheduled(host: LiveHost) -> tuple[int, int]:
    """Nanoseconds that the main thread of the opportunistic script ran, and was in the run queue."""
    words = Path(f"/proc/{host.processes[JobId('o')].pid}/schedstat").read_text().split()
    return int(words[0]), int(words[1])


def has_reported(host: LiveHost, job: str) -> bool:
    (gpu,) = host.service.machine.gpus.values()
    return gpu.members[JobId(job)].gate is not None
