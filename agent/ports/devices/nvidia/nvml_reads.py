"""What NVML says, as Covey's words. Blocking calls of the real `pynvml`, which is passed in; run in threads.

A driver may be older than pynvml, or not have a figure for a MIG instance: it says so (`absent`), and the figure is
left out. Any other error is no figure of 0: what is needed to use a device and cannot be read makes it `Unread`, with
the error. With MIG on, the instances are the devices, and the GPU itself is none.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from agent.ports.devices import bounds, health
from agent.ports.devices.inventory import KnownDevice, Listed, Unread
from covey.ports.devices import Device, DeviceHealth, DeviceProcess, DeviceSample

T = TypeVar("T")
WHOLE_CAN = frozenset({"process memory", "process utilization", "events"})
INSTANCE_CAN = frozenset({"process memory", "events"})
"""What an instance can: the driver tells no utilization of MIG instances by process."""
COUNT_MAX = 1 << 40
"""The count of errors above which the driver means that it does not know."""
MEMORY_MAX = 1 << 50
MINOR_MAX, CAP_MAX = 255, (1 << 20) - 1
CAPABILITIES = Path("/proc/driver/nvidia/capabilities")
"""Where the driver says which files open a MIG instance."""
MIG_EMPTY = "MIG is on and no instance is made: nvidia-smi mig -cgi and -cci make some, nvidia-smi -mig 0 turns MIG off"


class NvmlDevice(NamedTuple):
    """One device with the driver's handles of it."""

    device: Device
    number: int
    """The GPU's number; for an instance, that of the GPU it is a part of."""
    handle: Any
    whole: Any
    """The driver's handle of the whole GPU."""
    instance: int | None
    """The GPU instance id, for a MIG instance."""
    unified: bool = False
    """Whether the device has no memory of its own and uses the host's."""


class Reading(NamedTuple):
    """One reading of a device."""

    found: NvmlDevice
    used_bytes: int
    utilization: float | None
    health: DeviceHealth

    @property
    def listed(self) -> Listed:
        device = self.found.device
        known = KnownDevice(device.uuid, device.model, device.memory_bytes, self.found.number, device.parent)
        return Listed(known, self.used_bytes, self.utilization, self.health)


class Listing(NamedTuple):
    """All that the driver lists."""

    readings: tuple[Reading, ...]
    unread: tuple[Unread, ...]


def text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def absent(nvml: Any, error: Any) -> bool:
    """Whether this driver, or this device, does not have what was asked for, and never will."""
    return error.value in (
        nvml.NVML_ERROR_NOT_SUPPORTED,
        nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        nvml.NVML_ERROR_DEPRECATED,
    )


def if_there(nvml: Any, call: Callable[[], T], otherwise: T) -> T:
    """The call's result, or `otherwise` where the driver says that it does not have this. NVMLError for any other
    error."""
    try:
        return call()
    except nvml.NVMLError as error:
        if not absent(nvml, error):
            raise
        return otherwise


def read_all(
    nvml: Any,
    more: frozenset[str] = frozenset(),
    xids: Mapping[str, int] | None = None,
    host_bytes: Callable[[], int] = lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
) -> Listing:
    """Read every device of an initialised NVML. NVMLError when the driver does not even say how many there are. `more`:
    what whole GPUs can beside what NVML says; `xids`: the worst that was heard of each; `host_bytes`: memory of this
    machine, which a GPU without any of its own uses."""
    found: list[Reading] = []
    unread: list[Unread] = []
    for index in range(min(nvml.nvmlDeviceGetCount(), 256)):
        read = _Gpu(nvml, index, more, xids or {}, host_bytes)
        read.all()
        found += read.found
        unread += read.unread
    return Listing(tuple(found), tuple(unread))


class _Gpu:
    """One GPU that the driver counts, while it is read."""

    def __init__(
        self, nvml: Any, index: int, more: frozenset[str], xids: Mapping[str, int], host_bytes: Callable[[], int]
    ) -> None:
        self._nvml, self._index, self._more, self._xids, self._host_bytes = nvml, index, more, xids, host_bytes
        self.found: list[Reading] = []
        self.unread: list[Unread] = []
        self._uuid = self._model = ""

    def all(self) -> None:
        nvml = self._nvml
        try:
            whole = nvml.nvmlDeviceGetHandleByIndex(self._index)
            self._uuid = text(nvml.nvmlDeviceGetUUID(whole))
            self._model = text(nvml.nvmlDeviceGetName(whole))
            if if_there(nvml, lambda: bool(nvml.nvmlDeviceGetMigMode(whole)[0]), False):
                self._instances(whole)
            else:
                self.found.append(self._reading(whole, whole, None))
        except nvml.NVMLError as error:
            self._not_read(error, self._uuid)

    def _instances(self, whole: Any) -> None:
        nvml, there, hidden = self._nvml, 0, None
        for number in range(min(nvml.nvmlDeviceGetMaxMigDeviceCount(whole), 64)):
            uuid = ""
            try:
                handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, number)
                uuid = text(nvml.nvmlDeviceGetUUID(handle))
                instance = int(nvml.nvmlDeviceGetGpuInstanceId(handle))
                self.found.append(self._reading(whole, handle, instance))
            except nvml.NVMLError as error:
                if not uuid and error.value in (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_INVALID_ARGUMENT):
                    continue  # numbers have gaps
                if uuid:
                    self._not_read(error, uuid, number)
                else:
                    hidden = error  # nobody knows whether there is one of this number
                    continue
            there += 1
        if hidden is not None:
            self._not_read(hidden, self._uuid)
        elif not there:
            self.unread.append(Unread(self._index, MIG_EMPTY, uuid=self._uuid, model=self._model))

    def _not_read(self, error: Any, uuid: str, part: int | None = None) -> None:
        nvml, what = self._nvml, f"GPU {self._index}" + ("" if part is None else f", MIG instance {part}")
        said = _trouble(nvml, error) or DeviceHealth("unknown", f"the driver does not tell enough of {what}: {error}")
        parent = "" if part is None else self._uuid
        self.unread.append(Unread(self._index, said.why, said.condition, uuid, part, parent, self._model))

    def _reading(self, whole: Any, handle: Any, instance: int | None) -> Reading:
        nvml = self._nvml
        uuid = text(nvml.nvmlDeviceGetUUID(handle))
        memory = _memory_now(nvml, handle, None if instance is not None else self._host_bytes)
        can = INSTANCE_CAN if instance is not None else WHOLE_CAN | self._more | _limits(nvml, handle)
        used = utilization(nvml, handle)
        device = Device(
            uuid=uuid,
            model=text(nvml.nvmlDeviceGetName(handle)),
            memory_bytes=memory.total,
            backend="nvml",
            parent="" if instance is None else self._uuid,
            can=can if used is None else can | {"utilization"},
            number=(minor := _minor(nvml, whole)),
            caps=() if instance is None or minor is None else caps_of(nvml, handle, minor, instance),
        )
        found = NvmlDevice(device, self._index, handle, whole, instance, memory.unified)
        how = read_health(nvml, found, self._xids.get(uuid, 0))
        return Reading(found, memory.used, used, how)


def _minor(nvml: Any, whole: Any) -> int | None:
    """The number of a GPU's device file, which need not be the driver's index; None: the driver does not say."""
    try:
        minor = int(nvml.nvmlDeviceGetMinorNumber(whole))
    except nvml.NVMLError:
        return None
    return minor if 0 <= minor <= MINOR_MAX else None


def caps_of(nvml: Any, handle: Any, minor: int, instance: int, capabilities: Path = CAPABILITIES) -> tuple[int, ...]:
    """The numbers of the files that open a MIG instance: one of its GPU instance, one of its compute instance. Empty:
    the driver does not say, and nobody can open it."""
    try:
        part = capabilities / f"gpu{minor}/mig/gi{instance}"
        compute = part / f"ci{int(nvml.nvmlDeviceGetComputeInstanceId(handle))}"
        said = [(folder / "access").read_text() for folder in (part, compute)]
        found = tuple(int(text.partition("DeviceFileMinor:")[2].split()[0]) for text in said)
        return found if all(0 <= cap <= CAP_MAX for cap in found) else ()
    except (nvml.NVMLError, OSError, ValueError, IndexError):
        return ()


class _Memory(NamedTuple):
    total: int
    used: int
    unified: bool = False


def _memory_now(nvml: Any, handle: Any, host_bytes: Callable[[], int] | None) -> _Memory:
    """The memory of a device, bytes. A whole GPU without memory of its own, such as GB10, says that it has no such
    figure: it uses the host's, and what its processes hold of that is what they say. NVMLError when the driver does not
    tell."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        if host_bytes is None or error.value != nvml.NVML_ERROR_NOT_SUPPORTED:
            raise
        total = bounds.size(host_bytes(), MEMORY_MAX)
        used = sum(_memory(one) or 0 for one in processes(nvml, handle))
        return _Memory(total, bounds.size(used, total), unified=True)
    total = bounds.size(int(memory.total), MEMORY_MAX)
    return _Memory(total, bounds.size(int(memory.used), total))


def _limits(nvml: Any, handle: Any) -> frozenset[str]:
    """What limits the driver can hold cgroups to (r615 and later, and only root may ask)."""
    ask = getattr(nvml, "nvmlDeviceGetMemoryLimits_v1", None)
    if ask is None:
        return frozenset()
    try:
        ask(handle, nvml.c_nvmlGetMemoryLimits_v1_t(nameSpace=b"/sys/fs/cgroup"))
    except nvml.NVMLError as error:
        return frozenset({"hard limit"}) if error.value == nvml.NVML_ERROR_NOT_FOUND else frozenset()
    return frozenset({"hard limit"})


def utilization(nvml: Any, handle: Any) -> float | None:
    """The utilization, 0..1, over the driver's last window; None where there is none: of MIG instances, and of GPUs
    whose driver says so. NVMLError when the driver does not tell."""

    def read() -> float | None:
        return bounds.share(nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)

    return if_there(nvml, read, None)


def sample(nvml: Any, found: NvmlDevice, since_us: int) -> tuple[DeviceSample, int]:
    """A sample of the device now, and until when (the driver's clock, µs) its processes were looked at. NVMLError."""
    host_bytes = (lambda: found.device.memory_bytes) if found.unified else None
    memory = _memory_now(nvml, found.handle, host_bytes)
    used_by, until_us = _utilizations(nvml, found, since_us)
    rows = [
        DeviceProcess(int(one.pid), _memory(one), None if used_by is None else used_by.get(int(one.pid), 0.0))
        for one in processes(nvml, found.handle)
    ]
    total = found.device.memory_bytes
    return bounds.sample(memory.used, utilization(nvml, found.handle), rows, total), until_us


def _memory(process: Any) -> int | None:
    return None if process.usedGpuMemory is None else int(process.usedGpuMemory)


def processes(nvml: Any, handle: Any) -> Iterator[Any]:
    for ours in (COMPUTE, MPS):
        yield from _first_that_works(nvml, ours, handle)


COMPUTE = tuple(f"nvmlDeviceGetComputeRunningProcesses{version}" for version in ("_v3", "_v2"))
MPS = tuple(f"nvmlDeviceGetMPSComputeRunningProcesses{version}" for version in ("_v3", "_v2"))


def _first_that_works(nvml: Any, names: Sequence[str], handle: Any) -> Sequence[Any]:
    """Make the first form of a call that works: older drivers have older forms. NVMLError when the driver does not
    tell: then it is not known whether a process is there."""
    for name in names:
        try:
            return tuple(getattr(nvml, name)(handle))
        except nvml.NVMLError as error:
            if not absent(nvml, error):
                raise
    return ()


def _utilizations(nvml: Any, found: NvmlDevice, since_us: int) -> tuple[dict[int, float] | None, int]:
    """The utilization, 0..1, by pid since `since_us`, and until when; None when the driver does not say."""
    if "process utilization" not in found.device.can:
        return None, since_us
    try:
        samples = nvml.nvmlDeviceGetProcessUtilization(found.handle, since_us)
    except nvml.NVMLError as error:
        nothing = error.value in (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_SUCCESS)  # nobody did anything
        return ({} if nothing else None), since_us
    by_pid: dict[int, list[float]] = {}
    for one in samples:
        if one.timeStamp > since_us:
            by_pid.setdefault(int(one.pid), []).append(bounds.share(one.smUtil / 100))
    until_us = max([since_us, *(int(one.timeStamp) for one in samples)])
    return {pid: sum(shares) / len(shares) for pid, shares in by_pid.items()}, until_us


def read_health(nvml: Any, found: NvmlDevice, xid: int) -> DeviceHealth:
    """The health of a device. `xid`: the worst that was heard of it."""
    try:
        return health.of(read_counts(nvml, found.whole, xid))
    except nvml.NVMLError as error:
        said = _trouble(nvml, error) or DeviceHealth("unknown", f"the driver does not say how it is: {error}")
        return health.worse(said, health.of_xid(xid))


def _trouble(nvml: Any, error: Any) -> DeviceHealth | None:
    """What an error of any call says of the GPU's own health; None: nothing."""
    if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
        return DeviceHealth("lost", "the driver says that it is lost")
    if error.value == nvml.NVML_ERROR_RESET_REQUIRED:
        return DeviceHealth("drain", "the driver asks for a reset of the GPU")
    return None


def read_counts(nvml: Any, whole: Any, xid: int) -> health.Counts:
    """The driver's counts. NVMLError when the GPU does not answer, or the driver does not tell one of these for another
    reason than that it has none."""
    nvml.nvmlDeviceGetUUID(whole)
    hidden: list[str] = []

    def value(what: str, call: Callable[[], T], otherwise: T) -> T:
        try:
            return if_there(nvml, call, otherwise)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_INVALID_ARGUMENT:
                return otherwise  # a driver that is older than the figure
            if error.value != nvml.NVML_ERROR_NO_PERMISSION:
                raise
            hidden.append(what)
            return otherwise

    remapped = value("remapped rows", lambda: nvml.nvmlDeviceGetRemappedRows(whole), (0, 0, 0, 0))
    errors = value("memory errors", lambda: _uncorrected(nvml, whole), 0)
    unrepairable = value("broken memory", lambda: nvml.nvmlDeviceGetUnrepairableMemoryFlag_v1(whole), 0)
    return health.Counts(
        xid=xid,
        uncorrected=errors if 0 <= errors < COUNT_MAX else 0,
        remap_pending=bool(remapped[2]),
        remap_failed=bool(remapped[3]),
        unrepairable=bool(unrepairable),
        recovery=value("what is to be done", lambda: _recovery(nvml, whole), 0),
        hidden=tuple(hidden),
    )


def _uncorrected(nvml: Any, whole: Any) -> int:
    kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    return int(nvml.nvmlDeviceGetTotalEccErrors(whole, *kinds))


def _recovery(nvml: Any, whole: Any) -> int:
    (field,) = nvml.nvmlDeviceGetFieldValues(whole, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    if field.nvmlReturn != nvml.NVML_SUCCESS:
        raise nvml.NVMLError(field.nvmlReturn)
    return int(field.value.uiVal)


def own_cgroup(pid: int, root: str = "/") -> str:
    """The cgroup (version 2) that holds this process and what descends from it, and no other; empty when there is none:
    a limit on a cgroup that others share would hold them too."""
    try:
        with open(os.path.join(root, f"proc/{pid}/cgroup")) as file:
            lines = [line.strip() for line in file]
        path = next((line[3:] for line in lines if line.startswith("0::")), "")
        with open(os.path.join(root, f"sys/fs/cgroup{path}/cgroup.procs")) as file:
            members = {int(line) for line in file}
    except OSError:
        return ""
    return f"/sys/fs/cgroup{path}" if path not in ("", "/") and members <= _family(pid, root) else ""


def _family(pid: int, root: str) -> set[int]:
    """The process and its descendants."""
    found, layer = {pid}, [pid]
    while layer:
        one = layer.pop()
        with contextlib.suppress(OSError):
            for thread in os.listdir(os.path.join(root, f"proc/{one}/task")):
                with open(os.path.join(root, f"proc/{one}/task/{thread}/children")) as file:
                    new = {int(word) for word in file.read().split()} - found
                found |= new
                layer += new
    return found


def set_limit(nvml: Any, found: NvmlDevice, cgroup: str, limit_bytes: int | None) -> None:
    """Limit a cgroup. NVMLError when the driver refuses."""
    most = nvml.NVML_DEVICE_MEMORY_LIMIT_MAX if limit_bytes is None else limit_bytes
    limits = nvml.c_nvmlSetMemoryLimits_v1_t(nameSpace=os.fsencode(cgroup), softLimit=most, hardLimit=most)
    nvml.nvmlDeviceSetMemoryLimits_v1(found.handle, limits)
