"""When jobs that wait will start: many courses that things may take, and at which part of them a job has started.

In each of `DRAWS` courses (`machine/ahead/run_ahead.py`) every job's length is drawn from ended jobs like it
(`policy/foreseen/lengths.py`), and jobs come as they came in the last week (`policy/foreseen/arrivals.py`). With 19
courses the 10th start is the p50 and the 18th the p90: one more course has 18 of 20 equal chances of coming by then.

What is not known is said, and is no number: a job whose start depends on one of which no ended job is like it; one that
somebody holds; a start that lies beyond the decisions that are run ahead, `STEPS_MAX` a course.
"""

import itertools
import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple, cast

from covey.core.ids import JobId
from covey.core.units import format_seconds
from plugins.scheduler.machine.ahead.run_ahead import Arrival, Moment, RunAhead
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.spec import JobClass, JobSpec
from plugins.scheduler.policy.foreseen.arrivals import coming, recent
from plugins.scheduler.policy.foreseen.lengths import ALIKE_MIN, JobKind, Lengths, PastJob, kind_of, remaining_s
from plugins.scheduler.policy.settings import SchedulerSettings

DRAWS, P50, P90 = 19, 10, 18
"""The number of courses, and whose start in ascending order is said (Python counts from 0)."""
STEPS_MAX = 500
"""The most decisions that are run ahead in one course (chosen: 19 times as many take a few seconds)."""
NAMED_MAX = 2
"""The most bases that are named."""


class StartForeseen(NamedTuple):
    """When a job that waits will start, and from what that is known."""

    p50_s: float | None
    """Seconds until its start in half of all courses; None: not known."""
    p90_s: float | None
    """... in nine of ten."""
    basis: str
    """What the numbers are drawn from; or why they are not known."""


class Past(NamedTuple):
    """What is known of the past."""

    lengths: Lengths
    submitted: Sequence[PastJob]
    """Every job that was submitted, in any order, as far as it is known."""


class Foreseeing:
    """The courses from one moment on, for the jobs that wait then."""

    def __init__(
        self,
        begin: Moment,
        settings: SchedulerSettings,
        past: Past,
        seed: int,
        asked: Collection[JobId] | None = None,
        steps_max: int = STEPS_MAX,
    ) -> None:
        """`asked`: the jobs of whom anybody wants to know; None: all that wait."""
        self.begin, self.settings, self.past, self.seed = begin, settings, past, seed
        self.steps_max = steps_max
        self.recent = recent(past.submitted, begin.wall_s)
        self.asked = None if asked is None else set(asked)
        self.waiting: dict[JobId, Job] = {}
        self.first_s: dict[JobId, list[float]] = {}
        """Job that waits -> seconds until its start in each course; inf: it has not started there."""
        self.bases: dict[str, tuple[JobId, str, str]] = {}
        """What lengths of jobs that hold GPUs are drawn from, in words -> the first such job, its user, and the words
        for other users."""
        self.unlike: dict[JobId, None] = {}
        """Jobs whose length was wanted and is not known."""
        self.cut = False
        """Whether a course had more decisions than are run ahead."""

    def steps(self) -> Iterator[None]:
        """Run all courses, one decision at a time."""
        for draw in range(DRAWS):
            yield from self._course(random.Random(self.seed * DRAWS + draw))

    def _course(self, rng: random.Random) -> Iterator[None]:
        comes = self._comes(rng)
        course = RunAhead(self.begin, self.settings, lambda job: self._drawn_s(job, rng), comes)
        waits = [job for job in course.queue.live() if job.state == "queued" and job.array is None]
        self.waiting = {job.id: job for job in waits if self.asked is None or job.id in self.asked}
        left = set(self.waiting)
        for _ in itertools.islice(course.steps(), self.steps_max):
            left -= course.first_s.keys()
            if not left:
                break
            yield
        else:
            self.cut = True
        for id in self.waiting:
            self.first_s.setdefault(id, []).append(course.first_s.get(id, math.inf))

    def _drawn_s(self, job: Job, rng: random.Random) -> float:
        """For how many more seconds a job holds its GPUs; inf: no ended job is like it."""
        kind, ran_s = kind_of(job.spec), job.ran_s(self.begin.rack_s)
        basis = self.past.lengths.basis(kind, ran_s)
        if basis is None:
            self.unlike[job.id] = None
            return math.inf
        self.bases.setdefault(basis.words, (job.id, kind.user, basis.outline))
        return remaining_s(basis, ran_s, job.spec.time_limit_s, rng)

    def _comes(self, rng: random.Random) -> Iterator[Arrival]:
        for after_s, job in coming(self.recent, self.begin.wall_s, rng):
            length_s = job.held_s
            if length_s is None:
                basis = self.past.lengths.basis(job.kind, 0.0)
                if basis is None:
                    continue
                length_s = remaining_s(basis, 0.0, None, rng)
            yield Arrival(after_s, _spec_of(job.kind), length_s)

    # ---- what comes of it ----

    def answers(self, sees: Callable[[str], bool] = lambda user: True) -> dict[JobId, StartForeseen]:
        """What is known of each job that waits, once all courses were run. `sees`: whether whoever asks may see names
        of this user's jobs."""
        basis = self.basis(sees)
        return {id: self._answer(job, sorted(self.first_s[id]), basis) for id, job in self.waiting.items()}

    def _answer(self, job: Job, starts_s: Sequence[float], basis: str) -> StartForeseen:
        p50_s, p90_s = starts_s[P50 - 1], starts_s[P90 - 1]
        if job.holds.held:
            return StartForeseen(None, None, "not known: it is held until somebody releases it")
        if not starts_s[-1]:
            return StartForeseen(0.0, 0.0, "there is room for it now")
        if self.unlike:
            of = next(iter(self.unlike))
            said = f"no ended job is like {of}: {self.past.lengths.count} have ended, and {ALIKE_MIN} are needed"
            return StartForeseen(None, None, f"not known: {said}")
        beyond = f"later than the {self.steps_max} decisions that are run ahead"
        late = beyond if self.cut else "not while the rack is as it is"
        if p50_s == math.inf:
            return StartForeseen(None, None, f"not known: {late}")
        if p90_s == math.inf:
            return StartForeseen(p50_s, None, f"{basis}; p90: {late}")
        return StartForeseen(p50_s, p90_s, basis)

    def basis(self, sees: Callable[[str], bool]) -> str:
        """What lengths and arrivals are drawn from, in words."""
        first = itertools.islice(self.bases.items(), NAMED_MAX)
        named = [f"{words if sees(user) else outline} ({id})" for words, (id, user, outline) in first]
        more = len(self.bases) - len(named)
        parts = [*named, *([f"{more} more kinds"] if more > 0 else [])]
        lengths = f"from {', '.join(parts)}" if parts else f"from {self.past.lengths.count} ended jobs"
        span_s = self.begin.wall_s - self.recent[0].submitted_s if self.recent else 0.0
        comes = f"jobs come as in the last {format_seconds(span_s)}" if self.recent else "without jobs that come"
        return f"{lengths}; {comes}"


def _spec_of(kind: JobKind) -> JobSpec:
    """What a job of this kind asks for when it comes."""
    return JobSpec(
        name="comes",
        tenant=kind.tenant,
        job_class=cast(JobClass, kind.job_class),
        workers=max(1, kind.gpus),
        gpus_per_worker=min(1, kind.gpus),
        argv=("job",),
    )
