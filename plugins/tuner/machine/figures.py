"""Measured figures of hosts: moving averages that know how far chance may move them (Cruise §3.3.1)."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from covey.core.ids import HostId

Key = TypeVar("Key")

WEIGHT = 0.2
"""Weight of the newest measurement in the moving averages (§3.3.1)."""


DEVIATION_MIN = 0.05
"""Fraction of the median of its kind: a host that differs by less is like its kind. A change must save this fraction
too."""
ERRORS_MIN = 6.0
"""Standard errors of its moving average by which a host must differ, too. The error itself is known from some ten
measurements only, so this is less certain than its value suggests: with 4 a job of 32 hosts moved once in 250 decisions
by chance."""


class Figure(msgspec.Struct, frozen=True):
    """A moving average, and how far single measurements are from it."""

    mean: float
    variance: float = 0.0
    count: int = 1

    def with_measured(self, measured: float) -> "Figure":
        """The average with one more measurement; weights fall by `WEIGHT` with each newer one (§3.3.1)."""
        away = measured - self.mean
        variance = (1 - WEIGHT) * (self.variance + WEIGHT * away * away)
        return Figure(self.mean + WEIGHT * away, variance, self.count + 1)

    def differs(self, other: float) -> bool:
        """Does it differ from this value by more than chance?"""
        return abs(self.mean - other) > max(DEVIATION_MIN * other, ERRORS_MIN * self.error)

    @property
    def error(self) -> float:
        """One standard error of the average."""
        return math.sqrt(self.variance * WEIGHT / (2 - WEIGHT))


def measure(figures: dict[Key, Figure], key: Key, measured: float) -> None:
    """Add one measurement to the figure of this key."""
    old = figures.get(key)
    figures[key] = Figure(measured) if old is None else old.with_measured(measured)


def told_apart(figures: Mapping[Key, Figure], count_min: int) -> dict[Key, float]:
    """The value to use for each: its own if it was measured `count_min` times and differs from the median by more than
    chance, else the median. So hosts that are alike count as equal."""
    if not figures:
        return {}
    middle = statistics.median(each.mean for each in figures.values())
    return {
        key: each.mean if each.count >= count_min and each.differs(middle) else middle for key, each in figures.items()
    }


def short(seconds: float) -> str:
    """Seconds for people, to three digits."""
    return f"{seconds:.3g} s"


def named(hosts: Sequence[HostId]) -> str:
    """The first three of these hosts by name, and how many more there are."""
    return f"{', '.join(hosts[:3])}{f' and {len(hosts) - 3} more' if len(hosts) > 3 else ''}"
