"""Whether a rank is asked to end, and how long it may still save: as its agent says."""

import os
import threading
import time
from collections.abc import Callable

from covey.errors import CoveyError
from covey.wire import GRACE_KEPT, ExtendGrace, Frame, Refusal, Stopping


class Grace:
    """Of one rank. Methods may be called from any thread."""

    def __init__(self, preempt_file: str) -> None:
        """`preempt_file`: appears when the rank is asked to end, also while the agent is away; empty: there is none."""
        self._preempt_file = preempt_file
        self._stopping: Stopping | None = None
        self._killed_at_s = float("inf")
        self._answered = threading.Event()
        self._kept: Refusal | None = None

    @property
    def stopping(self) -> bool:
        return self._stopping is not None or (bool(self._preempt_file) and os.path.exists(self._preempt_file))

    @property
    def left_s(self) -> float:
        """Infinite while the agent has not said it."""
        return max(0.0, self._killed_at_s - time.monotonic())

    def sigterm(self) -> None:
        self._stopping = self._stopping or Stopping(0.0, "SIGTERM")

    def asked(self, stopping: Stopping) -> None:
        """The agent says that the rank is to end, or has more time."""
        self._killed_at_s = time.monotonic() + stopping.left_s
        self._stopping = stopping
        if not stopping.may_extend:
            self._answered.set()

    def refused(self, refusal: Refusal) -> None:
        """The answer to a question of this rank, if it is one of this kind."""
        if refusal.what == GRACE_KEPT:
            self._kept = refusal
            self._answered.set()

    def extend(self, seconds: float, timeout_s: float, say: Callable[[Frame], None], why: Callable[[], str]) -> float:
        """As of `JobClient.extend_grace`. `why`: there is no answer."""
        self._answered.clear()
        self._kept = None
        say(ExtendGrace(float(seconds)))
        if not self._answered.wait(timeout_s):
            raise CoveyError(GRACE_KEPT, why(), f"save within {self.left_s:.0f} s")
        if (kept := self._kept) is not None:
            raise CoveyError(kept.what, kept.why, kept.next)
        return self.left_s
