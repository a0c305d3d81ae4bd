"""Jobs that wait for the end of others (`--after ok:j3,any:j5`).

A job can only name jobs that were submitted before it, so no two wait for each other, and what is waited for is fixed
when the job is submitted. `ok`: the other one must be done; if it ends otherwise, this one is held, in words, and
`release` lets it start all the same. `any`: however it ends."""

from covey.core.ids import JobId
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.commands import NotApplied
from plugins.scheduler.messages.spec import JobSpec


def refusal(queue: JobTable, spec: JobSpec) -> NotApplied | None:
    """Why a job cannot wait for those that it names; None: it can."""
    for kind, id in map(parts_of, spec.after):
        if id in queue.jobs or (kind == "any" and queue.was(id)):
            continue
        what, near = f"{spec.called} was not accepted", f"--after {kind}:JOB, of a job that agentctl jobs --all shows"
        if queue.was(id):
            return NotApplied(
                4, what, f"{id} ended long ago, and nobody knows any more how (--after {kind}:{id})", near
            )
        return NotApplied(3, what, f"there is no job {id} (--after {kind}:{id})", near)
    return None


def parts_of(after: str) -> tuple[str, JobId]:
    """The kind and the job of `ok:j3`."""
    kind, _, id = after.partition(":")
    return kind, JobId(id)


def follow(queue: JobTable, job: Job) -> None:
    """Let a new job wait for those that it names, as far as they are not over."""
    job.holds.after = job.spec.after
    for after in job.spec.after:
        id = parts_of(after)[1]
        other = queue.jobs.get(id)
        if other is None:
            job.holds.after = _without(job, id)
        elif other.over:
            _end_of(queue, job, other)
        else:
            queue.dependents.setdefault(id, {})[job.id] = None


def told(queue: JobTable, ended: Job) -> None:
    """Tell all jobs that wait for this one that it is over."""
    for id in queue.dependents.pop(ended.id, {}):
        job = queue.jobs.get(id)
        if job is not None and not job.over:
            _end_of(queue, job, ended)


def _end_of(queue: JobTable, job: Job, ended: Job) -> None:
    kinds = {parts_of(after)[0] for after in job.holds.after if parts_of(after)[1] == ended.id}
    if not kinds:
        return
    how = ended.state if ended.state == "done" else f"{ended.state} {ended.ending.exit_code}"
    job.holds.after, job.holds.ended = _without(job, ended.id), {**job.holds.ended, ended.id: how}
    job.priority.queued_s = queue.clock_s
    queue.wake(job)
    if "ok" in kinds and ended.state != "done":
        job.holds.held = f"{ended.id}, which was to be done first, {how_words(how)}"
        queue.note(job.id, "held", job.holds.held)
    else:
        queue.note(job.id, "waits no longer", f"{ended.id} {how_words(how)}")


def how_words(how: str) -> str:
    """How a job ended, in words: `is done`, `failed (exit 3)`."""
    state, _, code = how.partition(" ")
    if state == "done":
        return "is done"
    return f"failed (exit {code})" if state == "failed" else f"was cancelled (exit {code})"


def _without(job: Job, id: JobId) -> tuple[str, ...]:
    return tuple(after for after in job.holds.after if parts_of(after)[1] != id)
