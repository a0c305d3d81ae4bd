"""The machine's clocks."""

import time


class RealClock:
    """`covey.ports.Clock`: never uvloop's cached `loop.time()`, which has millisecond steps."""

    now_s = staticmethod(time.monotonic)
    """A page's way looks at it four times: without a function of Python's around it."""

    def wall_s(self) -> float:
        return time.time()

    def boot_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def cpu_s(self) -> float:
        return time.thread_time()
