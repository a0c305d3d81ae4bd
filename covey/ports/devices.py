"""The devices port: the devices that jobs of a host share (GPUs or what replaces them), and the condition of each.

`covey.ports` has these names too, with all other ports.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

Condition = Literal["ok", "degraded", "unknown", "drain", "lost"]


INSTANCE = "MIG-"
"""Prefix of the UUID of every MIG instance, by the driver."""


def is_instance(uuid: str) -> bool:
    """Whether this is the UUID of a GPU instance (MIG): CUDA shows a process at most one of these, as its device 0."""
    return uuid.startswith(INSTANCE)


class Gpu(msgspec.Struct, frozen=True):
    """One GPU of a host, as it is now, also while its driver says nothing of it."""

    index: int
    uuid: str
    model: str
    """Name of the model; empty: not known."""
    memory_total_bytes: int
    """Bytes of device memory; 0: not known."""
    memory_used_bytes: int
    """Bytes of device memory in use; 0 also when not known."""
    utilization: float | None
    """Share of the driver's last sampling window in which the GPU was in use, 0..1; None: the driver does not say."""
    simulated: bool = False
    condition: Condition = "ok"
    why: str = ""
    """What is wrong with the GPU, or what is not known of it and why."""

    @property
    def takes_jobs(self) -> bool:
        """Whether a job may start on this GPU."""
        return self.condition in TAKES_JOBS


class DeviceProcess(msgspec.Struct, frozen=True):
    """What one process uses of one device."""

    pid: int
    memory_bytes: int | None
    """Bytes of device memory; None: the driver does not say."""
    utilization: float | None = None
    """Share of the time since the sample before, 0..1; None: the driver does not say."""


class DeviceSample(msgspec.Struct, frozen=True):
    """The use of one device now."""

    memory_used_bytes: int
    utilization: float | None
    """Share of the time since the sample before in which the device was in use, 0..1; None: the driver does not
    say."""
    processes: tuple[DeviceProcess, ...] = ()


TAKES_JOBS: frozenset[Condition] = frozenset({"ok", "degraded"})


class DeviceHealth(msgspec.Struct, frozen=True):
    """The condition of a device, and why. `degraded`: works, but somebody should look at it; `unknown`: the driver does
    not tell what is needed to use it, so jobs there are left alone and no new one comes; `drain`: jobs there may end,
    no new one comes; `lost`: cannot be used."""

    condition: Condition = "ok"
    why: str = ""

    @property
    def takes_jobs(self) -> bool:
        """Whether a job may start on this device."""
        return self.condition in TAKES_JOBS


class Device(msgspec.Struct, frozen=True):
    """One GPU, one MIG instance, or a set of cores in the place of one."""

    uuid: str
    model: str
    memory_bytes: int
    backend: str
    """Where the device comes from: `nvml`, `cpu` or `sim`."""
    parent: str = ""
    """UUID of the GPU that the device is an instance of; empty: it is no instance."""
    cores: tuple[int, ...] = ()
    """Cores to which ranks are bound, for a `cpu` device."""
    can: frozenset[str] = frozenset()
    """What the device can do, of `utilization`, `process memory`, `process utilization`, `hard limit`, `suspend`,
    `events`."""
    number: int | None = None
    """Number of its device file (/dev/nvidiaN), of the GPU's for an instance; None: not known, or it has none."""
    caps: tuple[int, ...] = ()
    """Numbers of the files (/dev/nvidia-caps/nvidia-capN) that open an instance."""


class Devices(Protocol):
    """The devices that jobs of this host share. Calls may take seconds (a driver in trouble) and then raise
    TimeoutError; they never block the loop. OSError: the device or its driver failed. All backends pass one suite of
    tests."""

    def devices(self) -> Sequence[Device]:
        """All devices whose memory is known, at once, also while the driver says nothing of them."""

    async def sample(self, uuid: str) -> DeviceSample: ...
    async def health(self, uuid: str) -> DeviceHealth: ...
    async def events(self) -> Sequence[tuple[str, DeviceHealth]]:
        """What happened to devices since the last call, (uuid, new condition); waits up to a second for the first."""

    async def set_hard_limit(self, uuid: str, pid: int, limit_bytes: int | None) -> bool:
        """Let the driver limit this process to `limit_bytes` from now on (None: no limit). Returns whether it does."""

    async def suspend(self, pid: int) -> bool:
        """Suspend the rank with this pid: whether it and all that it started hold no time on their devices any more,
        and no memory where the driver can do that. The suspension ends by itself 10 s after the last call, or when this
        agent dies: no rank stays suspended because its agent died."""

    async def resume(self, pid: int) -> bool: ...
