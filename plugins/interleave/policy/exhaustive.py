"""The best of all groupings of few jobs, exactly: what `schedule` gives for them, and is measured against (§4.4.7).

The score is a sum over groups, each of a set of jobs on a number of hosts. So the best that the jobs of a set can reach
on h hosts is, over every group that holds the first of them and every number of its hosts, what this group is worth
and the best of the others on the hosts that are left: 3^jobs pairs of sets, and hosts squared for each.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from plugins.interleave.policy.model import Group, JobProfile, Weights

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int_]
EQUAL = 1e-12
"""Difference in score below which scores are equal, and fewer jobs are preferred."""


def exhaustive(
    jobs: Sequence[JobProfile], hosts: int, weights: Weights, jobs_min: int = 0
) -> tuple[float, tuple[Group, ...]]:
    """(score, groups) over all subsets of at least `jobs_min` jobs, all their partitions and all ways to give them all
    hosts. A set of jobs is a whole number, job j its bit 1 << j."""
    worth = worth_of(jobs, hosts, weights)
    score, sets = best_sets(worth, hosts, jobs_min)
    return score, tuple(
        Group(tuple(job for bit, job in enumerate(jobs) if members >> bit & 1), given) for members, given in sets
    )


def best_sets(worth: Floats, hosts: int, jobs_min: int = 0) -> tuple[float, tuple[tuple[int, int], ...]]:
    """(score, sets with their hosts) that are worth most together, with at least `jobs_min` jobs: `worth` as of
    `worth_of`."""
    best = np.full_like(worth, -np.inf)
    best[0, 0] = 0.0
    for members in range(1, len(worth)):
        first, others = _splits(members)
        for given in range(1, hosts + 1):
            reached = (worth[first, given, None] + best[others, : hosts + 1 - given]).max(axis=0)
            np.maximum(best[members, given:], reached, out=best[members, given:])
    for members in range(len(worth)):
        if members.bit_count() < jobs_min:
            best[members, hosts] = -np.inf  # no set that is looked at below has all hosts
    top = float(best[:, hosts].max())
    members = min(np.flatnonzero(best[:, hosts] >= top - EQUAL).tolist(), key=lambda each: (each.bit_count(), each))
    return max(0.0, top) / hosts, _sets(hosts, members, worth, best)


def worth_of(jobs: Sequence[JobProfile], hosts: int, weights: Weights) -> Floats:
    """Hosts times score of every set of jobs as one group. Shape (2^jobs, hosts + 1); -inf without hosts."""
    given = np.arange(1, hosts + 1)
    work, net, bonus = np.zeros(1), np.zeros(1), np.zeros(1)
    longest = np.zeros((1, hosts))
    for job in jobs:  # the sets without the job, then the same with it
        work, net = np.append(work, work + job.work_s), np.append(net, net + job.net_s)
        bonus = np.append(bonus, bonus + job.bonus * hosts)
        longest = np.append(longest, np.maximum(longest, job.work_s / given + job.net_s), axis=0)
    cpu, talk = work[:, None] / given, np.broadcast_to(net[:, None], longest.shape)
    took = np.maximum(np.maximum(cpu, talk), longest)
    worth = given * (weights.cpu * cpu + weights.net * talk) + bonus[:, None]
    return np.append(np.full((len(work), 1), -np.inf), worth / np.where(took > 0, took, 1.0), axis=1)


def _splits(members: int) -> tuple[Ints, Ints]:
    """Every group of this set that holds its first job, and the jobs left beside it."""
    first = members & -members
    rest = members ^ first
    others, each = [rest], rest
    while each:
        each = (each - 1) & rest
        others.append(each)
    left = np.array(others)
    return members ^ left, left


def _sets(hosts: int, members: int, worth: Floats, best: Floats) -> tuple[tuple[int, int], ...]:
    """The groups that make up the best of this set on all hosts: their jobs, and the number of their hosts."""
    found: list[tuple[int, int]] = []
    while members:
        first, others = _splits(members)
        given = np.arange(1, hosts + 1)
        reached = worth[first][:, given] + best[others][:, hosts - given]
        at, more = divmod(int(reached.argmax()), hosts)
        found.append((int(first[at]), more + 1))
        members, hosts = int(others[at]), hosts - more - 1
    return tuple(found)
