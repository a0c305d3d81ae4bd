"""What NVML says, as Covey's words. Blocking calls of the real `pynvml`, which is passed in; run in threads.

A driver may be older than pynvml, hide a figure in a container, or not have it for a MIG instance: such a call raises
NVMLError and the figure is left out. With MIG on, the instances are the devices, and the GPU itself is none.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from agent.ports.devices import bounds, health
from covey.ports import Device, DeviceHealth, DeviceProcess, DeviceSample

WHOLE_CAN = frozenset({"process memory", "process utilization", "events"})
INSTANCE_CAN = frozenset({"process memory", "events"})
"""The driver tells no utilization of MIG instances by process."""
COUNT_MAX = 1 << 40
"""Errors above this are the driver's word for not knowing."""
MEMORY_MAX = 1 << 50


class NvmlDevice(NamedTuple):
    """One device with the driver's handles of it."""

    device: Device
    number: int
    """Of the GPU; of an instance, that of the GPU it is a part of."""
    handle: Any
    whole: Any
    """Of the GPU."""
    instance: int | None
    """GPU instance id, of a MIG instance."""


class Reading(NamedTuple):
    """A device now, as the scheduler counts it."""

    found: NvmlDevice
    used_bytes: int
    utilization: float


def text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def read_all(nvml: Any, more: frozenset[str] = frozenset()) -> tuple[Reading, ...]:
    """Every device of an initialised NVML. A GPU that fails is left out. NVMLError when the driver does. `more`: what
    whole GPUs can beside what NVML says."""
    found: list[Reading] = []
    for index in range(min(nvml.nvmlDeviceGetCount(), 256)):
        try:
            whole = nvml.nvmlDeviceGetHandleByIndex(index)
            handles = _instances(nvml, whole) if _in_parts(nvml, whole) else [(whole, None)]
            found += [_reading(nvml, index, whole, handle, part, more) for handle, part in handles]
        except nvml.NVMLError:
            continue
    return tuple(found)


def _in_parts(nvml: Any, whole: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(whole)[0])
    except nvml.NVMLError:
        return False


def _instances(nvml: Any, whole: Any) -> list[tuple[Any, int]]:
    found = []
    for number in range(min(nvml.nvmlDeviceGetMaxMigDeviceCount(whole), 64)):
        with contextlib.suppress(nvml.NVMLError):  # numbers have gaps
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, number)
            found.append((handle, int(nvml.nvmlDeviceGetGpuInstanceId(handle))))
    return found


def _reading(nvml: Any, index: int, whole: Any, handle: Any, instance: int | None, more: frozenset[str]) -> Reading:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    total = bounds.size(int(memory.total), MEMORY_MAX)
    device = Device(
        uuid=text(nvml.nvmlDeviceGetUUID(handle)),
        model=text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=total,
        backend="nvml",
        parent="" if instance is None else text(nvml.nvmlDeviceGetUUID(whole)),
        can=INSTANCE_CAN if instance is not None else WHOLE_CAN | more | _limits(nvml, handle),
    )
    used = bounds.size(int(memory.used), total)
    return Reading(NvmlDevice(device, index, handle, whole, instance), used, utilization(nvml, handle))


def _limits(nvml: Any, handle: Any) -> frozenset[str]:
    """Whether the driver holds cgroups to limits (r615 and later, and only root may ask)."""
    ask = getattr(nvml, "nvmlDeviceGetMemoryLimits_v1", None)
    if ask is None:
        return frozenset()
    try:
        ask(handle, nvml.c_nvmlGetMemoryLimits_v1_t(nameSpace=b"/sys/fs/cgroup"))
    except nvml.NVMLError as error:
        return frozenset({"hard limit"}) if error.value == nvml.NVML_ERROR_NOT_FOUND else frozenset()
    return frozenset({"hard limit"})


def utilization(nvml: Any, handle: Any) -> float:
    """0..1 over the driver's last window; 0 where there is none (MIG)."""
    try:
        return bounds.share(nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
    except nvml.NVMLError:
        return 0.0


def sample(nvml: Any, found: NvmlDevice, since_us: int) -> tuple[DeviceSample, int]:
    """The device now, and until when (the driver's clock, µs) its processes were looked at. NVMLError."""
    memory = nvml.nvmlDeviceGetMemoryInfo(found.handle)
    used_by, until_us = _utilizations(nvml, found, since_us)
    rows = [
        DeviceProcess(int(one.pid), _memory(one), None if used_by is None else used_by.get(int(one.pid), 0.0))
        for one in processes(nvml, found.handle)
    ]
    total = found.device.memory_bytes
    return bounds.sample(int(memory.used), utilization(nvml, found.handle), rows, total), until_us


def _memory(process: Any) -> int | None:
    return None if process.usedGpuMemory is None else int(process.usedGpuMemory)


def processes(nvml: Any, handle: Any) -> Iterator[Any]:
    for ours in (COMPUTE, MPS):
        yield from _first_that_works(nvml, ours, handle)


COMPUTE = tuple(f"nvmlDeviceGetComputeRunningProcesses{version}" for version in ("_v3", "_v2"))
MPS = tuple(f"nvmlDeviceGetMPSComputeRunningProcesses{version}" for version in ("_v3", "_v2"))


def _first_that_works(nvml: Any, names: Sequence[str], handle: Any) -> Sequence[Any]:
    """Older drivers have older forms of a call."""
    for name in names:
        try:
            return tuple(getattr(nvml, name)(handle))
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                return ()
    return ()


def _utilizations(nvml: Any, found: NvmlDevice, since_us: int) -> tuple[dict[int, float] | None, int]:
    """0..1 by pid since then, and until when; None when the driver does not say."""
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
    """`xid`: the worst that was heard of it."""
    try:
        return health.of(read_counts(nvml, found.whole, xid))
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
            return DeviceHealth("lost", "the driver says that it is lost")
        if error.value == nvml.NVML_ERROR_RESET_REQUIRED:
            return DeviceHealth("drain", "the driver asks for a reset of the GPU")
        return DeviceHealth("degraded", f"the driver failed: {error}")


def read_counts(nvml: Any, whole: Any, xid: int) -> health.Counts:
    """NVMLError when the GPU does not answer at all."""
    nvml.nvmlDeviceGetUUID(whole)
    remapped = _value(nvml, lambda: nvml.nvmlDeviceGetRemappedRows(whole), (0, 0, 0, 0))
    errors = _value(
        nvml,
        lambda: nvml.nvmlDeviceGetTotalEccErrors(
            whole, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        0,
    )
    return health.Counts(
        xid=xid,
        uncorrected=int(errors) if 0 <= int(errors) < COUNT_MAX else 0,
        remap_pending=bool(remapped[2]),
        remap_failed=bool(remapped[3]),
        unrepairable=bool(_value(nvml, lambda: nvml.nvmlDeviceGetUnrepairableMemoryFlag_v1(whole), 0)),
        recovery=int(_value(nvml, lambda: _recovery(nvml, whole), 0)),
    )


def _value(nvml: Any, call: Any, otherwise: Any) -> Any:
    """What a driver without this call, or a GPU without this figure, does not say. NVMLError of a GPU that is lost."""
    try:
        return call()
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
            raise
        return otherwise


def _recovery(nvml: Any, whole: Any) -> int:
    (field,) = nvml.nvmlDeviceGetFieldValues(whole, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    return int(field.value.uiVal) if field.nvmlReturn == nvml.NVML_SUCCESS else 0


def own_cgroup(pid: int, root: str = "/") -> str:
    """The cgroup (version 2) that holds this process and what descends from it, and nobody else; empty when there is
    none: a limit on a cgroup that others share would hold them too."""
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
    """It and its descendants."""
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
    """NVMLError when the driver refuses."""
    most = nvml.NVML_DEVICE_MEMORY_LIMIT_MAX if limit_bytes is None else limit_bytes
    limits = nvml.c_nvmlSetMemoryLimits_v1_t(nameSpace=os.fsencode(cgroup), softLimit=most, hardLimit=most)
    nvml.nvmlDeviceSetMemoryLimits_v1(found.handle, limits)
