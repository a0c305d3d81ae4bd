"""What GPUs this host has and what they do now, by NVML; and the probes port.

NVML calls can take seconds (first call, a GPU in trouble), so they run in a thread, at most once a second, and
`gpus()` answers at once with the newest reading. Without a driver there are no GPUs, and it is looked for again once a
minute: a driver may be installed while the agent runs.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from agent.ports.memory import memory_now
from covey.ports import Gpu, Logger, MemoryNow

REFRESH_S = 1.0
NO_DRIVER_S = 60.0
MEMORY_S = 0.1
"""A reading of /proc and the cgroups is good this long."""


def read_nvml(nvml: Any) -> Sequence[Gpu]:
    """Every GPU of an initialised NVML. A GPU that fails is left out; a figure the GPU does not have is 0."""
    found: list[Gpu] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid, model = _text(nvml.nvmlDeviceGetUUID(device)), _text(nvml.nvmlDeviceGetName(device))
            memory = nvml.nvmlDeviceGetMemoryInfo(device)
            total, used = int(memory.total), int(memory.used)
        except nvml.NVMLError:
            continue
        utilization = 0.0
        with contextlib.suppress(nvml.NVMLError):  # not to be had while MIG is on
            utilization = nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100
        found.append(Gpu(index, uuid, model, total, used, utilization))
    return tuple(found)


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


class RealProbes:
    """`covey.ports.Probes`. With `simulated` GPUs, NVML is not asked."""

    def __init__(self, log: Logger, simulated: Sequence[Gpu] = (), nvml: Any = None) -> None:
        self._log = log
        self._simulated = tuple(simulated)
        self._nvml = nvml
        self._initialised = False
        self._gpus: Sequence[Gpu] = self._simulated
        self._reading: Future[Sequence[Gpu]] | None = None
        self._read_again_s = 0.0
        self._memory: tuple[float, MemoryNow] | None = None

    async def start_up(self, timeout_s: float = 5.0) -> None:
        """Wait for the first reading, so that a starting agent does not publish that it has no GPUs."""
        self.gpus()
        if self._reading is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await asyncio.wrap_future(self._reading)
            self._take()

    def gpus(self) -> Sequence[Gpu]:
        if self._simulated:
            return self._simulated
        self._take()
        if self._reading is None and time.monotonic() >= self._read_again_s:
            self._reading = Future()
            self._reading.set_running_or_notify_cancel()  # from now on a caller that stops waiting cannot cancel it
            # A daemon: a driver that hangs must not keep the agent from ending.
            threading.Thread(target=self._read_into, args=(self._reading,), name="nvml", daemon=True).start()
        return self._gpus

    def memory(self) -> MemoryNow:
        now_s = time.monotonic()
        if self._memory is None or now_s - self._memory[0] > MEMORY_S:
            self._memory = now_s, memory_now()
        return self._memory[1]

    def _take(self) -> None:
        if self._reading is not None and self._reading.done():
            self._gpus = self._reading.result()
            self._reading = None
            self._read_again_s = time.monotonic() + (REFRESH_S if self._initialised else NO_DRIVER_S)

    def _read_into(self, reading: "Future[Sequence[Gpu]]") -> None:
        """In the thread. The reading ends also when NVML raises."""
        found: Sequence[Gpu] = ()
        try:
            found = self._read()
        finally:
            reading.set_result(found)

    def _read(self) -> Sequence[Gpu]:
        if self._nvml is None:
            import pynvml

            self._nvml = pynvml
        try:
            if not self._initialised:
                self._nvml.nvmlInit()
                self._initialised = True
                self._log.info("NVML found", driver=_text(self._nvml.nvmlSystemGetDriverVersion()))
            return read_nvml(self._nvml)
        except self._nvml.NVMLError as error:
            if self._initialised:
                self._log.warning("NVML failed", why=str(error))
                with contextlib.suppress(self._nvml.NVMLError):
                    self._nvml.nvmlShutdown()
            self._initialised = False
            return ()
