"""How long iterations of the jobs that are summed here may take, as `aggd` needs it to add first what is due first."""

from collections.abc import Iterator

from covey.wire.sums import UNKNOWN, Now, SetPace
from plugins.aggregator.machine.owner import Owner
from plugins.aggregator.machine.served_job import ServedJob
from plugins.aggregator.policy.profile import limit_of
from plugins.aggregator.policy.urgency import LAST, may_take


def paces(owner: Owner, now: Now) -> Iterator[SetPace]:
    """Orders that tell `aggd` the pace of each job, where it does not know it yet."""
    for job in now.jobs:
        held = owner.jobs.get(job.job)
        if held is not None and held.epoch == job.epoch and job.may_take_us != UNKNOWN:
            wanted = _may_take_us(held, held.unpromised or job.job in owner.refused)
            if wanted != job.may_take_us:
                yield SetPace(job.job, job.epoch, wanted)


def _may_take_us(held: ServedJob, unpromised: bool) -> int | None:
    """Microseconds that an iteration may take, as in `SetPace`. What a job needs is known if it was promised that."""
    if held.demand is None:
        return None if unpromised else 0
    allowed_us = may_take(held.demand.period_us, limit_of(held.demand))
    return None if allowed_us == LAST else round(allowed_us)
