"""Memory among opportunistic jobs by introspective trial (AntMan §3.3): jobs run with one split after another for a few
mini-batches each, and the best stays. `policy.memory` says which to try; this remembers which jobs and what they
did."""

from collections.abc import Mapping, Sequence

from covey.core.ids import JobId
from plugins.sharing.machine.member import GpuMember
from plugins.sharing.policy import memory
from plugins.sharing.policy.memory import LimitSearch

TRIAL_STEPS = 6
"""The number of mini-batches of every job per trial."""
TRIAL_S_MAX = 60.0
"""Seconds after which a trial ends even if a job is too slow for its mini-batches: then its speed is what it
managed."""


class MemorySearch:
    """The search for a split of memory; it starts anew whenever `demands` differ from those it was begun for."""

    def __init__(self) -> None:
        self.search: LimitSearch | None = None
        self.jobs: tuple[JobId, ...] = ()
        self.since_s = 0.0

    def stop(self) -> None:
        self.search, self.jobs = None, ()

    def targets(self, room: int, members: Sequence[GpuMember], now_s: float) -> dict[JobId, int]:
        """Bytes that each job should hold now. A job that keeps what it took at its start has that, and is tried with
        nothing else."""
        kept = {member.job: min(room, member.wanted_bytes) for member in members if member.fixed}
        others = [member for member in members if not member.fixed]
        return {**kept, **self._tried(max(0, room - sum(kept.values())), others, now_s)}

    def _tried(self, room: int, members: Sequence[GpuMember], now_s: float) -> dict[JobId, int]:
        jobs, wanted = tuple(member.job for member in members), tuple(member.wanted_bytes for member in members)
        same = self.search is not None and self.jobs == jobs and self.search.room == room
        if self.search is None or not same or self.search.wanted != tuple(min(want, room) for want in wanted):
            self.search, self.jobs, self.since_s = memory.begin(room, wanted), jobs, now_s
        return dict(zip(jobs, self.search.trial, strict=True))

    def told(self, members: Mapping[JobId, GpuMember], applied: bool, now_s: float) -> str | None:
        """Note a finished mini-batch; `applied`: all jobs go by the limits of this trial. Returns a reason when the
        next trial begins: the jobs' `steps` start anew then."""
        if self.search is None or self.search.over or not applied:
            self.since_s = now_s if not applied else self.since_s
            return None
        there = [members[job] for job in self.jobs]
        waited_s = now_s - self.since_s
        if any(member.steps.count < TRIAL_STEPS for member in there) and waited_s < TRIAL_S_MAX:
            return None
        speeds = [1 / member.steps.mean_s if member.steps.count else 0.0 for member in there]
        self.search = memory.measured(self.search, speeds)
        self.since_s = now_s
        done, score = self.search.trials, self.search.score
        if self.search.over:
            return f"best split after {done} trials: together {score:.2f} of {len(there)} jobs at full speed"
        return f"trial {done} of the memory split; best so far {score:.2f} of {len(there)}"
