"""Jobs that do not start yet for another reason than GPUs, as far as it is the leader who ends that: a time that has
not come, and tasks of arrays that have not begun."""

from covey.core.ids import JobId
from plugins.scheduler.machine.log.job_starts import no_room_for
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.machine.log.waiting.array_tasks import is_due, next_task
from plugins.scheduler.messages.commands import BeginReached, TaskBegun


class HeldBack:
    """What is known of such jobs; who calls it says what changed."""

    def __init__(self, queue: JobTable) -> None:
        self.queue = queue
        self.begins: dict[JobId, float] = {}
        """Queued job -> the time, by wall clocks, before which it is not to start."""
        self.arrays: dict[JobId, None] = {}
        """Arrays that changed, or of which a task did, since they were looked at."""
        self._looked = (0.0, 0.0)
        """The wall clock and the monotonic one at the newest look."""

    def put(self, job: Job) -> None:
        begin_s = job.holds.begin_wall_s
        if job.state == "queued" and begin_s is not None:
            self.begins[job.id] = begin_s
        else:
            self.begins.pop(job.id, None)
        if job.array is not None:
            self.arrays[job.id] = None
        elif job.task is not None:
            self.arrays[job.task.array] = None

    def drop(self, id: JobId) -> None:
        """Forget a job that is over."""
        self.begins.pop(id, None)
        self.arrays.pop(id, None)

    def commands(self, wall_s: float, now_s: float) -> list[BeginReached | TaskBegun]:
        """What the log is to be told now."""
        self._looked = wall_s, now_s
        if not self.begins and not self.arrays:
            return []
        return [*self._begun(wall_s), *self._tasks(wall_s)]

    def _begun(self, wall_s: float) -> list[BeginReached | TaskBegun]:
        due = sorted((begin_s, id) for id, begin_s in self.begins.items() if begin_s <= wall_s)
        return [BeginReached(wall_s=wall_s, job=id) for _, id in due]

    def _tasks(self, wall_s: float) -> list[BeginReached | TaskBegun]:
        """The next task of each array that may have one more. An array that may not is looked at again when it, or a
        task of it, changes."""
        found: list[BeginReached | TaskBegun] = []
        for id in sorted(self.arrays, key=lambda id: int(id[1:])):
            array = self.queue.jobs.get(id)
            if array is None or not is_due(self.queue, array):
                del self.arrays[id]
                continue
            index = next_task(array)
            if index is not None and no_room_for(self.queue, array.spec) is None:
                found.append(TaskBegun(wall_s=wall_s, job=id, index=index))
        return found

    def next_s(self) -> list[float]:
        """When the next job's time comes, by the monotonic clock."""
        wall_s, now_s = self._looked
        return [now_s + min(self.begins.values()) - wall_s] if self.begins else []
