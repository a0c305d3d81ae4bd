"""Which rank is stuck (`--hang`), or whether a whole gang is; and which host is late again and again.

What shows it, the strongest first:

    a sum waits for the part of rank 3            an aggregator says so (`stuck`)
    rank 3 does not wait, all that wait do so     each rank tells its agent for how long it has waited for others, and
    for others, and rank 3 shows no sign of life  since its last sign of life (`judged`)
    all stand still, rank 3 a step behind         each rank tells its agent, where no tensors are summed
    all stand still                               no rank can be named: the whole gang ends

A sign of life is a step, a batch that was fetched, also in an evaluation, a call of tensors, or `job.alive()`. A rank
that never connected to its agent has none, and what only it could know counts against itself alone. If a gang reports
nothing, and waits for nothing, nothing is known of it, and nothing is done.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from covey.core.units import format_seconds

LATE_SHARE = 0.1
"""The part of a job's time from which on it is said that others wait for a host."""
LATE_BEYOND = 3.0
"""The factor by which this part has to exceed that of any other host: where all are waited for in turn none is to
blame."""
FIRST_STEP = 3.0
"""The factor by which a gang may take longer for the first step or sum of a start: for what it compiles, loads and
prepares, often on one rank for all."""

LEARNT_STEPS, LEARNT_LEAST_S = 30.0, 60.0
"""Where nobody said `--hang`, ranks that make no progress are named after so many of their usual steps, and after at
least so many seconds."""


class RankSeen(Protocol):
    """What the judgement needs of one rank, as in `plugins.scheduler.messages.wire.RankNow`."""

    @property
    def rank(self) -> int: ...
    @property
    def runs(self) -> bool: ...
    @property
    def age_s(self) -> float: ...
    @property
    def says(self) -> bool: ...
    @property
    def step(self) -> int | None: ...
    @property
    def quiet_s(self) -> float | None: ...
    @property
    def waits_s(self) -> float: ...
    @property
    def begun(self) -> bool: ...


class StuckRank(NamedTuple):
    """A rank for which others wait."""

    rank: int
    waits_s: float
    why: str


class StuckGang(NamedTuple):
    """A gang whose ranks all stand still, none of which can be blamed."""

    quiet_s: float
    why: str


def learnt_s(step_s: float | None) -> float | None:
    """Seconds without progress after which a rank, or the gang, is named where nobody said `--hang`. `step_s`: how long
    its steps take, the median; None: too few are known, and nobody is named."""
    return None if step_s is None else max(LEARNT_LEAST_S, LEARNT_STEPS * step_s)


def stuck(
    missing: Collection[int], workers: int, waits_s: float, hang_s: float | None, asked: Collection[int] = ()
) -> int | None:
    """The lowest rank of those that are awaited and have not been asked about; None: none is stuck. `waits_s`: seconds
    for which the ranks that are there have waited. Where all are awaited no rank waits for another."""
    if hang_s is None or waits_s < hang_s or len(missing) >= workers:
        return None
    return min((rank for rank in missing if rank not in asked), default=None)


def judged(ranks: Sequence[RankSeen], workers: int, hang_s: float, steps_before: bool) -> StuckRank | StuckGang | None:
    """The stuck rank, or the stuck gang, of a gang of which every host answered; None: none is, or nothing can be said.
    `steps_before`: whether an earlier gang like it reported steps."""
    if len(ranks) < workers:
        return None
    limit_s = hang_s if any(rank.begun for rank in ranks) else FIRST_STEP * hang_s
    waiting = [rank for rank in ranks if rank.waits_s >= limit_s]
    rest = [rank for rank in ranks if rank.waits_s < limit_s]
    if waiting and rest:
        return _awaited(waiting, rest, limit_s)
    if waiting:
        waits_s = min(rank.waits_s for rank in waiting)
        return StuckGang(waits_s, f"all ranks have waited {format_seconds(waits_s)} for one another in tensors")
    stepped = any(rank.step is not None for rank in ranks)
    return _still(ranks, limit_s) if stepped or steps_before else None


def _awaited(waiting: Sequence[RankSeen], rest: Sequence[RankSeen], limit_s: float) -> StuckRank | StuckGang | None:
    waits_s = min(rank.waits_s for rank in waiting)
    for rank in sorted(rest, key=lambda rank: rank.rank):
        if rank.age_s < limit_s or not rank.runs:
            continue
        if not rank.says:
            return StuckRank(rank.rank, waits_s, "it has not joined its agent")
        if rank.quiet_s is not None and rank.quiet_s >= limit_s:
            return StuckRank(rank.rank, waits_s, f"its last sign of life is {format_seconds(rank.quiet_s)} old")
    if all(not rank.runs and rank.age_s >= limit_s for rank in rest):
        gone = ", ".join(str(rank.rank) for rank in rest)
        return StuckGang(waits_s, f"the others wait for rank {gone}, whose process is gone")
    return None


def _still(ranks: Sequence[RankSeen], limit_s: float) -> StuckRank | StuckGang | None:
    """The stuck rank or gang where all ranks that say something have been quiet for `limit_s` seconds, and none is
    new."""
    says = [rank for rank in ranks if rank.says]
    quiet = [rank.quiet_s for rank in says if rank.quiet_s is not None]
    if not says or len(quiet) < len(says) or min(*quiet, *(rank.age_s for rank in ranks)) < limit_s:
        return None
    quiet_s, steps = min(quiet), [rank.step for rank in ranks if rank.step is not None]
    if len(steps) == len(ranks) > 1:
        last, *others = sorted(steps)
        behind = [rank.rank for rank in ranks if rank.step == last]
        if others[0] > last:
            return StuckRank(
                behind[0], quiet_s, f"it is at step {last}, and the others are at step {others[0]} or later"
            )
    at = f"the last step was {max(steps)}" if steps else "no step since the start"
    ended = [str(rank.rank) for rank in ranks if not rank.runs]
    over = f"; rank {', '.join(ended)} has no process" if ended else ""
    return StuckGang(
        quiet_s, f"no rank finished a step or gave another sign of life for {format_seconds(quiet_s)} ({at}){over}"
    )


def unseen(reported: bool, joined: bool, beside: bool) -> str:
    """Why `--hang` does nothing about a job that runs, for people; empty: it does. `reported`: a rank did a step, or
    waits for others in tensors; `joined`: a rank is connected to its agent; `beside`: it has parts of GPUs."""
    if beside:
        return "it is opportunistic and shares GPUs, so it may be stopped for other jobs"
    if reported:
        return ""
    why = "it has reported no step yet" if joined else "it reports no steps"
    return f"--hang does not watch this job: {why}"


def is_late(share: float, next_share: float) -> bool:
    """Whether one host is to blame: others wait for it for `share` of a job's time, and for the next host for
    `next_share`."""
    return share >= LATE_SHARE and share >= LATE_BEYOND * next_share
