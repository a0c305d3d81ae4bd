"""Real ports on this machine for tests: an agent's worth of them, in a directory of their own."""

import asyncio
import functools
import inspect
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

import pytest
import uvloop

from agent.jobs.runner import SupervisedRunner
from agent.ports.devices.nvidia.nvml import NvmlDevices
from agent.ports.disk import DirectoryDisk
from agent.ports.probes import RealProbes
from agent.ports.processes.processes import ProgramBase
from agent.program import JsonLog, real_env
from agent.tasks import Tasks
from covey.core.events import Fact
from covey.core.ids import HostId, JobId
from covey.ports.env import Env
from plugins.base import RankSpec, RanksSpec

F = TypeVar("F", bound=Fact)
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def run_on(loop: str, work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on a loop of that kind, within ten seconds; a task that fails fails the test."""

    async def timed() -> None:
        async with asyncio.timeout(10):
            await work

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(timed())


def both_loops(story: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test once on each kind of loop."""

    @pytest.mark.parametrize("loop", LOOPS)
    @functools.wraps(story)
    def test(loop: str, **fixtures: Any) -> None:
        run_on(loop, story(**fixtures))

    asked = inspect.signature(story)
    loop = inspect.Parameter("loop", inspect.Parameter.KEYWORD_ONLY)
    test.__signature__ = asked.replace(parameters=[*asked.parameters.values(), loop])
    return cast(Callable[..., None], test)


async def until(true: Callable[[], object], timeout_s: float = 8.0) -> None:
    """Look every few milliseconds; AssertionError when it never becomes true."""
    end_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end_s, "it never became true"
        await asyncio.sleep(0.005)


class Lines:
    """A place for log lines."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        """Do nothing: no line waits."""


class Here:
    """One host on this machine: its ports, and what was told."""

    def __init__(self, env: Env, base: ProgramBase, lines: Lines) -> None:
        self.env, self.base, self.lines = env, base, lines
        self.facts: list[Fact] = []

    def runner(self) -> SupervisedRunner:
        return SupervisedRunner(self.env, self.facts.append, "127.0.0.1", f"{self.env.run_dir}/jobs.sock")

    def told(self, kind: type[F]) -> list[F]:
        return [fact for fact in self.facts if isinstance(fact, kind)]


@asynccontextmanager
async def here(directory: str) -> AsyncIterator[Here]:
    """A host in `directory`, whose path must be short: unix sockets are in it."""
    base = ProgramBase("h1", os.path.join(directory, "s"), os.path.join(directory, "r"), "127.0.0.1")
    lines = Lines()
    log = JsonLog(lines, "debug")  # type: ignore[arg-type]
    failed: list[BaseException] = []
    tasks = Tasks(log, lambda name, error: failed.append(error))
    disk = DirectoryDisk(base.state_dir)
    try:
        yield Here(real_env(base, log, tasks, RealProbes(NvmlDevices(log)), disk), base, lines)
    finally:
        await tasks.cancel_all()
        disk.close()
    assert failed == []


def ranks(job: str, *argv: str, epoch: int = 1, count: int = 1, grace_s: float = 5.0, **env: str) -> RanksSpec:
    """The spec of `count` ranks of `argv` on this host."""
    return RanksSpec(
        job=JobId(job),
        epoch=epoch,
        name="a test",
        tenant="lab",
        job_class="guaranteed",
        argv=argv,
        cwd="/",
        env=env,
        ranks=tuple(RankSpec(rank, rank, ()) for rank in range(count)),
        world_size=count,
        node_rank=0,
        nodes=(HostId("h1"),),
        master_addr="127.0.0.1",
        master_port=29_500,
        grace_s=grace_s,
    )
