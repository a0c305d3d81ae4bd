"""Devices of a story: what a process uses, and which fault happens when, said beforehand or during the story.

The simulator's hosts have these, in virtual time, and so has a real agent with `[gpus] simulated = N`, where nothing is
ever used. A fault is one of

    xid     the driver reported error `number`                    health as of a real device (health.py)
    ecc     `number` uncorrectable errors of memory more          the same
    lost    the device fell off the bus: calls about it fail      OSError
    stuck   the driver does not answer, about any device          TimeoutError, after the deadline
    well    all of that is over
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from agent.ports.devices import bounds, health
from covey.core.ids import HostId
from covey.core.units import GIB
from covey.ports.devices import Device, DeviceHealth, DeviceProcess, DeviceSample, Gpu

MODEL = "simulated GPU"
CAN = frozenset({"utilization", "process memory", "process utilization", "hard limit", "suspend", "events"})
STUCK_S = 5.0
"""Seconds for which a call waits for a driver that is stuck."""
LOOK_S = 1.0
LEASE_S = 10.0
"""How long a suspension lasts unless it is said again, on real devices too (suspensions.py)."""


class DeviceFault(msgspec.Struct, frozen=True):
    """Something that happens to one device."""

    at_s: float
    """When the fault happens, by the clock that the devices were made with."""
    uuid: str
    kind: Literal["xid", "ecc", "lost", "stuck", "well"]
    number: int = 0


class SimUse(msgspec.Struct):
    """What one process does with one device."""

    memory_bytes: int
    utilization: float
    limit_bytes: int | None = None


def simulated_devices(host: HostId, count: int, memory_bytes: int = 16 * GIB) -> tuple[Device, ...]:
    """`count` devices, with UUIDs that mark them as simulated."""
    return tuple(Device(f"GPU-sim-{host}-{index}", MODEL, memory_bytes, "sim", can=CAN) for index in range(count))


class SimDevices:
    """The simulated `agent.ports.devices.backend.Backend`."""

    def __init__(
        self,
        devices: Sequence[Device],
        now_s: Callable[[], float],
        script: Sequence[DeviceFault] = (),
        alive: Callable[[int], bool] = lambda pid: True,
    ) -> None:
        """`alive`: whether a process is still there; what one used ends with it."""
        self._devices = {device.uuid: device for device in devices}
        self._now_s, self._alive = now_s, alive
        self._script = sorted(script, key=lambda fault: (fault.at_s, fault.uuid))
        self._uses: dict[str, dict[int, SimUse]] = {uuid: {} for uuid in self._devices}
        self._counts: dict[str, health.Counts] = {}
        self._lost: set[str] = set()
        self._stuck: set[str] = set()
        self._told: dict[str, DeviceHealth] = {}
        self._suspended: dict[int, float] = {}
        """Suspended processes, and until when."""

    # ---- the story ----

    def use(self, uuid: str, pid: int, memory_bytes: int, utilization: float) -> None:
        """Let a process use this from now on. One that is held to a limit has no more memory than that."""
        known = self._uses[uuid].get(pid)
        self._uses[uuid][pid] = SimUse(memory_bytes, utilization, None if known is None else known.limit_bytes)

    def end(self, pid: int) -> None:
        """Let this process use nothing any more."""
        for uses in self._uses.values():
            uses.pop(pid, None)
        self._suspended.pop(pid, None)

    @property
    def uuids(self) -> Sequence[str]:
        """The UUIDs of all devices, those that fell off the bus included."""
        return tuple(self._devices)

    def heal(self) -> None:
        """Let nothing be wrong any more, and no fault happen that was to come."""
        self._script.clear()
        for uuid in self._devices:
            self._happen(DeviceFault(0.0, uuid, "well"))

    def strike(self, fault: DeviceFault) -> None:
        """Let a fault happen at its time, which may be now."""
        self._script = sorted([*self._script, fault], key=lambda one: (one.at_s, one.uuid))

    def _catch_up(self) -> None:
        while self._script and self._script[0].at_s <= self._now_s():
            self._happen(self._script.pop(0))
        for pid in {pid for uses in self._uses.values() for pid in uses if not self._alive(pid)}:
            self.end(pid)

    def _happen(self, fault: DeviceFault) -> None:
        counts = self._counts.get(fault.uuid, health.Counts())
        match fault.kind:
            case "xid":
                self._counts[fault.uuid] = msgspec.structs.replace(
                    counts, xid=health.worse_xid(counts.xid, fault.number)
                )
            case "ecc":
                more = counts.uncorrected + max(0, fault.number)
                self._counts[fault.uuid] = msgspec.structs.replace(counts, uncorrected=more)
            case "lost":
                self._lost.add(fault.uuid)
            case "stuck":
                self._stuck.add(fault.uuid)
            case "well":
                self._counts.pop(fault.uuid, None)
                self._lost.discard(fault.uuid)
                self._stuck.discard(fault.uuid)

    # ---- Backend ----

    async def start_up(self, timeout_s: float = 5.0) -> None:
        """Return at once."""

    def gpus(self) -> Sequence[Gpu]:
        self._catch_up()
        return tuple(self._gpu(index, device) for index, device in enumerate(self._devices.values()))

    def _gpu(self, index: int, device: Device) -> Gpu:
        now, how = self._sampled(device), self._health(device.uuid)
        return Gpu(
            index=index,
            uuid=device.uuid,
            model=device.model,
            memory_total_bytes=device.memory_bytes,
            memory_used_bytes=now.memory_used_bytes,
            utilization=now.utilization,
            simulated=True,
            condition=how.condition,
            why=how.why,
        )

    def unlisted(self) -> str:
        """Return the empty string: a story lists all devices."""
        return ""

    def forget(self, uuid: str) -> str:
        """Forget a device's errors, as after a reset."""
        self._catch_up()
        counts = self._counts.pop(uuid, None)
        return f"XID {counts.xid}" if counts is not None and counts.xid else ""

    def close(self) -> None:
        """Close nothing: nothing runs."""

    # ---- Devices ----

    def devices(self) -> Sequence[Device]:
        self._catch_up()
        return tuple(self._devices.values())

    async def sample(self, uuid: str) -> DeviceSample:
        await self._answer()
        return self._sampled(self._known(uuid))

    async def health(self, uuid: str) -> DeviceHealth:
        self._catch_up()
        if uuid not in self._devices:
            raise OSError(f"there is no device {uuid!r} here")
        return self._health(uuid)

    async def events(self) -> Sequence[tuple[str, DeviceHealth]]:
        if not (found := self._changes()):
            await asyncio.sleep(LOOK_S)
            found = self._changes()
        return found

    async def set_hard_limit(self, uuid: str, pid: int, limit_bytes: int | None) -> bool:
        await self._answer()
        self._known(uuid)
        known = self._uses[uuid].get(pid)
        if known is not None:
            known.limit_bytes = limit_bytes
        return known is not None

    async def suspend(self, pid: int) -> bool:
        await self._answer()
        there = any(pid in uses for uses in self._uses.values())
        if there:
            self._suspended[pid] = self._now_s() + LEASE_S
        return there

    async def resume(self, pid: int) -> bool:
        await self._answer()
        self._suspended.pop(pid, None)
        return any(pid in uses for uses in self._uses.values())

    # ---- within ----

    async def _answer(self) -> None:
        """Answer as the driver does: TimeoutError from one that is stuck."""
        self._catch_up()
        if self._stuck:
            await asyncio.sleep(STUCK_S)
            raise TimeoutError(f"the driver did not answer within {STUCK_S:g} s")

    def _known(self, uuid: str) -> Device:
        if uuid not in self._devices:
            raise OSError(f"there is no device {uuid!r} here")
        if uuid in self._lost:
            raise OSError(f"{uuid} has fallen off the bus")
        return self._devices[uuid]

    def _sampled(self, device: Device) -> DeviceSample:
        uses = sorted(self._uses[device.uuid].items())
        processes = [DeviceProcess(pid, *self._of(pid, use)) for pid, use in uses]
        memory = sum(process.memory_bytes or 0 for process in processes)
        utilization = sum(process.utilization or 0.0 for process in processes)
        return bounds.sample(memory, utilization, processes, device.memory_bytes)

    def _of(self, pid: int, use: SimUse) -> tuple[int, float]:
        """What a process uses. A suspended process keeps nothing: its memory is in the host's, as after a
        checkpoint."""
        if self._now_s() < self._suspended.get(pid, -math.inf):
            return 0, 0.0
        held = use.memory_bytes if use.limit_bytes is None else min(use.memory_bytes, use.limit_bytes)
        return held, use.utilization

    def _health(self, uuid: str) -> DeviceHealth:
        if uuid in self._lost:
            return DeviceHealth("lost", "it has fallen off the bus")
        if self._stuck:
            return DeviceHealth("unknown", "the driver does not answer")
        return health.of(self._counts.get(uuid, health.Counts()))

    def _changes(self) -> list[tuple[str, DeviceHealth]]:
        self._catch_up()
        now = {uuid: self._health(uuid) for uuid in self._devices}
        changed = [(uuid, one) for uuid, one in now.items() if one != self._told.get(uuid, DeviceHealth())]
        self._told = now
        return changed
