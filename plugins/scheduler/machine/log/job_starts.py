"""Commands of the log about a job until it runs, and about its class: it is submitted, granted GPUs, placed, promoted,
demoted, upgraded, or keeps GPUs while it waits for more."""

from covey.core.ids import JobId
from covey.tensors.numbers.blocks import tables_of, tables_of_ranks
from plugins.scheduler.machine.log import answers
from plugins.scheduler.machine.log.beside import beside, guaranteed_beside
from plugins.scheduler.machine.log.job_endings import enter
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job, JobArray, JobStart, JobTimes
from plugins.scheduler.machine.log.kept_bytes import LIVE_BYTES_MAX, USER_PART, Live, size_of
from plugins.scheduler.machine.log.replacing_jobs import not_replaced
from plugins.scheduler.machine.log.waiting import dependents
from plugins.scheduler.messages.commands import (
    Applied,
    Demoted,
    GpusKept,
    Granted,
    NotApplied,
    Placed,
    PlaceFailed,
    Promoted,
    Result,
    Submitted,
)
from plugins.scheduler.messages.spec import JobSpec, SealedEnv
from plugins.scheduler.policy import classes, explain
from plugins.scheduler.policy.carrying import first_carried

LIVE_MAX = 10_000
"""The most jobs that are not over; more are refused at submit, so that no tenant can fill every host's memory."""
TO_THE_HEAD = "it waited so long that it moves to the highest queue"


def submitted(queue: JobTable, command: Submitted) -> Result:
    """Make the job, or return the one that the same key made before."""
    if command.key in queue.keys:
        return Applied(queue.keys[command.key])
    spec = command.spec
    if no_room := no_room_for(queue, spec):
        return no_room
    if unknown := dependents.refusal(queue, spec):
        return unknown
    never = explain.over_quota(spec, queue.quota(spec.tenant), command.may_demote)
    if never is not None:
        return NotApplied(never.code, never.what, never.why, never.next)
    queue.next_number = max(queue.next_number, command.numbers)
    job = added(queue, command.key, spec, command.env, JobTimes(command.wall_s, submitted_rack_s=queue.rack_s))
    job.array = JobArray() if spec.array else None
    job.holds.begin_wall_s = spec.begin_wall_s
    by = f", by {command.by}" if command.by else ""
    queue.models.time_passed(command.wall_s)
    queue.say(job, "submitted", f"{spec.called} of tenant {spec.tenant}, {spec.job_class}: {explain.asks(spec)}{by}")
    dependents.follow(queue, job)
    if spec.hold and not job.holds.held:
        job.holds.held = f"it was submitted so{by}"
    return Applied(job.id)


def added(queue: JobTable, key: str, spec: JobSpec, env: SealedEnv | None, times: JobTimes) -> Job:
    """A new job of the log, queued."""
    id = JobId(f"j{queue.next_number}")
    job = Job(id=id, number=queue.next_number, key=key, spec=spec, env=env, times=times)
    job.priority.queued_s = queue.clock_s
    queue.next_number += 1
    queue.jobs[id] = job
    if key:
        queue.keys[key] = id
    queue.kept_bytes.submitted(job)
    return job


def no_room_for(queue: JobTable, spec: JobSpec) -> NotApplied | None:
    """Why the log takes no more jobs like this one now; None: it does."""
    if len(queue.jobs) - len(queue.ended) >= LIVE_MAX:
        why = f"{LIVE_MAX} jobs wait or run already, which is the limit"
        next = "wait until some end (agentctl jobs), then submit again"
        return NotApplied(4, f"{spec.called} was not accepted", why, next)
    live, size = queue.kept_bytes.live, size_of(spec)
    if live + size > LIVE_BYTES_MAX:
        why = f"its {size} bytes and the {live} of the jobs that wait or run exceed the log's limit of {LIVE_BYTES_MAX}"
        next = "submit with less environment and fewer arguments (--no-env), or wait until some jobs end"
        return NotApplied(4, f"{spec.called} was not accepted", why, next)
    return _of_one_user(queue, spec, size)


def _of_one_user(queue: JobTable, spec: JobSpec, size: int) -> NotApplied | None:
    """Why the log takes no more of this user's jobs now; None: it does."""
    if spec.owner is None:
        return None
    user = spec.owner.user
    mine = queue.kept_bytes.users.get(user, Live())
    if mine.jobs < LIVE_MAX // USER_PART and mine.bytes + size <= LIVE_BYTES_MAX // USER_PART:
        return None
    why = f"{mine.jobs} jobs of {user}, {mine.bytes} bytes, wait or run, and a user may have 1/{USER_PART} of the log"
    return NotApplied(4, f"{spec.called} was not accepted", why, "wait until some end (agentctl jobs), or cancel some")


def granted(queue: JobTable, job: Job, command: Granted) -> Result:
    if not job.may_start:
        return answers.not_free(job)
    quota = queue.quota(job.spec.tenant)
    if job.counts and quota is not None and queue.used(job.spec.tenant) + job.spec.gpus > quota:
        return answers.over_quota(job, queue.used(job.spec.tenant), quota, "granted")
    job.grant.epoch, job.grant.coordinator, job.grant.index = command.epoch, command.coordinator, queue.index
    queue.use(job, 1)
    enter(
        queue,
        job,
        "placing",
        "granted",
        f"epoch {job.grant.epoch}; {job.grant.coordinator} looks for {explain.gpus(job.spec.gpus)}",
    )
    return Applied(job.id)


def placed(queue: JobTable, job: Job, command: Placed) -> Result:
    wrong = answers.barred_place(job.spec, command.places, queue.drained)
    wrong = wrong or answers.wrong_places(job, command, queue.jobs, queue.holders)
    if wrong:
        return NotApplied(4, f"{job.id} was not placed", wrong, "none: its coordinator tries again")
    spec = job.spec
    tables = tables_of_ranks(spec.world_size) if spec.elastic else tables_of(len(command.places))
    carried = first_carried(spec.world_size, spec.workers) if spec.elastic else {}
    job.start = JobStart(command.places, tables, carried, command.master_addr, command.master_port)
    job.grant.index = queue.index
    job.times.began_rack_s = queue.rack_s if spec.elastic else None
    job.tally.attempt += 1
    job.bill.begin(job.attained_gpu_s, queue.rack_s)
    job.tally.place_failures = 0
    job.priority.waited_s += max(0.0, queue.clock_s - job.priority.queued_s)
    job.priority.first = queue.index if job.priority.first is None else job.priority.first
    if job.times.started_wall_s is None:
        job.times.started_wall_s, job.times.started_rack_s = command.wall_s, queue.rack_s
    for place in job.start.places:
        queue.hold(job, place)
    queue.give_back(job)
    where = ", ".join(f"{place.host} ({len(place.ranks)})" for place in job.start.places)
    enter(
        queue,
        job,
        "running",
        "placed",
        f"start {job.tally.attempt} under epoch {job.grant.epoch}, workers by host: {where}",
    )
    for other, hosts in beside(job, queue.holders).items():
        queue.note(job.id, "shares GPUs", explain.shares(other, queue.jobs[other].job_class, hosts))
        queue.note(other, "shares GPUs", explain.shares(job.id, job.job_class, hosts))
    return Applied(job.id)


def place_failed(queue: JobTable, job: Job, command: PlaceFailed) -> Result | None:
    if job.state == "running":
        return not_replaced(queue, job, command)
    job.tally.place_failures += 1
    queue.use(job, -1)
    enter(queue, job, "queued", "not placed", command.reason)
    return Applied(job.id)


def promoted(queue: JobTable, job: Job, command: Promoted) -> Result:
    job.priority.promoted, job.priority.base_gpu_s = queue.index, job.attained_gpu_s
    job.priority.lasts = command.lasts
    job.priority.base_ran_s = job.ran_s(queue.rack_s) if job.spec.elastic else 0.0
    job.priority.queued_s, job.priority.waited_s = queue.clock_s, 0.0
    why = "its turn has come by age, and it stays before all others until it ends" if command.lasts else TO_THE_HEAD
    queue.note(job.id, "promoted", why)
    return Applied(job.id)


def demoted(queue: JobTable, job: Job, command: Demoted) -> Result | None:
    if job.job_class != "auto":
        return None
    job.priority.demoted = queue.index
    queue.give_back(job)
    queue.touch(job)
    queue.note(job.id, "demoted", explain.demoted(job.spec, command.waited_s))
    return Applied(job.id)


def upgraded(queue: JobTable, job: Job) -> Result | None:
    if job.priority.demoted is None or job.priority.upgraded is not None:
        return None
    quota = queue.quota(job.spec.tenant)
    if not classes.may_upgrade(job.spec.gpus, queue.free_quota(job.spec.tenant), closed=False):
        return answers.over_quota(job, queue.used(job.spec.tenant), quota or 0, "upgraded")
    other = guaranteed_beside(job, queue.jobs, queue.holders)
    if other is not None:
        return answers.not_alone(job, *other)
    job.priority.upgraded = queue.index
    queue.use(job, 1)
    queue.touch(job)
    queue.note(job.id, "upgraded", explain.upgraded(job.spec, queue.used(job.spec.tenant), quota))
    return Applied(job.id)


def gpus_kept(queue: JobTable, job: Job, command: GpusKept) -> Result | None:
    if not job.counts:
        return None
    if not classes.may_keep(job.id, queue.keeper):
        why = f"GPUs are reserved for {queue.keeper} already, and only one job of a rack may have that"
        return NotApplied(4, f"no GPUs are reserved for {job.id}", why, f"see agentctl why {queue.keeper}")
    if sum(command.gpus.values()) > job.spec.gpus:
        why = f"it asks for {explain.gpus(job.spec.gpus)}"
        return NotApplied(4, f"no GPUs are reserved for {job.id}", why, "none: the leader tries again")
    queue.keeper, queue.kept = (job.id if command.gpus else None), dict(sorted(command.gpus.items()))
    queue.touch(job)
    queue.note(job.id, "reserves GPUs", explain.keeps(job.spec.gpus, queue.kept))
    return Applied(job.id)
