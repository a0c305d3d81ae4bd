"""The jobs that go first, and how much it matters that a job runs. Ours.

The paper takes jobs in the order of its lists (Algorithm 1, line 5), and of groupings asks only how busy they keep the
hosts. Ours: the mean completion time is least when the job with the least left goes first, so jobs are looked at in
that order. And since a job does one iteration while its group does one of each, a job of short iterations among long
ones hardly advances, though the hosts are busy: so each job has a *bonus*, which a grouping is paid for as it lets the
job run (`policy/model.JobProfile.bonus`). It has two parts:

    for the mean       more, the less the job has left
    for the end        hosts stay busy to the end only when no long job is left over for it. A job's *share* is what it
                       needs alone, of the time in which all hosts, busy, can do what all have left. Who has the largest
                       shares is paid to go on, the more the nearer the largest is to 1: its share falls behind
                       those of others then, so that in the end all long jobs end together

How much is left is known where a job says how many iterations it will do. Elsewhere it is what jobs that ended here ran
beyond as long, in the mean; and while none did, as long again as it has run. So, of those that say nothing, who has run
least goes first, as by attained service in `plugins/scheduler`.
"""

import math
from collections.abc import Sequence

import msgspec

from covey.core.ids import JobId
from plugins.interleave.policy.model import JobProfile

PRIOR = 2.0
"""Weight of the rule "as long again", in ended jobs."""
TYPICAL_S = 600.0
"""Seconds expected of a job of which nothing is known; only their order matters, and it is the same for all."""
ALONE_ON = 16
"""Hosts on which lengths of jobs are compared: those of the paper's profiles (§4.4.2)."""
BONUS = 0.15
"""The worth, against hosts that are all busy, of all jobs running as if each were alone."""
END = 0.2
"""The worth, against hosts that are all busy, of all jobs that may be left over at the end running as if alone."""
FAR, NEAR = 0.4, 0.8
"""Largest share of a job up to which nothing is paid for the end, and from which on all of `END` is."""
STEEP = 6.0
"""A job whose share is larger than another's by 1/6 has e times its part of `END`. With less, jobs that can wait are
paid too; with more the largest alone is hurried, and idles hosts."""


class Waiting(msgspec.Struct, frozen=True):
    """A job, and the iterations that it has still to do."""

    profile: JobProfile
    left: float


def alone_s(job: JobProfile, hosts: float) -> float:
    """Seconds of one iteration of a job on hosts of its own."""
    return job.work_s / hosts + job.net_s


def left_of(declared: int | None, done: int, each_s: float, ended_s: Sequence[float]) -> float:
    """Iterations, of `each_s` alone, that a job still has to do; at least 1. `ended_s`: seconds that each ended job
    would have run alone, all its iterations together."""
    if declared is not None:
        return float(max(1, declared - done))
    had_s = done * each_s
    beyond = [ran_s - had_s for ran_s in ended_s if ran_s > had_s]
    left_s = (sum(beyond) + PRIOR * max(had_s, TYPICAL_S)) / (len(beyond) + PRIOR)
    return max(1.0, left_s / each_s) if each_s > 0 else 1.0


def ordered(jobs: Sequence[Waiting], hosts: int) -> tuple[JobId, ...]:
    """The jobs, the one with the least left first, in seconds alone on the hosts of a profile, or on `hosts` if these
    are fewer."""
    left_s = _left_s(jobs, hosts)
    return tuple(sorted(left_s, key=lambda job: (left_s[job], job)))


def shares(jobs: Sequence[Waiting], hosts: int) -> dict[JobId, float]:
    """Share of each job: the time that it needs alone, of the time in which `hosts` hosts, all computing, do all that
    these jobs have left."""
    span_s = max(1e-9, sum(job.left * job.profile.work_s for job in jobs) / max(1, hosts))
    return {job: took_s / span_s for job, took_s in _left_s(jobs, hosts).items()}


def weighted(jobs: Sequence[Waiting], hosts: int) -> dict[JobId, JobProfile]:
    """The profiles of these jobs, each with its bonus. All share `BONUS`, more of it the less a job has left: as the
    root of one over it, since what is gained for the mean by speed is one over it, and for the end nothing. They also
    share the part of `END` that the largest share of a job demands, and nearly all of it goes to those that have the
    largest."""
    left_s, share = _left_s(jobs, hosts), shares(jobs, hosts)
    soon = {job: took_s**-0.5 for job, took_s in left_s.items()}
    largest = max(share.values(), default=0.0)
    threat = min(1.0, max(0.0, (largest - FAR) / (NEAR - FAR)))
    late = {job: math.exp(STEEP * (each - largest)) for job, each in share.items()}
    all_soon, all_late = sum(soon.values()), sum(late.values())
    found: dict[JobId, JobProfile] = {}
    for job in jobs:
        name = job.profile.job
        weight = BONUS * soon[name] / all_soon + END * threat * late[name] / all_late
        found[name] = msgspec.structs.replace(job.profile, bonus=weight * alone_s(job.profile, _alone_on(hosts)))
    return found


def _alone_on(hosts: int) -> int:
    return max(1, min(ALONE_ON, hosts))


def _left_s(jobs: Sequence[Waiting], hosts: int) -> dict[JobId, float]:
    return {job.profile.job: max(1e-9, job.left * alone_s(job.profile, _alone_on(hosts))) for job in jobs}
