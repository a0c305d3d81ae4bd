"""The devices port: what jobs of a host share, GPUs or what stands in their place, and how each is.

`covey.ports` has these names too, with all other ports.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

Condition = Literal["ok", "degraded", "unknown", "drain", "lost"]


INSTANCE = "MIG-"
"""With which the driver begins the UUID of every MIG instance."""


def is_instance(uuid: str) -> bool:
    """Whether this is an instance of a GPU (MIG): CUDA shows a process one of these at most, as its device 0."""
    return uuid.startswith(INSTANCE)


class Gpu(msgspec.Struct, frozen=True):
    """One GPU that its host has, as it is now, also while its driver says nothing of it."""

    index: int
    uuid: str
    model: str
    """Empty: not known."""
    memory_total_bytes: int
    """0: not known."""
    memory_used_bytes: int
    """0 also where it is not known."""
    utilization: float
    """0..1 over the driver's last sampling window; 0 also where it is not known."""
    simulated: bool = False
    condition: Condition = "ok"
    why: str = ""
    """What is wrong with it, or what is not known of it and why."""

    @property
    def takes_jobs(self) -> bool:
        """Whether a job may start there."""
        return self.condition in TAKES_JOBS


class DeviceProcess(msgspec.Struct, frozen=True):
    """What one process uses of one device."""

    pid: int
    memory_bytes: int | None
    """None: the driver does not say."""
    utilization: float | None = None
    """0..1 since the sample before; None: the driver does not say."""


class DeviceSample(msgspec.Struct, frozen=True):
    """One device now."""

    memory_used_bytes: int
    utilization: float
    """0..1 since the sample before."""
    processes: tuple[DeviceProcess, ...] = ()


TAKES_JOBS: frozenset[Condition] = frozenset({"ok", "degraded"})


class DeviceHealth(msgspec.Struct, frozen=True):
    """`degraded`: works, and somebody should look at it; `unknown`: the driver does not tell what is needed to use it,
    so what runs there is left alone and nothing new comes; `drain`: what runs may end, nothing new; `lost`: of no
    use."""

    condition: Condition = "ok"
    why: str = ""

    @property
    def takes_jobs(self) -> bool:
        """Whether a job may start there."""
        return self.condition in TAKES_JOBS


class Device(msgspec.Struct, frozen=True):
    """One GPU, one MIG instance, or a set of cores in the place of one."""

    uuid: str
    model: str
    memory_bytes: int
    backend: str
    """`nvml`, `cpu` or `sim`."""
    parent: str = ""
    """UUID of the GPU that it is an instance of."""
    cores: tuple[int, ...] = ()
    """Of a `cpu` device: its ranks are bound to these."""
    can: frozenset[str] = frozenset()
    """Of `process memory`, `process utilization`, `hard limit`, `suspend`, `events`."""


class Devices(Protocol):
    """The devices that jobs of this host share. Calls may take seconds (a driver in trouble) and then raise
    TimeoutError; they never block the loop. OSError: the device or its driver failed. One suite of tests holds for all
    backends."""

    def devices(self) -> Sequence[Device]:
        """Those whose memory is known, at once, also while the driver says nothing of them."""

    async def sample(self, uuid: str) -> DeviceSample: ...
    async def health(self, uuid: str) -> DeviceHealth: ...
    async def events(self) -> Sequence[tuple[str, DeviceHealth]]:
        """What happened to devices since the last call, (uuid, what it means); waits up to a second for the first."""

    async def set_hard_limit(self, uuid: str, pid: int, limit_bytes: int | None) -> bool:
        """Whether the driver holds this process to so much from now on (None: no limit)."""

    async def suspend(self, pid: int) -> bool:
        """Whether the rank with this pid, and all that it started, holds no time, and where the driver can no memory,
        of its devices any more. That ends by itself 10 s after the last call, or when this agent dies: nobody stays
        suspended because his agent did."""

    async def resume(self, pid: int) -> bool: ...
