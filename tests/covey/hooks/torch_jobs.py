"""Real PyTorch scripts as ranks of an agent's socket, and what the kernel says of them."""

import asyncio
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path

import pytest

from agent.jobs.socket.rank_pages import HeldPages
from covey.hooks import SITE
from covey.kernel.pages import FlagReader, RankLimits, RankReport
from plugins.base import RankPages
from plugins.facts import RankShares
from tests.agent.here import until
from tests.covey.agents import J1, Agent
from tests.covey.hooks.plain_scripts import WITHOUT_COMPILER

NEEDS_TORCH = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch here: make check TORCH=1"),
]
WHOLE_HEAD = """
import os, sys, time, torch
torch.set_num_threads(1)
torch.manual_seed(1)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
o = torch.optim.SGD(model.parameters(), 0.01)
x = torch.randn(64, 64)
def step():
    o.zero_grad(); model(x).square().mean().backward(); o.step()
def work(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        step()
"""
HEAD = WITHOUT_COMPILER + WHOLE_HEAD
SATURATED = "work(600)"
BURSTY = """
while True:
    for _ in range(20): step()
    time.sleep(0.012)
"""


@cache
def gate_folder() -> Path:
    """Folder of the gate of this Python's PyTorch."""
    return gate_library().parent


def gate_library() -> Path:
    """The gate of this Python's PyTorch, built now if it does not exist. Skips where there is no compiler."""
    done = subprocess.run([sys.executable, "-m", "covey.hooks.gate.build"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(done.stdout)
    return Path(done.stdout.split()[-1])


class TorchRank:
    """One running script."""

    def __init__(self, process: asyncio.subprocess.Process, pages: RankPages) -> None:
        self.process, self.pages = process, pages

    def obey(self, limits: RankLimits) -> None:
        self.pages.limits.write(limits)

    async def obeyed(self, limits: RankLimits) -> None:
        """Write limits, and wait until the rank has acknowledged them."""
        self.obey(limits)
        await until(lambda: self.acked() == limits.epoch)

    async def batches(self) -> RankReport:
        """The next report with mini-batches; the first comes seconds after the pages, which come while torch is
        imported."""
        async with asyncio.timeout(100):
            while (report := self.pages.report.fresh()) is None or not report.batches:
                assert self.process.returncode is None, "the script ended"
                await asyncio.sleep(0.01)
        return report

    def flag(self) -> FlagReader:
        """The rank's flag, as a neighbour reads it."""
        held = self.pages
        assert isinstance(held, HeldPages)
        return FlagReader(held.flag.view)

    def acked(self) -> int:
        self.pages.report.fresh()
        return 0 if self.pages.report.newest is None else self.pages.report.newest.acked

    def cpu_ns(self) -> int:
        """Processor time of its main thread, in ns."""
        return int(self._schedstat()[0])

    def queued_ns(self) -> int:
        """Ns that its main thread waited for a core."""
        return int(self._schedstat()[1])

    def _schedstat(self) -> list[str]:
        return Path(f"/proc/{self.process.pid}/schedstat").read_text().split()

    async def used(self, seconds: float) -> float:
        """Processor time of its main thread, as a share of the time."""
        return (await self._passed(seconds))[0]

    async def ran(self, seconds: float) -> float:
        """Processor time of its main thread, as a share of the time in which it did not wait for a core."""
        return (await self._passed(seconds))[1]

    async def ran_freely(self) -> float:
        """The largest share of three looks, since other programs that use this machine are not a limit."""
        return max([await self.ran(0.5) for _ in range(3)])

    async def _passed(self, seconds: float) -> tuple[float, float]:
        cpu_ns, queued_ns, began_ns = self.cpu_ns(), self.queued_ns(), time.monotonic_ns()
        await asyncio.sleep(seconds)
        cpu_ns, took_ns = self.cpu_ns() - cpu_ns, time.monotonic_ns() - began_ns
        return cpu_ns / took_ns, cpu_ns / max(cpu_ns, took_ns - self.queued_ns() + queued_ns)


@contextlib.asynccontextmanager
async def running(
    agent: Agent, script: str, rank: int = 1, head: str = HEAD, **environ: str
) -> AsyncIterator[TorchRank]:
    """The script as this rank, once its pages are there; killed at the end, if it has not ended."""
    ours = {"PATH": os.environ["PATH"], "PYTHONPATH": SITE, "HOME": "/tmp", "OMP_NUM_THREADS": "1"}
    known = {**ours, **agent.environ(COVEY_RANK=str(rank)), **environ}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-c", head + script, env=known, start_new_session=True
    )
    try:
        shares = RankShares(J1, 1, rank)
        async with asyncio.timeout(300):
            await until(lambda: shares in agent.facts or process.returncode is not None, 300)
        assert process.returncode is None, "the script ended"
        agent.facts.remove(shares)
        (pages,) = [peer.pages for peer in agent.socket.peers(J1) if peer.rank == rank and peer.pages is not None]
        started = TorchRank(process, pages)
        await started.batches()
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await until(lambda: not [peer for peer in agent.socket.peers(J1) if peer.rank == rank])
