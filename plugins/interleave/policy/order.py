"""Which jobs go first: those with the least left, and those that would otherwise end last. Ours.

The paper takes jobs in the order of its lists (Algorithm 1, line 5). The mean completion time is least when the job
with the least left goes first; the hosts stay busy to the end only when no long job is left over for it. So a job that
could not be done in time if it waited is *late* and goes before all others; the rest go by what they have left.

How much is left is known where a job says how many iterations it will do. Elsewhere it is what jobs that ended here did
beyond as many iterations, in the mean; and while none did, as many again as it has done.
"""

from collections.abc import Sequence

import msgspec

from covey.core import JobId
from plugins.interleave.policy.model import Profile

PRIOR = 2.0
"""Ended jobs that the rule "as many again" counts as."""
TYPICAL = 100.0
"""Iterations expected of a job of which nothing is known; only their order matters, and it is the same for all."""
LATE_AT = 0.7
"""Of all the time that is left: a job that needs more of it alone is late. In a group it is not alone, and several late
ones cannot all be last; but with 0.35 on tuning seed 101 all long jobs were late from the start, and the short ones
waited for them (completion time 1.35x for 2.12x)."""


class Waiting(msgspec.Struct, frozen=True):
    """A job, and how many iterations it has still to do."""

    profile: Profile
    left: float


def left_of(declared: int | None, done: int, ended: Sequence[int]) -> float:
    """Iterations that a job still has to do; at least 1."""
    if declared is not None:
        return float(max(1, declared - done))
    beyond = [n - done for n in ended if n > done]
    guess = max(float(done), TYPICAL)
    return max(1.0, (sum(beyond) + PRIOR * guess) / (len(beyond) + PRIOR))


class Order(msgspec.Struct, frozen=True):
    """Who goes before whom."""

    late: tuple[JobId, ...]
    """The latest first."""
    rest: tuple[JobId, ...]
    """The least left first."""


def ordered(jobs: Sequence[Waiting], hosts: int, group_hosts: float, late_at: float = LATE_AT) -> Order:
    """The late jobs and the others. Late: its iterations, alone on `group_hosts` hosts, take more than `late_at` of the
    time in which `hosts` hosts, all busy, can do all that these jobs have left."""
    cpu = sum(job.left * job.profile.work_s for job in jobs)
    net = sum(job.left * job.profile.net_s * group_hosts for job in jobs)
    span_s = max(cpu, net) / hosts
    alone = {job.profile.job: job.left * (job.profile.work_s / group_hosts + job.profile.net_s) for job in jobs}
    late = sorted((job for job, took_s in alone.items() if took_s > late_at * span_s), key=lambda j: (-alone[j], j))
    rest = sorted((job for job, took_s in alone.items() if took_s <= late_at * span_s), key=lambda j: (alone[j], j))
    return Order(tuple(late), tuple(rest))
