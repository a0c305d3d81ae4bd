"""Questions to a lender, answered in order, each within a deadline: one timer looks at the oldest. The base of the two
ways to ask (`lender_lane`, `lender_pair`)."""

import asyncio
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable

from covey.ports.env import Env
from plugins.memory.datapath.wire.slabwire import Versions

Answered = Callable[[bool, Versions], None]
"""Called with whether the lender did it, and for a read the version of each page."""
NO_VERSIONS: Versions = array("Q")


class AskedInOrder(ABC):
    """A queue of questions under way. `lost` is called once when nothing more will be answered, with the reason."""

    def __init__(self, env: Env, deadline_s: float, lost: Callable[[str], None]) -> None:
        self.why = ""
        self._env, self._deadline_s, self._lost = env, deadline_s, lost
        self._loop = asyncio.get_running_loop()
        self._timed = False

    @abstractmethod
    def _oldest_s(self) -> float | None:
        """Time at which the oldest unanswered question was sent; None: all are answered."""

    @abstractmethod
    def _close(self) -> None:
        """Close what the questions are sent over: a connection, or a queue pair."""

    @abstractmethod
    def _take_all(self) -> list[Answered]:
        """Remove all questions under way; returns the functions that are to hear that."""

    def _late(self, left_s: float) -> float:
        """Seconds left for the oldest question, of which `left_s` are left by the clock."""
        return left_s

    def _watch(self) -> None:
        """Start the timer after something was sent."""
        if not self._timed:
            self._timed = True
            self._loop.call_later(self._deadline_s, self._look)

    def _look(self) -> None:
        """Check the oldest question: it is too old, or has some time left."""
        self._timed = False
        sent_s = self._oldest_s()
        if self.why or sent_s is None:
            return
        left_s = self._late(sent_s + self._deadline_s - self._env.clock.now_s())
        if left_s <= 0:
            self.end(f"did not answer within {self._deadline_s:g} s")
        else:
            self._timed = True
            self._loop.call_later(left_s, self._look)

    def end(self, why: str) -> None:
        """End for the given reason. Idempotent. Questions under way are answered with no; their later answers are not
        seen here."""
        if self.why:
            return
        self.why = why
        self._close()
        self._lost(self.why)
        for answered in self._take_all():
            answered(False, NO_VERSIONS)
