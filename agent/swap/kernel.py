"""What the kernel of this host knows of swap, NBD devices and memory; and the programs of util-linux that change it.

Everything is looked up when it is asked for: nothing is remembered here that could be wrong after a crash.
"""

import errno
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from plugins.memory.policy.swapping import GroupMemory, RoomNow

PROC, SYS, DEV = Path("/proc"), Path("/sys"), Path("/dev")
PROGRAMS = "/usr/sbin:/usr/bin:/sbin:/bin"
PROGRAM_S = 60.0
"""Seconds that `modprobe`, `mkswap` and `swapon` may take: they read and write a few pages of the device."""
MODULE = "nbd"
UNLIMITED = 1 << 62
"""The limit of a group without a limit is more than this in cgroup v1."""
DELETED = r"\040(deleted)"
_DEVICE = re.compile(r"nbd(\d+)")


class SwapArea(NamedTuple):
    device: str
    """The device's path as the kernel shows it, which is not always where the device is (`area`)."""
    size_bytes: int
    used_bytes: int


def run(*command: str, within_s: float | None = PROGRAM_S) -> None:
    """Run a program. OSError that says what it printed, when it fails."""
    environ = {"PATH": PROGRAMS, "LC_ALL": "C"}
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=within_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} did not end within {within_s:g} s") from error
    if done.returncode:
        raise OSError(f"{command[0]}: {(done.stderr or done.stdout).strip()[-200:] or f'status {done.returncode}'}")


def load_module() -> None:
    """Load NBD. OSError when this kernel has none and gets none."""
    if not (SYS / "module" / MODULE).exists() and not (SYS / "block" / "nbd0").exists():
        run("modprobe", MODULE)


def numbered(backend: str) -> int | None:
    """The number of the device that has this backend; None when there is none."""
    for number, path in _devices():
        try:
            if (path / "backend").read_text().strip() == backend:
                return number
        except OSError:
            continue  # not connected, or a kernel without (before 5.14)
    return None


def _devices() -> Iterator[tuple[int, Path]]:
    try:
        names = sorted(os.listdir(SYS / "block"))
    except OSError:
        return
    for name in names:
        found = _DEVICE.fullmatch(name)
        if found:
            yield int(found[1]), SYS / "block" / name


def device(number: int) -> str:
    return f"{DEV}/nbd{number}"


def areas() -> list[SwapArea]:
    """All swap areas in use, as `/proc/swaps` has them."""
    found: list[SwapArea] = []
    for line in (PROC / "swaps").read_text().splitlines()[1:]:
        words = line.rsplit(None, 4)
        if len(words) == 5 and words[2].isdecimal() and words[3].isdecimal():
            found.append(SwapArea(words[0], int(words[2]) << 10, int(words[3]) << 10))
    return found


def area(name: str) -> SwapArea | None:
    """The swap area of a block device, by its last name: what was switched on in a mount namespace that has ended
    since, such as that of a service that was restarted, is shown as `/nbd0`."""
    wanted = name.rpartition("/")[2]
    return next((each for each in areas() if _last_name(each.device) == wanted), None)


def _last_name(shown: str) -> str:
    return shown.removesuffix(DELETED).rpartition("/")[2]


def in_use(name: str) -> bool:
    """Whether the kernel itself uses this block device, as swap or for a file system, whatever it calls it. OSError."""
    try:
        os.close(os.open(name, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
    except OSError as error:
        if error.errno == errno.EBUSY:
            return True
        raise
    return False


def begin(name: str, priority: int) -> None:
    """Make and switch on a swap area on this device, used before those of lower priority; freed pages are discarded.
    OSError."""
    run("mkswap", name)
    run("swapon", "--discard=pages", "--priority", str(priority), name)


def room(name: str) -> RoomNow:
    """The room that there is for the pages in the swap area on that device."""
    memory = _numbers((PROC / "meminfo").read_text().replace(":", ""))
    mine = area(name)
    elsewhere = sum(each.size_bytes - each.used_bytes for each in areas() if each != mine)
    return RoomNow(
        total_bytes=memory.get("MemTotal", 0) << 10,
        available_bytes=memory.get("MemAvailable", 0) << 10,
        elsewhere_bytes=elsewhere,
        used_bytes=mine.used_bytes if mine is not None else 0,
        groups=tuple(groups()),
    )


def groups() -> Iterator[GroupMemory]:
    """The memory groups that have a limit and pages in swap."""
    one, two = SYS / "fs" / "cgroup" / "memory", SYS / "fs" / "cgroup"
    is_one = one.is_dir()
    for folder, _, _ in os.walk(one if is_one else two):
        try:
            found = _group_one(Path(folder)) if is_one else _group_two(Path(folder))
        except (OSError, ValueError):
            continue  # it ended meanwhile, or is no group with memory
        if found is not None and found.swapped_bytes:
            yield found


def _group_two(folder: Path) -> GroupMemory | None:
    limit = (folder / "memory.max").read_text().strip()
    if limit == "max":
        return None
    stat = _numbers((folder / "memory.stat").read_text())
    return GroupMemory(
        name=folder.name,
        limit_bytes=int(limit),
        used_bytes=int((folder / "memory.current").read_text()),
        cache_bytes=stat.get("inactive_file", 0) + stat.get("active_file", 0),
        swapped_bytes=int((folder / "memory.swap.current").read_text()),
    )


def _group_one(folder: Path) -> GroupMemory | None:
    limit = int((folder / "memory.limit_in_bytes").read_text())
    if limit > UNLIMITED:
        return None
    stat = _numbers((folder / "memory.stat").read_text())
    return GroupMemory(
        name=folder.name,
        limit_bytes=limit,
        used_bytes=int((folder / "memory.usage_in_bytes").read_text()),
        cache_bytes=stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0),
        swapped_bytes=stat.get("total_swap", 0),
    )


def _numbers(text: str) -> dict[str, int]:
    """The numbers in lines `NAME NUMBER ...`, by name."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdecimal()}
