"""The end that an agent asked of a rank: whether it was asked, how long is left, whether more was granted, and what was
saved for it."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from covey.core.errors import CoveyError
from covey.wire.job import GRACE_KEPT, SAVED_PATH_MAX, CheckpointSaved, Refusal, Stopping


class StopAsked:
    """The end that is asked of one rank. `preempt_file` exists once the job is asked to end, also while the agent is
    away; empty: there is no such file."""

    def __init__(self, preempt_file: str) -> None:
        self._file = preempt_file
        name = f"SIG{os.environ.get('COVEY_STOP_SIGNAL', 'TERM')}"
        self._number = signal.Signals.__members__.get(name, signal.SIGTERM)
        self._stopping: Stopping | None = None
        self._listens = False
        self.saved: CheckpointSaved | None = None
        """The newest checkpoint that this process wrote."""
        self._killed_at_s = float("inf")
        self._answered = threading.Event()
        self._kept: Refusal | None = None

    @property
    def asked(self) -> bool:
        return self._stopping is not None or (bool(self._file) and os.path.exists(self._file))

    @property
    def left_s(self) -> float:
        """Seconds until what is left of this rank is killed, by the agent's last message; infinite without one."""
        return max(0.0, self._killed_at_s - time.monotonic())

    def listens(self) -> None:
        """The script asks whether to stop: from now on the stop signal does not end it, if this is the main thread, and
        nothing else was to happen."""
        if not self._listens and threading.current_thread() is threading.main_thread():
            self._listens = True
            if signal.getsignal(self._number) is signal.SIG_DFL:
                self.defer()

    def wrote(self, step: int, path: Path) -> CheckpointSaved:
        """Remember a checkpoint that is complete. Returns what the agent is told of it."""
        self.saved = CheckpointSaved(step, os.path.abspath(path)[:SAVED_PATH_MAX], time.time())
        return self.saved

    def defer(self) -> None:
        """The stop signal only makes `asked` true from now on. Call it in the main thread."""

        def deferred(_number: int, _frame: object) -> None:
            self._stopping = self._stopping or Stopping(0.0, self._number.name)

        signal.signal(self._number, deferred)

    def asks_for_more(self) -> None:
        self._answered.clear()
        self._kept = None

    def more(self, timeout_s: float, no_answer: Callable[[], str]) -> float:
        """Seconds left, once the agent has answered. CoveyError when it has not, or refused."""
        if not self._answered.wait(timeout_s):
            raise CoveyError(GRACE_KEPT, no_answer(), f"save within {self.left_s:.0f} s")
        if (kept := self._kept) is not None:
            raise CoveyError(kept.what, kept.why, kept.next)
        return self.left_s

    # ---- from the agent ----

    def told(self, stopping: Stopping) -> None:
        self._killed_at_s = time.monotonic() + stopping.left_s
        self._stopping = stopping
        if not stopping.may_extend:
            self._answered.set()

    def refused(self, refusal: Refusal) -> None:
        """The agent grants no more time."""
        self._kept = refusal
        self._answered.set()
