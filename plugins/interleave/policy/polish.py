"""Small changes to a grouping, the best of them again and again, until none helps. Ours.

With thousands of jobs a good grouping has many neighbours just as good. With five it matters which five: Algorithm 1
takes the first so many, and a single wrong one costs up to 14 % of the score. So for small sets every neighbour is
looked at: one job added, dropped, replaced by one that waits, moved to another group or exchanged; one host moved; two
groups joined; a job on its own. A group contributes hosts x score, so a change costs only what it touches.
"""

from collections.abc import Iterator, Sequence

import msgspec

from plugins.interleave.policy.model import Group, JobProfile, Weights

BETTER = 1e-5
"""Gain in score; a smaller one is not worth another round."""
ROUNDS_MAX = 400
EXHAUSTIVE_NEIGHBOURS = 20_000
"""Neighbours of one round above which exchanges between groups are left out."""


class PolishLimits(msgspec.Struct, frozen=True):
    """Limits that a grouping must keep."""

    jobs_min: int = 1
    group_max: int | None = None


Indices = tuple[int, ...]
Cell = tuple[Indices, int]
"""Jobs by index, ascending, and number of hosts."""
Change = tuple[tuple[int, ...], tuple[Cell, ...]]
"""Indices of groups that go, and groups that come."""


def polished(
    jobs: Sequence[JobProfile], groups: Sequence[Group], hosts: int, weights: Weights, limits: PolishLimits
) -> tuple[Group, ...]:
    """The grouping after all changes that help."""
    return _Polish(jobs, groups, hosts, weights, limits).run()


class _Polish:
    def __init__(
        self, jobs: Sequence[JobProfile], groups: Sequence[Group], hosts: int, weights: Weights, limits: PolishLimits
    ) -> None:
        self.jobs, self.hosts, self.weights, self.limits = jobs, hosts, weights, limits
        self.work = [job.work_s for job in jobs]
        self.net = [job.net_s for job in jobs]
        self.bonus = [job.bonus * hosts for job in jobs]
        place = {job.job: at for at, job in enumerate(jobs)}
        self.cells: list[Cell] = [
            (tuple(sorted(place[job.job] for job in group.jobs)), group.hosts) for group in groups if group.jobs
        ]
        self.known: dict[Cell, float] = {}

    def run(self) -> tuple[Group, ...]:
        for _ in range(ROUNDS_MAX):
            found = [(gain, change) for change in self._changes() if (gain := self._gain(change)) > BETTER * self.hosts]
            if not found:
                break
            found.sort(key=lambda each: -each[0])
            self._make(found)
        return tuple(Group(tuple(self.jobs[at] for at in cell[0]), cell[1]) for cell in sorted(self.cells))

    def _gain(self, change: Change) -> float:
        return sum(map(self._worth, change[1])) - sum(self._worth(self.cells[at]) for at in change[0])

    def _make(self, found: Sequence[tuple[float, Change]]) -> None:
        """Make the best change, and then each next one that touches neither its groups nor its jobs."""
        running = sum(len(members) for members, _ in self.cells)
        touched: set[int] = set()
        new: list[Cell] = []
        used: set[int] = set()
        for _, (places, cells) in found:
            before = {job for at in places for job in self.cells[at][0]}
            after = {job for members, _ in cells for job in members}
            fewer = len(before) - len(after)
            if (
                touched & set(places)
                or used & (after - before)
                or (fewer > 0 and running - fewer < self.limits.jobs_min)
            ):
                continue
            touched |= set(places)
            used |= after
            running -= fewer
            new += cells
        self.cells = [cell for at, cell in enumerate(self.cells) if at not in touched] + new

    def _worth(self, cell: Cell) -> float:
        """Hosts x score of one group, exactly equations 4.1 and 4.3, and the gain from its jobs' bonuses."""
        known = self.known.get(cell)
        if known is not None:
            return known
        members, hosts = cell
        cpu = talk = longest = bonus = 0.0
        for at in members:
            own, said = self.work[at] / hosts, self.net[at]
            cpu += own
            talk += said
            bonus += self.bonus[at]
            longest = max(longest, own + said)
        took = max(cpu, talk, longest)
        worth = (hosts * (self.weights.cpu * cpu + self.weights.net * talk) + bonus) / took if took > 0 else 0.0
        self.known[cell] = worth
        return worth

    def _changes(self) -> Iterator[Change]:
        running = {at for members, _ in self.cells for at in members}
        waiting = [at for at in range(len(self.jobs)) if at not in running]
        yield from self._within(waiting, may_drop=len(running) > self.limits.jobs_min)
        yield from self._between()
        yield from self._new_groups(waiting)

    def _fits(self, members: Indices) -> bool:
        return self.limits.group_max is None or len(members) <= self.limits.group_max

    def _within(self, waiting: Sequence[int], may_drop: bool) -> Iterator[Change]:
        for at, (members, hosts) in enumerate(self.cells):
            for new in waiting:
                if self._fits((*members, new)):
                    yield (at,), ((tuple(sorted((*members, new))), hosts),)
                for old in members:
                    yield (at,), ((tuple(sorted(set(members) - {old} | {new})), hosts),)
            if may_drop and len(members) > 1:
                for old in members:
                    yield (at,), ((tuple(m for m in members if m != old), hosts),)

    def _between(self) -> Iterator[Change]:
        exchanges = sum(len(members) for members, _ in self.cells) ** 2 <= EXHAUSTIVE_NEIGHBOURS
        for one, (mine, my_hosts) in enumerate(self.cells):
            for other, (theirs, their_hosts) in enumerate(self.cells):
                if one == other:
                    continue
                for hosts in {1, 2, 4, my_hosts // 8, my_hosts // 4, my_hosts // 2}:
                    if 0 < hosts < my_hosts:
                        yield (one, other), ((mine, my_hosts - hosts), (theirs, their_hosts + hosts))
                for job in mine:
                    into = tuple(sorted((*theirs, job)))
                    if len(mine) > 1 and self._fits(into):
                        yield (one, other), ((tuple(m for m in mine if m != job), my_hosts), (into, their_hosts))
                if one < other:
                    joined = tuple(sorted((*mine, *theirs)))
                    if self._fits(joined):
                        yield (one, other), ((joined, my_hosts + their_hosts),)
                    if exchanges:
                        yield from self._exchanged(one, other)
                if self._may_end(theirs):
                    yield (one, other), ((mine, my_hosts + their_hosts),)

    def _may_end(self, members: Indices) -> bool:
        running = sum(len(each) for each, _ in self.cells)
        return running - len(members) >= self.limits.jobs_min

    def _exchanged(self, one: int, other: int) -> Iterator[Change]:
        (mine, my_hosts), (theirs, their_hosts) = self.cells[one], self.cells[other]
        for a in mine:
            for b in theirs:
                yield (
                    (one, other),
                    (
                        (tuple(sorted(set(mine) - {a} | {b})), my_hosts),
                        (tuple(sorted(set(theirs) - {b} | {a})), their_hosts),
                    ),
                )

    def _new_groups(self, waiting: Sequence[int]) -> Iterator[Change]:
        """Changes that give part of a group's hosts to a waiting or own job alone, or to half of its jobs."""
        for at, (members, hosts) in enumerate(self.cells):
            for given in {1, hosts // 4, hosts // 2}:
                if not 0 < given < hosts:
                    continue
                for new in waiting:
                    yield (at,), ((members, hosts - given), ((new,), given))
                if len(members) > 1:
                    for old in members:
                        yield (at,), ((tuple(m for m in members if m != old), hosts - given), ((old,), given))
                    for half in (members[::2], members[1::2]):
                        rest = tuple(m for m in members if m not in half)
                        yield (at,), ((rest, hosts - given), (half, given))
