"""The machine's clocks."""

import time


class RealClock:
    """`covey.ports.Clock`: never uvloop's cached `loop.time()`, which has millisecond steps."""

    def now_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()

    def boot_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def cpu_s(self) -> float:
        return time.thread_time()
