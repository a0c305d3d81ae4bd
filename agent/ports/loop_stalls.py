"""How long an event loop is held up, as the loop sees it itself: a timer that comes late.

While the process works it is due every 5 ms, and what holds the loop up for longer is seen; while it rests, every
100 ms. The kernel counts for how long this thread was ready to run and had no processor (`/proc/.../schedstat`): that
much of a delay is the machine's, the rest the loop's own, a callback that took long or that waited for a disk or for
memory. Where the kernel does not count it all of it is the loop's own.
"""

import asyncio
import os
import threading
import time

STALL_S = 0.005
"""Seconds from which on a delay counts."""
BUSY_S, IDLE_S = 0.005, 0.1
IDLE_SHARE = 0.02
"""The part of a processor below which the process rests."""
WINDOW_S = 60.0
"""Seconds of a window: the longest delay is of the window that runs and of the one before."""


class Delays:
    """The delays above 5 ms, and the longest of all of the last minute or two. `add` gets the time now."""

    def __init__(self, now_s: float) -> None:
        self.count = 0
        self._longest_s = self._before_s = 0.0
        self._window_s = now_s

    @property
    def longest_s(self) -> float:
        return max(self._longest_s, self._before_s)

    def add(self, delay_s: float, now_s: float) -> None:
        if delay_s > STALL_S:
            self.count += 1
        if now_s - self._window_s > WINDOW_S:
            self._window_s, self._before_s, self._longest_s = now_s, self._longest_s, 0.0
        self._longest_s = max(self._longest_s, delay_s)


class RunDelay:
    """The time for which this thread has waited for a processor, ever."""

    def __init__(self) -> None:
        self._file = -1
        try:
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            self.now_s()
        except (OSError, ValueError, IndexError):
            self.close()

    def now_s(self) -> float:
        return int(os.pread(self._file, 128, 0).split()[1]) / 1e9 if self._file >= 0 else 0.0

    def close(self) -> None:
        """Close the file. Idempotent."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    __del__ = close


class RealLoopStalls:
    """The `covey.ports.probes.LoopStalls` of the running loop, in whose thread it is made."""

    def __init__(self) -> None:
        now_s = time.monotonic()
        self.own, self.waits = Delays(now_s), Delays(now_s)
        self._loop, self._run_delay = asyncio.get_running_loop(), RunDelay()
        self._seen_s, self._cpu_s = now_s, time.process_time()
        self._waited_s = self._run_delay.now_s()
        self._arm(BUSY_S)

    @property
    def count(self) -> int:
        return self.own.count

    @property
    def longest_s(self) -> float:
        return self.own.longest_s

    @property
    def waits_count(self) -> int:
        return self.waits.count

    @property
    def waits_longest_s(self) -> float:
        return self.waits.longest_s

    def _arm(self, in_s: float) -> None:
        self._due_s = time.monotonic() + in_s
        self._loop.call_later(in_s, self._look)

    def _look(self) -> None:
        now_s, cpu_s, waited_s = time.monotonic(), time.process_time(), self._run_delay.now_s()
        late_s = now_s - self._due_s
        machines_s = min(late_s, waited_s - self._waited_s)
        self.own.add(late_s - machines_s, now_s)
        self.waits.add(machines_s, now_s)
        rests = cpu_s - self._cpu_s < IDLE_SHARE * (now_s - self._seen_s)
        self._seen_s, self._cpu_s, self._waited_s = now_s, cpu_s, waited_s
        self._arm(IDLE_S if rests else BUSY_S)
