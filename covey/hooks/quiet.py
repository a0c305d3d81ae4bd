"""While mini-batches of a rank are no news: their times are noted, and counted later.

A hook runs with cold caches, since what the script computes went through them: each object that it looks at costs
half a microsecond. So what it has to look at is one small object."""

import threading
from collections.abc import Sequence

NEVER = float("-inf")


class Quiet:
    """Nothing limits the rank, it only computes, and it is too early for a report. So are most mini-batches of one that
    is alone on its device. Set under the lock of its `ShareControl`, looked at without one."""

    __slots__ = ("_at", "_changes", "_left", "_thread", "_until_s")

    def __init__(self) -> None:
        self.nobody_asks()

    def nobody_asks(self) -> None:
        """There is no agent that wants reports."""
        self._set(float("inf"), (0,), 0, None, 1 << 30)

    def until(self, until_s: float, changes: Sequence[int], thread: int | None, left: int) -> None:
        """Until that moment (`time.perf_counter`), while `changes[0]` stays as it is, for at most `left` mini-batches,
        all of them in this thread."""
        self._set(until_s, changes, changes[0], thread, left)

    def end(self) -> None:
        self._until_s = NEVER

    def lasts(self, now_s: float, waiting: int) -> bool:
        """Whether a mini-batch that ends now, in this thread, is no news, with so many before it."""
        if now_s >= self._until_s or self._changes[0] != self._at or waiting >= self._left:
            return False
        return self._thread is None or threading.get_ident() == self._thread

    def _set(self, until_s: float, changes: Sequence[int], at: int, thread: int | None, left: int) -> None:
        self._until_s = NEVER
        self._changes, self._at, self._thread, self._left = changes, at, thread, left
        self._until_s = until_s
