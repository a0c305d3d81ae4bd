"""How long a job will hold its GPUs, from ended jobs that are like it, given how long it has held them already.

Ended jobs are *like* a job when they agree with it in what `ALIKE` lists, the most alike first: the same user, the
same name without its numbers (`bert-lr3` and `bert-lr4` are both `bert-lr*`), as many GPUs; at last all jobs. Of the
most alike ones those count that held their GPUs for longer than this job has by now, and there must be `ALIKE_MIN` of
them, or else the next likeness is looked at.

A draw takes each of these n lengths with the same chance, and with a chance of 1 in n + 1 a longer one than all: so
often the next of n + 1 jobs of one kind is the longest. How much longer follows from nothing that was seen; drawn is
longest / u with u from 0 to 1, by which a job that has run for some time runs as long again with a chance of one half.
A job's time limit bounds each draw.
"""

import bisect
import random
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from covey.core.job_records import JobRecord
from covey.core.units import format_seconds
from plugins.scheduler.messages.spec import JobSpec

ALIKE_MIN = 5
"""The fewest ended jobs from which anything is said (chosen: with fewer the 90 % are the longest one seen)."""
SHORTEST_S = 1.0
_NUMBERS = re.compile(r"[0-9]+")


class JobKind(NamedTuple):
    """What is known of a job before it runs, as far as its length may depend on it."""

    user: str
    """The user whose job it is; empty: the agent's own."""
    name: str
    """The job's name with `*` in place of its numbers."""
    gpus: int
    tenant: str
    job_class: str


class PastJob(NamedTuple):
    """A job that has ended, or, with `held_s` None, one that was submitted and has not."""

    kind: JobKind
    submitted_s: float
    held_s: float | None
    """Seconds for which it held its GPUs, all starts together."""


class AlikeJobs(NamedTuple):
    """One way in which jobs are alike."""

    of: Callable[[JobKind], tuple[object, ...]]
    """What alike jobs have in common."""
    words: str
    """Which jobs these are, with fields of a kind in braces."""


ALIKE: tuple[AlikeJobs, ...] = (
    AlikeJobs(lambda kind: (kind.user, kind.name, kind.gpus), "of {user} named {name} with {gpus}"),
    AlikeJobs(lambda kind: (kind.user, kind.name), "of {user} named {name}"),
    AlikeJobs(lambda kind: (kind.user, kind.gpus), "of {user} with {gpus}"),
    AlikeJobs(lambda kind: (kind.user,), "of {user}"),
    AlikeJobs(lambda kind: (kind.tenant, kind.gpus), "of tenant {tenant} with {gpus}"),
    AlikeJobs(lambda kind: (kind.tenant,), "of tenant {tenant}"),
    AlikeJobs(lambda kind: (kind.gpus,), "with {gpus}"),
    AlikeJobs(lambda kind: (), "of any kind"),
)


class Basis(NamedTuple):
    """The ended jobs from which a job's length is drawn."""

    lengths_s: list[float]
    """The lengths of all ended jobs that are alike, ascending, seconds."""
    first: int
    """Index of the first that is longer than what the job has run by now."""
    words: str
    """Which jobs these are: `34 jobs of ann named bert* with 8 GPUs`."""
    outline: str
    """`words` for other users, who see no names: `34 jobs of ann with 8 GPUs`."""


def pattern_of(name: str) -> str:
    """The name without its numbers: `bert-lr3` is `bert-lr*`."""
    return _NUMBERS.sub("*", name)


def kind_of(spec: JobSpec) -> JobKind:
    """The kind of a job that was submitted."""
    user = "" if spec.owner is None else spec.owner.user
    return JobKind(user, pattern_of(spec.called), spec.gpus, spec.tenant, spec.job_class)


def ended_job(record: JobRecord) -> PastJob | None:
    """What the record of an ended job says of its kind; None: it never ran."""
    if record.started_wall_s is None:
        return None
    kind = JobKind(record.user, pattern_of(record.name), record.gpus, record.tenant, record.job_class)
    held_s = record.seconds.held / record.gpus if record.gpus else record.took_s
    return PastJob(kind, record.submitted_wall_s, held_s)


class Lengths:
    """The lengths of ended jobs, by every likeness."""

    def __init__(self, ended: Iterable[PastJob] = ()) -> None:
        self._by: list[dict[tuple[object, ...], list[float]]] = [{} for _ in ALIKE]
        self.count = 0
        for job in ended:
            self.add(job)

    def add(self, job: PastJob) -> None:
        """Take in a job that has ended; one that has not is left out."""
        if job.held_s is None:
            return
        self.count += 1
        for likeness, known in zip(ALIKE, self._by, strict=True):
            bisect.insort(known.setdefault(likeness.of(job.kind), []), max(SHORTEST_S, job.held_s))

    def basis(self, kind: JobKind, ran_s: float) -> Basis | None:
        """The ended jobs from which the length of a job of this kind is drawn that has held its GPUs for so many
        seconds; None: too few have ended to say. Where too few of any likeness were longer, those of any kind serve,
        and what is longer than all of them is drawn."""
        for likeness, known in zip(ALIKE, self._by, strict=True):
            lengths_s = known.get(likeness.of(kind), [])
            first = bisect.bisect_right(lengths_s, ran_s)
            if len(lengths_s) - first >= ALIKE_MIN:
                count, ran_s = len(lengths_s) - first, ran_s if first else 0.0
                words, outline = _words(likeness.words, kind, count, ran_s), likeness.words.replace(" named {name}", "")
                return Basis(lengths_s, first, words, _words(outline, kind, count, ran_s))
        everything = self._by[-1].get((), [])
        if len(everything) < ALIKE_MIN:
            return None
        first = bisect.bisect_right(everything, ran_s)
        longer = len(everything) - first
        said = f"{longer} of {len(everything)} jobs of any kind that ran longer than {format_seconds(ran_s)}"
        return Basis(everything, first, said, said)


def remaining_s(basis: Basis, ran_s: float, limit_s: float | None, rng: random.Random) -> float:
    """One draw of the seconds for which a job will still hold its GPUs, at least one. `limit_s`: its time limit."""
    longer = len(basis.lengths_s) - basis.first
    at = rng.randrange(longer + 1)
    if at < longer:
        length_s = basis.lengths_s[basis.first + at]
    else:
        length_s = max(ran_s, basis.lengths_s[-1]) / (1.0 - rng.random())
    if limit_s is not None:
        length_s = min(length_s, limit_s)
    return max(SHORTEST_S, length_s - ran_s)


def _words(template: str, kind: JobKind, count: int, ran_s: float) -> str:
    gpus = "no GPU" if not kind.gpus else f"{kind.gpus} GPU{'s' if kind.gpus > 1 else ''}"
    user = kind.user or "the agent's user"
    alike = template.format(user=user, name=kind.name, gpus=gpus, tenant=kind.tenant)
    longer = f" that ran longer than {format_seconds(ran_s)}" if ran_s else ""
    return f"{count} jobs {alike}{longer}"
