"""The rack's clock: seconds during which agents took part in this log, by clocks that do not step.

Each command carries the proposer's reading; the log keeps the highest (`Queue.rack_s`). Between commands every host
counts on by its own monotonic clock. So the duration that people see of a job is the same on every host, and no clock
that is set, forward or back, changes it. It stands still while no agent of the rack runs.
"""

from covey.ports import Clock


class RackClock:
    """As this host reads it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._said_s, self._at_s = 0.0, clock.now_s()
        """A reading, and when on this host's clock."""

    def now_s(self) -> float:
        return self._said_s + max(0.0, self._clock.now_s() - self._at_s)

    def heard(self, said_s: float) -> None:
        """The log has this reading: whoever is behind it catches up."""
        if said_s > self.now_s():
            self._said_s, self._at_s = said_s, self._clock.now_s()
