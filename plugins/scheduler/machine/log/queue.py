"""The replicated state machine: tenants' quotas and users, jobs, grants and attained service.

`apply` is deterministic: equal commands in one order give one state and equal answers on every host. What must never
happen is refused here and nowhere else, because no command of a leader that was cut off gets past this place:

- no tenant ever holds more GPUs than its quota (one lowered under what is held lets that run out and grants nothing);
- a grant's epoch grows by one each time, and a command of another epoch changes nothing;
- a gang is placed whole, and no GPU belongs to two gangs; where GPUs are shared, none to two guaranteed ones;
- at most one gang keeps GPUs that do not suffice for it yet.

No clock is read here. How long jobs wait comes through the log too: the leader counts the time during which any job
waits (`Elapsed`), and a job remembers what that clock showed when its wait began.

Ended jobs are kept for the list, the newest `ENDED_MAX` of them; their keys and environments go with them.
"""

from collections.abc import Mapping, Sequence
from typing import assert_never

from covey.core.events import LogEvent
from covey.core.version import newest
from plugins.scheduler.machine.log import (
    answers,
    arranging,
    job_endings,
    job_starts,
    replacing,
    replacing_jobs,
    tenants,
)
from plugins.scheduler.machine.log.asked import holds, tasks, turns
from plugins.scheduler.machine.log.job_table import DRAINED_MAX, FORGOTTEN_MAX, JobTable
from plugins.scheduler.machine.log.jobs import HOLDING, Job, State
from plugins.scheduler.messages.commands import (
    AboutJob,
    AboutWaiting,
    Applied,
    Arranged,
    Attained,
    BeginReached,
    CancelAsked,
    Command,
    Demoted,
    Elapsed,
    GpusKept,
    Granted,
    HoldAsked,
    HostDrained,
    HostForgotten,
    Leads,
    MoveAsked,
    NotApplied,
    Placed,
    PlaceFailed,
    PlacesLost,
    PriorityAsked,
    Promoted,
    QuotaSet,
    RanksDone,
    RanksReported,
    ReleaseAsked,
    Replaced,
    RequeueAsked,
    Result,
    ScaleAsked,
    Submitted,
    TakenBack,
    TaskBegun,
    TenantSet,
    TimeLimitReached,
    TimeLimitSet,
    TuneAsked,
    Upgraded,
    WeightSet,
)
from plugins.scheduler.policy.eligible import Drain

FINDS: Mapping[type[AboutJob], tuple[State, ...]] = {
    Granted: ("queued",),
    Placed: ("placing",),
    PlaceFailed: ("placing", "running"),
    PlacesLost: ("running",),
    MoveAsked: ("running",),
    Replaced: ("running",),
    ScaleAsked: ("running",),
    TuneAsked: ("running",),
    RanksReported: ("running", "stopping"),
    RanksDone: ("running",),
    TimeLimitReached: ("running",),
    TakenBack: HOLDING,
    Promoted: ("queued",),
    Demoted: ("queued",),
    Upgraded: ("running",),
    GpusKept: ("queued",),
}
"""The states in which a command may find its job, which must be under the command's epoch as well, or under the one
before when the command is a grant."""


def apply(queue: JobTable, index: int, command: Command) -> tuple[Result, Sequence[LogEvent]]:
    """Apply the command at `index` of the log. Each change is noted once in the event log of its job."""
    queue.index, queue.rack_s = index, max(queue.rack_s, command.rack_s)
    queue.needs = newest(queue.needs, command.needs)
    queue.notes, queue.woken = [], {}
    result = _dispatch(queue, command)
    queue.tell_feeds([*answers.touched(command, result), *queue.woken])
    return result, queue.notes


def _dispatch(queue: JobTable, command: Command) -> Result:
    match command:
        case Submitted():
            return job_starts.submitted(queue, command)
        case WeightSet():
            return tenants.weight_set(queue, command)
        case QuotaSet():
            return tenants.quota_set(queue, command)
        case TenantSet():
            return tenants.tenant_set(queue, command)
        case HostDrained():
            return _host_drained(queue, command)
        case HostForgotten():
            return _host_forgotten(queue, command)
        case Attained():
            return _attained(queue, command)
        case Elapsed():
            queue.clock_s = max(queue.clock_s, command.clock_s)
            return Applied()
        case Leads():
            return _leads(queue, command)
        case Arranged():
            return arranging.arranged(queue, command)
        case _:
            job = queue.jobs.get(command.job)
            if job is None:
                return answers.unknown(command.job, queue.was(command.job))
            return _about_job(queue, job, command) or answers.stale(job, command)


def _about_job(queue: JobTable, job: Job, command: AboutJob) -> Result | None:
    """Apply a command about a job. None: the job is not, or no more, where this command takes it to be, and nothing
    changes."""
    if isinstance(command, AboutWaiting):
        return _about_waiting(queue, job, command)
    if (
        isinstance(command, Placed)
        and job.placed
        and (job.grant.epoch, job.start.places) == (command.epoch, command.places)
    ):
        return Applied(job.id)  # it was heard before
    if isinstance(command, Replaced) and replacing.was_replaced(job, command):
        return Applied(job.id)
    grants = isinstance(command, Granted)
    if job.state not in FINDS[type(command)] or command.epoch != job.grant.epoch + grants:
        return None
    match command:
        case Granted():
            return job_starts.granted(queue, job, command)
        case Placed():
            return job_starts.placed(queue, job, command)
        case PlaceFailed():
            return job_starts.place_failed(queue, job, command)
        case PlacesLost():
            return replacing_jobs.places_lost(queue, job, command)
        case MoveAsked():
            return replacing_jobs.move_asked(queue, job, command)
        case Replaced():
            return replacing_jobs.replaced(queue, job, command)
        case ScaleAsked():
            return arranging.scale_asked(queue, job, command)
        case TuneAsked():
            return arranging.tune_asked(queue, job, command)
        case RanksReported():
            by_others = replacing_jobs.lost_by_report(queue, job, command)
            return by_others or job_endings.ranks_reported(queue, job, command)
        case RanksDone():
            return job_endings.ranks_done(queue, job, command)
        case TimeLimitReached():
            return job_endings.time_limit_reached(queue, job)
        case TakenBack():
            return job_endings.taken_back(queue, job, command)
        case Promoted():
            return job_starts.promoted(queue, job, command)
        case Demoted():
            return job_starts.demoted(queue, job, command)
        case Upgraded():
            return job_starts.upgraded(queue, job)
        case GpusKept():
            return job_starts.gpus_kept(queue, job, command)
        case _:
            assert_never(command)


def _about_waiting(queue: JobTable, job: Job, command: AboutWaiting) -> Result:
    match command:
        case CancelAsked():
            return tasks.cancel_asked(queue, job, command)
        case HoldAsked():
            return holds.hold_asked(queue, job, command)
        case ReleaseAsked():
            return holds.release_asked(queue, job, command)
        case RequeueAsked():
            return holds.requeue_asked(queue, job, command)
        case PriorityAsked():
            return turns.priority_asked(queue, job, command)
        case TimeLimitSet():
            return holds.time_limit_set(queue, job, command)
        case BeginReached():
            return holds.begin_reached(queue, job)
        case TaskBegun():
            return tasks.task_begun(queue, job, command)
        case _:
            assert_never(command)


def _host_drained(queue: JobTable, command: HostDrained) -> Result:
    """Drain or cordon a host, or use it again; a repeated command changes nothing."""
    host, by = command.host, command.by or "a person"
    before = queue.drained.get(host)
    now = Drain(by, command.stop_jobs, command.wall_s, command.cordon, command.why) if command.drained else None
    if command.cordon and before is not None and not before.cordon:
        what = f"{host} was not {'cordoned' if command.drained else 'uncordoned'}"
        return NotApplied(4, what, f"it {before.told}, and what is there leaves it", f"agentctl hosts resume {host}")
    if (now and (now.stop_jobs, now.cordon)) == (before and (before.stop_jobs, before.cordon)):
        return Applied()
    if command.closed not in (None, len(queue.drained)):
        why = f"{len(queue.drained)} hosts are drained or cordoned by now, and not {command.closed}"
        return NotApplied(4, f"{host} was not cordoned", why, "none: it looks again")
    rest = {other: drain for other, drain in queue.drained.items() if other != host}
    if now is not None and len(rest) >= DRAINED_MAX:
        what = f"{host} was not {'cordoned' if command.cordon else 'drained'}"
        why = f"{DRAINED_MAX} hosts are drained or cordoned already, which is the limit"
        next = "agentctl hosts resume HOST (or uncordon), for hosts that are in use again"
        return NotApplied(4, what, why, next)
    queue.drained = rest if now is None else dict(sorted({**rest, host: now}.items()))
    if now is not None and not now.cordon:
        arranging.owners_lost(queue, host)
    queue.notes.append(LogEvent(f"host/{host}", *_of_drain(before, now, by), f"log/{queue.index}"))
    return Applied()


def _host_forgotten(queue: JobTable, command: HostForgotten) -> Result:
    """Remember that a host will never come back, and nothing else of it. Not applied while a job has ranks there:
    whoever asks takes those back first."""
    host = command.host
    if jobs := sorted(job.id for job in queue.live() if job.awaits(host)):
        why = f"{', '.join(jobs[:5])} {'has' if len(jobs) == 1 else 'have'} ranks on it"
        return NotApplied(4, f"{host} was not forgotten", why, f"agentctl hosts forget {host}, again")
    queue.drained = {other: drain for other, drain in queue.drained.items() if other != host}
    boot = max(queue.forgotten.pop(host, 0), command.boot)
    queue.forgotten[host] = boot
    for oldest in list(queue.forgotten)[:-FORGOTTEN_MAX]:
        del queue.forgotten[oldest]
    said = f"{command.by or 'a person'}: it will never come back"
    queue.notes.append(LogEvent(f"host/{host}", "host forgotten", said, f"log/{queue.index}"))
    return Applied()


def _attained(queue: JobTable, command: Attained) -> Result:
    for id, service in sorted(command.service_gpu_s.items()):
        job = queue.jobs.get(id)
        known = 0.0 if job is None else job.measured.attained.get(command.host, 0.0)
        if job is not None and service > known:
            job.measured.attained = {**job.measured.attained, command.host: service}
            if job.counts:
                queue.attain(job.spec.tenant, service - known)
    for id, use in sorted(command.uses.items()):
        job = queue.jobs.get(id)
        if job is not None and job.placed and job.grant.epoch == use.epoch:
            job.bill.measured(command.host, use)
    for id, (largest, total) in sorted(command.tensors.items()):
        job = queue.jobs.get(id)
        if job is not None and (total, largest) > (job.measured.tensors[1], job.measured.tensors[0]):
            job.measured.tensors = (largest, total)
            queue.models.saw_tensors(job.spec, largest, total)
    for id, saved in sorted(command.saved.items()):
        job = queue.jobs.get(id)
        if job is not None and (job.measured.saved is None or saved.step > job.measured.saved.step):
            job.measured.saved = saved
            age_s, told_s = command.wall_s - saved.wall_s, job.ending.told_rack_s
            job.measured.saves_at_stop |= told_s is not None and age_s <= queue.rack_s - told_s
            job.bill.saved(age_s, job.attained_gpu_s, queue.rack_s)
    for id, said in sorted(command.heals.items()):
        if (job := queue.jobs.get(id)) is not None:
            replacing.heals(job, command.host, said)
    for id, stays in sorted(command.stays.items()):
        job = queue.jobs.get(id)
        if job is not None and replacing.state_stays(job, command.host, stays):
            queue.touch(job)
    for id, steps in sorted(command.steps.items()):
        job = queue.jobs.get(id)
        if job is not None and job.placed and job.grant.epoch == steps.epoch and job.place_on(command.host) is not None:
            job.start.step = max(steps.step, job.start.step or 0)
            job.start.timings = {**job.start.timings, command.host: steps.timing}
    return Applied()


def _leads(queue: JobTable, command: Leads) -> Result:
    if command.term < queue.leading_term:
        why = f"a leader of term {queue.leading_term} was elected since"
        return NotApplied(75, f"the leader of term {command.term} may not decide any more", why, "none: it steps down")
    queue.leading_term, queue.leases_over_s = command.term, command.leases_over_s
    queue.pauses_over_s = command.pauses_over_s
    return Applied()


def _of_drain(before: Drain | None, now: Drain | None, by: str) -> tuple[str, str]:
    """What happened to a host, and why, for its event log."""
    if now is None:
        what = "host uncordoned" if before is not None and before.cordon else "host resumed"
        return what, f"{by}: ranks may start there again"
    if now.cordon:
        return "host cordoned", f"{by}: no rank starts there; what is there stays{f'; {now.why}' if now.why else ''}"
    stays = "others stop and are queued again" if now.stop_jobs else "others stay until they end"
    return "host drained", f"{by}: no rank starts there; jobs that heal move to other hosts, {stays}"
