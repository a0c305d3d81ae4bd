"""How a script gets on, as its process says every so often when the agent asks for it (`submit --hang`).

    script --a step, a batch, a call of tensors, `alive`--> sign of life
                                                                 |
    agent <-- Heartbeat(newest step, quiet for 3 s, waits 0 s) --+-- the thread of `covey.job.client`, every `every_s`

A process that says nothing any more says something too: it is suspended, or its interpreter is held by a call that
never returns. Its agent counts on from what it heard last.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from covey.wire.job import Heartbeat


class CallTimes:
    """Calls of `job.tensors` that are under way: since when each waits for other ranks, and how long all took."""

    def __init__(self) -> None:
        self.communicate_s = 0.0
        """Spent in calls, without threads in the background."""
        self.last_s = time.monotonic()
        """When a call last began or ended."""
        self.rounds = 0
        """Whose result was taken."""
        self._here = threading.local()
        self._began: dict[int, float] = {}
        """By thread."""

    def in_background(self) -> None:
        """This thread's calls are not counted in `communicate_s`."""
        self._here.background = True

    @contextlib.contextmanager
    def timed(self, waits: bool = True) -> Iterator[None]:
        """`waits`: others may be late for it."""
        began_s, thread = time.monotonic(), threading.get_ident()
        self.last_s = began_s
        if waits:
            self._began[thread] = began_s
        try:
            yield
        finally:
            self._began.pop(thread, None)
            self.last_s = time.monotonic()
            if not getattr(self._here, "background", False):
                self.communicate_s += self.last_s - began_s

    def waits_s(self, now_s: float) -> float:
        """For how long the one waits that has waited longest; 0: none does."""
        began = list(self._began.values())
        return now_s - min(began) if began else 0.0


class TimedTensors(Protocol):
    """What is asked of `job.tensors`."""

    @property
    def calls(self) -> CallTimes: ...
    def reaches(self) -> bool: ...


class Heartbeats:
    """Of one process. Methods may be called from any thread; none waits."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.every_s = 0.0
        """As the agent wants it; 0: none."""
        self.seen: Callable[[], tuple[int | None, float]] | None = None
        """The newest step that `covey.hooks` saw, and when it last saw a sign of life."""
        self._tensors: TimedTensors | None = None
        self._now_s, self._sign_s, self._said_s = now_s, now_s(), 0.0
        self._step: int | None = None
        self._at_work = False
        self._excused_s = now_s()
        """When it last was not to blame for standing still."""

    def sign(self, step: int | None = None) -> None:
        """The script is alive, and did this step, if one is named."""
        self._sign_s = self._now_s()
        if step is not None:
            self._step = step

    def uses(self, tensors: TimedTensors) -> None:
        """The script, from now on."""
        self._tensors = tensors

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """What goes on inside has a limit of its own."""
        self._at_work = True
        try:
            yield
        finally:
            self._at_work = False
            self.sign()

    def left_s(self, most_s: float | None) -> float | None:
        """Until the next one, if that is sooner; None: for ever."""
        if not self.every_s:
            return most_s
        left_s = max(0.0, self._said_s + self.every_s - self._now_s())
        return left_s if most_s is None else min(left_s, most_s)

    def due(self) -> list[Heartbeat]:
        """The one that is due now, or none."""
        if not self.every_s or self._now_s() < self._said_s + self.every_s:
            return []
        self._said_s = self._now_s()
        return [self.now()]

    def now(self) -> Heartbeat:
        """Where those that add what it pushes are out of reach, nobody can say for whom it waits."""
        now_s, step, sign_s, waits_s, rounds = self._now_s(), self._step, self._sign_s, 0.0, 0
        if self.seen is not None:
            seen, at_s = self.seen()
            step, sign_s = seen if step is None else step, max(sign_s, at_s)
        if self._tensors is not None:
            calls = self._tensors.calls
            sign_s, waits_s, rounds = max(sign_s, calls.last_s), calls.waits_s(now_s), calls.rounds
        if self._at_work or not (self._tensors is None or self._tensors.reaches()):
            self._excused_s = now_s
        sign_s, waits_s = max(sign_s, self._excused_s), min(waits_s, now_s - self._excused_s)
        begun = step is not None or rounds > 0
        return Heartbeat(step, max(0.0, now_s - sign_s), max(0.0, waits_s), begun)
