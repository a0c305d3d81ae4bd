"""Hosts for whose ranks others wait again and again, as the host that sums a job sees it once a second.

    seconds of a job:   . . h2 . . . h2 h2 . .      one is h2's when all that is awaited in it is on h2,
                                                    and fewer than half of the ranks are

A share of these seconds is a share of the job's time. A few such hosts cause most of the trouble of a rack: a card that
throttles, a link that lost half its speed, another user's process.
"""

from collections import Counter, deque

import msgspec

from covey.core.ids import HostId, JobId
from plugins.facts import RanksAwaited
from plugins.gossiped import LateHost
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.policy.hang import is_late

WINDOW = 300
"""The number of newest seconds that count."""
ENOUGH = 60
"""Seconds of a job before anything is said of its hosts."""


class Waited(msgspec.Struct):
    """What one job waited for in its newest seconds."""

    epoch: int
    seconds: deque[HostId | None]
    """The host that was waited for in each second; None: no host in particular."""


class LateHosts:
    """Late hosts of the jobs whose tensors this host sums."""

    def __init__(self, queue: JobTable) -> None:
        self.queue = queue
        self.waited: dict[JobId, Waited] = {}

    def second(self, event: RanksAwaited) -> None:
        """Count one second. `event`: what was awaited in it, if anything."""
        self.waited = {id: waited for id, waited in self.waited.items() if self._runs(id, waited.epoch)}
        job = self.queue.as_it_runs(event.job)
        if job is None or not self._runs(job.id, event.epoch):
            return
        waited = self.waited.setdefault(job.id, Waited(event.epoch, deque(maxlen=WINDOW)))
        waited.seconds.append(_awaited_host(job, event))

    def late(self) -> list[LateHost]:
        """The late hosts, the worst first."""
        found: list[LateHost] = []
        for id, waited in sorted(self.waited.items()):
            hosts = Counter(host for host in waited.seconds if host is not None)
            seconds = len(waited.seconds)
            for (host, count), *others in [hosts.most_common(2)] if hosts and seconds >= ENOUGH else []:
                if is_late(count / seconds, others[0][1] / seconds if others else 0.0):
                    found.append(LateHost(host, id, round(100 * count / seconds)))
        return sorted(found, key=lambda late: (-late.percent, late.host))

    def _runs(self, id: JobId, epoch: int) -> bool:
        job = self.queue.jobs.get(id)
        return job is not None and job.grant.epoch == epoch and job.state == "running" and not job.seeks


def _awaited_host(job: Job, event: RanksAwaited) -> HostId | None:
    late = job.carriers(event.ranks)
    hosts = {place.host for place in job.start.places for rank in place.ranks if rank in late}
    return hosts.pop() if len(hosts) == 1 and 2 * len(event.ranks) < job.spec.world_size else None
