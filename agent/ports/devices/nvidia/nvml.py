"""NVIDIA GPUs and MIG instances, by the driver (NVML).

Every call runs in a thread with a deadline (`driver_calls.py`): the first one may take seconds, and a GPU in trouble
may hold one for ever. `gpus()` and `devices()` answer at once with the newest reading, made again at most once a
second (`nvml_driver.py`). Devices are those of the host's inventory (`inventory.py`): one that the driver does not tell
of now is `unknown`, with the cause. Where there never was a driver there are no devices, and it is looked for again
once a minute: it may be installed while the agent runs.

*Suspending* is CUDA's checkpoint (drivers from 570 on; not of MIG instances): memory of a rank goes to the host and its
calls wait, until a lease is over (`guards/checkpoints.py`). *Hard limits* are by cgroup (drivers from r615 on, as
root), so a process is held to one only where it has a cgroup of its own; ranks that share the agent's have none.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from agent.ports.devices import health
from agent.ports.devices.driver_calls import DEADLINE_S, FIRST_S, DriverCalls, Newest
from agent.ports.devices.guards.checkpoints import ANSWER_S, Checkpoints
from agent.ports.devices.inventory import Inventory, KnownDevice, shown
from agent.ports.devices.nvidia import nvml_reads
from agent.ports.devices.nvidia.nvml_driver import NONSENSE, DriverSaid, NvmlDriver, nvidia_gpus
from agent.ports.devices.nvidia.nvml_reads import NvmlDevice
from agent.ports.devices.rank_trees import RankTrees
from covey.ports.devices import Device, DeviceHealth, DeviceSample, Gpu
from covey.ports.log import Logger
from covey.ports.processes import ProcessId

T = TypeVar("T")
REFRESH_S = 1.0
LOOK_S = 1.0


class NvmlDevices:
    """The `agent.ports.devices.backend.Backend` of NVIDIA's GPUs."""

    def __init__(
        self,
        log: Logger,
        nvml: Any = None,
        deadline_s: float = DEADLINE_S,
        first_s: float = FIRST_S,
        socket: str = "",
        checkpoints: Checkpoints | None = None,
        remembered: str = "",
        wanted: bool = False,
    ) -> None:
        """`nvml`: the module pynvml; None: imported when it is first needed. `socket`: path of the jobs.sock whose
        agent's ranks may be suspended; empty: any agent's. `remembered`: path of the inventory; `wanted`: agent.toml
        says that there are GPUs."""
        self._log = log
        self._inventory = Inventory(remembered, log)
        self._trees = RankTrees(socket)
        self._checkpoints = checkpoints or Checkpoints(self._users)
        self._driver = NvmlDriver(
            log, nvml, self._inventory, self._checkpoints.able, self._on_xid, lambda: wanted or nvidia_gpus() > 0
        )
        self._calls = DriverCalls("the driver", deadline_s, first_s)
        self._newest: Newest[DriverSaid] = Newest(self._calls, "devices", self._driver.read, DriverSaid(), REFRESH_S)
        self._since_us: dict[str, int] = {}
        self._moves = DriverCalls("CUDA's checkpoint", ANSWER_S, ANSWER_S)
        """Calls that move gigabytes by CUDA's checkpoint: they take seconds, and nothing else waits for them."""
        self.counters = self._calls.counters
        self.counters["xids"] = 0
        self._struck = asyncio.Event()
        """Set when a device had an XID."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told: dict[str, DeviceHealth] = {}

    # ---- Backend ----

    async def start_up(self, timeout_s: float = 5.0) -> None:
        await self._newest.first(timeout_s)

    def gpus(self) -> Sequence[Gpu]:
        told, xids = self._newest.now(), self._inventory.xids
        listed = [one.listed for one in told.listing.readings]
        found = shown(self._inventory.devices, listed, told.listing.unread, self._silence(told))
        deaf = self._driver.deaf
        heard = (_unheard(gpu, deaf[gpu.index]) if gpu.index in deaf else gpu for gpu in found)
        return tuple(_struck(gpu, xids[gpu.uuid]) if gpu.uuid in xids else gpu for gpu in heard)

    def unlisted(self) -> str:
        told = self._newest.now()
        silence = self._silence(told)
        return silence if silence and told.expected and not self._inventory.devices else ""

    def forget(self, uuid: str) -> str:
        told = self._newest.now()
        listed = any(one.found.device.uuid == uuid for one in told.listing.readings)
        return self._inventory.forget(uuid, listed)

    def close(self) -> None:
        self._checkpoints.close()
        self._driver.close()

    def _silence(self, told: DriverSaid) -> str:
        """Why it is not known how devices are now; empty: the driver says it."""
        return self._calls.silence or self._newest.failed or told.silence

    # ---- Devices ----

    def devices(self) -> Sequence[Device]:
        handles, known = self._driver.handles, self._inventory.devices
        found = [(gpu, known[gpu.uuid]) for gpu in self.gpus() if gpu.uuid in known and gpu.memory_total_bytes]
        return tuple(handles[gpu.uuid].device if gpu.uuid in handles else _silent(was) for gpu, was in found)

    async def sample(self, uuid: str) -> DeviceSample:
        found, since_us = self._known(uuid), self._since_us.get(uuid, 0)
        nvml = self._driver.nvml
        sample, self._since_us[uuid] = await self._ask("sample", lambda: nvml_reads.sample(nvml, found, since_us))
        return sample

    async def health(self, uuid: str) -> DeviceHealth:
        row = self._row(uuid)
        said = DeviceHealth(row.condition, row.why)
        found = self._driver.handles.get(uuid)
        if found is None or said.condition == "unknown":
            return said
        nvml, xid = self._driver.nvml, self._inventory.xids.get(uuid, 0)
        try:
            return await self._ask("health", lambda: nvml_reads.read_health(nvml, found, xid))
        except TimeoutError:
            return DeviceHealth("unknown", "the driver does not answer")
        except OSError as error:
            return DeviceHealth("unknown", str(error))

    async def events(self) -> Sequence[tuple[str, DeviceHealth]]:
        self._newest.now()  # the driver may come while the agent runs
        self._loop = asyncio.get_running_loop()
        self._struck.clear()
        if not (found := await self._changes()):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._struck.wait()
            found = await self._changes()
        return found

    async def _changes(self) -> list[tuple[str, DeviceHealth]]:
        now = {gpu.uuid: await self.health(gpu.uuid) for gpu in self.gpus()}
        changed = [(uuid, one) for uuid, one in now.items() if one != self._told.get(uuid, DeviceHealth())]
        self._told = now
        return changed

    async def set_hard_limit(self, uuid: str, pid: int, limit_bytes: int | None) -> bool:
        found = self._known(uuid)
        if "hard limit" not in found.device.can:
            return False
        return await self._calls.within("hard limit", lambda: self._limited(found, pid, limit_bytes))

    async def suspend(self, pid: int) -> bool:
        done = await self._moves.within("suspend", lambda: self._checkpoints.suspend(pid))
        if not done and self._checkpoints.why:
            self._log.warning("a rank was not suspended", pid=pid, why=self._checkpoints.why)
        return done

    async def resume(self, pid: int) -> bool:
        return await self._moves.within("resume", lambda: self._checkpoints.resume(pid))

    # ---- within ----

    def _row(self, uuid: str) -> Gpu:
        for gpu in self.gpus():
            if gpu.uuid == uuid:
                return gpu
        raise OSError(f"there is no device {uuid!r} here")

    def _known(self, uuid: str) -> NvmlDevice:
        found = self._driver.handles.get(uuid)
        if found is None:
            raise OSError(f"{uuid} cannot be asked: {self._row(uuid).why}")
        return found

    async def _ask(self, what: str, call: Callable[[], T]) -> T:
        """Ask the driver. OSError when it fails, TimeoutError when it hangs."""
        try:
            return await self._calls.within(what, call)
        except TimeoutError:
            raise
        except (self._driver.nvml.NVMLError, *NONSENSE) as error:
            raise OSError(f"the driver failed: {error}") from error

    def _limited(self, found: NvmlDevice, pid: int, limit_bytes: int | None) -> bool:
        cgroup = nvml_reads.own_cgroup(pid)
        if not cgroup:
            return False
        try:
            nvml_reads.set_limit(self._driver.nvml, found, cgroup, limit_bytes)
        except (self._driver.nvml.NVMLError, *NONSENSE) as error:
            self._log.warning("the driver sets no limit", pid=pid, why=str(error))
            return False
        return True

    # ---- in threads ----

    def _users(self, pid: int) -> Sequence[ProcessId]:
        """The processes of that rank that the driver finds on a GPU. OSError when it does not tell of one of its GPUs:
        a part of a rank is not moved out and taken for all of it."""
        nvml = self._driver.nvml
        rows = [row for tree in self._trees.read() if tree.pid == pid for row in tree.rows if not row.ended]
        found: set[int] = set()
        for device in tuple(self._driver.handles.values()):
            try:
                found |= {int(one.pid) for one in nvml_reads.processes(nvml, device.handle)}
            except (nvml.NVMLError, *NONSENSE) as error:
                raise OSError(f"the driver does not tell who uses {device.device.uuid}: {error}") from error
        return [row.id for row in rows if row.pid in found]

    def _on_xid(self, whole: str, instance: int | None, number: int) -> None:
        """Record the XID of a GPU, or of one of its instances: of the GPU and all its instances when the driver does
        not say which."""
        self.counters["xids"] += 1
        self._log.warning("XID", gpu=whole, instance=instance, number=number)
        self._inventory.struck(
            [
                uuid
                for uuid, found in tuple(self._driver.handles.items())
                if whole in (uuid, found.device.parent) and instance in (None, found.instance)
            ],
            number,
        )
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop ended before the agent did
                self._loop.call_soon_threadsafe(self._struck.set)


def _struck(gpu: Gpu, xid: int) -> Gpu:
    """The GPU with the XID that was heard of it, which the newest reading may not have."""
    now = health.worse(DeviceHealth(gpu.condition, gpu.why), health.of_xid(xid))
    return msgspec.structs.replace(gpu, condition=now.condition, why=now.why)


def _unheard(gpu: Gpu, why: str) -> Gpu:
    """The GPU, of which nobody would hear an XID."""
    now = health.worse(DeviceHealth(gpu.condition, gpu.why), health.unheard(why))
    return msgspec.structs.replace(gpu, condition=now.condition, why=now.why)


def _silent(was: KnownDevice) -> Device:
    """A device that has not been listed since this agent began."""
    return Device(was.uuid, was.model, was.memory_bytes, "nvml", was.parent)
