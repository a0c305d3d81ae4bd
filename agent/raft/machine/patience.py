"""How long silence may last before it counts as a loss: longer where earlier silences were long and ended well.

A host whose processor or disk is busy answers late; a fixed timeout then changes the leader every half minute although
no host failed. So each host remembers the longest silences of the last minute that *ended*, which shows that no host
was lost, and waits `STRETCH` times as long as the longest of them. Only ever longer than configured: a lease that was
promised for the configured time still holds. A host that was late itself cannot tell whether others were: `Stall` makes
it wait for one more heartbeat before it decides.
"""

import math
from collections import deque

MEMORY_S = 60.0
"""Seconds for which a silence is remembered."""
STRETCH = 2.0
"""The factor on the longest silence seen: load seldom doubles from one minute to the next."""
LATE_S_MAX = 2.5
"""Seconds above which a silence is an outage, not lateness: it stretches nothing, so a real loss is noticed within
twice this."""


class ElectionPatience:
    """The longest silences of the last minute, newest last, each longer than all after it."""

    def __init__(self) -> None:
        self._silences: deque[tuple[float, float]] = deque()
        """The silences: (when it ended, how long it was)."""

    def ended(self, silence_s: float, now_s: float) -> None:
        """Note that a host that was silent for this long sent a message again."""
        if silence_s > LATE_S_MAX:
            return
        while self._silences and self._silences[-1][1] <= silence_s:
            self._silences.pop()
        self._silences.append((now_s, silence_s))
        self._forget(now_s)

    def stretched(self, least_s: float, now_s: float) -> float:
        """Seconds to wait now, at least `least_s`."""
        self._forget(now_s)
        worst_s = self._silences[0][1] if self._silences else 0.0
        return max(least_s, STRETCH * worst_s)

    def _forget(self, now_s: float) -> None:
        while self._silences and now_s - self._silences[0][0] > MEMORY_S:
            self._silences.popleft()


class Stall:
    """Whether this host itself was stopped or late just now: messages received meanwhile are still unread."""

    def __init__(self, heartbeat_s: float, now_s: float) -> None:
        self._heartbeat_s, self._last_s = heartbeat_s, now_s
        self.ended_s = -math.inf
        """When this host last continued after a stall."""

    def passed(self, due_s: float, now_s: float) -> None:
        """Note that an event is handled; the core was to wake at `due_s`."""
        if now_s - max(due_s, self._last_s) > self._heartbeat_s:
            self.ended_s = now_s
        self._last_s = now_s

    def holds(self, now_s: float) -> bool:
        """Whether a decision about others can wait for one more heartbeat."""
        return now_s < self.ended_s + self._heartbeat_s
