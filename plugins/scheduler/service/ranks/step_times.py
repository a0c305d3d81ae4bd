"""Steps of the jobs that run here, as their ranks report them: the newest, how long they take, and what sees them."""

from collections import deque
from collections.abc import Mapping
from statistics import median

import msgspec

from covey.core.ids import JobId
from plugins.facts import JobHooked, JobSaved, MemoryInUse, MemoryMeasured, SavedAt, StepTimed, StepTiming
from plugins.scheduler.messages.commands import JobSteps

JOBS_MAX = 2000
"""The most grants whose steps are kept in memory."""
STEPS_TIMED = 101
"""The number of newest steps whose median tells how fast a gang is."""
STEPS_ENOUGH = 10
"""The least number of steps that tell anything: the first ones pay for warming up."""
METRICS_MAX = 16


class _Timed(msgspec.Struct, frozen=True):
    step_s: float
    input_s: float
    communicate_s: float
    sending_s: float
    turns_s: float


class GrantSteps:
    """Step times of one job under one epoch."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.metrics: dict[str, float] = {}
        self.boundary = ""
        self.memory_bytes: dict[int, int] = {}
        """Device memory of each rank, bytes."""
        self.hooked: dict[int, str] = {}
        """What sees each rank's steps, or why nothing does."""
        self.saved: SavedAt | None = None
        """The newest checkpoint that ranks here wrote."""
        self.memory: MemoryInUse | None = None
        """What the job's processes here have of the host's memory; None: they did not say."""
        self._timed: deque[_Timed] = deque(maxlen=STEPS_TIMED)

    def stepped(self, fact: StepTimed) -> None:
        older = self.step is not None and fact.step < self.step
        metrics = {**fact.metrics, **self.metrics} if older else {**self.metrics, **fact.metrics}
        self.metrics = dict(list(metrics.items())[-METRICS_MAX:])
        self.step = fact.step if self.step is None else max(self.step, fact.step)
        self.boundary = fact.boundary
        if fact.memory_bytes:
            self.memory_bytes[fact.rank] = fact.memory_bytes
        if fact.step_s > 0:
            timed = fact.step_s, fact.input_s, fact.communicate_s, fact.sending_s, fact.turns_s
            self._timed.append(_Timed(*timed))

    def step_s(self) -> float | None:
        """The median step time in seconds; None while there are too few."""
        return round(median(timed.step_s for timed in self._timed), 6) if len(self._timed) >= STEPS_ENOUGH else None

    def timing(self) -> StepTiming | None:
        step_s = self.step_s()
        if step_s is None:
            return None
        return StepTiming(
            step_s=step_s,
            input_s=round(median(timed.input_s for timed in self._timed), 6),
            communicate_s=round(median(timed.communicate_s for timed in self._timed), 6),
            memory_bytes=max(self.memory_bytes.values(), default=0),
            boundary=self.boundary,
            sending_s=round(median(timed.sending_s for timed in self._timed), 6),
            turns_s=round(median(timed.turns_s for timed in self._timed), 6),
        )


def newer(one: SavedAt | None, other: SavedAt) -> SavedAt:
    """The newer of two checkpoints: the one of a later step, and `one` where they are of the same."""
    return other if one is None or other.step > one.step else one


class StepTimes:
    """The grants of this host whose ranks reported steps, the longest silent ones first."""

    def __init__(self) -> None:
        self._grants: dict[tuple[JobId, int], GrantSteps] = {}

    def of(self, job: JobId, epoch: int) -> GrantSteps:
        """The steps of this grant; empty when none were reported."""
        return self._grants.get((job, epoch)) or GrantSteps()

    def newest_epoch(self, job: JobId) -> int:
        """The newest epoch of this job whose steps are known; 0: none is."""
        return max((epoch for known, epoch in self._grants if known == job), default=0)

    def stepped(self, fact: StepTimed) -> None:
        self._grant(fact.job, fact.epoch).stepped(fact)

    def hooked(self, fact: JobHooked) -> None:
        self._grant(fact.job, fact.epoch).hooked[fact.rank] = fact.problem or fact.to

    def wrote(self, fact: JobSaved) -> None:
        """A rank here wrote a checkpoint."""
        grant = self._grant(fact.job, fact.epoch)
        grant.saved = newer(grant.saved, fact.saved)

    def measured(self, fact: MemoryMeasured) -> None:
        self._grant(fact.job, fact.epoch).memory = fact.memory

    def forget(self, job: JobId, epoch: int) -> None:
        self._grants.pop((job, epoch), None)

    def news(self, jobs: dict[JobId, int]) -> dict[JobId, JobSteps]:
        """The step times that the log may be told of these jobs (job -> epoch)."""
        found = {}
        for job, epoch in jobs.items():
            known = self._grants.get((job, epoch))
            timing = known.timing() if known is not None else None
            if known is not None and known.step is not None and timing is not None:
                found[job] = JobSteps(epoch, known.step, timing)
        return found

    def saved_news(self, known: Mapping[JobId, SavedAt | None]) -> dict[JobId, SavedAt]:
        """The checkpoints that ranks here wrote of these jobs, and that the log does not know yet. `known`: the newest
        that it knows."""
        newest = {job: grant.saved for (job, _), grant in self._grants.items() if grant.saved is not None}
        return {job: saved for job, saved in newest.items() if job in known and newer(known[job], saved) is saved}

    def _grant(self, job: JobId, epoch: int) -> GrantSteps:
        grant = self._grants.pop((job, epoch), None) or GrantSteps()
        self._grants[job, epoch] = grant
        while len(self._grants) > JOBS_MAX:
            del self._grants[next(iter(self._grants))]
        return grant
