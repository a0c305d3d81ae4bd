"""A real `aggd` on loopback, in a thread with a loop of its own, for scripts that block."""

import asyncio
import os
import random
import threading
from pathlib import Path
from typing import Any, cast

from agent.ports.clock import RealClock
from agent.ports.memory.pages import MemfdPages
from agent.ports.network.bytes import SocketBytes
from agent.ports.processes.processes import ProgramBase, RealProcesses
from agent.tasks import Tasks
from covey.core.ids import HostId, JobId
from covey.ports.env import Env
from covey.ports.log import Logger
from covey.tensors.direct.owner import DirectOwner
from covey.wire.job import AggregatorAt
from covey.wire.sums import GetStatus, Now, Order, Serve
from plugins.aggregator.datapath.aggd import Aggd, AggdConfig

SECRET = b"sixteen bytes !!"


class Quiet:
    """A log that nobody reads, except for errors."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def debug(self, event: str, **fields: Any) -> None: ...
    def info(self, event: str, **fields: Any) -> None: ...
    def warning(self, event: str, **fields: Any) -> None:
        self.warnings.append(f"{event} {fields}")

    def error(self, event: str, **fields: Any) -> None:
        self.errors.append(f"{event} {fields}")


def bytes_env(run_dir: Path, tasks: Tasks, log: Logger) -> Env:
    """The ports of a byte process: those that it must not touch are absent."""
    absent = cast(Any, None)
    return Env(
        host=HostId("h1"),
        clock=RealClock(),
        rng=random.Random(1),
        entropy=os.urandom,
        spawn=tasks.spawn,
        log=log,
        datagrams=absent,
        links=absent,
        bytes=SocketBytes(log),
        disk=absent,
        processes=RealProcesses(ProgramBase("h1", str(run_dir), str(run_dir), "127.0.0.1")),
        probes=absent,
        pages=MemfdPages(),
        run_dir=str(run_dir),
    )


class AggdThread:
    new_loop = staticmethod(asyncio.new_event_loop)

    def __init__(self, run_dir: Path, **config: Any) -> None:
        self.log = Quiet()
        self.failures: list[str] = []
        settings = {"bind": "127.0.0.1:0", "control": "aggd.sock", "memory_bytes_max": 1 << 30, **config}
        self._config = AggdConfig(**settings)
        self._run_dir = run_dir
        (run_dir / "logs").mkdir(exist_ok=True)
        self._ready = threading.Event()
        self._loop = self.new_loop()
        self._thread = threading.Thread(target=self._main)
        self._thread.start()
        assert self._ready.wait(5)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._work())
        self._loop.close()

    async def _work(self) -> None:
        tasks = Tasks(self.log, lambda name, error: self.failures.append(f"{name}: {error!r}"))
        self.aggd = Aggd(bytes_env(self._run_dir, tasks, self.log), self._config)
        self._task = asyncio.ensure_future(self.aggd.run())
        await self.aggd.listening.wait()
        self._ready.set()
        await asyncio.gather(self._task, return_exceptions=True)
        await tasks.cancel_all()

    def order(self, order: Order) -> Now:
        async def perform() -> Now:
            return self.aggd.perform(order)

        return asyncio.run_coroutine_threadsafe(perform(), self._loop).result(5)

    def serve(self, job: str, epoch: int, workers: int) -> AggregatorAt:
        self.order(Serve(JobId(job), epoch, workers, SECRET))
        return AggregatorAt(JobId(job), epoch, HostId("h1"), self.aggd.address, SECRET, near=self.aggd.near)

    def now(self) -> Now:
        return self.order(GetStatus())

    def kill(self) -> None:
        """Drop every connection at once; the address answers no more."""
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(5)
        assert not self._thread.is_alive()

    def finish(self) -> None:
        self.kill()
        assert not self.failures and not self.log.errors, (self.failures, self.log.errors)


class OwnerThread:
    """A rank that owns tables, in the place of an `AggdThread`."""

    def __init__(self, run_dir: Path, memory_bytes_max: int = 1 << 30) -> None:
        self._memory_bytes_max = memory_bytes_max
        self.log, self.failures = Quiet(), list[str]()
        self.owner = DirectOwner(JobId("j1"), 0, self.log.warning)

    def order(self, order: Order) -> Now:
        return self.owner.perform(order, "127.0.0.1", self._memory_bytes_max)

    def serve(self, job: str, epoch: int, workers: int) -> AggregatorAt:
        now = self.order(Serve(JobId(job), epoch, workers, SECRET))
        return AggregatorAt(JobId(job), epoch, HostId("h1"), now.address, SECRET)

    def now(self) -> Now:
        return self.order(GetStatus())

    def kill(self) -> None:
        self.owner.cut()

    def finish(self) -> None:
        self.owner.close(left=False)
