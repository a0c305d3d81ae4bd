"""Clocks of a host."""

from typing import Protocol


class Clock(Protocol):
    """Clocks that never go back, for decisions; one clock for people; and the CPU time of this thread."""

    def now_s(self) -> float:
        """Monotonic seconds with microsecond resolution, never the event loop's cached time."""

    def wall_s(self) -> float:
        """Seconds since 1970, for display only."""

    def boot_s(self) -> float:
        """Seconds since this machine started, with the time it slept: the same for all processes of the machine. Leases
        use this clock, since a machine that was suspended must find that its leases are over."""

    def cpu_s(self) -> float:
        """Seconds of CPU time that the calling thread has used; always 0 in the simulator, where work takes no time."""
