"""Which sums one aggregator makes first: those that are due first (ours, for the slots of AutoPS §4.3.3.2).

The thesis gives each job slots in the aggregator's cycle and does not say who keeps to them. Here an iteration of a job
that was promised a place may take as long as its loss limit allows, so its sums are due at the end of that; of all that
can be added the aggregator adds what is due first, a part of a tensor at a time. Whatever order meets all deadlines,
this one does (Liu and Layland 1973, theorem 7), and no sum waits for a slot while there is nothing else to do. What
comes after it was due is an outlier: it waits as if its iteration began now, so that no other job notices. In order of
arrival a job with short iterations waits behind a whole tensor of one with long ones.

    D 100 ms, limit 10 %    began |--------------- computes ---|--push--| due at 111 ms
    D 900 ms, limit 10 %    ... push -------------------------------------------------> due at 1,000 ms: waits

A job without a promise waits for all others if it was refused one; on its trial, which finds out how fast it can be, it
goes first.
"""

import heapq
import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Generic, TypeVar

Work = TypeVar("Work")

ON_TRIAL, LAST = 0.0, math.inf
"""Time that an iteration may take of a job on trial, and of one that was promised nothing, for the order alone."""
LAST_S = 10.0
"""Seconds for which the sums of a job that was promised nothing wait for all others."""


def may_take(period: float, limit: Fraction) -> float:
    """Time that an iteration of D may take, in the same unit: d, of which (d - D) / d is the limit; with a limit of the
    whole speed as long as it likes."""
    return period / float(1 - limit) if limit < 1 else LAST


def due(began: float, allowed: float, now: float) -> float:
    """Time at which sums are due of an iteration that began at `began` and may take `allowed`."""
    return (began if began + allowed >= now else now) + allowed


class MostUrgent(Generic[Work]):
    """A queue of work: what is due first is at the front; of equals what came first."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Work]] = []
        self._count: Iterator[int] = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, due: float, work: Work) -> None:
        heapq.heappush(self._waiting, (due, next(self._count), work))

    @property
    def first(self) -> Work:
        return self._waiting[0][2]

    @property
    def first_due(self) -> float:
        return self._waiting[0][0]

    def pop(self) -> Work:
        return heapq.heappop(self._waiting)[2]
