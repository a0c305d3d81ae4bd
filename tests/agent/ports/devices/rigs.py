"""One rig per backend: the same things done to each, so that one suite holds for all."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol

import pytest

from agent.ports.devices import cpu, sim
from agent.ports.devices.backend import Backend
from agent.ports.devices.cpu import CpuDevices
from agent.ports.devices.guards.checkpoints import Checkpoints
from agent.ports.devices.nvidia.nvml import NvmlDevices
from agent.ports.devices.settings import CpuDevice, usable_cores
from agent.ports.devices.sim import DeviceFault, SimDevices, simulated_devices
from agent.ports.processes import procfs
from agent.program import JsonLog
from covey.core.ids import HostId
from covey.core.units import GIB, MIB
from tests.agent.here import Lines, until
from tests.agent.ports.devices.stand_in import Board, StandIn, beneath_pynvml

DEADLINE_S = 1.0
BUSY = "import time\nheld = bytearray(32 << 20)\nend = time.time() + 20\nwhile time.time() < end: pass\n"
IDLE = "import time\nheld = bytearray(32 << 20)\ntime.sleep(20)\n"
HELD = 32 * MIB


class Rig(Protocol):
    """What the suite does to a backend."""

    @property
    def devices(self) -> Backend: ...
    async def use(self, uuid: str, busy: bool) -> int:
        """Start a process that holds `HELD` bytes there, and computes or not; returns its pid."""

    async def end(self, pid: int) -> None: ...
    def break_(self, uuid: str) -> None:
        """Let the device be of no use from now on."""

    def hang(self) -> None: ...
    def answer(self) -> None:
        """Let the driver hang no more."""


class SimRig:
    def __init__(self) -> None:
        self.devices = SimDevices(simulated_devices(HostId("h1"), 2), time.monotonic)
        self._pid = 1000

    async def use(self, uuid: str, busy: bool) -> int:
        self._pid += 1
        self.devices.use(uuid, self._pid, HELD, 0.9 if busy else 0.0)
        return self._pid

    async def end(self, pid: int) -> None:
        self.devices.end(pid)

    def _strike(self, kind: str, uuid: str = "") -> None:
        uuid = uuid or self.devices.devices()[0].uuid
        self.devices.strike(DeviceFault(0.0, uuid, kind))  # type: ignore[arg-type]

    def break_(self, uuid: str) -> None:
        self._strike("lost", uuid)

    def hang(self) -> None:
        self._strike("stuck")

    def answer(self) -> None:
        self._strike("well")


class NvmlRig:
    def __init__(self, driver: StandIn) -> None:
        self.driver = driver
        none = Checkpoints(lambda _pid: (), "/nonexistent/libcuda.so.1")
        self.devices = NvmlDevices(
            JsonLog(Lines()),  # type: ignore[arg-type]
            deadline_s=DEADLINE_S,
            first_s=DEADLINE_S,
            checkpoints=none,
        )
        self._pid = 1000

    def _board(self, uuid: str) -> Board:
        return next(board for board in self.driver.boards if board.uuid == uuid)

    async def use(self, uuid: str, busy: bool) -> int:
        self._pid += 1
        board = self._board(uuid)
        board.processes[self._pid], board.used = HELD, board.used + HELD
        board.shares[self._pid] = 90 if busy else 0
        board.busy = max(board.busy, board.shares[self._pid])
        return self._pid

    async def end(self, pid: int) -> None:
        for board in self.driver.boards:
            board.used -= board.processes.pop(pid, 0)
            board.shares.pop(pid, None)

    def break_(self, uuid: str) -> None:
        self._board(uuid).lost = True

    def hang(self) -> None:
        self.driver.open.clear()

    def answer(self) -> None:
        self.driver.open.set()


class CpuRig:
    """Real processes on cores, marked as the runner marks ranks."""

    def __init__(self) -> None:
        self.cores = sorted(usable_cores())
        listed = [CpuDevice(str(core), "2 GiB") for core in self.cores[:2]]
        self.devices = CpuDevices("h1", listed, f"/run/{os.getpid()}/jobs.sock", lambda: self.cores, DEADLINE_S)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._read: Callable[..., object] | None = None
        self._answers = True

    async def use(self, uuid: str, busy: bool) -> int:
        return await self.start(uuid, BUSY if busy else IDLE)

    async def start(self, uuid: str, code: str) -> int:
        process = self._started(uuid, code)
        await until(lambda: "-c" in procfs.words(process.pid, "cmdline"))
        await asyncio.sleep(0.3)  # so that it holds its memory, and has computed
        return process.pid

    def _started(self, uuid: str, code: str) -> "subprocess.Popen[bytes]":
        number = len(self.processes)
        env = {"COVEY_GPUS": uuid, "COVEY_SOCKET": f"/run/{os.getpid()}/jobs.sock", "COVEY_JOB_ID": f"j{number}"}
        process = subprocess.Popen([sys.executable, "-S", "-c", code], env=env, start_new_session=True)
        self.processes[process.pid] = process
        return process

    async def end(self, pid: int) -> None:
        self.processes[pid].send_signal(signal.SIGCONT)
        self.processes[pid].kill()
        self.processes[pid].wait()

    def break_(self, uuid: str) -> None:
        gone = {core for device in self.devices.devices() if device.uuid == uuid for core in device.cores}
        self.cores = [core for core in self.cores if core not in gone]

    def hang(self) -> None:
        """Let the backend hang: a read of /proc waits for a process that holds its memory map."""
        self._answers, trees = False, self.devices._trees
        self._read = self._read or trees.read

        def read() -> object:
            while not self._answers:
                time.sleep(0.01)
            assert self._read is not None
            return self._read()

        trees.read = read  # type: ignore[assignment,method-assign]

    def answer(self) -> None:
        self._answers = True

    def over(self) -> None:
        self.devices.close()
        for process in self.processes.values():
            process.kill()
            process.wait()


COMPUTES = """
import sys, time, torch
held = torch.zeros(32 << 20, dtype=torch.uint8, device="cuda")
x = torch.ones(4096, 4096, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
end = time.time() + 120
while time.time() < end:
    if sys.argv[1] == "busy":
        for _ in range(20): y = x @ x
        torch.cuda.synchronize()
    else:
        time.sleep(1)
"""


class GpuRig:
    """Real processes on this machine's GPUs, by the real driver, marked as the runner marks ranks."""

    def __init__(self) -> None:
        self.devices = NvmlDevices(JsonLog(Lines()), socket=f"/run/{os.getpid()}/jobs.sock")  # type: ignore[arg-type]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    async def use(self, uuid: str, busy: bool) -> int:
        process = self._started(uuid, busy)
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"ready\n"
        return process.pid

    def _started(self, uuid: str, busy: bool) -> "subprocess.Popen[bytes]":
        env = {**os.environ, "COVEY_GPUS": uuid, "COVEY_SOCKET": f"/run/{os.getpid()}/jobs.sock"}
        env |= {"COVEY_JOB_ID": f"j{len(self.processes)}", "CUDA_VISIBLE_DEVICES": uuid}
        command = [sys.executable, "-c", COMPUTES, "busy" if busy else "idle"]
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, start_new_session=True)
        self.processes[process.pid] = process
        return process

    async def end(self, pid: int) -> None:
        self.processes[pid].kill()
        await asyncio.to_thread(self.processes[pid].wait)
        await asyncio.sleep(1.0)

    def break_(self, uuid: str) -> None:
        pytest.skip("nobody breaks a real device")

    def hang(self) -> None:
        pytest.skip("nobody makes a real driver hang")

    def answer(self) -> None:
        """Do nothing: it never hung."""

    def over(self) -> None:
        self.devices.close()
        for process in self.processes.values():
            process.kill()
            process.wait()


@cache
def has_gpu() -> bool:
    """Whether PyTorch of this Python can use a GPU, asked of a process of its own, so that this one has no CUDA
    context."""
    script = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0


@contextmanager
def rig_of(backend: str) -> Iterator[Rig]:
    match backend:
        case "sim":
            yield SimRig()
        case "gpu":
            if not has_gpu():
                pytest.skip("PyTorch finds no CUDA device here: nothing of a GPU was tried")
            real = GpuRig()
            try:
                yield real
            finally:
                real.over()
        case "cpu":
            rig = CpuRig()
            try:
                yield rig
            finally:
                rig.answer()
                rig.over()
        case _:
            with beneath_pynvml(StandIn(Board("GPU-1"), Board("GPU-2", memory=40 * GIB), limits=True)) as driver:
                nvml = NvmlRig(driver)
                try:
                    yield nvml
                finally:
                    nvml.devices.close()


def quicken(patch: "Callable[[object, str, object], None]") -> None:
    """Have a stuck driver of a story given up as soon as a real one."""
    patch(sim, "STUCK_S", DEADLINE_S)
    patch(cpu, "REFRESH_S", 0.0)
