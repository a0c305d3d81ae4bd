"""One job of Slurm's accounting, with the attempts of it that ran.

A job that was requeued ran before: it held GPUs then and did not wait. Its earlier runs count to what it takes,
because the accounting does not say what of their work was kept, and not to its waiting time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Run:
    """An attempt that held GPUs: its start in seconds since 1970 where it is known, its seconds and its GPUs."""

    start_s: int | None
    ran_s: int
    gpus: int


@dataclass
class Found:
    """One job by the lines of Slurm. Moments are seconds since 1970."""

    id: str
    submit_s: int
    gpus: int
    ran_s: int
    """Seconds that the job ran in all its attempts."""
    limit_s: int | None
    tenant: str
    state: str
    start_s: int | None
    """Start of the job's last attempt, in seconds since 1970."""
    earlier: tuple[Run, ...] = ()
    """Attempts before the last one."""

    def waited_s(self) -> int | None:
        """Seconds before the last start in which no earlier attempt ran; None when no line says when it started."""
        if self.start_s is None:
            return None
        return max(0, self.start_s - self.submit_s - sum(run.ran_s for run in self.earlier))

    def runs(self) -> list[Run]:
        """All attempts, the last one included."""
        return [*self.earlier, Run(self.start_s, self.ran_s - _as_wide(self.earlier, self.gpus), self.gpus)]


def with_earlier(last: Found, runs: Sequence[Run | None]) -> Found:
    """The last attempt with the earlier ones: their GPU time is the job's, and its limit covers it."""
    earlier = tuple(run for run in runs if run is not None and run.ran_s)
    more_s = _as_wide(earlier, last.gpus)
    limit_s = None if last.limit_s is None else last.limit_s + more_s
    return replace(last, ran_s=last.ran_s + more_s, limit_s=limit_s, earlier=earlier)


def _as_wide(runs: Sequence[Run], gpus: int) -> int:
    """Seconds that the GPU time of these runs takes on `gpus` GPUs, each rounded up."""
    return sum(-(-run.ran_s * run.gpus // gpus) for run in runs)
