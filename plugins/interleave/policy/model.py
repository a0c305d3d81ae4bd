"""The speed that a group of jobs reaches on a number of hosts (Harmony §4.3.2, equations 4.1 to 4.4)."""

from collections.abc import Iterable, Sequence

import msgspec

from covey.core.ids import JobId


class JobProfile(msgspec.Struct, frozen=True):
    """One job, as measured, and how much it matters that it runs."""

    job: JobId
    work_s: float
    """Host-seconds of computing in one iteration: T_cpu times the hosts it was measured on (equation 4.2)."""
    net_s: float
    """Seconds of communication in one iteration, T_net; more hosts do not change it."""
    bonus: float = 0.0
    """How much it matters that the job runs, ours: a grouping in which its group's iteration takes T seconds gains
    bonus/T (`policy/order.weighted`). 0: only busy hosts count, as in the paper."""

    def cpu_s(self, hosts: float) -> float:
        """T_cpu in seconds on this many hosts (equation 4.2)."""
        return self.work_s / hosts


class Weights(msgspec.Struct, frozen=True):
    """Weight of each resource in the score. The paper says only that CPU counts more (§4.3.2)."""

    cpu: float = 0.6
    net: float = 0.4


class Use(msgspec.Struct, frozen=True):
    """Share of the time in which each resource is busy, 0..1."""

    cpu: float
    net: float

    def score(self, weights: Weights) -> float:
        """Score of both resources together, 0..1."""
        return weights.cpu * self.cpu + weights.net * self.net


class Group(msgspec.Struct, frozen=True):
    """Jobs that share hosts, and the number of these hosts."""

    jobs: tuple[JobProfile, ...]
    hosts: int


NOTHING = Use(0.0, 0.0)


def iteration_s(jobs: Sequence[JobProfile], hosts: float) -> float:
    """Seconds in which every job of a group runs once: all computing, all communication, or the longest job, whichever
    is longest (equation 4.1)."""
    cpu = sum(job.work_s for job in jobs) / hosts
    return max(cpu, sum(job.net_s for job in jobs), max((j.work_s / hosts + j.net_s for j in jobs), default=0.0))


def use(jobs: Sequence[JobProfile], hosts: float) -> Use:
    """How busy a group keeps its hosts (equation 4.3)."""
    took = iteration_s(jobs, hosts)
    if took <= 0:
        return NOTHING
    return Use(sum(job.work_s for job in jobs) / hosts / took, sum(job.net_s for job in jobs) / took)


def use_of_all(groups: Iterable[Group], hosts: int | None = None) -> Use:
    """Mean use over groups, weighted by hosts (equation 4.4); over `hosts` in all when some are in no group."""
    each = [(group.hosts, use(group.jobs, group.hosts)) for group in groups if group.hosts > 0]
    total = sum(count for count, _ in each) if hosts is None else hosts
    if total == 0:
        return NOTHING
    return Use(sum(n * u.cpu for n, u in each) / total, sum(n * u.net for n, u in each) / total)


def pushed(groups: Iterable[Group]) -> float:
    """Gain of a grouping from the jobs that it lets run: bonus / T of each, T its group's iteration. Ours."""
    total = 0.0
    for group in groups:
        took = iteration_s(group.jobs, group.hosts) if group.hosts > 0 else 0.0
        total += sum(job.bonus for job in group.jobs) / took if took > 0 else 0.0
    return total


def score_of(groups: Sequence[Group], hosts: int, weights: Weights) -> float:
    """Score of all groups on `hosts` hosts, idle ones counted: how busy they are (equation 4.4), and which jobs run."""
    return use_of_all(groups, hosts).score(weights) + pushed(groups)
