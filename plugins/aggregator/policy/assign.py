"""The aggregator that sums each tensor: Pseudocode 3 of AutoPS (§4.3.3.2), repaired, with an index instead of a scan.

For each tensor: among the aggregators where neither the new job nor any job that is there would be hurt, the one with
the least free time that suffices; when there is none, a new one. What differs from the printed lines, and why:

    printed                                      here
    d = max(D, ceil(C / D))                      C / floor(C / D), as in the integer program (`policy.cycle`)
    losses of the jobs that are there            those, and the new job's own
    only the last job's loss is compared         any job that is hurt rules the aggregator out
    an aggregator ruled out leaves the set       it is ruled out for this job only
    fits when F >= e                             F >= executions * e: a short iteration runs several times a cycle
    one lane                                     lanes * C; a tensor whose sum outlasts an iteration is refused, as no
                                                 lane could keep up with it

`by_scan` is the printed loop. `Packing` finds the same answers from sorted free times: while one job's tensors are
placed, only the aggregator that just got one has changed.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Sequence
from fractions import Fraction

import msgspec

from covey.core.ids import JobId
from plugins.aggregator.policy.cycle import LOSS_LIMIT, Cycle, Share, cycle_for, executions, grown, hurts, loss, used


class Tensor(msgspec.Struct, frozen=True):
    """One tensor of a job, or one part of a large one."""

    name: str
    work_us: int
    """CPU time of one sum in microseconds, e."""


class AggregationProfile(msgspec.Struct, frozen=True):
    """The figures of a job that are known after its trial iterations (AutoPS §4.3.3.1)."""

    job: JobId
    period_us: int
    """D: microseconds of an iteration when the job runs alone."""
    tensors: tuple[Tensor, ...]
    servers: int = 1
    """Number of parameter servers that its owner would have started."""
    limit: Fraction = LOSS_LIMIT
    window_us: int = 0
    """Microseconds from its first push to its last; 0: not known. An aggregator that gets more of it than this is still
    summing when the ranks wait (ours: the thesis plans with means, and learns of bursts by measuring)."""

    @property
    def work_us(self) -> int:
        return sum(tensor.work_us for tensor in self.tensors)

    def share(self, work_us: int) -> Share:
        return Share(self.period_us, work_us, self.limit, self.window_us)


class CycleRoom(msgspec.Struct, frozen=True):
    """An aggregator as it would be with a certain job: its cycle, how often the job runs in it, and what is free for
    the job."""

    us: int
    executions: int
    free_us: int


def largest_first(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in the order in which a job's are placed; ties by name."""
    return sorted(tensors, key=lambda tensor: (-tensor.work_us, tensor.name))


def flaw(profile: AggregationProfile) -> str:
    """Why no aggregator can sum this job; empty when one can."""
    if profile.period_us <= 0 or profile.limit <= 0:
        return "its iteration and its loss limit must be above 0"
    names = {tensor.name for tensor in profile.tensors}
    if len(names) < len(profile.tensors):
        return "two of its tensors have one name"
    if any(tensor.work_us < 0 for tensor in profile.tensors):
        return "a tensor takes less than no time"
    longest = max(profile.tensors, key=lambda tensor: tensor.work_us, default=None)
    most_us = min(profile.period_us, profile.window_us or profile.period_us)
    if longest is not None and longest.work_us > most_us:
        took = f"{longest.work_us} us and must not take more than {most_us} us"
        return f"summing {longest.name} takes {took}: split it"
    return ""


def room(cycle: Cycle, job: JobId, share: Share) -> CycleRoom | None:
    """The cycle of the aggregator with this job (the work of `share` does not count); None when any job is hurt."""
    us = cycle_for(_with(cycle, job, share), cycle.times, cycle.us)
    if us is None:
        return None
    used_us = cycle.used_us if us == cycle.us else used(us, cycle.shares.values())
    jobs = len(cycle.shares.keys() | {job})
    often, free_us = executions(us, share.period_us), cycle.free_in(us, used_us, jobs)
    if share.most_us:
        here, most_us = cycle.shares.get(job), int(share.most_us * cycle.filled_by(jobs))
        free_us = min(free_us, often * (most_us - (here.work_us if here is not None else 0)))
    return CycleRoom(us, often, free_us)


def _with(cycle: Cycle, job: JobId, share: Share) -> list[Share]:
    """Shares to find a cycle for; their work does not count."""
    there = list(cycle.shares.values())
    return there if job in cycle.shares else [*there, share]


def refusal_of(cycle: Cycle, job: JobId, share: Share) -> str:
    """An aggregator's own exact check of more work, whatever the sender believed; empty when it takes it."""
    found = room(cycle, job, share)
    if found is None:
        us = max(cycle.us, share.period_us)
        name = next(name for name, one in sorted({**cycle.shares, job: share}.items()) if hurts(us, one))
        period_us = share.period_us if name == job else cycle.shares[name].period_us
        return f"in a cycle of {us} us, {name} would lose {float(loss(us, period_us)):.1%} of its speed"
    need_us = found.executions * share.work_us
    if need_us <= found.free_us:
        return ""
    part = cycle.filled_by(len(cycle.shares.keys() | {job}))
    limit = f", of which several jobs may be promised {float(part):.0%}" if part < 1 else ""
    return f"{need_us} us of work and {max(0, found.free_us)} us free in a cycle of {found.us} us{limit}"


def best_fit(cycles: Sequence[Cycle], job: JobId, share: Share, barred: Collection[int] = ()) -> int | None:
    """Index of the aggregator where this work fits with the least free time: lines 1-21, looking at every one; ties by
    index."""
    best: tuple[int, int] | None = None
    for index, cycle in enumerate(cycles):
        found = room(cycle, job, share) if index not in barred else None
        if found is not None and found.free_us >= found.executions * share.work_us:
            best = min(best or (found.free_us, index), (found.free_us, index))
    return best[1] if best is not None else None


class Packing:
    """Aggregators while a decision is made: `cycles` by index, each job's free times sorted.

    Every answer is the one of `best_fit`. An index holds, for a job and each count of executions, (free, aggregator)
    ascending; a tensor looks once into each, and a placement moves one entry of each job's index.
    """

    def __init__(self, cycles: Sequence[Cycle]) -> None:
        self.cycles = list(cycles)
        self._jobs: dict[JobId, _Index] = {}

    def place(self, job: JobId, share: Share, barred: Collection[int] = ()) -> int | None:
        """Put this work where it fits best, and return the index; None, and nothing happens, where it fits nowhere."""
        index = self._jobs.get(job)
        if index is None:
            index = self._jobs[job] = _Index(job, share, barred)
            for each, cycle in enumerate(self.cycles):
                index.set(each, cycle)
        at = index.best(share.work_us)
        if at is not None:
            self.put(at, job, share)
        return at

    def open(self, empty: Cycle) -> int:
        """Add one aggregator and return its index."""
        self.cycles.append(empty)
        at = len(self.cycles) - 1
        for index in self._jobs.values():
            index.set(at, self.cycles[at])
        return at

    def put(self, at: int, job: JobId, share: Share) -> None:
        self.cycles[at] = grown(self.cycles[at], job, share)
        for index in self._jobs.values():
            index.set(at, self.cycles[at])


class _Index:
    """Free times for one job, sorted, by number of executions."""

    def __init__(self, job: JobId, share: Share, barred: Collection[int]) -> None:
        self._job, self._share, self._barred = job, share, barred
        self._sorted: dict[int, list[tuple[int, int]]] = {}
        self._rooms: dict[int, CycleRoom] = {}

    def best(self, work_us: int) -> int | None:
        found: tuple[int, int] | None = None
        for often, free in self._sorted.items():
            at = bisect_left(free, (often * work_us, -1))
            if at < len(free) and (found is None or free[at] < found):
                found = free[at]
        return found[1] if found is not None else None

    def set(self, at: int, cycle: Cycle) -> None:
        before = self._rooms.pop(at, None)
        if before is not None:
            free = self._sorted[before.executions]
            del free[bisect_left(free, (before.free_us, at))]
        now = room(cycle, self._job, self._share) if at not in self._barred else None
        if now is not None:
            self._rooms[at] = now
            insort(self._sorted.setdefault(now.executions, []), (now.free_us, at))


class Assignment(msgspec.Struct, frozen=True):
    """The aggregators of a job's tensors, and all aggregators afterwards."""

    on: tuple[int, ...]
    """Index of the aggregator of each tensor; indices from the number of given aggregators upward are new ones."""
    cycles: tuple[Cycle, ...]
    """All aggregators afterwards."""


def assign(
    profile: AggregationProfile,
    cycles: Sequence[Cycle],
    new_max: int | None = None,
    empty: Cycle = Cycle(),
    barred: Collection[int] = (),
) -> Assignment | None:
    """Assign a job's tensors, in the order given, to these aggregators and as few new ones as best fit needs.

    `empty` is a new aggregator. None when more than `new_max` of them would be needed. The profile has no `flaw`.
    """
    packing, on = Packing(cycles), []
    for tensor in profile.tensors:
        share = profile.share(tensor.work_us)
        at = packing.place(profile.job, share, barred)
        if at is None:
            if new_max is not None and len(packing.cycles) - len(cycles) >= new_max:
                return None
            at = packing.open(empty)
            packing.put(at, profile.job, share)
        on.append(at)
    return Assignment(tuple(on), tuple(packing.cycles))


def by_scan(profile: AggregationProfile, cycles: Sequence[Cycle], empty: Cycle = Cycle()) -> Assignment:
    """The assignment found by looking at every aggregator for every tensor, as printed."""
    after, on = list(cycles), []
    for tensor in profile.tensors:
        share = profile.share(tensor.work_us)
        at = best_fit(after, profile.job, share)
        if at is None:
            after.append(empty)
            at = len(after) - 1
        after[at] = grown(after[at], profile.job, share)
        on.append(at)
    return Assignment(tuple(on), tuple(after))
