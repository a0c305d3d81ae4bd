"""The changes when a job comes or goes: as little as possible (Harmony §4.3.2, dynamic job regrouping).

A change of groups pauses jobs and moves models, so it must be worth 5 %, and it touches the fewest groups:

    a job came     profiled, and no other waits: into the group where it helps most, or it waits too
    a job ended    a job like it takes its place; or some jobs that are together like it; or its group and the smallest
                   other are arranged anew, then one more, and so on; of these plans the one with the fewest groups,
                   unless one with more is 5 % better
"""

from collections.abc import Callable, Sequence
from itertools import combinations

import msgspec

from plugins.interleave.policy.model import Group, JobProfile, Weights, score_of, use_of_all
from plugins.interleave.policy.schedule import schedule

ALIKE = 0.05
"""Relative difference of iteration time and of computing to communicating, within which jobs are alike: 5 %
(§4.3.2)."""
WORTH = 0.05
"""Relative gain in score below which nothing is changed (§4.3.2: 5 %)."""
STARTS = 2
"""Groupings that are polished in one regrouping; there are as many regroupings as jobs that end."""
BUNCH_MAX = 3
"""Most jobs that may stand in for one. Ours: a larger bunch makes the group slower to end."""
BUNCH_OF = 40
"""Waiting jobs that are looked at for a bunch, the first ones."""


MERGED_MAX = 3
"""Other groups that `rearranged` looks at: agents decide beside their other work, and what more groups would gain is
found by the next review of all of them."""


class Change(msgspec.Struct, frozen=True):
    """A change: groups that are replaced, by their indices, and the groups that replace them."""

    replaces: tuple[int, ...]
    groups: tuple[Group, ...]
    score: float
    """Score of all groups afterwards."""


def are_alike(one: Sequence[JobProfile], other: Sequence[JobProfile], hosts: int, within: float = ALIKE) -> bool:
    """Do these jobs together take as long as those, and lean like them, on this many hosts? (§4.3.2)"""
    cpu, net = _sums(one, hosts)
    their_cpu, their_net = _sums(other, hosts)
    return _near(cpu + net, their_cpu + their_net, within) and _near(cpu * their_net, their_cpu * net, within)


def replacement(ended: JobProfile, waiting: Sequence[JobProfile], hosts: int) -> tuple[JobProfile, ...]:
    """A job like the one that ended, else a bunch of jobs that are like it together, the fewest and first of them;
    empty when there is none."""
    for job in waiting:
        if are_alike([job], [ended], hosts):
            return (job,)
    length = ended.work_s / hosts + ended.net_s
    shorter = [job for job in waiting[:BUNCH_OF] if job.work_s / hosts + job.net_s < length * (1 + ALIKE)]
    for count in range(2, BUNCH_MAX + 1):
        for bunch in combinations(shorter, count):
            if are_alike(bunch, [ended], hosts):
                return bunch
    return ()


def arrival(groups: Sequence[Group], job: JobProfile, hosts: int, weights: Weights) -> Change | None:
    """The change that puts the job into the group that it raises most; None when it raises none (§4.3.2)."""
    best: Change | None = None
    now = score_of(groups, hosts, weights)
    for at, group in enumerate(groups):
        with_it = Group((*group.jobs, job), group.hosts)
        after = score_of([*groups[:at], with_it, *groups[at + 1 :]], hosts, weights)
        if after > max(now, best.score if best else 0.0) + 1e-12:
            best = Change((at,), (with_it,), after)
    return best


def repaired(
    groups: Sequence[Group],
    broken: int,
    ended: JobProfile | None,
    waiting: Sequence[JobProfile],
    hosts: int,
    weights: Weights,
    group_max: int | None = None,
    starts_max: int = STARTS,
) -> Change | None:
    """The change after `ended` has gone from group `broken`; None when nothing is worth it.

    `groups[broken]` no longer holds the job, and may be empty. Hosts in no group are given to the first plan.
    """
    now = score_of(groups, hosts, weights)
    if ended is not None:
        stand_in = replacement(ended, waiting, groups[broken].hosts)
        jobs = (*groups[broken].jobs, *stand_in)
        if stand_in and (group_max is None or len(jobs) <= group_max):
            group = Group(jobs, groups[broken].hosts)
            return Change((broken,), (group,), score_of(_with(groups, (broken,), (group,)), hosts, weights))
    most = weights.cpu + weights.net
    if use_of_all(groups, hosts).score(weights) * (1 + WORTH) > most:
        return None
    idle = hosts - sum(group.hosts for group in groups)
    others = sorted((at for at in range(len(groups)) if at != broken), key=lambda at: (len(groups[at].jobs), at))
    best: Change | None = None
    for count in range(len(others) + 1):
        taken = (broken, *others[:count])
        running = [job for at in taken for job in groups[at].jobs]
        candidates = [*running, *waiting]
        if not candidates:
            continue
        given = sum(groups[at].hosts for at in taken) + idle
        found = schedule(candidates, given, weights, group_max=group_max, starts_max=starts_max)
        score = score_of(_with(groups, taken, found.groups), hosts, weights)
        if best is None or score >= best.score * (1 + WORTH):
            best = Change(taken, found.groups, score)
        if use_of_all(_with(groups, best.replaces, best.groups), hosts).score(weights) * (1 + WORTH) > most:
            break
    if best is None or best.score < now * (1 + WORTH):
        return None
    return best


def rearranged(
    groups: Sequence[Group],
    broken: int,
    hosts: int,
    weights: Weights,
    best_of: Callable[[Sequence[JobProfile], int], Sequence[Group]],
) -> Change | None:
    """The change as `repaired` has it where no job waits and all have to run: group `broken` and the smallest others,
    as few as are worth it, arranged anew by `best_of`. Hosts in no group are given to them. None when nothing is worth
    it."""
    now = score_of(groups, hosts, weights)
    idle = hosts - sum(group.hosts for group in groups)
    others = sorted((at for at in range(len(groups)) if at != broken), key=lambda at: (len(groups[at].jobs), at))
    best: Change | None = None
    for count in range(min(len(others), MERGED_MAX) + 1):
        taken = (broken, *others[:count])
        jobs = [job for at in taken for job in groups[at].jobs]
        given = sum(groups[at].hosts for at in taken) + idle
        found = tuple(best_of(jobs, given))
        score = score_of(_with(groups, taken, found), hosts, weights)
        if best is None or score >= best.score * (1 + WORTH):
            best = Change(taken, found, score)
    return best if best is not None and best.score >= now * (1 + WORTH) else None


def _with(groups: Sequence[Group], replaced: Sequence[int], by: Sequence[Group]) -> list[Group]:
    gone = set(replaced)
    return [*(group for at, group in enumerate(groups) if at not in gone), *by]


def _sums(jobs: Sequence[JobProfile], hosts: int) -> tuple[float, float]:
    return sum(job.work_s for job in jobs) / hosts, sum(job.net_s for job in jobs)


def _near(one: float, other: float, within: float) -> bool:
    return abs(one - other) <= within * max(abs(one), abs(other))
