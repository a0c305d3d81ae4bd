"""The rack's clock: seconds during which agents took part in this log, by clocks that do not step.

Each command carries the proposer's reading; the log keeps the highest (`JobTable.rack_s`). Between commands every host
counts on by its own monotonic clock. So people see one duration of a job on every host, and no clock that is set,
forward or back, changes it. It stands still while no agent of the rack runs.
"""

from covey.ports.clock import Clock


class RackClock:
    """The rack's clock as this host reads it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._said_s = 0.0
        self._at_s: float | None = None
        """When `_said_s` was read, on this host's clock; None: it was never asked for, and begins at the first
        question."""

    def now_s(self) -> float:
        now_s = self._clock.now_s()
        if self._at_s is None:
            self._at_s = now_s
        return self._said_s + max(0.0, now_s - self._at_s)

    def heard(self, said_s: float) -> None:
        """Catch up with the log's reading, if this host's clock is behind it."""
        if said_s > self.now_s():
            self._said_s, self._at_s = said_s, self._clock.now_s()
