"""Simulated clocks and probes of one host: monotonic time with its own rate, wall time with its own error."""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from agent.ports.devices.sim import CAN, SimDevices
from covey.core.units import GIB
from covey.ports.devices import Device, Gpu
from covey.ports.probes import CardNow, MemoryNow

WALL_START_S = 1_800_000_000.0
"""Seconds since 1970 at which every simulated story begins."""


AGAIN_S = 0.05
"""Seconds after which a timer is looked at again whose clock stands still."""


class Time(Protocol):
    """The world's time, in seconds."""

    now: float


class SimClock:
    """The `Clock` of one host. `now_s` never goes back, whatever is done to it; `wall_s` may jump."""

    def __init__(self, world: Time, start_s: float) -> None:
        self._world = world
        self._base_world = world.now
        self._base_local = start_s
        self.rate = 1.0
        """Local seconds per true second; 1.01 is a clock that drifts by one percent."""
        self._stands = False
        self.wall_error_s = 0.0
        self.skews: dict[int, tuple[float, float]] = {}
        """Present errors of the clock, by number: seconds of wall time, and a factor on the rate."""

    def now_s(self) -> float:
        if self._stands:
            return self._base_local
        return self._base_local + (self._world.now - self._base_world) * self.rate

    def wall_s(self) -> float:
        return WALL_START_S + self._world.now + self.wall_error_s

    def boot_s(self) -> float:
        return self.now_s()

    def cpu_s(self) -> float:
        return 0.0

    def world_time(self, local_s: float) -> float:
        """The world's time at which `now_s` will read `local_s`."""
        since = self._world.now + AGAIN_S if self._stands else self._base_world
        return since + (local_s - self._base_local) / self.rate

    def skew(self, number: int, wall_s: float, rate: float) -> None:
        """Add an error to the clock: several add up, and each ends by itself."""
        self.skews[number] = (wall_s, rate)
        self._apply()

    def end_skew(self, number: int | None = None) -> None:
        """End this skew (None: all); does nothing when it has ended before."""
        if number is None:
            self.skews.clear()
        self.skews.pop(-1 if number is None else number, None)
        self._apply()

    def stand_still(self) -> None:
        """Stop until `go_on`, as the clocks of a virtual machine do while it is suspended."""
        self.drift(self.rate)
        self._stands = True

    def go_on(self) -> None:
        self._base_world, self._stands = self._world.now, False

    def _apply(self) -> None:
        self.wall_error_s = sum(wall_s for wall_s, _ in self.skews.values())
        self.drift(math.prod(rate for _, rate in self.skews.values()))

    def drift(self, rate: float) -> None:
        """Run at another rate from now on, without a jump."""
        local = self.now_s()
        self._base_world, self._base_local, self.rate = self._world.now, local, rate


class SimLoopStalls:
    """The port `covey.ports.probes.LoopStalls`: callbacks take no simulated time."""

    count = waits_count = 0
    longest_s = waits_longest_s = 0.0


class SimProbes:
    """The `Probes` of one host: what it has, less what is used and what a fault filled."""

    def __init__(
        self,
        host: str,
        gpus: int,
        now_s: Callable[[], float],
        alive: Callable[[int], bool] = lambda pid: True,
        memory_bytes: int = 64 * GIB,
        model: str = "SimGPU 16GB",
    ) -> None:
        """Create the probes. `now_s`: the world's time, by which faults of devices come; `alive`: whether a process is
        still there."""
        uuids = [f"GPU-{host}-{index}" for index in range(gpus)]
        self.devices = SimDevices([Device(uuid, model, 16 * GIB, "sim", can=CAN) for uuid in uuids], now_s, alive=alive)
        """Devices of the host: stories set what processes use there, and strike them with faults."""
        self.total_bytes = memory_bytes
        self.used_bytes = 4 * GIB
        self.card_bytes = 0
        """Bytes that its card has carried in each direction, as a story says."""
        self.filled_bytes = 0
        """Bytes taken by `fill`."""
        self._stalls: Callable[[], object] = lambda: None

    def gpus(self) -> Sequence[Gpu]:
        return self.devices.gpus()

    def gpus_unlisted(self) -> str:
        return self.devices.unlisted()

    def forget_gpu(self, uuid: str) -> str:
        return self.devices.forget(uuid)

    def card(self, address: str) -> CardNow:
        return CardNow("sim0", self.card_bytes, self.card_bytes)

    def cores(self) -> int:
        return 1

    def watch_memory(self, stalls: Callable[[], None]) -> str:
        loop = asyncio.get_running_loop()
        self._stalls = lambda: loop.call_soon(stalls)  # the newest agent; a dead one hears nothing
        return ""

    def stay_in_memory(self, flushes: bool) -> str:
        return ""

    def swap_lacks(self, helper: str) -> str:
        return f"no swap helper listens at {helper}"

    def keep_heap(self, size_bytes: int) -> str:
        return ""

    def watch_loop(self) -> "SimLoopStalls":
        return SimLoopStalls()

    def fill(self, size_bytes: int) -> None:
        """Let a fault take `size_bytes` of memory; where too little is left, tasks wait for it at once."""
        self.filled_bytes = size_bytes
        if self.memory().pressure_some_avg10:
            self._stalls()

    def memory(self) -> MemoryNow:
        available = max(0, self.total_bytes - self.used_bytes - self.filled_bytes)
        pressure = 40.0 if available < self.total_bytes // 20 else 0.0
        return MemoryNow(total_bytes=self.total_bytes, available_bytes=available, pressure_some_avg10=pressure)
