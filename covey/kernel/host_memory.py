"""How much memory this host has, and has available: the smaller of what machine and cgroups say, and the pressure.

The kernel's `MemAvailable` counts what could be freed without swapping. A cgroup counts its own page cache as used;
what of it is inactive could be freed too, so it counts as available. Every level of the tree may hold a limit: of
version 2 `memory.max`, above which a process is killed, or `memory.high`, above which all its processes are slowed.
"""

import os
from collections.abc import Iterator

from covey.ports.probes import MemoryNow

UNLIMITED = 1 << 60
"""The bytes from which on a limit is none: cgroup v1 writes "no limit" as a number near 2**63."""
Files = tuple[tuple[str, ...], tuple[str, ...], str]
"""The places where a hierarchy of cgroups may be mounted, its files with a limit, and its file with the memory in
use."""
VERSION_1: Files = (("sys/fs/cgroup/memory",), ("memory.limit_in_bytes",), "memory.usage_in_bytes")
VERSION_2: Files = (("sys/fs/cgroup", "sys/fs/cgroup/unified"), ("memory.max", "memory.high"), "memory.current")


def memory_now(root: str = "/") -> MemoryNow:
    """The memory now, from /proc and /sys below `root`; files that are absent (no cgroups, no PSI) are no limit and no
    pressure."""
    machine = _table(os.path.join(root, "proc/meminfo"), "MemTotal:", "MemAvailable:", "MemFree:")
    total = machine.get("MemTotal:", 0) * 1024
    available = machine.get("MemAvailable:", machine.get("MemFree:", 0)) * 1024
    pressure = _pressure(os.path.join(root, "proc/pressure/memory"))
    for limit, used, reclaimable, group_pressure in _groups(root):
        total = min(total, limit)
        available = min(available, max(0, limit - used + reclaimable))
        pressure = max(pressure, group_pressure)
    kills = _table(os.path.join(root, "proc/vmstat"), "oom_kill").get("oom_kill")
    return MemoryNow(
        total_bytes=total, available_bytes=min(available, total), pressure_some_avg10=pressure, oom_kills=kills
    )


def available_bytes(root: str = "/") -> int:
    """Bytes of memory that this process could use without swapping, in its cgroup too; 0 where nobody says."""
    return memory_now(root).available_bytes


def _groups(root: str) -> Iterator[tuple[int, int, int, float]]:
    """The limit, used and reclaimable bytes, and pressure of each limited cgroup above this process."""
    for line in (_read(os.path.join(root, "proc/self/cgroup")) or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mounts, limits, usage = VERSION_2
        elif "memory" in controllers.split(","):
            mounts, limits, usage = VERSION_1
        else:
            continue
        for mount in mounts:
            for directory in _upwards(os.path.join(root, mount), path):
                limit = min(_number(os.path.join(directory, name), UNLIMITED) for name in limits)
                used = _number(os.path.join(directory, usage), -1)
                if limit >= UNLIMITED or used < 0:
                    continue
                counts = _table(os.path.join(directory, "memory.stat"), "total_inactive_file", "inactive_file")
                reclaimable = counts.get("total_inactive_file", counts.get("inactive_file", 0))
                yield limit, used, min(reclaimable, used), _pressure(os.path.join(directory, "memory.pressure"))


def _upwards(mount: str, path: str) -> Iterator[str]:
    """The cgroup's directory and those above it. In a container the path may be the host's: then only directories that
    exist."""
    parts = [part for part in path.split("/") if part and part != ".."]
    for depth in range(len(parts), -1, -1):
        directory = os.path.join(mount, *parts[:depth])
        if os.path.isdir(directory):
            yield directory


def _read(path: str) -> str | None:
    """A file of the kernel, 64 KiB at most: without buffers and decoders, since this is read again each second."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    parts: list[bytes] = []
    try:
        while (part := os.read(file, 1 << 16)) and sum(map(len, parts)) < 1 << 16:
            parts.append(part)
    except OSError:  # PSI may be built in but switched off: EOPNOTSUPP on read
        return None
    finally:
        os.close(file)
    return b"".join(parts).decode(errors="replace")


def _number(path: str, otherwise: int) -> int:
    """The number in a file, or `otherwise` where there is none: no such file, `max`."""
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else otherwise


def _table(path: str, *names: str) -> dict[str, int]:
    """The numbers in `name number ...` lines, by name, of these names."""
    text, found = "\n" + (_read(path) or ""), {}
    for name in names:
        words = text.partition(f"\n{name} ")[2][:80].split(maxsplit=1)
        if words and words[0].isdigit():
            found[name] = int(words[0])
    return found


def _pressure(path: str) -> float:
    """The pressure in percent: `some avg10=` of a PSI file; 0 where there is none."""
    for line in (_read(path) or "").splitlines():
        if line.startswith("some avg10="):
            text = line.split()[1].removeprefix("avg10=")
            return float(text) if text.replace(".", "", 1).isdigit() else 0.0
    return 0.0
