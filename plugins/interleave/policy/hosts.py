"""Groups with hosts, where jobs are on hosts already.

A job keeps a process where its rank 0 is (`policy/groups.PlacedJob.keeps`), and can use no more hosts than it may have
processes. So jobs whose rank 0 is on one host stay together, as one *unit*; a group has a host for each of its units at
least, and no more than each of its jobs can use. Each new group keeps the other hosts that its jobs have, as far as it
can.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from covey.core.ids import HostId, JobId
from plugins.interleave.policy.exhaustive import Floats, best_sets
from plugins.interleave.policy.groups import PlacedJob
from plugins.interleave.policy.model import Group, JobProfile, Weights, iteration_s
from plugins.interleave.policy.regroup import STARTS
from plugins.interleave.policy.schedule import EXACT_JOBS, EXACT_STEPS, schedule


def best_groups(
    profiles: Sequence[JobProfile], jobs: Mapping[JobId, PlacedJob], hosts: int, weights: Weights
) -> tuple[Group, ...]:
    """The groups with the highest score in which all these jobs can run. With very many units they are as `schedule`
    finds them, and it may be that not all can be had."""
    units = units_of(profiles, jobs)
    if len(units) > EXACT_JOBS or 3 ** len(units) * hosts**2 > EXACT_STEPS or len(units) > hosts:
        return capped(schedule(profiles, hosts, weights, jobs_min=len(profiles), starts_max=STARTS).groups, jobs)
    _, sets = best_sets(_worth(units, jobs, hosts, weights), hosts, len(units))
    groups = [(tuple(unit for bit, unit in enumerate(units) if members >> bit & 1), given) for members, given in sets]
    found = [Group(tuple(job for unit in group for job in unit), given) for group, given in groups]
    return tuple(Group(group.jobs, min(group.hosts, _most(group.jobs, jobs))) for group in found)


def units_of(profiles: Sequence[JobProfile], jobs: Mapping[JobId, PlacedJob]) -> list[tuple[JobProfile, ...]]:
    """These jobs, those together that must keep the same host."""
    found: dict[frozenset[HostId], list[JobProfile]] = {}
    for profile in profiles:
        found.setdefault(jobs[profile.job].keeps, []).append(profile)
    return [tuple(unit) for unit in found.values()]


def _most(profiles: Sequence[JobProfile], jobs: Mapping[JobId, PlacedJob]) -> int:
    """The most hosts that each of these jobs can use."""
    return min(jobs[profile.job].most for profile in profiles)


def _worth(
    units: Sequence[tuple[JobProfile, ...]], jobs: Mapping[JobId, PlacedJob], hosts: int, weights: Weights
) -> Floats:
    """Hosts times score of every set of units as one group, as `exhaustive.worth_of`: -inf with fewer hosts than units;
    with more hosts than it can use, as with those that it can."""
    worth = np.full((1 << len(units), hosts + 1), -np.inf)
    for members in range(1, len(worth)):
        group = [job for bit, unit in enumerate(units) if members >> bit & 1 for job in unit]
        most = _most(group, jobs)
        work, net, bonus = (sum(each) for each in zip(*((j.work_s, j.net_s, j.bonus) for j in group), strict=True))
        for given in range(members.bit_count(), hosts + 1):
            used = min(given, most)
            took = iteration_s(group, used)
            busy = used * (weights.cpu * work / used + weights.net * net) + bonus * hosts
            worth[members, given] = busy / took if took > 0 else 0.0
    return worth


def capped(groups: Sequence[Group], jobs: Mapping[JobId, PlacedJob]) -> tuple[Group, ...]:
    """The groups, none with more hosts than each of its jobs can use. Hosts that one cannot use go to the one that
    computes longest and can."""
    caps = [_most(group.jobs, jobs) for group in groups]
    given = [min(group.hosts, cap) for group, cap in zip(groups, caps, strict=True)]
    for _ in range(sum(group.hosts for group in groups) - sum(given)):
        room = [at for at in range(len(groups)) if given[at] < caps[at]]
        if not room:
            break
        given[max(room, key=lambda at: (_excess_s(groups[at].jobs, given[at]), -at))] += 1
    return tuple(Group(group.jobs, hosts) for group, hosts in zip(groups, given, strict=True))


def _excess_s(profiles: Sequence[JobProfile], hosts: int) -> float:
    return sum(job.work_s for job in profiles) / max(1, hosts) - sum(job.net_s for job in profiles)


class _Chosen(msgspec.Struct):
    jobs: tuple[JobId, ...]
    wanted: int
    hosts: set[HostId]


def given_hosts(
    groups: Sequence[Group], jobs: Mapping[JobId, PlacedJob], free: Sequence[HostId]
) -> tuple[tuple[HostId, ...], ...] | str:
    """The hosts of each group, of `free`; or why there is no way to give them, in words."""
    left = set(free)
    chosen = [_Chosen(tuple(job.job for job in group.jobs), group.hosts, set()) for group in groups]
    unmet = [(group, job) for group in chosen for job in group.jobs]
    while unmet:
        ways = {at: jobs[job].keeps & (left | group.hosts) for at, (group, job) in enumerate(unmet)}
        at = min(ways, key=lambda at: (not ways[at] & unmet[at][0].hosts, len(ways[at]), at))
        group, job = unmet.pop(at)
        if ways[at] & group.hosts:
            continue
        if not ways[at] or len(group.hosts) == group.wanted:
            return f"{job} must keep a process on {' or '.join(sorted(jobs[job].keeps))}, which others need"
        near = _near(group.jobs, jobs)
        host = min(ways[at], key=lambda host: (-near.get(host, 0), host))
        group.hosts.add(host)
        left.discard(host)
    for group in sorted(chosen, key=lambda each: (-each.wanted, each.jobs)):
        near = _near(group.jobs, jobs)
        more = sorted(left, key=lambda host: (-near.get(host, 0), host))[: group.wanted - len(group.hosts)]
        group.hosts.update(more)
        left.difference_update(more)
    return tuple(tuple(sorted(group.hosts)) for group in chosen)


def _near(group: Sequence[JobId], jobs: Mapping[JobId, PlacedJob]) -> dict[HostId, int]:
    """How many processes of these jobs each host has."""
    found: dict[HostId, int] = {}
    for job in group:
        for host, count in jobs[job].processes.items():
            found[host] = found.get(host, 0) + count
    return found
