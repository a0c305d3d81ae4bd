"""Bounds of what a driver may say: figures outside are bounded, so that a driver that lies does no harm further up."""

import math
from collections.abc import Iterable

from covey.ports.devices import DeviceProcess, DeviceSample

PID_MAX = 1 << 22
"""Linux's highest limit of pids (PID_MAX_LIMIT)."""
PROCESSES_MAX = 4096


def share(value: float) -> float:
    """The value bounded to 0..1; 0 for what is no number."""
    return min(1.0, max(0.0, value)) if math.isfinite(value) else 0.0


def size(value: int, most: int) -> int:
    """The value bounded to 0..most."""
    return min(max(0, value), most)


def sample(
    used_bytes: int, utilization: float | None, processes: Iterable[DeviceProcess], total_bytes: int
) -> DeviceSample:
    """A sample with one process per pid, the first that was named, each bounded by the device."""
    kept: dict[int, DeviceProcess] = {}
    for process in processes:
        if 0 < process.pid <= PID_MAX and process.pid not in kept and len(kept) < PROCESSES_MAX:
            memory = None if process.memory_bytes is None else size(process.memory_bytes, total_bytes)
            use = None if process.utilization is None else share(process.utilization)
            kept[process.pid] = DeviceProcess(process.pid, memory, use)
    busy = None if utilization is None else share(utilization)
    return DeviceSample(size(used_bytes, total_bytes), busy, tuple(kept[pid] for pid in sorted(kept)))
