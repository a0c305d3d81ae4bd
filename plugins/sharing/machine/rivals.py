"""Controllers of the other kind, behind the interface of `Ladder`: one rate, one baseline, a law per window."""

import math
from collections import deque
from typing import ClassVar, Generic, Protocol, Self, TypeVar

from plugins.sharing.machine.ladder import Ladder
from plugins.sharing.policy import ladder, lease
from plugins.sharing.policy.interference import TOLERANCE, StepSamples
from plugins.sharing.policy.ladder import FREE, STOPPED, Rates

BASELINE_STEPS = 32
WINDOW_STEPS = 10
"""The number of mini-batches that AntMan's job side averages."""


class Law(Protocol):
    """The interface of a law of `policy.rivals`."""

    @property
    def rate(self) -> float: ...
    def after(self, excess: float, tolerance: float) -> Self: ...


L = TypeVar("L", bound=Law)


class Constant:
    """A law with the same rates at all times, whatever is measured."""

    rates: ClassVar[Rates]

    def stepped(
        self, step_s: float, idle_s: float, now_s: float, ended_s: float | None = None, *others: bool
    ) -> str | None:
        return None

    def passed(self, now_s: float, busy: bool) -> str | None:
        return None


class Naive(Constant):
    """No control at all: packing."""

    rates = FREE


class Alone(Constant):
    """The others never run: what packing and laws are compared with."""

    rates = STOPPED


class Throttle(Generic[L]):
    """One law, told the mean slowdown of each window of mini-batches (`ticks` False) or of the newest ones every time
    the clock ticks (True: TGS)."""

    def __init__(self, law: L, tolerance: float = TOLERANCE, ticks: bool = False) -> None:
        self.law, self.tolerance, self.ticks = law, tolerance, ticks
        self.baseline = StepSamples()
        self.recent: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._now_s = self._changed_s = -math.inf
        """When the newest event happened; when the rate last changed."""

    @property
    def measuring(self) -> bool:
        return self.baseline.count < BASELINE_STEPS

    @property
    def rates(self) -> Rates:
        return STOPPED if self.measuring else ladder.plain(self.law.rate)

    def stepped(
        self, step_s: float, idle_s: float, now_s: float, ended_s: float | None = None, *others: bool
    ) -> str | None:
        self._now_s = now_s
        if ended_s is not None and ended_s <= self._changed_s:
            return None  # as the ladder, which knows of each mini-batch when it ended
        if self.measuring:
            self.baseline = self.baseline.plus(step_s)
            return None
        self.recent.append(step_s)
        return None if self.ticks or len(self.recent) < WINDOW_STEPS else self._decide(clear=True)

    def passed(self, now_s: float, busy: bool) -> str | None:
        self._now_s = now_s
        return self._decide(clear=False) if self.ticks and self.recent else None

    def _decide(self, clear: bool) -> str | None:
        excess = sum(self.recent) / len(self.recent) / self.baseline.mean_s - 1
        old, self.law = self.law.rate, self.law.after(excess, self.tolerance)
        if clear:
            self.recent.clear()
        if self.law.rate == old:
            return None
        self._changed_s = self._now_s
        return f"{100 * excess:+.1f} % slower: {100 * old:.1f} % -> {100 * self.law.rate:.1f} %"


class Flag(Constant):
    """A controller that is told when the guaranteed job is idle on the device, and nothing else: idle phases are free,
    busy ones closed."""

    rates = Rates(1.0, math.inf, 0.0)


class Flagged(Throttle[L]):
    """A law that is told the same flag: idle phases are free, and the law rules what happens in busy ones."""

    @property
    def rates(self) -> Rates:
        return STOPPED if self.measuring else Rates(1.0, math.inf, self.law.rate)


class SpreadLadder(Ladder):
    """The ladder without its head: below 1 the others run at a rate that is spread over each idle phase. It shows what
    the head is good for: an operation that starts late in an idle phase reaches into the busy one."""

    @property
    def rates(self) -> Rates:
        rates = super().rates
        if self.phase != "run" or not 0 < self.u < 1:
            return rates
        return Rates(self.u, math.inf, 0.0)


class Orphaned(Ladder):
    """The ladder of an agent that falls silent at `dies_s`, as a rule in its baseline, with the others stopped. They go
    by what their last limits say for that case from then on (`policy.lease`)."""

    def __init__(self, tolerance: float = TOLERANCE, dies_s: float = 0.1) -> None:
        super().__init__(tolerance)
        self.dies_s = dies_s
        self._now_s = 0.0  # nothing of this is silent before it has begun

    @property
    def rates(self) -> Rates:
        return lease.effective(super().rates, lease.failsafe(beside_guaranteed=True), self._now_s - self.dies_s)

    def stepped(
        self, step_s: float, idle_s: float, now_s: float, ended_s: float | None = None, *others: bool
    ) -> str | None:
        if now_s < self.dies_s:
            return super().stepped(step_s, idle_s, now_s, ended_s, *others)
        self._now_s = now_s
        return None

    def passed(self, now_s: float, busy: bool) -> str | None:
        self._now_s = now_s
        return super().passed(now_s, busy) if now_s < self.dies_s else None
