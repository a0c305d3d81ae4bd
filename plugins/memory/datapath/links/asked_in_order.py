"""What is asked of a lender is answered in order, each within a deadline: one timer looks at the oldest. The base of
the two ways to ask (`lender_lane`, `lender_pair`)."""

import asyncio
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable

from covey.ports import Env
from plugins.memory.datapath.wire.slabwire import Versions

Answered = Callable[[bool, Versions], None]
"""Whether the lender did it, and for what was read the version of each page."""
NO_VERSIONS: Versions = array("Q")


class AskedInOrder(ABC):
    """`lost` is called once when nothing more will be answered, with the reason."""

    def __init__(self, env: Env, deadline_s: float, lost: Callable[[str], None]) -> None:
        self.why = ""
        self._env, self._deadline_s, self._lost = env, deadline_s, lost
        self._loop = asyncio.get_running_loop()
        self._timed = False

    @abstractmethod
    def _oldest_s(self) -> float | None:
        """When the oldest that is not answered was sent; None: all are."""

    @abstractmethod
    def _close(self) -> None:
        """Close what the questions are sent over: a connection, or a queue pair."""

    @abstractmethod
    def _take_all(self) -> list[Answered]:
        """Nothing is under way any more; who is to hear that."""

    def _late(self, left_s: float) -> float:
        """Seconds that are left, of what has so many by the clock."""
        return left_s

    def _watch(self) -> None:
        """After something was sent."""
        if not self._timed:
            self._timed = True
            self._loop.call_later(self._deadline_s, self._look)

    def _look(self) -> None:
        """The oldest is too old, or has some time left."""
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
        """Idempotent. What is under way is answered with no; nobody here sees any of it any more."""
        if self.why:
            return
        self.why = why
        self._close()
        self._lost(self.why)
        for answered in self._take_all():
            answered(False, NO_VERSIONS)
