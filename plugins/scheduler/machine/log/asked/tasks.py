"""Commands of the log about tasks of arrays: one begins, as a job of its own; jobs, arrays and tasks are cancelled."""

import msgspec

from plugins.scheduler.machine.log import answers, job_endings
from plugins.scheduler.machine.log.job_starts import added, no_room_for
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job, JobTask, JobTimes
from plugins.scheduler.machine.log.waiting import array_tasks
from plugins.scheduler.messages.arrays import is_in, tasks_of, written
from plugins.scheduler.messages.commands import Applied, CancelAsked, NotApplied, Result, TaskBegun


def task_begun(queue: JobTable, array: Job, command: TaskBegun) -> Result:
    """Make a job of the array's next task; a repeated command changes nothing."""
    record, index = array.array, command.index
    if record is None or array_tasks.next_task(array) != index or not array_tasks.is_due(queue, array):
        return answers.not_changed(array, f"task {index} is not the next that may begin", "none: the leader asks again")
    if no_room := no_room_for(queue, array.spec):
        return no_room
    spec = msgspec.structs.replace(array.spec, array="", after=(), begin_wall_s=None, hold=False)
    times = JobTimes(array.times.submitted_wall_s, submitted_rack_s=array.times.submitted_rack_s)
    job = added(queue, "", spec, array.env, times)
    job.task, job.priority.turn = JobTask(array.id, index, array.spec.array), array.turn
    job.holds.ended = dict(array.holds.ended)
    tasks = tasks_of(array.spec.array)
    record.begun = (tasks.place_of(index) or 0) + 1
    record.live = {**record.live, index: job.id}
    queue.tasks[array.id, index] = job.id
    queue.touch(array)
    queue.wake(job)
    queue.say(job, "submitted", f"task {index} of {array.id}, {spec.called} of tenant {spec.tenant}")
    return Applied(job.id)


def cancel_asked(queue: JobTable, job: Job, command: CancelAsked) -> Result:
    """Cancel a job; of an array all tasks, or those that are named."""
    if job.array is None:
        return job_endings.cancel_asked(queue, job, command)
    if job.over:
        return Applied(job.id)
    record, by = job.array, f"by {command.by or 'a person'}"
    if not command.tasks:
        record.closed = record.closed or f"cancelled {by}"
        queue.touch(job)
        queue.note(job.id, "cancelled", f"{by}: no more tasks begin, and {len(record.live)} are cancelled")
        meant = list(record.live)
    else:
        tasks = tasks_of(job.spec.array)
        meant = list(dict.fromkeys(tasks.within(command.tasks)))
        if not meant:
            why = f"it has the tasks {job.spec.array}, and none of {written(command.tasks)}"
            return NotApplied(3, f"nothing of {job.id} was cancelled", why, f"agentctl job {job.id}")
        if (said := _left_out(job, meant)) is not None:
            return said
        queue.touch(job)
        queue.note(job.id, "tasks cancelled", f"{written(command.tasks)} {by}")
    for index in meant:
        if (id := record.live.get(index)) is not None:
            job_endings.cancel_asked(queue, queue.jobs[id], CancelAsked(wall_s=command.wall_s, job=id, by=command.by))
            queue.wake(queue.jobs[id])
    whole = array_tasks.ended(job)
    if whole is not None and job.id not in queue.ended:
        job_endings.end(queue, job, whole.state, whole.reason, command.wall_s, whole.code)
    return Applied(job.id)


def _left_out(job: Job, meant: list[int]) -> NotApplied | None:
    """Leave out of an array those of its tasks that have not begun; why that cannot be."""
    assert job.array is not None
    tasks, record = tasks_of(job.spec.array), job.array
    places = [place for index in meant if (place := tasks.place_of(index)) is not None and place >= record.begun]
    new = [place for place in places if not is_in(place, record.left_out)]
    if array_tasks.leave_out(job, new):
        return None
    why = "its tasks that are left out are in too many pieces to remember"
    return NotApplied(4, f"nothing of {job.id} was cancelled", why, f"cancel whole ranges, or {job.id}")
