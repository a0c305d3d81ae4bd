"""The probes port: what GPUs this host has, what they do now, and how much memory is left."""

import time
from collections.abc import Callable, Sequence

from agent.ports.devices.backend import Backend
from agent.ports.loop_stalls import RealLoopStalls
from agent.ports.memory import lock as memory_lock
from agent.ports.memory import stalls as memory_stalls
from agent.ports.memory import swap_seen
from agent.ports.network.card import card_now
from agent.ports.processors import cores_now
from covey.kernel.host_memory import memory_now
from covey.ports.devices import Gpu
from covey.ports.probes import CardNow, MemoryNow

MEMORY_S = 0.1
"""Seconds for which a reading of /proc and the cgroups is good."""


class RealProbes:
    """The `covey.ports.probes.Probes` of this machine."""

    def __init__(self, devices: Backend) -> None:
        self.devices = devices
        self._memory: tuple[float, MemoryNow] | None = None

    def gpus(self) -> Sequence[Gpu]:
        return self.devices.gpus()

    def gpus_unlisted(self) -> str:
        return self.devices.unlisted()

    def forget_gpu(self, uuid: str) -> str:
        return self.devices.forget(uuid)

    def memory(self) -> MemoryNow:
        now_s = time.monotonic()
        if self._memory is None or now_s - self._memory[0] > MEMORY_S:
            self._memory = now_s, memory_now()
        return self._memory[1]

    def card(self, address: str) -> CardNow | None:
        return card_now(address)

    def cores(self) -> int:
        return cores_now()

    def watch_memory(self, stalls: Callable[[], None]) -> str:
        def told() -> None:
            self._memory = None
            stalls()

        return memory_stalls.watch(told)

    def stay_in_memory(self, flushes: bool) -> str:
        return memory_lock.stay_in_memory(flushes)

    def swap_lacks(self, helper: str) -> str:
        return swap_seen.lacks(helper)

    def keep_heap(self, size_bytes: int) -> str:
        return memory_lock.keep_heap(size_bytes)

    def watch_loop(self) -> RealLoopStalls:
        return RealLoopStalls()
