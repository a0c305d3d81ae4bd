"""Times in which the mini-batches of a rank are no news: they are noted, and counted later.

A hook runs with cold caches, since the script's data went through them: each object that it touches costs half a
microsecond. So it has to touch only one small object."""

import threading
from collections.abc import Sequence

NEVER = float("-inf")


class Quiet:
    """A time in which nothing limits the rank, it only computes, and it is too early for a report, as in most
    mini-batches of a rank that is alone on its device. Set under the lock of its `ShareControl`, read without one."""

    __slots__ = ("_at", "_changes", "_left", "_thread", "_until_s")

    def __init__(self) -> None:
        self.nobody_asks()

    def nobody_asks(self) -> None:
        """No agent wants reports: all mini-batches are no news."""
        self._set(float("inf"), (0,), 0, None, 1 << 30)

    def until(self, until_s: float, changes: Sequence[int], thread: int | None, left: int) -> None:
        """The quiet time lasts until `until_s` (`time.perf_counter`), while `changes[0]` stays unchanged, for at most
        `left` mini-batches, all of them in this thread."""
        self._set(until_s, changes, changes[0], thread, left)

    def end(self) -> None:
        self._until_s = NEVER

    def lasts(self, now_s: float, waiting: int) -> bool:
        """Whether a mini-batch that ends now, in this thread, is no news, with `waiting` others noted before it."""
        if now_s >= self._until_s or self._changes[0] != self._at or waiting >= self._left:
            return False
        return self._thread is None or threading.get_ident() == self._thread

    def _set(self, until_s: float, changes: Sequence[int], at: int, thread: int | None, left: int) -> None:
        self._until_s = NEVER
        self._changes, self._at, self._thread, self._left = changes, at, thread, left
        self._until_s = until_s
