"""Which task of an array begins next, and what the end of one means for the array.

An array is one record until its tasks begin. A task that begins is a job of its own, with the place in the order that
the array has; there is one at most that waits for GPUs, so the log has as many jobs of an array as run, and one."""

from typing import NamedTuple

from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job, Over
from plugins.scheduler.messages.arrays import PARTS_MAX, joined, tasks_of

FAILED_NAMED = 5
"""The most failed tasks that an array names."""


def next_task(array: Job) -> int | None:
    """The index of the task that begins next; None: all have begun, or are left out."""
    assert array.array is not None
    if array.array.closed:
        return None
    tasks, place = tasks_of(array.spec.array), array.array.begun
    for first, last in array.array.left_out:
        if first <= place <= last:
            place = last + 1
    return tasks.at(place)


def is_due(queue: JobTable, array: Job) -> bool:
    """Whether a task of this array should begin now: fewer run than may, and none waits already."""
    record = array.array
    if record is None or array.state != "queued" or not array.is_free or next_task(array) is None:
        return False
    if len(record.live) >= tasks_of(array.spec.array).at_once:
        return False
    live = (queue.jobs[id] for id in record.live.values())
    return not any(job.state == "queued" and job.is_free for job in live)


class ArrayEnd(NamedTuple):
    """An array that is over now: how, why in words, and its exit code."""

    array: Job
    state: Over
    reason: str
    code: int


def task_over(queue: JobTable, job: Job) -> ArrayEnd | None:
    """Count a task of an array that has ended; what the array comes to, if that was its last one."""
    array = queue.jobs.get(job.task.array) if job.task is not None else None
    if array is None or array.array is None or job.task is None or array.over:
        return None
    record = array.array
    live = {index: id for index, id in record.live.items() if id != job.id}
    record.live = live
    if job.state == "done":
        record.done += 1
    elif job.state == "cancelled":
        record.cancelled += 1
    else:
        record.failed += 1
        record.failed_tasks = (*record.failed_tasks, job.task.index)[:FAILED_NAMED]
        record.code = record.code or job.ending.exit_code or 1
    queue.wake(array)
    return ended(array)


def ended(array: Job) -> ArrayEnd | None:
    """What an array comes to that has no tasks left; None: it has some."""
    record = array.array
    assert record is not None
    if record.live or next_task(array) is not None:
        return None
    count = tasks_of(array.spec.array).count
    if record.closed:
        return ArrayEnd(array, "cancelled", f"{record.closed}; {told(array)}", 143)
    if record.failed:
        named = ", ".join(map(str, record.failed_tasks)) + (" ..." if record.failed > len(record.failed_tasks) else "")
        return ArrayEnd(array, "failed", f"{record.failed} of {count} tasks failed: {named}", record.code)
    if record.cancelled == count:
        return ArrayEnd(array, "cancelled", f"all {count} tasks were cancelled", 143)
    return ArrayEnd(array, "done", f"of {count} tasks {record.done} are done, {record.cancelled} were cancelled", 0)


def told(array: Job) -> str:
    """How far an array is, in words."""
    record = array.array
    assert record is not None
    tasks = tasks_of(array.spec.array)
    begun = record.done + record.failed + record.cancelled + len(record.live)
    rest = 0 if record.closed else tasks.count - begun
    parts = [(record.done, "done"), (record.failed, "failed"), (record.cancelled, "cancelled")]
    parts += [(len(record.live), "begun"), (rest, "not begun")]
    return f"{tasks.count} tasks: " + ", ".join(f"{count} {word}" for count, word in parts if count)


def leave_out(array: Job, places: list[int]) -> bool:
    """Leave these tasks out, by the places at which they would begin; whether the record has room for that."""
    record = array.array
    assert record is not None
    left_out = joined([*record.left_out, *((place, place) for place in places)])
    if len(left_out) > PARTS_MAX:
        return False
    record.cancelled += len(places)
    record.left_out = left_out
    return True
