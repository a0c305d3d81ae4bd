"""The jobs that run now, their groups, and the number of hosts of each (Harmony, Algorithm 1, repaired).

As printed the algorithm adds one job after another, stops at the first that does not raise the utilisation, and returns
the last grouping, not the best. With two jobs on many hosts one resource or the other is always busy, U_cpu + U_net =
1, and nothing that a third job does at once is better: it stops at two jobs out of thousands. Repaired:

- the number of jobs is searched from all of them downwards by a factor, and the best grouping found is kept; of
  groupings that are equally good within `ENOUGH`, the one with fewer jobs, since fewer jobs in a group end sooner
  (§4.3.2);
- besides n_G, which may be the number of jobs and so leave every job alone, some smaller numbers of groups are tried;
- small sets are polished at the end: one job added, dropped, replaced or moved, one host moved (`polish`). Only there,
  and where all groupings are looked at, do bonuses of jobs count.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from plugins.interleave.policy import model, polish
from plugins.interleave.policy.assign import Floats, Ints, allocate, assign, groups_best, score_of
from plugins.interleave.policy.exhaustive import exhaustive
from plugins.interleave.policy.model import Group, JobProfile, Use, Weights, use_of_all

FACTOR = 1.3
"""Ratio of one number of jobs tried to the next."""
ENOUGH = 1e-3
"""Gain in score; a smaller one is no reason to run more jobs at once."""
POLISHED_MAX = 160
"""Jobs in a grouping, or hosts, up to which it is polished: beyond, there is nothing left to gain."""
STARTS = 4
"""Groupings that are polished, the best first; with few jobs eight times that, since they have few good neighbours."""
EXACT_JOBS, EXACT_STEPS = 11, 7_000_000
"""Most jobs, and most steps (3^jobs hosts^2), for which the best of all groupings is found: 0.1 s."""
FEW = 16
"""Number of jobs up to which they count as few."""
DEFAULT = Weights()


class Grouping(msgspec.Struct, frozen=True):
    """Groups with their hosts, and how busy these are."""

    groups: tuple[Group, ...]
    use: Use
    score: float
    """Score: how busy hosts are, and which jobs run (`model.score_of`)."""

    @property
    def jobs(self) -> int:
        """Number of jobs that run."""
        return sum(len(group.jobs) for group in self.groups)


class _Found(msgspec.Struct, frozen=True):
    score: float
    jobs: int
    """Number of jobs in it, the first ones."""
    group: Ints
    given: Ints


def grouping(groups: Sequence[Group], hosts: int, weights: Weights = DEFAULT) -> Grouping:
    """Groups and their score on `hosts` hosts, idle ones counted."""
    return Grouping(tuple(groups), use_of_all(groups, hosts), model.score_of(groups, hosts, weights))


def schedule(
    jobs: Sequence[JobProfile],
    hosts: int,
    weights: Weights = DEFAULT,
    jobs_min: int = 1,
    group_max: int | None = None,
    starts_max: int | None = None,
) -> Grouping:
    """The grouping with the highest score found. Jobs that come first in `jobs` are preferred; at least `jobs_min` run;
    no group has more than `group_max` jobs; of all groupings tried the `starts_max` best are polished, with 0 it is
    Algorithm 1 and nothing more. Each host is in exactly one group."""
    if not jobs or hosts < 1:
        return grouping((), hosts, weights)
    is_few = len(jobs) <= EXACT_JOBS and 3 ** len(jobs) * hosts**2 <= EXACT_STEPS
    if is_few and group_max is None and starts_max != 0:
        return grouping(exhaustive(jobs, hosts, weights, jobs_min)[1], hosts, weights)
    work = np.array([job.work_s for job in jobs])
    net = np.array([job.net_s for job in jobs])
    found: list[_Found] = []
    for size in _sizes(len(jobs), jobs_min):
        found += [
            _tried(work[:size], net[:size], count, hosts, weights)
            for count in _counts(work[:size], net[:size], hosts)
            if group_max is None or -(-size // count) <= group_max
        ]
    if not found:
        return grouping((), hosts, weights)
    best = _preferred(found)
    if starts_max == 0 or min(len(jobs), best.jobs) > POLISHED_MAX or hosts > 4 * POLISHED_MAX:
        return grouping(_groups(jobs, best), hosts, weights)
    limits = polish.PolishLimits(jobs_min=jobs_min, group_max=group_max)
    if starts_max is None:
        starts_max = STARTS if len(jobs) > FEW else 8 * STARTS
    ranked = sorted(found, key=lambda each: (-each.score, each.jobs))
    starts = [best, *[each for each in ranked if each is not best][: starts_max - 1]]
    polished = [
        grouping(polish.polished(jobs, _groups(jobs, each), hosts, weights, limits), hosts, weights) for each in starts
    ]
    top = max(each.score for each in polished)
    return min((each for each in polished if each.score >= top - ENOUGH), key=lambda each: (each.jobs, -each.score))


def arranged(jobs: Sequence[JobProfile], count: int, hosts: int, weights: Weights = DEFAULT) -> Grouping:
    """All of these jobs in exactly `count` groups (Algorithm 2 and the allocation after it)."""
    work = np.array([job.work_s for job in jobs])
    net = np.array([job.net_s for job in jobs])
    return grouping(_groups(jobs, _tried(work, net, count, hosts, weights)), hosts, weights)


def _sizes(jobs: int, least: int) -> list[int]:
    """Numbers of jobs to try, from all downwards."""
    sizes, size = [], float(jobs)
    while round(size) > max(least, 8):
        sizes.append(round(size))
        size /= FACTOR
    return [*sizes, *range(min(jobs, max(least, 8)), max(1, least) - 1, -1)]


def _counts(work: Floats, net: Floats, hosts: int) -> list[int]:
    """Numbers of groups to try with these jobs."""
    size = len(work)
    ideal = groups_best(work, net, hosts)
    wanted = {ideal, round(ideal * 0.75), round(ideal * 1.25), *(size // each for each in (2, 3, 4, 6))}
    return sorted({min(max(1, count), size, hosts) for count in wanted})


def _tried(work: Floats, net: Floats, count: int, hosts: int, weights: Weights) -> _Found:
    group = assign(work, net, count, hosts)
    given = allocate(work, net, group, count, hosts)
    return _Found(score_of(work, net, group, given, weights), len(work), group, given)


def _preferred(found: Sequence[_Found]) -> _Found:
    top = max(each.score for each in found)
    return min((each for each in found if each.score >= top - ENOUGH), key=lambda each: (each.jobs, -each.score))


def _groups(jobs: Sequence[JobProfile], found: _Found) -> tuple[Group, ...]:
    members: list[list[JobProfile]] = [[] for _ in range(len(found.given))]
    for job, at in zip(jobs, found.group.tolist(), strict=False):
        members[at].append(job)
    return tuple(Group(tuple(each), int(given)) for each, given in zip(members, found.given, strict=True))
