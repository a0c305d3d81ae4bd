"""What the devices of this host show: which jobs hold some of them, how busy they are, how they are."""

from collections import deque
from collections.abc import Mapping

from covey.core.ids import JobId
from covey.ports.devices import Device, DeviceHealth, Devices, DeviceSample
from covey.ports.env import Env
from plugins.facts import GpuUse

WINDOW_S = 10.0
"""Seconds over which utilisation is averaged (AntMan §3.3)."""


class DeviceWatch:
    """The newest samples of the devices. It asks `probes.devices`, one device after the other; a device that does not
    answer keeps what it showed last."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self._used: dict[str, deque[tuple[float, float]]] = {}
        self.samples: dict[str, DeviceSample] = {}
        self.healths: dict[str, DeviceHealth] = {}
        self.failures = 0
        self._failed: dict[str, str] = {}

    @property
    def port(self) -> Devices:
        return self._env.probes.devices

    def devices(self) -> dict[str, Device]:
        return {device.uuid: device for device in self.port.devices()}

    async def look(self, uuid: str) -> DeviceSample | None:
        """Look at a device; None: it did not answer, which is said once for each reason."""
        try:
            sample, self.healths[uuid] = await self.port.sample(uuid), await self.port.health(uuid)
        except (OSError, TimeoutError) as error:
            self.failures += 1
            if self._failed.get(uuid) != str(error):
                self._failed[uuid] = str(error)
                self._env.log.warning("a device does not answer", gpu=uuid, why=str(error))
            return None
        self._failed.pop(uuid, None)
        self.samples[uuid] = sample
        now_s = self._env.clock.now_s()
        used = self._used.setdefault(uuid, deque())
        if sample.utilization is not None:
            used.append((now_s, min(1.0, max(0.0, sample.utilization))))
        while used and used[0][0] < now_s - WINDOW_S:
            used.popleft()
        return sample

    def utilization(self, uuid: str) -> float | None:
        """Mean utilization over the last 10 s, 0..1; None: nothing is known."""
        used = self._used.get(uuid)
        return sum(share for _, share in used) / len(used) if used else None

    def use(self, uuid: str, free_bytes: int, out_of_use: str, jobs: int = 1) -> GpuUse:
        """How a GPU is used. `out_of_use`: why the device is being emptied, or must not be used any more; empty: it is
        in use. `jobs`: how many have ranks there."""
        health = self.healths.get(uuid, DeviceHealth())
        why = out_of_use or ("" if health.takes_jobs else health.why or health.condition)
        refusal = f"{uuid} is out of use: {why}" if why else ""
        return GpuUse(uuid, self.utilization(uuid), free_bytes, refusal, jobs)

    def forget(self, known: Mapping[str, Device]) -> None:
        """Forget devices that are gone."""
        for kept in (self._used, self.samples, self.healths, self._failed):
            for uuid in [uuid for uuid in kept if uuid not in known]:
                del kept[uuid]


def holders(sample: DeviceSample, jobs: Mapping[JobId, frozenset[int]]) -> frozenset[JobId]:
    """Jobs with a process on the device that may hold some of it, by their processes."""
    there = {process.pid for process in sample.processes if process.memory_bytes is None or process.memory_bytes > 0}
    return frozenset(job for job, pids in jobs.items() if pids & there)
