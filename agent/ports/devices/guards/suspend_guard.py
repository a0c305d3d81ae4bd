"""The guard of suspended processes: it lets them run again when the agent that stopped them does not renew that in
time.

A process that was stopped (SIGSTOP) stays so when the agent dies or hangs, for ever. So before the agent stops one it
tells this guard, a process of its own, until when. Lines on standard input, each answered by one line:

    hold SECONDS PID:START,...       from now on, these for so long at most; what it held of them before is replaced
    drop PID:START,...               these are let run by the agent itself

When the time is over, or standard input ends, what is held and its descendants get SIGCONT. START is field 22 of
/proc/PID/stat: a pid that is used again is left alone. Run as a script of its own, without any of Covey's
modules.
"""

import os
import select
import signal
import sys
import time


def fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat, from the third on; empty when the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().decode(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def go_on(held: "tuple[int, int]") -> None:
    """Send SIGCONT to this process and all that descend from it."""
    pid, started = held
    found = fields(pid)
    if not found or int(found[19]) != started:
        return
    parents = {
        int(entry): int(row[1]) for entry in os.listdir("/proc") if entry.isdigit() and (row := fields(int(entry)))
    }
    line, seen = [pid], set()
    while line:
        one = line.pop()
        seen.add(one)
        line += [child for child, parent in parents.items() if parent == one and child not in seen]
        try:
            os.kill(one, signal.SIGCONT)
        except OSError:
            continue


def read(text: str) -> "list[tuple[int, int]]":
    pairs = (pair.partition(":") for pair in text.split(",") if pair)
    return [(int(pid), int(started)) for pid, _, started in pairs]


def main() -> None:
    held: dict[tuple[int, int], float] = {}
    unread, open_ = b"", True
    while open_:
        soonest = min(held.values(), default=None)
        wait_s = None if soonest is None else max(0.0, soonest - time.monotonic())
        if select.select([0], [], [], wait_s)[0]:
            data = os.read(0, 65536)
            open_ = bool(data)
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                word, _, rest = line.decode().partition(" ")
                if word == "hold":
                    seconds, _, rest = rest.partition(" ")
                    held |= dict.fromkeys(read(rest), time.monotonic() + float(seconds))
                else:
                    held = {one: until for one, until in held.items() if one not in read(rest)}
                os.write(1, b"ok\n")
        over = [one for one, until in held.items() if not open_ or until <= time.monotonic()]
        for one in over:
            del held[one]
            go_on(one)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when its agent does
    try:
        main()
    except BrokenPipeError:
        sys.exit(0)
