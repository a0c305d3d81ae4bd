"""The sharing of one host at work: the real service on the real jobs.sock, real processes as ranks; the caller of
`come` takes the scheduler's place."""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from agent.jobs.socket.jobs_socket import JobSocket
from covey import hooks as attach
from covey.core.events import Fact
from covey.core.ids import JobId
from covey.core.units import GIB
from covey.ports.devices import Device, DeviceHealth, DeviceProcess, DeviceSample
from covey.wire.job import Frame, Stopping
from plugins.base import JobPeer, RankSpec, RanksSpec
from plugins.facts import (
    GpusMeasured,
    JobKind,
    KindChanged,
    RanksComing,
    RanksEnded,
    RanksMayStart,
    RanksStarted,
    RanksUnfit,
)
from plugins.sharing.machine.ladder import Ladder
from plugins.sharing.policy.settings import SharingSettings
from plugins.sharing.service.main import SharingService
from tests.agent.here import Here, here, ranks, until

ROOT = Path(__file__).parents[3]


class CoreDevice:
    """One device, a core: the ranks here are its processes. It is the `covey.ports.devices.Devices` of a harness."""

    def __init__(self, memory_bytes: int) -> None:
        self.device = Device("CPU-h1-0", "a core", memory_bytes, "cpu", can=frozenset({"suspend"}))
        self.pids: set[int] = set()
        self.news: asyncio.Queue[tuple[str, DeviceHealth]] = asyncio.Queue()
        self.condition = DeviceHealth()
        self.samples = 0
        """How often the device was looked at."""

    def devices(self) -> Sequence[Device]:
        return (self.device,)

    async def sample(self, uuid: str) -> DeviceSample:
        self.samples += 1
        return DeviceSample(0, 0.5, tuple(DeviceProcess(pid, None) for pid in sorted(self.pids)))

    async def health(self, uuid: str) -> DeviceHealth:
        return self.condition

    async def events(self) -> Sequence[tuple[str, DeviceHealth]]:
        return [await self.news.get()]

    async def set_hard_limit(self, uuid: str, pid: int, limit_bytes: int | None) -> bool:
        return False

    async def suspend(self, pid: int) -> bool:
        os.kill(pid, signal.SIGSTOP)
        return True

    async def resume(self, pid: int) -> bool:
        os.kill(pid, signal.SIGCONT)
        return True


class OnePidRunner:
    """The part of `plugins.base.Runner` that jobs.sock and sharing ask for."""

    def __init__(self) -> None:
        self.specs: dict[tuple[JobId, int], RanksSpec] = {}
        self.pids: dict[tuple[JobId, int], dict[int, int]] = {}
        self.stopped: list[tuple[JobId, str]] = []
        self.ending: set[tuple[JobId, int]] = set()
        """Jobs, with their epochs, that were asked to end."""

    def token(self, job: JobId, epoch: int) -> str | None:
        return "secret" if (job, epoch) in self.specs else None

    def spec(self, job: JobId, epoch: int) -> RanksSpec | None:
        return self.specs.get((job, epoch))

    def runs_as(self, spec: RanksSpec) -> int:
        return -1

    def other_uids(self) -> set[int]:
        return set()

    def stopping(self, job: JobId, epoch: int) -> Stopping | None:
        return None

    def joins(self, job: JobId, epoch: int, rank: int) -> None:
        pass

    def is_ending(self, job: JobId, epoch: int) -> bool:
        return (job, epoch) in self.ending

    async def extend(self, job: JobId, epoch: int, seconds: float) -> None:
        raise AssertionError("nobody stops here")

    async def kept(self) -> Sequence[RanksSpec]:
        return list(self.specs.values())

    def running(self) -> Mapping[tuple[JobId, int], Mapping[int, int]]:
        return self.pids

    async def stop(self, job: JobId, epoch: int, grace_s: float, why: str) -> None:
        self.stopped.append((job, why))
        for pid in self.pids.get((job, epoch), {}).values():
            os.kill(pid, signal.SIGKILL)


class LiveHost:
    """A `plugins.base.Host` for one life of the service, and the next."""

    def __init__(self, host: Here, devices: CoreDevice, settings: SharingSettings, controller: type[Ladder]) -> None:
        self.here, self.devices = host, devices
        self.id, self.boot, self.advertise = host.env.host, 1, "127.0.0.1"
        probes = _Probes(host.env.probes, devices)
        self.env = replace(host.env, probes=probes)
        self.runner: Any = OnePidRunner()
        self.told: list[Fact] = []
        self.notes: list[tuple[str, str, str]] = []
        self.processes: dict[JobId, subprocess.Popen[bytes]] = {}
        self._settings, self._controller = settings, controller
        self._tasks: list[asyncio.Task[Any]] = []
        self.reads = 0
        """How often the service has read the pages of ranks."""
        self.service: SharingService
        self.socket: JobSocket

    # ---- what the service asks of it ----

    def settings(self, kind: type[Any]) -> Any:
        return self._settings

    def peers(self, job: JobId) -> Sequence[JobPeer]:
        return self.socket.peers(job)

    def publish(self, fact: Fact) -> None:
        if not isinstance(fact, GpusMeasured):
            self.told.append(fact)

    def note(self, subject: str, event: str, reason: str, key: str = "") -> None:
        self.notes.append((subject, event, reason))

    # ---- the agent ----

    async def begin(self) -> None:
        """Start the agent's part: its socket, its service; ranks that run are found."""

        async def deliver(peer: JobPeer, frame: Frame) -> None:
            raise AssertionError(f"{frame} is nobody's here")

        def spawn(name: str, work: Any) -> object:
            self._tasks.append(asyncio.get_running_loop().create_task(work, name=name))
            return self._tasks[-1]

        self.env = replace(self.env, spawn=spawn)
        self.service = SharingService(self)  # type: ignore[arg-type]
        self.service.machine.controller = self._controller
        read = self.service._read

        def counted() -> None:
            read()
            self.reads += 1

        self.service._read = counted  # type: ignore[method-assign]
        self.socket = JobSocket(self.env, self.runner, self.service.on_fact, deliver)
        await self.socket.start()
        await self.service.start()

    async def end(self) -> None:
        """Let the agent die: nothing is said to any rank."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await self.socket.stop()

    # ---- the scheduler ----

    def coming(self, job: str, kind: JobKind, memory_bytes: int = 0, running: bool = False, epoch: int = 1) -> None:
        gpus: dict[int, tuple[str, ...]] = {0: (self.devices.device.uuid,)}
        self.service.on_fact(RanksComing(JobId(job), epoch, kind, gpus, memory_bytes, running))

    def change(self, job: str, kind: JobKind, grant: int) -> None:
        self.service.on_fact(KindChanged(JobId(job), 1, kind, grant))

    def may_start(self, job: str) -> bool:
        return RanksMayStart(JobId(job), 1) in self.told

    def given_back(self, job: str) -> str | None:
        """Why the job cannot be on this host; None: it can."""
        return next((f.why for f in self.told if isinstance(f, RanksUnfit) and f.job == job), None)

    async def come(self, job: str, kind: JobKind, argv: Sequence[str], memory_bytes: int = 0, **env: str) -> None:
        """Let a job come, wait until it may start, and start it on core 0."""
        self.coming(job, kind, memory_bytes)
        await until(lambda: self.may_start(job), 60.0)
        asked = {"COVEY_GPU_MEMORY": str(memory_bytes)} if memory_bytes else {}
        self.start(job, argv, **asked, **env)

    def start(self, job: str, argv: Sequence[str], **env: str) -> None:
        key = (JobId(job), 1)
        gpus = (RankSpec(0, 0, (self.devices.device.uuid,)),)
        self.runner.specs[key] = msgspec.structs.replace(ranks(job, *argv), ranks=gpus)
        given = {
            **os.environ,
            "COVEY_SOCKET": f"{self.env.run_dir}/jobs.sock",
            "COVEY_JOB_ID": job,
            "COVEY_RANK": "0",
            "COVEY_WORLD_SIZE": "1",
            "COVEY_EPOCH": "1",
            "COVEY_TABLES": "1",
            "COVEY_TOKEN": "secret",
            "COVEY_HOST": "h1",
            "COVEY_GPUS": self.devices.device.uuid,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{attach.SITE}{os.pathsep}{ROOT}",
            **env,
        }
        process = self.processes[JobId(job)] = subprocess.Popen(
            argv, env=given, cwd=ROOT, start_new_session=True, preexec_fn=_on_core_0
        )
        self.devices.pids.add(process.pid)
        self.runner.pids[key] = {0: process.pid}
        self.service.on_fact(RanksStarted(JobId(job), 1, {0: process.pid}))

    def kill(self, job: str) -> None:
        """Kill the job's process, and tell the service, as the runner does."""
        process = self.processes.pop(JobId(job))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.devices.pids.discard(process.pid)
        self.runner.specs.pop((JobId(job), 1), None)
        self.runner.pids.pop((JobId(job), 1), None)
        self.service.on_fact(RanksEnded(JobId(job), 1, {0: -9}, ""))

    def state(self) -> str:
        return self.service.machine.gpus[self.devices.device.uuid].state


_prctl = ctypes.CDLL(None).prctl
PR_SET_PDEATHSIG = 1


def _on_core_0() -> None:
    """Pin the new process to core 0; it does not outlive this one, whose end might be a signal."""
    os.sched_setaffinity(0, {0})
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class _Probes(msgspec.Struct, frozen=True):
    inner: Any
    devices: CoreDevice

    def gpus(self) -> Any:
        return self.inner.gpus()

    def gpus_unlisted(self) -> str:
        return str(self.inner.gpus_unlisted())

    def forget_gpu(self, uuid: str) -> str:
        return str(self.inner.forget_gpu(uuid))

    def memory(self) -> Any:
        return self.inner.memory()

    def watch_memory(self, stalls: Any) -> str:
        return str(self.inner.watch_memory(stalls))

    def card(self, address: str) -> Any:
        return self.inner.card(address)

    def cores(self) -> int:
        return 1

    def stay_in_memory(self, flushes: bool) -> str:
        return str(self.inner.stay_in_memory(flushes))

    def swap_lacks(self, helper: str) -> str:
        return str(self.inner.swap_lacks(helper))

    def keep_heap(self, size_bytes: int) -> str:
        return str(self.inner.keep_heap(size_bytes))

    def watch_loop(self) -> Any:
        return self.inner.watch_loop()


@contextlib.asynccontextmanager
async def live_host(
    memory_bytes: int = 2 * GIB,
    settings: SharingSettings | None = None,
    controller: type[Ladder] = Ladder,
    device: CoreDevice | None = None,
) -> AsyncIterator[LiveHost]:
    """A host with one device, whose processes are killed at the end. `device`: another than a core with
    `memory_bytes`."""
    with tempfile.TemporaryDirectory(prefix="covey-") as directory:
        async with here(directory) as there:
            host = LiveHost(there, device or CoreDevice(memory_bytes), settings or SharingSettings(), controller)
            await host.begin()
            try:
                yield host
            finally:
                for job in list(host.processes):
                    host.kill(job)
                await host.end()


PYTHON = sys.executable
