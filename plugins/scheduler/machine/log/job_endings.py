"""How a job leaves its states: it is stopped, waits for the reports of its hosts, is queued again, or is over."""

from collections.abc import Sequence
from typing import assert_never

import msgspec

from covey.core import HostId, JobId, LogEvent
from covey.tensors.numbers.blocks import tables_of
from plugins.scheduler.machine.log import replacing
from plugins.scheduler.machine.log.job_table import ENDED_MAX, JobTable
from plugins.scheduler.machine.log.jobs import HOLDING, TRANSITIONS, After, Cause, Job, State
from plugins.scheduler.machine.log.kept_bytes import ENDED_BYTES_MAX
from plugins.scheduler.messages.spec import SealedEnv
from plugins.scheduler.policy import explain


class JobEndings(JobTable):
    """Steps that several commands of the log share."""

    def __init__(self) -> None:
        super().__init__()
        self._notes: list[LogEvent] = []

    def _again(self, job: Job, cause: Cause, said: str) -> None:
        """It stops because of this, which is counted, and is queued again unless that happened too often."""
        count, allowed = job.happened(cause)
        if allowed is None or count <= allowed:
            self._stop(job, "queued", said)
        else:
            self._stop(job, "failed", f"{said}{explain.too_often(cause, count, allowed)}")

    def _stop(self, job: Job, after: After, reason: str) -> None:
        job.lost = (*job.lost, *job.missing)
        replacing.whole_again(job)
        job.after = after
        self._enter(job, "stopping", "stopping", reason)

    def _end_when_all_reported(self, job: Job, wall_s: float) -> None:
        if job.awaited:
            return
        if job.missing:
            job.hosts_lost += 1
            self._again(job, "host lost", f"{', '.join(job.missing)} was lost, and nothing of it is left")
        if job.step_s is not None and tables_of(len(job.places)) == job.tables:  # else it stepped on more hosts, too
            self.models.saw_steps(job.spec, len(job.places), job.step_s)
        codes = [code for reported in job.codes.values() for code in reported.values()]
        if (not job.lost and not job.asked and not any(codes)) or job.after is None:
            self._end(job, "done", f"{all_ranks(job.spec.workers)} exited with 0", wall_s, 0)
            return
        code = (
            explain.job_code(job.blame.code) if job.blame else explain.EXIT_LOST if job.lost else explain.EXIT_CANCELLED
        )
        match job.after:
            case "failed":
                self._end(job, "failed", job.reason, wall_s, code)
            case "cancelled":
                self._end(job, "cancelled", job.reason, wall_s, code)
            case "queued":
                self._use(job, -1)
                job.queued_s = self.clock_s
                self._enter(job, "queued", "queued again", job.reason)
            case _:
                assert_never(job.after)

    def _end(self, job: Job, state: State, reason: str, wall_s: float, code: int) -> None:
        if job.state in HOLDING:
            self._use(job, -1)
        self._give_back(job)
        job.exit_code, job.ended_wall_s, job.ended_rack_s = code, wall_s, self.rack_s
        job.spec = msgspec.structs.replace(job.spec, env={})
        job.env = SealedEnv(job.env.digest) if job.env is not None else None
        self._enter(job, state, state, reason)
        self.ended.append(job.id)
        self.kept_bytes.over(job)
        while len(self.ended) > ENDED_MAX or self.kept_bytes.ended > ENDED_BYTES_MAX:
            gone = self.jobs.pop(self.ended.pop(0))
            del self.keys[gone.key]
            self.kept_bytes.forgotten(gone.id)

    def _give_back(self, job: Job) -> None:
        """What was kept for this job is open to all again."""
        if self.keeper == job.id:
            self.keeper, self.kept = None, {}

    def _enter(self, job: Job, state: State, event: str, reason: str) -> None:
        if state in ("queued", "placing"):
            replacing.began_anew(job)
            job.codes, job.lost, job.asked, job.after, job.blame = {}, (), False, None, None
        job.state = TRANSITIONS.next(job.state, state)
        self._say(job, event, reason)

    def _say(self, job: Job, event: str, reason: str) -> None:
        """Why it is in its state."""
        job.reason = reason
        self._changed[job.id] = None
        self._note(job.id, event, reason)

    def _note(self, job: JobId, event: str, reason: str) -> None:
        key = f"log/{self.index}.{len(self._notes)}" if self._notes else f"log/{self.index}"
        self._notes.append(LogEvent(job, event, reason, key))

    def _lose(self, job: Job, hosts: Sequence[HostId]) -> list[HostId]:
        """Nobody waits for these any more; those for which somebody did."""
        lost = sorted({host for host in hosts if job.awaits(host)})
        job.lost = (*job.lost, *(host for host in lost if job.left_on(host) is None))
        for host in lost:
            self._left(job, host)
        return lost

    def _left(self, job: Job, host: HostId) -> None:
        self._free(job, host)
        replacing.left(job, host)
        self._changed[job.id] = None


def all_ranks(ranks: int) -> str:
    return "its rank" if ranks == 1 else f"all {ranks} ranks"
