"""What a host says in the log of its ranks that have ended."""

from collections import deque

import msgspec

from covey.core.ids import HostId
from plugins.facts import RanksEnded
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.commands import RanksReported
from plugins.scheduler.policy import explain
from plugins.scheduler.service.ranks.step_times import GrantSteps

SIGTERM = 15


class KillsSeen:
    """How many processes the kernel of this host killed for memory, as its counter says, in the newest seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def second(self, now_s: float, count: int | None) -> None:
        """Take note of the counter, once a second; None: the kernel has none."""
        if count is None:
            self._seen.clear()
            return
        self._seen.append((now_s, count))
        while len(self._seen) > 1 and self._seen[1][0] <= now_s - explain.KILLED_WITHIN_S:
            self._seen.popleft()

    def recent(self, count: int | None) -> int:
        """How many were killed in the newest seconds; 0 also while that is not known."""
        return max(0, count - self._seen[0][1]) if count is not None and self._seen else 0


def report_of(
    host: HostId, fact: RanksEnded, steps: GrantSteps, asked: bool, silent: tuple[HostId, ...]
) -> RanksReported:
    """The report of ranks that ended. `asked`: this host had told them to end; `silent`: other hosts of the gang that
    did not answer."""
    return RanksReported(
        wall_s=0.0,
        job=fact.job,
        epoch=fact.epoch,
        host=host,
        codes=fact.codes,
        reason=explain.with_oom(fact.reason, fact.oom)[:1000],
        asked=asked or bool(fact.reason),
        lost=fact.lost,
        step=steps.step,
        metrics=steps.metrics,
        step_s=steps.step_s(),
        unreachable=silent,
        since=fact.since,
        oom_bytes=0 if fact.oom is None else max(1, fact.oom.peak_bytes or fact.oom.limit_bytes),
    )


def with_late_ranks(fact: RanksEnded, job: Job | None, host: HostId) -> RanksEnded | None:
    """The end that is reported once the log has more ranks in a place than those that ran there and have ended: the
    others came too late to join them. None: it has not. From an elastic job's place some may have left meanwhile."""
    place = job.place_on(host) if job is not None and job.grant.epoch == fact.epoch else None
    if job is None or place is None or place.since <= fact.since:
        return None
    known = {rank: code for rank, code in fact.codes.items() if rank in place.ranks or not job.spec.elastic}
    if not set(known) < set(place.ranks):
        return None
    why = fact.reason or "its ranks here had ended before others could join them"
    codes = {**known, **{rank: -SIGTERM for rank in place.ranks if rank not in known}}
    return msgspec.structs.replace(fact, codes=codes, reason=why, lost=True, since=place.since)
