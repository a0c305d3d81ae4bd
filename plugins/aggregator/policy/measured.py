"""The time that iterations really take, and which assignment is taken back for it (AutoPS §4.3.3.2, §4.5.2.3).

Cycles are a plan. Caches, links and bursts that meet are not in it, so each job's speed is measured: when it is at its
loss limit or above it over 100 iterations, the newest assignment that could be the cause is reverted.
"""

from collections.abc import Iterable, Mapping
from fractions import Fraction

import msgspec

from covey.core.ids import JobId

ITERATIONS = 100
"""Iterations after which a job's speed is judged (AutoPS §4.5.2.3)."""
BARRED = "it was slowed, or slowed others, there"
"""Why an aggregator does not take a job back before one that was there has left, for people."""


class MeasuredIterations(msgspec.Struct, frozen=True):
    """Count and time of iterations since the assignment of a job, or of one beside it, changed."""

    count: int = 0
    total_us: int = 0

    def plus(self, period_us: int) -> "MeasuredIterations":
        return MeasuredIterations(self.count + 1, self.total_us + period_us)


def loss_measured(measured: MeasuredIterations, period_us: int) -> Fraction:
    """Part of its speed that a job lost, 0 or more: 1 - D / mean iteration."""
    if measured.total_us <= 0:
        return Fraction(0)
    return max(Fraction(0), 1 - Fraction(period_us * measured.count, measured.total_us))


def is_hurt(measured: MeasuredIterations, period_us: int, limit: Fraction, iterations: int = ITERATIONS) -> bool:
    """Were enough iterations measured, and is the loss in them the limit or more?"""
    return measured.count >= iterations and loss_measured(measured, period_us) >= limit


def reverted(hurt: JobId, beside: Iterable[JobId], assigned: Mapping[JobId, int]) -> JobId:
    """The job that has to go: the one assigned last, of the job that is hurt and those on its aggregators."""
    return max({hurt, *beside}, key=lambda job: (assigned[job], job))
