"""Views of a job that this host sums, for people and for other plugins."""

from collections.abc import Sequence

import msgspec

from covey.core.ids import HostId
from covey.tensors.numbers.blocks import job_of
from covey.tensors.numbers.tensor_wire import grant_of
from covey.wire.sums import JobCounters
from plugins.aggregator.machine.direct_tables import DirectTables
from plugins.aggregator.machine.owner import Owner
from plugins.facts import RanksAwaited, SumsWorked
from plugins.views import AggregatorJobView


def awaited(job: JobCounters) -> RanksAwaited:
    """The ranks for which the job's round waits, if any is under way."""
    return RanksAwaited(job_of(job.job), grant_of(job.epoch), tuple(job.missing), job.waits_s)


def worked(before: Sequence[JobCounters], now: Sequence[JobCounters]) -> list[SumsWorked]:
    """What was done for each table from one look to the next; of what is new in the second one nothing is known."""
    known, found = {(job.job, job.epoch): job for job in before}, list[SumsWorked]()
    for job in now:
        old = known.get((job.job, job.epoch))
        if old is not None and job.iterations > old.iterations and job.busy_us >= old.busy_us:
            took_s, rounds = (job.busy_us - old.busy_us) / 1e6, job.iterations - old.iterations
            found.append(SumsWorked(job_of(job.job), grant_of(job.epoch), job.job, rounds, took_s))
    return found


def view(owner: Owner, job: JobCounters, age_s: float) -> AggregatorJobView:
    """View of a job: what the process counted `age_s` seconds ago, and what this host promised."""
    held = owner.jobs.get(job.job)
    demand = held.demand if held is not None else None
    here = owner.refused.get(job.job, "")
    refused = f"{owner.me}: {here}" if here else owner.emptier.refused.get(job.job, held.refused if held else "")
    return msgspec.structs.replace(
        _counted(job, owner.me, "aggd", age_s),
        period_us=demand.period_us if demand else None,
        work_us=demand.work_us if demand else None,
        load=owner.ledger.load(job.job) if demand else None,
        loss=owner.ledger.loss(job.job) if demand else None,
        loss_measured=owner.judged.get(job.job),
        refused=refused,
        not_direct=held.not_direct if held is not None else "",
    )


def direct_view(owner: DirectTables, job: JobCounters, process: int, age_s: float) -> AggregatorJobView | None:
    """View of a table that this process of a rank sums; None when it is not to sum it any more."""
    held = owner.tables.get(job.job)
    if held is None or owner.process_of(job.job) != process or held.epoch != job.epoch:
        return None
    return _counted(job, owner.me, f"rank {held.rank}", max(0.0, age_s))


def _counted(job: JobCounters, host: HostId, by: str, age_s: float) -> AggregatorJobView:
    """What who sums on this host has counted."""
    return AggregatorJobView(
        job=job.job,
        host=host,
        epoch=job.epoch,
        workers=job.workers,
        joined=job.joined,
        tensors=job.tensors,
        bytes=job.bytes,
        rounds=job.rounds,
        received_bytes=job.received_bytes,
        sent_bytes=job.sent_bytes,
        age_s=age_s,
        not_finite=job.not_finite,
        missing=tuple(job.missing),
        waits_s=round(job.waits_s, 3),
        by=by,
    )
