"""Processes that run on what others leave of the cores, until they are let go.

A rank that starts beside a guaranteed job imports its framework for ten seconds or more, and nothing in it can hold it
back before it has. So it is started with the lowest priority (`agent/ports/processes/shim.py`, `hold_back`): nice 19,
and of the kernel's automatic groups, one per session, in which nice counts within the group alone, the whole group.
Once its first mini-batch ends it is let go with all that it has started meanwhile: threads and children have inherited
what it had.

Raising a priority again needs CAP_SYS_NICE, or a limit RLIMIT_NICE of 20 (`LimitNICE=+0` in covey.service). Without
either a rank's own nice stays as it is, since it could not be taken back; its automatic group needs neither.
"""

import os
import time

from agent.ports.processes import procfs

HELD_NICE = 19
AGAIN_S, TRIES = 0.15, 10
"""Seconds between two tries, and their number: the kernel takes one change of a group in 0.1 s from users."""
ROUNDS_MAX = 20
"""The most times that a tree is read while it is let go, since it may fork: until nothing is held."""


def let_go(pid: int) -> bool:
    """Let a rank go, blocking for some milliseconds. Whether nothing of that rank is held back any more; True for one
    that is gone."""
    for _ in range(ROUNDS_MAX):
        held = [(process, thread) for process in tree(pid) for thread in _threads(process) if _is_held(thread)]
        groups = [process for process in tree(pid) if _group_is_held(process)]
        if not held and not groups:
            return True
        done = [_raise(thread) for _, thread in held] + [_raise_group(process) for process in groups[:1]]
        if not all(done):
            return False
    return False


def tree(pid: int) -> list[int]:
    """The process and its descendants that are alive."""
    found, line = dict.fromkeys([pid]), [pid]
    while line:
        one = line.pop()
        for thread in _threads(one):
            for word in procfs.words(one, f"task/{thread}/children"):
                for child in word.split():
                    if child.isdecimal() and int(child) not in found:
                        found[int(child)] = None
                        line.append(int(child))
    return list(found)


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _is_held(thread: int) -> bool:
    try:
        return os.getpriority(os.PRIO_PROCESS, thread) == HELD_NICE
    except OSError:
        return False


def _raise(thread: int) -> bool:
    """Raise a thread's priority to what this process itself has, which no rank is above."""
    try:
        os.setpriority(os.PRIO_PROCESS, thread, max(0, os.getpriority(os.PRIO_PROCESS, 0)))
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return True


def _group_is_held(pid: int) -> bool:
    """Whether the process's group is held. That of a zombie cannot be read, and is not."""
    try:
        with open(f"/proc/{pid}/autogroup") as file:
            return file.read().split()[-1:] == [str(HELD_NICE)]
    except OSError:
        return False


def _raise_group(pid: int) -> bool:
    for _ in range(TRIES):
        try:
            with open(f"/proc/{pid}/autogroup", "w") as file:
                file.write("0")
            return True
        except BlockingIOError:
            time.sleep(AGAIN_S)
        except OSError:
            return not os.path.exists(f"/proc/{pid}")
    return False
