"""The demand of a job on its aggregator, from its trial iterations (AutoPS §4.3.3.1).

An iteration is what the script calls a step; for a script that never says so it is a round of its most frequent tensor.
D is the mean of the trial's iterations without outliers, e what the aggregator worked for the job in them, divided by
their number. Both are whole microseconds from here on.

Some iterations are not like the others: one that saves or evaluates may take ten times as long. They say nothing of
what sharing costs, so they count neither for D nor for the loss. Being slowed for good moves the median along, and is
seen.
"""

from collections.abc import Sequence
from fractions import Fraction
from statistics import median

import msgspec

from covey.core.ids import JobId
from plugins.aggregator.messages import Demand
from plugins.aggregator.policy.assign import AggregationProfile, Tensor
from plugins.aggregator.policy.cycle import Share
from plugins.aggregator.policy.measured import MeasuredIterations

OUTLIER = 3
"""An iteration of more than this many times the median of those before it is left out; ours."""
RECENT = 9
"""Number of iterations of which that median is taken."""
CALIBRATE = Fraction(1, 2)
"""Weight of a new window when D is measured again while the job is alone (EWMA); ours."""
PERIOD_CHANGED, WORK_CHANGED = Fraction(1, 20), Fraction(1, 5)
"""Relative changes of D and e below which another check is not worth it; ours."""


class Pace(msgspec.Struct, frozen=True):
    """A window of iterations, outliers left out."""

    measured: MeasuredIterations = MeasuredIterations()
    recent: tuple[int, ...] = ()

    def plus(self, period_us: int) -> "Pace":
        counted = self.measured if is_outlier(self.recent, period_us) else self.measured.plus(period_us)
        return Pace(counted, (*self.recent, period_us)[-RECENT:])

    def begun_anew(self) -> "Pace":
        return Pace(MeasuredIterations(), self.recent)


def is_outlier(recent: Sequence[int], period_us: int) -> bool:
    """Is an iteration too long to be compared with those before it? The first few never are."""
    return len(recent) > RECENT // 2 and period_us > OUTLIER * median(recent)


def demand_of(measured: MeasuredIterations, busy_us: int, iterations: int, limit: Fraction) -> Demand | None:
    """D and e from a window: `measured` without outliers, `busy_us` of work in `iterations`. None without any.

    A lane cannot be busier than all the time: where outliers left out of D make e look longer, e is D.
    """
    if not measured.count or iterations <= 0:
        return None
    period_us = max(1, measured.total_us // measured.count)
    return Demand(period_us, min(period_us, -(-max(0, busy_us) // iterations)), int(limit * 1000))


def calibrated(old: Demand, new: Demand, alone: bool) -> Demand:
    """The demand after one more window: e is the newest; D follows only windows in which the job shared its aggregator
    with no other, as anything else would take a loss for its pace."""
    period_us = old.period_us + int(CALIBRATE * (new.period_us - old.period_us)) if alone else old.period_us
    return msgspec.structs.replace(old, period_us=max(1, period_us), work_us=min(max(1, period_us), new.work_us))


def differs(old: Demand, new: Demand) -> bool:
    """Should the aggregator check again?"""
    return (
        abs(new.period_us - old.period_us) > PERIOD_CHANGED * old.period_us
        or abs(new.work_us - old.work_us) > WORK_CHANGED * old.work_us
    )


def limit_of(demand: Demand) -> Fraction:
    """The job's LossLimit, exactly."""
    return Fraction(demand.limit_permille, 1000)


def share_of(demand: Demand) -> Share:
    """The job's share of one aggregator that sums all of it."""
    return Share(demand.period_us, demand.work_us, limit_of(demand))


def profile_of(job: JobId, demand: Demand) -> AggregationProfile:
    """Profile of a whole job as one piece of work: live jobs have one aggregator each."""
    return AggregationProfile(job, demand.period_us, (Tensor("all", demand.work_us),), limit=limit_of(demand))
