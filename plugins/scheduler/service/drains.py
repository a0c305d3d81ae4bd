"""What people ask of a host as a whole: that everything leaves it, and that it is used again."""

from collections.abc import Mapping
from typing import Any

from covey.core.errors import Refused
from covey.core.ids import HostId
from plugins.base import Host
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.commands import HostDrained
from plugins.scheduler.service import asked
from plugins.scheduler.service.log import QueueLog

SHOWN_S = 2.0
"""Seconds for which this host's own copy of the log is waited for."""
GOSSIP_BYTES_MAX = 48
"""The longest name of whoever drains a host in gossip, bytes: all that a host gossips has 960 bytes."""


class Drains:
    def __init__(self, host: Host, queue: JobTable, log: QueueLog) -> None:
        self.host, self.queue, self.log = host, queue, log

    async def drain(self, host: HostId, given: Mapping[str, Any]) -> list[Job]:
        """Drain a host: nothing new starts on it from now on, and the leader has what can leave it leave. Returns the
        jobs that are on it. Refused: no host of this name is known. `given`: `stop_jobs`."""
        self._known(host)
        stop = given.get("stop_jobs", False)
        if not isinstance(stop, bool):
            example = f"agentctl hosts drain {host} --stop-jobs"
            raise Refused(2, f"{host} was not drained", f"stop_jobs is true or false, not {stop!r:.80}", example)
        await self._say(HostDrained(wall_s=0.0, host=host, stop_jobs=stop, by=asked.by(given)))
        return [job for job in self.queue.live() if job.awaits(host)]

    async def resume(self, host: HostId, given: Mapping[str, Any]) -> list[Job]:
        """Let jobs, slabs and sums use the host again. Returns the jobs that are on it."""
        if host not in self.queue.drained:
            self._known(host)
            raise Refused(4, f"{host} was not resumed", "it is not drained", "agentctl hosts")
        await self._say(HostDrained(wall_s=0.0, host=host, drained=False, by=asked.by(given)))
        return [job for job in self.queue.live() if job.awaits(host)]

    def _known(self, host: HostId) -> None:
        if all(view.host != host for view in self.host.hosts()):
            raise Refused(3, f"there is no host {str(host)[:80]!r}", "no host of that name is known", "agentctl hosts")

    async def _say(self, command: HostDrained) -> None:
        host = command.host
        await self.log.change(command, f"{'drain' if command.drained else 'resume'} {host}")
        await self.log.until(lambda: (host in self.queue.drained) == command.drained, SHOWN_S)


def in_gossip(by: str) -> str:
    """The beginning of the drainer's name, cut to `GOSSIP_BYTES_MAX` bytes."""
    return by.encode()[:GOSSIP_BYTES_MAX].decode(errors="ignore")
