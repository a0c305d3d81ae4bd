"""Devices made of cores: `cpu` of `[gpus]`, for hosts without GPUs, laptops and tests.

A device is a set of cores and a memory size. Ranks are bound to the cores of their devices before their program begins
(`covey.ports.processes.Command.cores`). What a rank uses is read from /proc (`rank_trees.py`), with everything that it
started: a rank of several devices uses each alike, since the kernel does not say on which core a process spent its
time.

The memory size is what the scheduler and the sharing of devices go by; no rank is held to it (`hard limit` is not in
`can`). Suspending stops a rank's processes for a lease (`guards/suspensions.py`); their memory stays where it is.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Sequence

from agent.ports.devices import bounds
from agent.ports.devices.driver_calls import DEADLINE_S, DriverCalls, Newest
from agent.ports.devices.guards.suspensions import Suspensions
from agent.ports.devices.rank_trees import RankTree, RankTrees, resident_bytes
from agent.ports.devices.settings import CpuDevice, usable_cores
from covey.ports.devices import Device, DeviceHealth, DeviceProcess, DeviceSample, Gpu
from covey.ports.processes import ProcessId

WINDOW_S = 0.1
"""The least seconds between two readings: the kernel counts processor time in hundredths of a second."""
REFRESH_S = 1.0
LOOK_S = 1.0
"""Seconds between two looks for cores that went away or came back."""
CAN = frozenset({"utilization", "process memory", "process utilization", "suspend", "events"})
Used = tuple[float, dict[int, float]]
"""A time, and the processor time of each rank until then."""


def devices_of(host: str, settings: Sequence[CpuDevice]) -> tuple[Device, ...]:
    """The devices in the settings. UUIDs say which host and which entry: they stay unchanged over every restart."""
    return tuple(
        Device(
            uuid=f"CPU-{host}-{number}",
            model=f"{len(entry.core_numbers)}-core CPU",
            memory_bytes=entry.memory_bytes,
            backend="cpu",
            cores=entry.core_numbers,
            can=CAN,
        )
        for number, entry in enumerate(settings)
    )


class CpuDevices:
    """The `agent.ports.devices.backend.Backend` of devices made of cores."""

    def __init__(
        self,
        host: str,
        settings: Sequence[CpuDevice],
        socket: str = "",
        usable: Callable[[], Collection[int]] = usable_cores,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """`socket`: path of the jobs.sock whose agent's ranks are counted; empty: any agent's."""
        self._devices = {device.uuid: device for device in devices_of(host, settings)}
        self._usable = usable
        self._trees = RankTrees(socket)
        self._calls = DriverCalls("/proc", deadline_s, deadline_s)
        self.counters = self._calls.counters
        self._lock = threading.Lock()
        self._before: Used | None = None
        self._samples: dict[str, DeviceSample] = {uuid: DeviceSample(0, 0.0) for uuid in self._devices}
        self._newest = Newest(self._calls, "processes", self._read, self._samples, REFRESH_S)
        self._suspensions = Suspensions(self._processes)
        self._told: dict[str, DeviceHealth] = {uuid: DeviceHealth() for uuid in self._devices}

    # ---- Backend ----

    async def start_up(self, timeout_s: float = 5.0) -> None:
        """Return at once: the devices are what agent.toml says."""

    def gpus(self) -> Sequence[Gpu]:
        samples = self._newest.now()
        return tuple(self._gpu(*one, samples[one[1].uuid]) for one in enumerate(self._devices.values()))

    def _gpu(self, index: int, device: Device, sample: DeviceSample) -> Gpu:
        now = self._health(device)
        return Gpu(
            index=index,
            uuid=device.uuid,
            model=device.model,
            memory_total_bytes=device.memory_bytes,
            memory_used_bytes=sample.memory_used_bytes,
            utilization=sample.utilization,
            condition=now.condition,
            why=now.why,
        )

    def unlisted(self) -> str:
        """Return the empty string: agent.toml lists all devices."""
        return ""

    def forget(self, uuid: str) -> str:
        """Return the empty string: nothing is remembered beside agent.toml."""
        return ""

    def close(self) -> None:
        """Let whatever is suspended run again."""
        self._suspensions.close()

    # ---- Devices ----

    def devices(self) -> Sequence[Device]:
        return tuple(self._devices.values())

    async def sample(self, uuid: str) -> DeviceSample:
        self._known(uuid)
        return (await self._calls.within("processes", self._read))[uuid]

    async def health(self, uuid: str) -> DeviceHealth:
        return self._health(self._known(uuid))

    async def events(self) -> Sequence[tuple[str, DeviceHealth]]:
        if not (found := self._changes()):
            await asyncio.sleep(LOOK_S)
            found = self._changes()
        return found

    async def set_hard_limit(self, uuid: str, pid: int, limit_bytes: int | None) -> bool:
        self._known(uuid)
        return False

    async def suspend(self, pid: int) -> bool:
        return await self._calls.within("suspend", lambda: self._suspensions.suspend(pid))

    async def resume(self, pid: int) -> bool:
        return await self._calls.within("resume", lambda: self._suspensions.resume(pid))

    # ---- within ----

    def _known(self, uuid: str) -> Device:
        try:
            return self._devices[uuid]
        except KeyError:
            raise OSError(f"there is no device {uuid!r} here") from None

    def _health(self, device: Device) -> DeviceHealth:
        if why := self._calls.silence:
            return DeviceHealth("unknown", why)
        gone = sorted(set(device.cores) - set(self._usable()))
        if len(gone) == len(device.cores):
            return DeviceHealth("lost", f"its cores are no longer available: {','.join(map(str, gone))}")
        if gone:
            return DeviceHealth("drain", f"cores {','.join(map(str, gone))} are no longer available")
        return DeviceHealth()

    def _changes(self) -> list[tuple[str, DeviceHealth]]:
        now = {uuid: self._health(device) for uuid, device in self._devices.items()}
        changed = [(uuid, health) for uuid, health in now.items() if health.condition != self._told[uuid].condition]
        self._told = now
        return changed

    def _processes(self, pid: int) -> Sequence[ProcessId]:
        """The processes of the rank with this pid, if it has a device here."""
        with self._lock:
            trees = self._trees.read()
        found = [tree for tree in trees if tree.pid == pid and self._devices.keys() & set(tree.devices)]
        return [row.id for tree in found for row in tree.rows if not row.ended]

    def _read(self) -> dict[str, DeviceSample]:
        """Read what ranks use, in a thread. A reading that is less than `WINDOW_S` old is returned again."""
        with self._lock:
            now_s = time.monotonic()
            if self._before is not None and now_s - self._before[0] < WINDOW_S:
                return self._samples
            trees = [tree for tree in self._trees.read() if self._devices.keys() & set(tree.devices)]
            now = {tree.pid: tree.cpu_s for tree in trees}
            # A rank that the reading before did not find began since; of the first reading nothing is known.
            before_s, before = self._before or (now_s - WINDOW_S, now)
            self._before = now_s, now
            used, elapsed_s = {pid: cpu_s - before.get(pid, 0.0) for pid, cpu_s in now.items()}, now_s - before_s
            self._samples = {
                uuid: self._sampled(device, trees, used, elapsed_s) for uuid, device in self._devices.items()
            }
            return self._samples

    def _sampled(
        self, device: Device, trees: Sequence[RankTree], used: dict[int, float], elapsed_s: float
    ) -> DeviceSample:
        here = [tree for tree in trees if device.uuid in tree.devices]
        processes = [
            DeviceProcess(
                pid=tree.pid,
                memory_bytes=sum(resident_bytes(row.pid) for row in tree.rows) // len(tree.devices),
                utilization=bounds.share(used[tree.pid] / (elapsed_s * self._cores(tree))),
            )
            for tree in here
        ]
        memory = sum(process.memory_bytes or 0 for process in processes)
        utilization = sum(process.utilization or 0.0 for process in processes)
        return bounds.sample(memory, utilization, processes, device.memory_bytes)

    def _cores(self, tree: RankTree) -> int:
        """The number of cores of all devices of this rank."""
        return max(1, sum(len(self._devices[uuid].cores) for uuid in tree.devices if uuid in self._devices))
