"""How long an event loop is held up, as the loop sees it itself: a timer that comes late.

While the process works it is due every 5 ms, and what holds the loop up for longer is seen; while it rests, every
100 ms. It cannot tell a callback that took long from a machine that had no processor for this process: both held up
whoever waited.
"""

import asyncio
import time

STALL_S = 0.005
"""From here on it counts."""
BUSY_S, IDLE_S = 0.005, 0.1
IDLE_SHARE = 0.02
"""Below this part of a processor the process rests."""
WINDOW_S = 60.0
"""The longest is of the window that runs and of the one before."""


class RealLoopStalls:
    """`covey.ports.LoopStalls` of the running loop."""

    def __init__(self) -> None:
        self.count = 0
        self._loop = asyncio.get_running_loop()
        self._longest_s = self._before_s = 0.0
        self._window_s = self._seen_s = time.monotonic()
        self._cpu_s = time.process_time()
        self._arm(BUSY_S)

    @property
    def longest_s(self) -> float:
        return max(self._longest_s, self._before_s)

    def _arm(self, in_s: float) -> None:
        self._due_s = time.monotonic() + in_s
        self._loop.call_later(in_s, self._look)

    def _look(self) -> None:
        now_s, cpu_s = time.monotonic(), time.process_time()
        late_s = now_s - self._due_s
        if late_s > STALL_S:
            self.count += 1
        if now_s - self._window_s > WINDOW_S:
            self._window_s, self._before_s, self._longest_s = now_s, self._longest_s, 0.0
        self._longest_s = max(self._longest_s, late_s)
        rests = cpu_s - self._cpu_s < IDLE_SHARE * (now_s - self._seen_s)
        self._seen_s, self._cpu_s = now_s, cpu_s
        self._arm(IDLE_S if rests else BUSY_S)
