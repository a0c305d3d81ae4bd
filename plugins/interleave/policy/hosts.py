"""From groups with numbers of hosts to groups with hosts.

Each new group keeps the hosts that its jobs have, as far as it can. Every job keeps one of the hosts that it must keep
(`policy/groups.PlacedJob.keeps`): at least one process with its state goes on, from which the others take it.
"""

from collections.abc import Mapping, Sequence

import msgspec

from covey.core.ids import HostId, JobId
from plugins.interleave.policy.groups import PlacedJob
from plugins.interleave.policy.model import Group, JobProfile


def capped(groups: Sequence[Group], most: Mapping[JobId, int]) -> tuple[Group, ...]:
    """The groups, none with more hosts than each of its jobs can use (a process on each). Hosts that one cannot use go
    to the one that computes longest and can."""
    caps = [min((most[job.job] for job in group.jobs), default=0) for group in groups]
    given = [min(group.hosts, cap) for group, cap in zip(groups, caps, strict=True)]
    for _ in range(sum(group.hosts for group in groups) - sum(given)):
        room = [at for at, group in enumerate(groups) if given[at] < caps[at]]
        if not room:
            break
        at = max(room, key=lambda at: (_excess_s(groups[at].jobs, given[at]), -at))
        given[at] += 1
    return tuple(Group(group.jobs, hosts) for group, hosts in zip(groups, given, strict=True))


def _excess_s(jobs: Sequence[JobProfile], hosts: int) -> float:
    return sum(job.work_s for job in jobs) / max(1, hosts) - sum(job.net_s for job in jobs)


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
