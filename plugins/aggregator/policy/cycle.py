"""Cyclic execution: the arithmetic of one aggregator that sums tensors of several jobs (AutoPS §4.3.3.2, figure 4.6).

    cycle       C   the longest iteration D among its jobs; each sum has its slot in it, cycle after cycle
    executions      floor(C / D): how often a job's sums run in one cycle
    stretched   d   C / executions: what an iteration of the job takes in this cycle; never less than D
    loss            (d - D) / d, which is (C mod D) / C: the part of the cycle that does not divide into iterations
    used, free      W = sum over jobs of executions * e;  F = lanes * C * fill - W

The thesis prints ceil(C / D) where its integer program has C / floor(C / D), and compares that count with a duration;
only the program's form gives its own example of 17 % (D = 5 in a cycle of 12). The executions here are floor(C / D)
with this aggregator's C alone. A job slowed by another aggregator runs less often than that, so an aggregator may be
a little less busy than it planned and never more; and it can check itself knowing nobody else's cycle.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from fractions import Fraction

import msgspec

from covey.core.ids import JobId

LOSS_LIMIT = Fraction(1, 10)
"""A job may lose less than this part of its speed by sharing (AutoPS §4.3.3.2, `LossLimit`)."""
FILL = Fraction(3, 4)
"""Part of its cycle that an aggregator promises (ours; the thesis: all of it). A cycle counts means, and the rest is
for bursts that meet: with this reserve plans are kept when sums are made by `policy.urgency`
(docs/results/aggregator.md)."""


class Share(msgspec.Struct, frozen=True):
    """The demand of one job on one aggregator."""

    period_us: int
    """D: microseconds of an iteration when the job runs alone; above 0."""
    work_us: int
    """Microseconds of work of its tensors here, once each: the sum of their e."""
    limit: Fraction = LOSS_LIMIT
    """Its loss limit, above 0."""
    most_us: int = 0
    """Most `work_us` of the job that one aggregator may have; 0: no limit."""


class Cycle(msgspec.Struct, frozen=True):
    """One aggregator: its jobs and what follows from them. Made by `cycle_of` and `grown`, which keep it consistent."""

    shares: Mapping[JobId, Share] = {}
    lanes: int = 1
    """Sums that it runs at a time."""
    times: int = 1
    """How many of its longest iterations a cycle may cover, where fewer would hurt (1: the thesis)."""
    us: int = 0
    """C in microseconds; 0 without jobs."""
    used_us: int = 0
    """W in microseconds, of lanes * C."""
    fill: Fraction = Fraction(1)
    """Part of the cycle that may be promised to several jobs; also of the time that a burst of one of them may take."""

    @property
    def free_us(self) -> int:
        return self.free_in(self.us, self.used_us, len(self.shares))

    def free_in(self, us: int, used_us: int, jobs: int) -> int:
        """F in microseconds, if the cycle had this length and number of jobs."""
        return int(self.lanes * us * self.filled_by(jobs)) - used_us

    def filled_by(self, jobs: int) -> Fraction:
        """Part of the cycle that may be promised: a job that is alone meets no bursts of others."""
        return self.fill if jobs > 1 else Fraction(1)

    @property
    def load(self) -> Fraction:
        """W / C over its lanes, 0..1."""
        return Fraction(self.used_us, self.lanes * self.us) if self.us else Fraction(0)


def executions(cycle_us: int, period_us: int) -> int:
    """How often a job runs in one cycle; the cycle is not shorter than its iteration."""
    return cycle_us // period_us


def stretched(cycle_us: int, period_us: int) -> Fraction:
    """The microseconds that an iteration takes in this cycle."""
    return Fraction(cycle_us, cycle_us // period_us)


def loss(cycle_us: int, period_us: int) -> Fraction:
    """Part of its speed that a job loses in this cycle, 0 <= loss < 1/2."""
    return Fraction(cycle_us % period_us, cycle_us)


def hurts(cycle_us: int, share: Share) -> bool:
    """Does a job lose its limit or more in this cycle? (The limit itself is too much: Pseudocode 3, line 6.)"""
    return (cycle_us % share.period_us) * share.limit.denominator >= share.limit.numerator * cycle_us


def used(cycle_us: int, shares: Iterable[Share]) -> int:
    """W: the work of all jobs in one cycle, microseconds."""
    return sum(cycle_us // share.period_us * share.work_us for share in shares)


def cycle_for(shares: Collection[Share], times: int, now_us: int = 0) -> int | None:
    """Microseconds of the cycle in which no job is hurt: the present one if it will do, else the longest iteration,
    else, up to `times` of that, the shortest that is a whole number of some job's iterations. None when there is none.

    The thesis stops at the longest iteration: 5 in a cycle of 12 loses 17 %. In a cycle of 25, where 12 runs twice,
    5 loses nothing and 12 loses 4 %.
    """
    longest_us = max(share.period_us for share in shares)
    tests = [(share.period_us, share.limit.numerator, share.limit.denominator) for share in shares]
    for us in _cycles(shares, longest_us, times, now_us):
        for at, (period_us, top, bottom) in enumerate(tests):
            if us % period_us * bottom >= top * us:  # `hurts`, as this is where the time goes
                if at:
                    tests.insert(0, tests.pop(at))  # who was hurt will be hurt
                break
        else:
            return us
    return None


def _cycles(shares: Collection[Share], longest_us: int, times: int, now_us: int) -> Iterator[int]:
    yield max(now_us, longest_us)
    if now_us > longest_us:
        yield longest_us
    if times > 1:
        periods = {share.period_us for share in shares}
        most_us = times * longest_us
        yield from sorted({us for one in periods for us in range(longest_us // one * one + one, most_us + 1, one)})


def cycle_of(
    shares: Mapping[JobId, Share], lanes: int = 1, times: int = 1, now_us: int = 0, fill: Fraction = Fraction(1)
) -> Cycle:
    """An aggregator with these jobs, in the cycle that hurts no job, or if there is none in the longest iteration; the
    present cycle stays if it will do."""
    if not shares:
        return Cycle({}, lanes, times, fill=fill)
    us = cycle_for(list(shares.values()), times, now_us) or max(share.period_us for share in shares.values())
    return Cycle(shares, lanes, times, us, used(us, shares.values()), fill)


def grown(cycle: Cycle, job: JobId, share: Share) -> Cycle:
    """The cycle with this share added to what the job has there; nothing is checked."""
    known = cycle.shares.get(job)
    if known is None:
        return cycle_of({**cycle.shares, job: share}, cycle.lanes, cycle.times, cycle.us, cycle.fill)
    both = msgspec.structs.replace(share, work_us=known.work_us + share.work_us)
    more_us = executions(cycle.us, share.period_us) * share.work_us
    shares = {**cycle.shares, job: both}
    return msgspec.structs.replace(cycle, shares=shares, used_us=cycle.used_us + more_us)


def sound(cycle: Cycle) -> bool:
    """Is no job hurt, and does the work fit?"""
    return cycle.free_us >= 0 and not any(hurts(cycle.us, share) for share in cycle.shares.values())


def without(cycle: Cycle, job: JobId, hold: bool = True) -> Cycle:
    """The cycle after a job left, as short as its longest iteration.

    A shorter cycle can hurt those that stay, or be too short for their work: 5 and 12 share a cycle of 60 without loss
    and cannot share one of 12. With `hold` the old cycle is then kept, in which all stays as it was. (The thesis does
    not speak of this case.)
    """
    shares = {name: share for name, share in cycle.shares.items() if name != job}
    shorter = cycle_of(shares, cycle.lanes, cycle.times, fill=cycle.fill)
    if hold and not sound(shorter):
        return msgspec.structs.replace(cycle, shares=shares, used_us=used(cycle.us, shares.values()))
    return shorter


def runs_late(begun_us: int, cycle_us: int, now_us: int, due_us: Iterable[int], work_us: int) -> bool:
    """Does a sum that missed its slot still run in this cycle? Only if there is time beside all that is due in the rest
    of it. Otherwise it waits for the next cycle, and no other job notices (AutoPS §4.3.3.2, outliers)."""
    return begun_us + cycle_us - now_us - sum(due_us) >= work_us
