"""When tasks of this machine wait for memory: the kernel says so by pressure stall information (PSI), unasked."""

import asyncio
import os
import select
from collections.abc import Callable

FILE = "/proc/pressure/memory"
TRIGGER = b"some 150000 2000000\0"
"""The PSI trigger: some task waited for 150 ms in 2 s, in microseconds. A user other than root may only watch whole
multiples of 2 s."""
_watched: list[select.epoll] = []
"""The watches, open as long as this process lives."""


def watch(stalls: Callable[[], None], path: str = FILE) -> str:
    """Call `stalls` on the running loop at each such moment, at most once in 2 s, until the process ends. Returns why
    that cannot be, in words; empty: it can."""
    try:
        file = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return f"{path}: {error.strerror}"
    try:
        os.write(file, TRIGGER)
        ready = select.epoll()
        ready.register(file, select.EPOLLPRI)
    except OSError as error:
        os.close(file)
        return f"{path} takes no trigger: {error.strerror}"

    # The loop knows no priority events, but whether this epoll has one. To look at it takes the event away.
    asyncio.get_running_loop().add_reader(ready.fileno(), stalls)
    _watched.append(ready)
    return ""
