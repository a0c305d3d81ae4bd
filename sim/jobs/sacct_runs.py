"""One job of Slurm's accounting, with the attempts of it that ran.

A job that was requeued ran before: it held GPUs then and did not wait. Its earlier runs count to what it takes, because
the accounting does not say what of their work was kept, and not to how long it waited.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Run:
    """An attempt that held GPUs; seconds, and since 1970 where it is known."""

    start_s: int | None
    ran_s: int
    gpus: int


@dataclass
class Found:
    """One job by the lines of Slurm. Seconds since 1970."""

    id: str
    submit_s: int
    gpus: int
    ran_s: int
    """In all its attempts."""
    limit_s: int | None
    tenant: str
    state: str
    start_s: int | None
    """Start of the job's last attempt, in seconds."""
    earlier: tuple[Run, ...] = ()
    """Attempts before that one."""

    def waited_s(self) -> int | None:
        """Seconds until its last start in which no earlier attempt ran; None when no line says when it started."""
        if self.start_s is None:
            return None
        return max(0, self.start_s - self.submit_s - sum(run.ran_s for run in self.earlier))

    def runs(self) -> list[Run]:
        """Every attempt."""
        return [*self.earlier, Run(self.start_s, self.ran_s - _as_wide(self.earlier, self.gpus), self.gpus)]


def with_earlier(last: Found, runs: Sequence[Run | None]) -> Found:
    """The last attempt and those before: their GPU time is the job's, and its limit covers it."""
    earlier = tuple(run for run in runs if run is not None and run.ran_s)
    more_s = _as_wide(earlier, last.gpus)
    limit_s = None if last.limit_s is None else last.limit_s + more_s
    return replace(last, ran_s=last.ran_s + more_s, limit_s=limit_s, earlier=earlier)


def _as_wide(runs: Sequence[Run], gpus: int) -> int:
    """Seconds that the GPU time of these takes on so many GPUs, each rounded up."""
    return sum(-(-run.ran_s * run.gpus // gpus) for run in runs)
