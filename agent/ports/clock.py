"""The machine's clocks."""

import time


class RealClock:
    """The `covey.ports.clock.Clock` of the machine: never uvloop's cached `loop.time()`, which has millisecond
    steps."""

    now_s = staticmethod(time.monotonic)
    """The monotonic clock itself, without a Python function around it: the way of one page reads it four times."""

    def wall_s(self) -> float:
        return time.time()

    def boot_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def cpu_s(self) -> float:
        return time.thread_time()
