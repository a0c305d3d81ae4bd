"""The command of the log that moves a job before, or behind, others of its tenant that wait.

They exchange their places and no others: what other tenants' jobs have before them stays the same. A job that has
started once keeps its place, which goes by that start."""

from plugins.scheduler.machine.log import answers
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.commands import Applied, PriorityAsked, Result


def priority_asked(queue: JobTable, job: Job, command: PriorityAsked) -> Result:
    if job.task is not None:
        array = job.task.array
        return answers.not_changed(job, f"it is a task of {array}, and has its place", f"agentctl priority {array}")
    if not _waits(job):
        why = "it has started before, and its place goes by that" if job.state == "queued" else f"it is {job.state}"
        return answers.not_changed(job, why, f"agentctl job {job.id}")
    others = [each for each in queue.live() if _waits(each) and each.task is None and each.id != job.id]
    others = [each for each in others if each.spec.tenant == job.spec.tenant]
    if command.own:
        others = [each for each in others if each.spec.owner == job.spec.owner]
    others.sort(key=_turn)
    before = sorted([job, *others], key=_turn)
    after = [job, *others] if command.up else [*others, job]
    turns = [each.turn for each in before]
    for each, turn in zip(after, turns, strict=True):
        if each.turn != turn:
            _take(queue, each, turn)
    place = "first" if command.up else "last"
    whose = "its owner's" if command.own else "its tenant's"
    queue.note(job.id, "priority", f"{place} of {whose} {len(after)} waiting jobs, by {command.by or 'a person'}")
    return Applied(job.id)


def _take(queue: JobTable, job: Job, turn: int) -> None:
    """Give a job this place, and tasks of an array with it."""
    tasks = [] if job.array is None else [queue.jobs[id] for id in job.array.live.values()]
    for each in [job, *tasks]:
        each.priority.turn = None if turn == each.number else turn
        queue.wake(each)


def _waits(job: Job) -> bool:
    return job.state == "queued" and job.priority.first is None


def _turn(job: Job) -> tuple[int, int]:
    return job.turn, job.number
