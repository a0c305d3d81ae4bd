"""NVIDIA GPUs and MIG instances, by the driver (NVML).

Every call runs in a thread with a deadline (`driver_calls.py`): the first one may take seconds, and a GPU in trouble
may hold one for ever. `gpus()` and `devices()` answer at once with the newest reading, made again at most once a
second. Without a driver there are no devices, and it is looked for again once a minute: it may be installed while the
agent runs.

*Suspending* is CUDA's checkpoint (drivers from 570 on; not of MIG instances): memory of a rank goes to the host and its
calls wait, until a lease is over (`checkpoints.py`). *Hard limits* are by cgroup (drivers from r615 on, as root), so a
process is held to one only where it has a cgroup of its own; ranks that share the agent's have none.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from agent.ports.devices import health, nvml_reads
from agent.ports.devices.checkpoints import ANSWER_S, Checkpoints
from agent.ports.devices.driver_calls import DEADLINE_S, FIRST_S, DriverCalls, Newest
from agent.ports.devices.nvml_reads import NvmlDevice, Reading
from agent.ports.devices.rank_trees import RankTrees
from agent.ports.devices.xid_events import XidEvents
from covey.ports import Device, DeviceHealth, DeviceSample, Gpu, Logger, ProcessId

T = TypeVar("T")
REFRESH_S = 1.0
NO_DRIVER_S = 60.0
LOOK_S = 1.0


class NvmlDevices:
    """`agent.ports.devices.backend.Backend`."""

    def __init__(
        self,
        log: Logger,
        nvml: Any = None,
        deadline_s: float = DEADLINE_S,
        first_s: float = FIRST_S,
        socket: str = "",
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """`nvml`: the module pynvml; None: imported when it is first needed. `socket`: of the agent whose ranks may be
        suspended; empty: of any."""
        self._log, self._nvml = log, nvml
        self._initialised = False
        self._look_again_s = 0.0
        self._calls = DriverCalls("the driver", deadline_s, first_s)
        none: tuple[Reading, ...] = ()
        self._newest: Newest[tuple[Reading, ...]] = Newest(self._calls, "devices", self._read, none, REFRESH_S)
        self._ever: dict[str, NvmlDevice] = {}
        """Of this driver since it was found, those that fell off the bus included."""
        self._since_us: dict[str, int] = {}
        self._xids: dict[str, int] = {}
        self._trees = RankTrees(socket)
        self._checkpoints = checkpoints or Checkpoints(self._users)
        self._moves = DriverCalls("CUDA's checkpoint", ANSWER_S, ANSWER_S)
        """Of gigabytes: they take seconds, and nothing else waits for them."""
        self.counters = self._calls.counters
        self.counters["xids"] = 0
        self._struck = asyncio.Event()
        """A device had an XID."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told: dict[str, DeviceHealth] = {}
        self._looked_s = 0.0
        self._events: XidEvents | None = None

    # ---- Backend ----

    async def start_up(self, timeout_s: float = 5.0) -> None:
        await self._newest.first(timeout_s)

    def gpus(self) -> Sequence[Gpu]:
        return tuple(
            Gpu(
                index=found.number,
                uuid=found.device.uuid,
                model=found.device.model,
                memory_total_bytes=found.device.memory_bytes,
                memory_used_bytes=used,
                utilization=utilization,
            )
            for found, used, utilization in self._newest.now()
        )

    def close(self) -> None:
        self._checkpoints.close()
        if self._events is not None:
            self._events.close()

    # ---- Devices ----

    def devices(self) -> Sequence[Device]:
        return tuple(found.device for found, _, _ in self._newest.now())

    async def sample(self, uuid: str) -> DeviceSample:
        found, since_us = self._known(uuid), self._since_us.get(uuid, 0)
        sample, self._since_us[uuid] = await self._ask("sample", lambda: nvml_reads.sample(self._nvml, found, since_us))
        return sample

    async def health(self, uuid: str) -> DeviceHealth:
        found = self._known(uuid)
        try:
            return await self._calls.within("health", lambda: self._health(found))
        except TimeoutError as error:
            return DeviceHealth("degraded", str(error))

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
        now = {uuid: await self.health(uuid) for uuid in self._ever}
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

    def _known(self, uuid: str) -> NvmlDevice:
        try:
            return self._ever[uuid]
        except KeyError:
            raise OSError(f"there is no device {uuid!r} here") from None

    async def _ask(self, what: str, call: Callable[[], T]) -> T:
        """OSError when the driver fails, TimeoutError when it hangs."""
        try:
            return await self._calls.within(what, call)
        except (self._nvml.NVMLError, MemoryError, IndexError, ValueError) as error:  # the last three: nonsense
            raise OSError(f"the driver failed: {error!r}") from error

    def _health(self, found: NvmlDevice) -> DeviceHealth:
        return nvml_reads.read_health(self._nvml, found, self._xids.get(found.device.uuid, 0))

    def _limited(self, found: NvmlDevice, pid: int, limit_bytes: int | None) -> bool:
        cgroup = nvml_reads.own_cgroup(pid)
        if not cgroup:
            return False
        try:
            nvml_reads.set_limit(self._nvml, found, cgroup, limit_bytes)
        except self._nvml.NVMLError as error:
            self._log.warning("the driver sets no limit", pid=pid, why=str(error))
            return False
        return True

    # ---- in threads ----

    def _users(self, pid: int) -> Sequence[ProcessId]:
        """Processes of that rank that the driver finds on a GPU."""
        rows = [row for tree in self._trees.read() if tree.pid == pid for row in tree.rows if not row.ended]
        found: set[int] = set()
        for device in tuple(self._ever.values()):
            with contextlib.suppress(self._nvml.NVMLError):
                found |= {int(one.pid) for one in nvml_reads.processes(self._nvml, device.handle)}
        return [row.id for row in rows if row.pid in found]

    def _read(self) -> tuple[Reading, ...]:
        """Every device now; none without a driver. Begins with the driver, and again when it failed."""
        if not self._initialised and not self._begun():
            return ()
        try:
            more = frozenset({"suspend"}) if self._checkpoints.able() else frozenset()
            found = nvml_reads.read_all(self._nvml, more)
        except self._nvml.NVMLError as error:
            self._failed(error)
            return ()
        self._ever = {**self._ever, **{one.found.device.uuid: one.found for one in found}}
        if self._events is None and found:
            wholes = {one.found.number: one.found.whole for one in found}
            self._events = XidEvents(self._nvml, tuple(wholes.values()), self._on_xid)
        return found

    def _begun(self) -> bool:
        """Whether there is a driver now."""
        if time.monotonic() < self._look_again_s:
            return False
        if self._nvml is None:
            import pynvml

            self._nvml = pynvml
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError:
            self._look_again_s = time.monotonic() + NO_DRIVER_S
            return False
        self._initialised, self._ever, self._xids = True, {}, {}
        self._log.info("NVML found", driver=nvml_reads.text(self._nvml.nvmlSystemGetDriverVersion()))
        return True

    def _failed(self, error: Exception) -> None:
        self._log.warning("NVML failed", why=str(error))
        if self._events is not None:
            self._events.close()
            self._events = None
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()
        self._initialised, self._look_again_s = False, time.monotonic() + REFRESH_S

    def _on_xid(self, whole: str, instance: int | None, number: int) -> None:
        """Of a GPU, or of one of its instances: of all of them when the driver does not say which."""
        self.counters["xids"] += 1
        self._log.warning("XID", gpu=whole, instance=instance, number=number)
        struck = [
            uuid
            for uuid, found in self._ever.items()
            if whole in (uuid, found.device.parent) and instance in (None, found.instance)
        ]
        now = {uuid: health.worse_xid(self._xids.get(uuid, 0), number) for uuid in struck}
        self._xids = {**self._xids, **now}  # at once, for readers in other threads
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop ended before the agent did
                self._loop.call_soon_threadsafe(self._struck.set)
