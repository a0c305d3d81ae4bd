"""Commands of the log that keep a job from starting, or no longer: it is held, released, queued again, or its time has
come; and its time limit."""

import msgspec

from plugins.scheduler.machine.log import answers
from plugins.scheduler.machine.log.job_endings import enter, stop
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.commands import (
    Applied,
    HoldAsked,
    ReleaseAsked,
    RequeueAsked,
    Result,
    TimeLimitSet,
)
from plugins.scheduler.policy import explain


def hold_asked(queue: JobTable, job: Job, command: HoldAsked) -> Result:
    if job.state == "placing":
        queue.use(job, -1)
        enter(queue, job, "queued", "taken back", "it is held")
    elif job.state != "queued":
        next = f"agentctl submit, again; {job.id} stays as it is" if job.over else f"agentctl requeue {job.id} --hold"
        return answers.not_changed(job, f"it is {job.state}, and only a job that waits can be held", next)
    if not job.holds.held:
        hold(queue, job, command.by)
    return Applied(job.id)


def hold(queue: JobTable, job: Job, by: str) -> None:
    """Hold a job, which gives back the GPUs that are kept for it."""
    job.holds.held = f"by {by or 'a person'}"
    queue.give_back(job)
    queue.touch(job)
    queue.note(job.id, "held", f"{job.holds.held}, until agentctl release {job.id}")


def release_asked(queue: JobTable, job: Job, command: ReleaseAsked) -> Result:
    if job.over:
        return answers.not_changed(job, f"it is {job.state}", "agentctl submit, again")
    if job.holds.held:
        held, job.holds.held = job.holds.held, ""
        job.priority.queued_s = queue.clock_s
        queue.touch(job)
        queue.note(job.id, "released", f"by {command.by or 'a person'}; it was held: {held}")
    return Applied(job.id)


def requeue_asked(queue: JobTable, job: Job, command: RequeueAsked) -> Result:
    """Stop this start of a job and queue it again, with its whole time limit; a job that waits stays where it is, or is
    held. A script that is asked to end because its time is over may have itself queued again."""
    if job.array is not None:
        return answers.not_changed(job, "it is an array, and only its tasks run", f"agentctl requeue {job.id}[INDEX]")
    if job.over:
        return answers.not_changed(job, f"it is {job.state}, and its environment is gone", "agentctl submit, again")
    if command.epoch != job.grant.epoch:
        return Applied(job.id)  # it was started anew since
    by = f"requeued by {command.by or 'a person'}"
    if command.test and job.state != "running":
        why = f"it is {job.state}, and only a job that runs can be tried"
        return answers.not_changed(job, why, f"agentctl why {job.id}")
    if command.test:
        by = f"its stop is tried by {command.by or 'a person'} (preempt --test), which counts as no preemption"
    if job.state == "stopping" and job.ending.cause == "time limit":
        job.ending.after = "queued"
        queue.say(job, "stopping", f"{by}; {job.reason}")
    elif job.state == "stopping" and job.ending.after != "queued":
        return answers.not_changed(job, f"it is stopping, to be {job.ending.after}", f"agentctl wait {job.id}")
    if job.state == "placing":
        queue.use(job, -1)
        enter(queue, job, "queued", "taken back", by)
    elif job.state == "running":
        stop(queue, job, "queued", by, "requeued")
    if command.hold and not job.holds.held:
        hold(queue, job, command.by)
    return Applied(job.id)


def begin_reached(queue: JobTable, job: Job) -> Result:
    if job.holds.begin_wall_s is not None:
        job.holds.begin_wall_s = None
        job.priority.queued_s = queue.clock_s
        queue.touch(job)
        queue.note(job.id, "waits no longer", "its time has come")
    return Applied(job.id)


def time_limit_set(queue: JobTable, job: Job, command: TimeLimitSet) -> Result:
    """Give a job another time limit, all its starts together; of an array, to tasks that have not begun."""
    if job.over or (job.state == "stopping" and job.ending.after != "queued"):
        return answers.not_changed(job, f"it is {job.state}", f"agentctl job {job.id}")
    before = job.spec.time_limit_s
    if before == command.time_limit_s:
        return Applied(job.id)
    job.spec = msgspec.structs.replace(job.spec, time_limit_s=command.time_limit_s)
    queue.kept_bytes.changed(job)
    queue.touch(job)
    now, was = explain.time_limit(command.time_limit_s), explain.time_limit(before)
    queue.note(job.id, "time limit changed", f"{now} by {command.by or 'a person'}; it was {was}")
    return Applied(job.id)
