"""Who runs next: discretised two-dimensional attained service (2DAS; NSDI'19 §3.3).

A job's attained service is its GPUs times the seconds it ran. Jobs start in queue 0 and sink as they attain service;
inside a queue it is first come, first served. The walk goes down the order and skips a gang that does not fit whole
(all or nothing, no blocking behind it). Where the paper's text, pseudocode and simulator disagree, Covey keeps running
jobs ahead of waiting ones inside a queue ("sticky"): a job is preempted only by one of a strictly higher queue or a
promoted one. The literal pseudocode preempts six times as often for nothing.

A job that waits long goes to the head of everything: by STARVELIMIT and PROMOTEKNOB, and a wide gang by
`machine/leader/gang_clocks.py`. The simulator asks when that will be, the leader whether it is so by now; both ask
these functions. A leader that decides less often than once a second finds several such jobs at once, and promotes them
in the order of the seconds in which they became due.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from covey.core.ids import JobId
from plugins.scheduler.policy.rules import Discipline as Discipline

NEVER = 1 << 60
"""A number in place of the first start of a job that never started; above every index of the log, and every time."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One job as the order sees it."""

    id: JobId
    number: int
    """The job's place in the order of admission; the last tie-break."""
    tenant: str
    job_class: str
    gpus: int
    """GPUs that the job takes of the capacity."""
    submitted: float
    attained_gpu_s: float
    """Attained service since the job's last promotion, GPU·s."""
    running: bool
    """Whether the job runs or resumes: it holds GPUs and would have to be preempted."""
    first: float | None = None
    """When the job first started."""
    promoted: float | None = None
    """When the job was promoted to the head of everything for having starved; None once that is over."""
    firm: bool = False
    """Whether the job runs, and stays whatever the order says (`machine/leader/firm_jobs.py`)."""
    remaining_s: float = 0.0
    """Seconds that the job still has to run, known only to the disciplines that are told how long jobs are (`srsf`,
    `srtf`)."""


def queue_of(attained_gpu_s: float, thresholds: Sequence[float]) -> int:
    """The index of the queue [h_i-1, h_i) that holds this attained service; 0 is the highest."""
    return bisect.bisect_right(thresholds, attained_gpu_s)


def gittins(attained: float, delta: float, totals: Sequence[float]) -> float:
    """The Gittins index, 1/(GPU·s): the chance to end within `delta` more GPU·s, over the service that would cost, from
    the totals of ended jobs, ascending (Tiresias, Pseudocode 1)."""
    begin = bisect.bisect_right(totals, attained)
    end = bisect.bisect_right(totals, attained + delta)
    beyond = len(totals) - end
    cost = sum(totals[begin:end]) - attained * (end - begin) + (delta * beyond if beyond and delta != math.inf else 0.0)
    return (end - begin) / cost if end > begin else 0.0


def best_gittins(attained: float, totals: Sequence[float]) -> float:
    """The largest Gittins index over all deltas: it is reached where a job of the past ended."""
    later = [total - attained for total in totals if total > attained]
    return max((gittins(attained, delta, totals) for delta in sorted(set(later))), default=0.0)


def key(
    row: Row,
    thresholds: Sequence[float],
    discipline: Discipline = "dlas",
    sticky: bool = True,
    totals: Sequence[float] = (),
    narrow_first: bool = False,
) -> tuple[object, ...]:
    """The sort key of a job: smallest first. `narrow_first`: among those of a queue that wait, fewer GPUs come
    first."""
    by_arrival = (row.submitted, row.number)
    match discipline:
        case "dlas" | "dgittins":
            return _queued_key(row, thresholds, discipline, sticky, totals, narrow_first)
        case "las":
            return (row.attained_gpu_s, row.number)
        case "gittins":
            return (-best_gittins(row.attained_gpu_s, totals), row.number)
        case "srsf":
            return (row.remaining_s * row.gpus, row.number)
        case "srtf":
            return (row.remaining_s, row.number)
        case "sjf":
            return (row.gpus, *by_arrival)
        case "fjf" | "fifo" | "backfill" | "gandiva":
            return by_arrival


def _queued_key(
    row: Row,
    thresholds: Sequence[float],
    discipline: Discipline,
    sticky: bool,
    totals: Sequence[float],
    narrow_first: bool,
) -> tuple[object, ...]:
    queue = 0 if row.promoted is not None else queue_of(row.attained_gpu_s, thresholds)
    promoted = (0, row.promoted, row.number) if row.promoted is not None else (1, 0.0, 0)
    stays = (0 if row.running else 1,) if sticky else ()
    index: tuple[float, ...] = ()
    if discipline == "dgittins" and queue < len(thresholds):
        index = (-gittins(row.attained_gpu_s, thresholds[queue], totals),)
    return (queue, promoted, *index, *stays, *inside(row, narrow_first), row.number)


def inside(row: Row, narrow_first: bool) -> tuple[float, float, float]:
    """The sort key of two jobs of one queue that both run, or both wait: the smaller comes first, and the lower number
    among equals. The leader's books (`machine/leader/run_queues.py`) and the sorted order (`key`) both go by this."""
    narrow = row.gpus if narrow_first and not row.running and row.promoted is None else 0
    return narrow, NEVER if row.first is None else row.first, row.submitted


def rank(row: Row, quotas: Mapping[str, int | None], default: int | None) -> int:
    """The rank of a job's tenant and class: 0: a tenant with a quota; 1: a tenant without one, who shares what is left;
    2: an opportunistic job."""
    if row.job_class == "opportunistic":
        return 2
    return 1 if quotas.get(row.tenant, default) is None else 0


def ordered(
    rows: Sequence[Row],
    thresholds: Sequence[float],
    quotas: Mapping[str, int | None],
    default: int | None = None,
    narrow_first: bool = False,
) -> list[Row]:
    """All jobs, whoever may run first at the front: those of tenants with a quota first, then 2DAS."""
    return sorted(rows, key=lambda row: (rank(row, quotas, default), *key(row, thresholds, narrow_first=narrow_first)))


class Selection(msgspec.Struct, frozen=True):
    """One decision: who runs, who is stopped for it, and what keeps each of the others."""

    run: tuple[JobId, ...]
    """The jobs that run, in order; those that do not run yet are to be started, in this order, as GPUs become free."""
    preempt: tuple[JobId, ...]
    """The jobs that run, but are not selected."""
    over_quota: tuple[JobId, ...]
    """The jobs that wait only because their tenant's quota is used up by jobs ahead of them."""


def select(
    order: Sequence[Row],
    capacity: int,
    quotas: Mapping[str, int | None],
    default: int | None = None,
    stop_at_first: bool = False,
) -> Selection:
    """Walk the order with `capacity` GPUs and each tenant's quota; skip what does not fit whole (scheduling by 2DAS).

    `stop_at_first` is a FIFO queue with head-of-line blocking.
    """
    free = capacity
    left: dict[str, int] = {}
    run: list[JobId] = []
    preempt: list[JobId] = []
    over_quota: list[JobId] = []
    for row in order:
        quota = None if row.job_class == "opportunistic" else quotas.get(row.tenant, default)
        within = quota is None or row.gpus <= left.get(row.tenant, quota)
        if within and row.gpus <= free:
            free -= row.gpus
            if quota is not None:
                left[row.tenant] = left.get(row.tenant, quota) - row.gpus
            run.append(row.id)
            continue
        if row.running:
            preempt.append(row.id)
        elif not within:
            over_quota.append(row.id)
        if stop_at_first:
            break
    return Selection(tuple(run), tuple(preempt), tuple(over_quota))


Seconds = TypeVar("Seconds", int, float)
EARLY_S = 1e-6
"""How long before its time an event is already looked at, s: sums of seconds are rounded."""


def promoted_after(
    queue: int, ran_s: Seconds, waited_s: Seconds, knob: tuple[int, int] | None, starve_limit_s: Seconds | None
) -> Seconds | None:
    """Seconds of the present wait after which a job is promoted; None: never. `ran_s` and `waited_s` count since its
    last promotion, without the present wait. The limit holds in every queue; the knob, a fraction, below the highest:
    a job that waited `knob` times as long as it ran."""
    after = starve_limit_s
    if knob is not None and queue > 0 and ran_s > 0:
        lacks = max(0 * ran_s, -(-knob[0] * ran_s // knob[1]) - waited_s)
        after = lacks if after is None else min(after, lacks)
    return after


def due_second(since_s: Seconds, after_s: Seconds) -> int:
    """The whole second in which a job that waits since then became due: promotions of one decision come in this order,
    those of one second by admission."""
    return math.floor(since_s + after_s + EARLY_S)


WIDE_PART = 8
"""A gang of at least one part in so many of its pool is wide (chosen: with all gangs of two GPUs philly at 640 GPUs
loses 5 % in the mean, with these no trace over 0.7 %; `make tables ONLY=jobs-wide` has gangs of an eighth)."""
OVERLOAD = 2
"""The jobs of a pool that is not overloaded ask for at most so many times its GPUs, wide gangs whose clock runs not
counted (chosen on the traces: at 2.5 one of fourteen loses 11 %, at 1.5 gangs of a full rack starve at 95 % load)."""


def widest_narrow(pool: int) -> int:
    """The most GPUs of a gang that is not wide in a pool of so many GPUs."""
    return max(1, -(-pool // WIDE_PART) - 1)


def is_calm(asked: int, pool: int) -> bool:
    """Whether a pool is not overloaded. `asked`: GPUs that its jobs hold or wait for, without wide gangs whose clock
    runs."""
    return asked <= OVERLOAD * pool


def due_after(patience_s: float, ran_s: float, waited_s: float) -> float:
    """Seconds that the clock of a gang still has to run until it is promoted. `waited_s`: seconds that it has run."""
    return max(0.0, patience_s + ran_s - waited_s)


STOP_PART = 10
"""A job that saves is stopped only while that loses at most one part in so many of the time for which it has held its
GPUs (chosen: so at most a tenth of all held time is lost to stops, by the rule alone)."""


def stoppable_for(held_s: float, unsaved_s: float, restart_s: float) -> int:
    """Whole seconds from now for which a job may be stopped if it saves nothing more; -1: it may not be stopped before
    it saves again. `held_s`: for how long it has held its GPUs; `unsaved_s`: what it ran since it saved; `restart_s`:
    what a stop and a start cost beside."""
    left_s = held_s - STOP_PART * (unsaved_s + restart_s)
    return -1 if left_s < 0 else int(left_s / (STOP_PART - 1))
