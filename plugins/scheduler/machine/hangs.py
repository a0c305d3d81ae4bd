"""A rank for which all others wait: who is told, and how often.

    host that sums --RankHangs--> its host: stacks are kept, its process is ended, a successor takes its place
                   --StacksWanted--> hosts of the other ranks: stacks are kept

One rank at a time: a successor of each needs others that live. The host of a rank knows since when its process runs,
and leaves one alone that is younger than what its job allows: the round that waits may be older than a successor.
"""

from collections.abc import Sequence

import msgspec

from covey.core import JobId, Send
from plugins.facts import RanksAwaited
from plugins.scheduler.machine.job_table import JobTable
from plugins.scheduler.messages.wire import RankHangs, StacksWanted
from plugins.scheduler.policy.hang import stuck

NEXT_S = 10.0
"""Between two ranks of one job."""
HEARD_S = 5.0
"""Within which a host is to hear of it."""

Asked = dict[int, float]
"""Rank -> when its host was told."""


class Hangs:
    """Of jobs whose tensors this host sums."""

    def __init__(self, queue: JobTable) -> None:
        self.queue = queue
        self.asked: dict[tuple[JobId, int], Asked] = {}
        """By job and epoch."""

    def handle(self, event: RanksAwaited, now_s: float) -> Sequence[Send]:
        job = self.queue.jobs.get(event.job)
        self.asked = {key: asked for key, asked in self.asked.items() if self._runs(*key)}
        if job is None or job.state != "running" or job.epoch != event.epoch or job.seeks or job.leaving:
            return ()
        hang_s = job.spec.hang_s
        if hang_s is None:
            return ()
        known = self.asked.get((job.id, job.epoch), {})
        recent = {rank: at_s for rank, at_s in known.items() if now_s - at_s < hang_s}
        if any(now_s - at_s < NEXT_S for at_s in recent.values()):
            return ()
        rank = stuck(event.ranks, job.spec.workers, event.waits_s, hang_s, recent)
        place = next((place for place in job.places if rank in place.ranks), None)
        if rank is None or place is None:
            return ()
        self.asked[job.id, job.epoch] = {**recent, rank: now_s}
        others = [other.host for other in job.places if other.host != place.host]
        wanted = StacksWanted(job.id, job.epoch)
        hangs = RankHangs(job.id, job.epoch, rank, event.waits_s)
        return [*(Send(host, wanted, HEARD_S) for host in others), Send(place.host, hangs, HEARD_S)]

    def _runs(self, id: JobId, epoch: int) -> bool:
        job = self.queue.jobs.get(id)
        return job is not None and job.epoch == epoch and job.state == "running"


class RankAge(msgspec.Struct, frozen=True):
    """Since when a rank's newest process runs on this host, as far as this agent knows."""

    pid: int
    since_s: float
