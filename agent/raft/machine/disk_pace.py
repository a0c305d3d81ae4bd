"""How long the log's disk takes, and whether a host with such a disk should lead.

A leader commits through the disks of the others, so its own may hang for long unnoticed, until its writes fill its
memory and a loss of one voter stops the rack. So a leader whose oldest write takes longer than `SLOW_S` hands over; and
a host does not stand for election while a write hangs, and after a slow one only when no other host did for some time:
it may be the only one left.
"""

from collections import deque
from collections.abc import Iterable

from agent.raft.machine.types import Action, Persist, SaveSnapshot

SLOW_S = 2.0
"""Seconds from which on a write is slow: a healthy disk syncs within some hundredths of a second, a busy one within
some tenths."""
SNAPSHOT_BYTES_PER_S = 20_000_000
"""Bytes per second of a snapshot, by which its write may take longer."""
RELUCTANCE = 4.0
"""The factor by which a host whose last write was slow waits longer before it stands for election."""


class DiskPace:
    def __init__(self) -> None:
        self._writing: deque[tuple[int, float]] = deque()
        """The writes under way: (number, time from which the write counts as slow)."""
        self._last_was_slow = False

    def began(self, actions: Iterable[Action], now_s: float) -> None:
        """Note that the writes among these actions begin now."""
        for action in actions:
            if isinstance(action, Persist | SaveSnapshot):
                size = len(action.image.data) if isinstance(action, SaveSnapshot) else 0
                self._writing.append((action.number, now_s + SLOW_S + size / SNAPSHOT_BYTES_PER_S))

    def done(self, number: int, now_s: float) -> None:
        """Note that everything up to this number is durable."""
        while self._writing and self._writing[0][0] <= number:
            _, slow_from_s = self._writing.popleft()
            self._last_was_slow = now_s > slow_from_s

    def hangs(self, now_s: float) -> bool:
        """Whether a write is under way that takes too long."""
        return bool(self._writing) and now_s > self._writing[0][1]

    @property
    def reluctance(self) -> float:
        """The factor on the time to wait before standing for election."""
        return RELUCTANCE if self._last_was_slow else 1.0
