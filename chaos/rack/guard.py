"""Ends what is left of a laboratory when its driver was killed: its hosts, what entered them, their folders.

    driver -- "pid 4711", "folder /tmp/covey-lab-x", "done" --> guard

A host whose first process reads a pipe of the driver ends by itself (`init.py`); one that boots systemd does not, nor
does an nsenter that stopped with what it had started. The guard is told of each of them and reads until the driver
says that all is done, or is gone. It is started as a file by an isolated Python, in a session of its own, so that
whatever ends the driver does not end the guard first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time

GONE_S = 20.0
"""Seconds for which the guard tries to remove groups of processes that are still being taken apart."""


def started(pid: int) -> str:
    """Ticks since boot when this process began; empty when there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pids: list[tuple[int, str]] = []
    folder = ""
    print("here", flush=True)
    for line in sys.stdin:
        word, _, what = line.strip().partition(" ")
        if word == "done":
            return
        if word == "pid":
            pids.append((int(what), started(int(what))))
        else:
            folder = what
    for pid, began in pids:
        if began and started(pid) == began:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    remove_groups(os.path.basename(folder))
    shutil.rmtree(folder, ignore_errors=True)


def remove_groups(name: str) -> None:
    """Remove the control groups of booted hosts, wherever they are mounted, once they are empty."""
    until_s = time.monotonic() + GONE_S
    while time.monotonic() < until_s:
        left = [path for root in group_roots() for path in groups_below(root, name)]
        if not left:
            return
        for path in left:
            with contextlib.suppress(OSError):
                os.rmdir(path)
        time.sleep(0.05)


def group_roots() -> list[str]:
    with open("/proc/self/mounts") as mounts:
        return [fields[1] for fields in map(str.split, mounts) if fields[2] == "cgroup2"]


def groups_below(root: str, name: str) -> list[str]:
    """Control groups of this laboratory below a root, innermost first."""
    found: list[str] = []
    for folder, _, _ in os.walk(root, topdown=False):
        if any(part.startswith(f"{name}-") for part in folder.split("/")):
            found.append(folder)
    return found


if __name__ == "__main__":
    main()
