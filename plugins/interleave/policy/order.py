"""Which jobs go first, and how much it matters that a job goes on. Ours.

The paper takes jobs in the order of its lists (Algorithm 1, line 5), and of groupings asks only how busy they keep the
hosts. The mean completion time is least when the job with the least left goes first; the hosts stay busy to the end
only when no long job is left over for it. So a job that could not be done in time if it waited is *late* and goes
before all others; the rest go by what they have left. And since a job does one iteration while its group does one of
each, a job of short iterations among long ones hardly goes on, though the hosts are busy: so each job has an *urge*,
which a grouping is paid for as it lets the job go on (`policy/model.Profile.urge`).

How much is left is known where a job says how many iterations it will do. Elsewhere it is what jobs that ended here ran
beyond as long, in the mean; and while none did, as long again as it has run. So, of those that say nothing, who has run
least goes first, as by attained service in `plugins/scheduler`.
"""

from collections.abc import Sequence

import msgspec

from covey.core import JobId
from plugins.interleave.policy.model import Group, Profile, iteration_s

PRIOR = 2.0
"""Ended jobs that the rule "as long again" counts as."""
TYPICAL_S = 600.0
"""Seconds expected of a job of which nothing is known; only their order matters, and it is the same for all."""
ALONE_ON = 16
"""Hosts on which lengths of jobs are compared: those of the paper's profiles (§4.4.2)."""
LATE_AT = 0.8
"""Of all the time that is left: a job that needs more of it alone is late. In a group it is not alone, and several late
ones cannot all be last; but with 0.35 on tuning seed 101 all long jobs were late from the start, and the short ones
waited for them (completion time 1.35x for 2.12x)."""
URGE = 0.05
"""What it is worth, against hosts that are all busy, if all jobs went on as if each were alone."""
URGE_LATE = 0.04
"""The same for each late job alone, as its share of the time that is left."""
URGE_LATE_ALL = 0.25
"""For all late ones together: many that are thought late are no reason to leave hosts idle."""
HELD_UP = 2.0
"""A late job whose group takes so many times as long for an iteration as it would alone goes on too slowly."""


class Waiting(msgspec.Struct, frozen=True):
    """A job, and how many iterations it has still to do."""

    profile: Profile
    left: float


class Order(msgspec.Struct, frozen=True):
    """Who goes before whom."""

    late: tuple[JobId, ...]
    """The latest first."""
    rest: tuple[JobId, ...]
    """The least left first."""


def alone_s(job: Profile, hosts: float) -> float:
    """Seconds of one iteration of a job on hosts of its own."""
    return job.work_s / hosts + job.net_s


def left_of(declared: int | None, done: int, each_s: float, ended_s: Sequence[float]) -> float:
    """Iterations, of `each_s` alone, that a job still has to do; at least 1. `ended_s`: how long the jobs that ended
    here ran, alone, all their iterations together."""
    if declared is not None:
        return float(max(1, declared - done))
    had_s = done * each_s
    beyond = [ran_s - had_s for ran_s in ended_s if ran_s > had_s]
    left_s = (sum(beyond) + PRIOR * max(had_s, TYPICAL_S)) / (len(beyond) + PRIOR)
    return max(1.0, left_s / each_s) if each_s > 0 else 1.0


def ordered(jobs: Sequence[Waiting], hosts: int, group_hosts: float, late_at: float = LATE_AT) -> Order:
    """The late jobs and the others. Late: its iterations, alone on `group_hosts` hosts, take more than `late_at` of the
    time in which `hosts` hosts, all busy, can do all that these jobs have left."""
    cpu = sum(job.left * job.profile.work_s for job in jobs)
    net = sum(job.left * job.profile.net_s * group_hosts for job in jobs)
    span_s = max(cpu, net) / hosts
    alone = {job.profile.job: job.left * alone_s(job.profile, group_hosts) for job in jobs}
    late = sorted((job for job, took_s in alone.items() if took_s > late_at * span_s), key=lambda j: (-alone[j], j))
    rest = sorted((job for job, took_s in alone.items() if took_s <= late_at * span_s), key=lambda j: (alone[j], j))
    return Order(tuple(late), tuple(rest))


def urged(jobs: Sequence[Waiting], hosts: int) -> dict[JobId, Profile]:
    """The profiles of these jobs, each with its urge. All urges share `URGE`, more of it the less a job has left: as
    the root of one over it, since what is gained for the mean by speed is one over it, and for the makespan nothing.
    A late job has `URGE_LATE` on top, times its share of the time that is left, at most twice."""
    on = max(1, min(ALONE_ON, hosts))
    left_s = {job.profile.job: max(1e-9, job.left * alone_s(job.profile, on)) for job in jobs}
    span_s = max(1e-9, sum(job.left * job.profile.work_s for job in jobs) / max(1, hosts))
    total = sum(took_s**-0.5 for took_s in left_s.values())
    late = {name: min(2.0, took_s / span_s) for name, took_s in left_s.items() if took_s > LATE_AT * span_s}
    each = min(URGE_LATE, URGE_LATE_ALL / max(1.0, sum(late.values())))
    found: dict[JobId, Profile] = {}
    for job in jobs:
        name = job.profile.job
        weight = URGE * left_s[name] ** -0.5 / total + each * late.get(name, 0.0)
        found[name] = msgspec.structs.replace(job.profile, urge=weight * alone_s(job.profile, on))
    return found


def are_held_up(late: Sequence[Profile], groups: Sequence[Group], hosts: int) -> bool:
    """Does one of these late jobs wait, or go on too slowly where it is?"""
    took = {job.job: iteration_s(group.jobs, group.hosts) for group in groups for job in group.jobs}
    on = max(1, min(ALONE_ON, hosts))
    return any(job.job not in took or took[job.job] > HELD_UP * alone_s(job, on) for job in late)
