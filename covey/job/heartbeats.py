"""Reports on a script's progress that its process sends regularly when the agent asks for them (`submit --hang`).

    script --a step, a batch, a call of tensors, `alive`--> sign of life
                                                                 |
    agent <-- Heartbeat(newest step, quiet for 3 s, waits 0 s) --+-- the thread of `covey.job.client`, every `every_s`

Silence tells something too: the process is suspended, or its interpreter is held by a call that never returns. The
agent continues to count from the last report.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from covey.wire.job import Heartbeat


class CallTimes:
    """Calls of `job.tensors` that are under way: since when each waits for other ranks, and how long all calls took."""

    def __init__(self) -> None:
        self._waited_s, self._under_way, self._since_s = 0.0, 0, 0.0
        """Seconds in which calls were under way, without those of threads in the background; how many are now, and
        since when some are."""
        self._lock = threading.Lock()
        self.last_s = time.monotonic()
        """Time at which a call last began or ended, monotonic seconds."""
        self.rounds = 0
        """Number of rounds whose result was taken."""
        self._here = threading.local()
        self._began: dict[int, float] = {}
        """Time at which the waiting call of each thread began, by thread id."""

    @property
    def communicate_s(self) -> float:
        """Seconds in which the script waited in calls so far: those of several threads at once count once."""
        with self._lock:
            return self._waited_s + (time.monotonic() - self._since_s if self._under_way else 0.0)

    def in_background(self) -> None:
        """The calls of this thread are not counted in `communicate_s`."""
        self._here.background = True

    @contextlib.contextmanager
    def timed(self, waits: bool = True) -> Iterator[None]:
        """Count the call inside. `waits`: it may wait for other ranks that are late."""
        began_s, thread = time.monotonic(), threading.get_ident()
        self.last_s = began_s
        if waits:
            self._began[thread] = began_s
        counts = not getattr(self._here, "background", False)
        if counts:
            with self._lock:
                self._since_s = self._since_s if self._under_way else began_s
                self._under_way += 1
        try:
            yield
        finally:
            self._began.pop(thread, None)
            self.last_s = time.monotonic()
            if counts:
                with self._lock:
                    self._under_way -= 1
                    if not self._under_way:
                        self._waited_s += self.last_s - self._since_s

    def waits_s(self, now_s: float) -> float:
        """Seconds that the call that has waited longest waits; 0 when none waits."""
        began = list(self._began.values())
        return now_s - min(began) if began else 0.0


class TimedTensors(Protocol):
    """What heartbeats need of `job.tensors`."""

    @property
    def calls(self) -> CallTimes: ...
    def reaches(self) -> bool: ...


class Heartbeats:
    """The heartbeats of one process. Methods may be called from any thread; none waits."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.every_s = 0.0
        """Seconds between two heartbeats, as the agent wants it; 0: none."""
        self.seen: Callable[[], tuple[int | None, float]] | None = None
        """Returns the newest step that `covey.hooks` saw, and when it last saw a sign of life."""
        self.waits_for_turn: Callable[[], bool] = lambda: False
        """Whether the script waits for its turn beside other jobs, which nobody is to blame for."""
        self._tensors: TimedTensors | None = None
        self._now_s, self._sign_s, self._said_s = now_s, now_s(), 0.0
        self._step: int | None = None
        self._at_work = False
        self._excused_s = now_s()
        """Time until which the script is not to blame for lack of progress, monotonic seconds."""

    def sign(self, step: int | None = None) -> None:
        """The script is alive, and did this step if one is given."""
        self._sign_s = self._now_s()
        if step is not None:
            self._step = step

    def uses(self, tensors: TimedTensors) -> None:
        """From now on the script uses `tensors`."""
        self._tensors = tensors

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Excuse the script during the work inside: that work has a time limit of its own."""
        self._at_work = True
        try:
            yield
        finally:
            self._at_work = False
            self.sign()

    def left_s(self, most_s: float | None) -> float | None:
        """Seconds until the next heartbeat, or `most_s` if that is less; None: no limit."""
        if not self.every_s:
            return most_s
        left_s = max(0.0, self._said_s + self.every_s - self._now_s())
        return left_s if most_s is None else min(left_s, most_s)

    def due(self) -> list[Heartbeat]:
        """The heartbeat that is due now, or nothing."""
        if not self.every_s or self._now_s() < self._said_s + self.every_s:
            return []
        self._said_s = self._now_s()
        return [self.now()]

    def now(self) -> Heartbeat:
        """The heartbeat of this moment. Waiting is excused while aggregators cannot be reached: then nobody can say
        which rank is waited for."""
        now_s, step, sign_s, waits_s, rounds = self._now_s(), self._step, self._sign_s, 0.0, 0
        if self.seen is not None:
            seen, at_s = self.seen()
            step, sign_s = seen if step is None else step, max(sign_s, at_s)
        if self._tensors is not None:
            calls = self._tensors.calls
            sign_s, waits_s, rounds = max(sign_s, calls.last_s), calls.waits_s(now_s), calls.rounds
        if self._at_work or self.waits_for_turn() or not (self._tensors is None or self._tensors.reaches()):
            self._excused_s = now_s
        sign_s, waits_s = max(sign_s, self._excused_s), min(waits_s, now_s - self._excused_s)
        begun = step is not None or rounds > 0
        return Heartbeat(step, max(0.0, now_s - sign_s), max(0.0, waits_s), begun)
