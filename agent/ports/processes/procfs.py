"""Processes on this machine, from /proc: their pids, start times, parents and environments. Each may end at any moment,
so every answer may be about one that has ended."""

import os

from covey.ports.processes import ProcessId


def pids() -> list[int]:
    """The pids of every process and zombie, ascending."""
    return sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def words(pid: int, file: str) -> list[str]:
    """The NUL-separated words of /proc/PID/`cmdline` or `environ`; empty for a zombie. OSError when it is gone or
    another user's."""
    with open(f"/proc/{pid}/{file}", "rb") as opened:
        return [os.fsdecode(word) for word in opened.read().split(b"\0") if word]


def environment(pid: int) -> dict[str, str]:
    """The process's variables as they were when it began. OSError when it is gone or another user's."""
    pairs = (word.partition("=") for word in words(pid, "environ"))
    return {name: value for name, _, value in pairs}


def is_ours(pid: int) -> bool:
    """Whether the process runs as this user. FileNotFoundError when it is gone."""
    return os.stat(f"/proc/{pid}").st_uid == os.geteuid()


def user_of(pid: int) -> int | None:
    """The process's real user, also where its files in /proc are root's since it may not be dumped; None when it is
    gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return next(int(line.split()[1]) for line in file if line.startswith(b"Uid:"))
    except (FileNotFoundError, ProcessLookupError, StopIteration):
        return None


def stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third on (state, ppid, ...); None when there is no such process. The name
    in the second field may hold anything, also blanks and parentheses."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()


def start_ticks(pid: int) -> int | None:
    """When a process was started, in clock ticks since boot (field 22); of a zombie too."""
    fields = stat(pid)
    return None if fields is None else int(fields[19])


def live_ticks(pid: int) -> int | None:
    """When a process that runs or is stopped was started, in clock ticks; None when it has ended, whether or not it was
    reaped."""
    fields = stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])


def parent(pid: int) -> int | None:
    """The parent's pid (field 4); 0 for the first process."""
    fields = stat(pid)
    return None if fields is None else int(fields[1])


def group(pid: int) -> int | None:
    """The process group (field 5); None when the process is gone."""
    fields = stat(pid)
    return None if fields is None else int(fields[2])


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal. False when it is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            caught = next(line.split()[1] for line in file if line.startswith(b"SigCgt:"))
    except (FileNotFoundError, ProcessLookupError, StopIteration):
        return False
    return bool(int(caught, 16) >> (number - 1) & 1)


def is_alive(process: ProcessId) -> bool:
    """Whether this very process is running or stopped; a zombie has ended."""
    return live_ticks(process.pid) == process.started


def name_of(pid: int) -> str:
    """The process's own name, at most 15 characters of it; empty when it is gone."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read().decode(errors="replace").rstrip("\n")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def descendants(root: int) -> list[ProcessId]:
    """The children, grandchildren and so on, zombies included, by pid."""
    children: dict[int, list[ProcessId]] = {}
    for pid in pids():
        if (fields := stat(pid)) is not None:
            children.setdefault(int(fields[1]), []).append(ProcessId(pid, int(fields[19])))
    found: list[ProcessId] = []
    layer = children.get(root, [])
    while layer:
        found += layer
        layer = [child for parent in layer for child in children.get(parent.pid, [])]
    return sorted(found, key=lambda process: process.pid)
