"""What is asked of a host as a whole: that everything leaves it, that nothing new comes, that it is used again. People
ask; that nothing new comes the host asks itself, too, when starts fail on it."""

from collections.abc import Mapping
from typing import Any

from covey.core.errors import NoLeader, OutcomeUnknown, Refused
from covey.core.ids import HostId
from plugins.base import Host
from plugins.facts import RanksEnded
from plugins.gossiped import DrainedNow
from plugins.scheduler.machine.host.failed_starts import (
    CloseHost,
    FailedStarts,
    HostLooked,
    StartedWell,
    StartFailed,
    StayOpen,
)
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.commands import HostDrained, HostForgotten
from plugins.scheduler.policy.eligible import Drain
from plugins.scheduler.service import asked
from plugins.scheduler.service.log import QueueLog

SHOWN_S = 2.0
"""Seconds for which this host's own copy of the log is waited for."""
GOSSIP_BYTES_MAX = 48
"""The longest name of whoever drains a host, and the longest reason, in gossip, bytes: all that a host gossips has 960
bytes."""


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
        await self._say(HostDrained(wall_s=0.0, host=host, stop_jobs=stop, by=asked.by(given)), f"drain {host}")
        return self._there(host)

    async def resume(self, host: HostId, given: Mapping[str, Any]) -> list[Job]:
        """Let jobs, slabs and sums use the host again, drained or cordoned. Returns the jobs that are on it."""
        if host not in self.queue.drained:
            self._known(host)
            raise Refused(4, f"{host} was not resumed", "it is not drained", "agentctl hosts")
        await self._say(HostDrained(wall_s=0.0, host=host, drained=False, by=asked.by(given)), f"resume {host}")
        return self._there(host)

    async def cordon(self, host: HostId, given: Mapping[str, Any]) -> list[Job]:
        """Have no rank start on a host from now on; what is there stays. Returns the jobs that are on it. Refused: no
        host of this name is known, or it is drained, which is more."""
        self._known(host)
        await self._say(HostDrained(wall_s=0.0, host=host, by=asked.by(given), cordon=True), f"cordon {host}")
        return self._there(host)

    async def uncordon(self, host: HostId, given: Mapping[str, Any]) -> list[Job]:
        """Let jobs use a cordoned host again. Returns the jobs that are on it. Refused: it is not cordoned."""
        if host not in self.queue.drained:
            self._known(host)
            raise Refused(4, f"{host} was not uncordoned", "it is not cordoned", "agentctl hosts")
        command = HostDrained(wall_s=0.0, host=host, drained=False, by=asked.by(given), cordon=True)
        await self._say(command, f"uncordon {host}")
        return self._there(host)

    def knows(self, host: HostId) -> bool:
        """Whether the log knows something of this host that `forget` ends."""
        return host in self.queue.drained or bool(self._there(host))

    async def forget(self, host: HostId, given: Mapping[str, Any]) -> None:
        """Write down that a host will never come back. `given`: `boot`, the latest that is meant. Refused: a job has
        ranks there."""
        command = HostForgotten(wall_s=0.0, host=host, boot=asked.whole(given, "boot", 0), by=asked.by(given))
        await self.log.change(command, f"forget {host}")
        await self.log.until(lambda: host not in self.queue.drained, SHOWN_S)

    def _there(self, host: HostId) -> list[Job]:
        return [job for job in self.queue.live() if job.awaits(host)]

    def _known(self, host: HostId) -> None:
        if all(view.host != host for view in self.host.hosts()):
            raise Refused(3, f"there is no host {str(host)[:80]!r}", "no host of that name is known", "agentctl hosts")

    async def _say(self, command: HostDrained, what: str) -> None:
        host = command.host
        await self.log.change(command, what)
        await self.log.until(lambda: (host in self.queue.drained) == command.drained, SHOWN_S)


ITSELF = "its own agent"
"""By whom a host is cordoned that cordoned itself."""


class OwnCordon:
    """Cordons this host when starts of jobs fail on it one after another."""

    def __init__(self, host: Host, queue: JobTable, log: QueueLog) -> None:
        self.host, self.queue, self.log = host, queue, log
        self.starts = FailedStarts()
        self._closes = False
        """Whether the log is being asked."""

    def ended(self, fact: RanksEnded) -> None:
        """Take in the end of ranks here, which may never have run."""
        job = self.queue.jobs.get(fact.job)
        owner = None if job is None else job.spec.owner
        user = "" if owner is None else owner.user
        self.starts.handle(StartFailed(fact.job, user, fact.unstarted, fact.reason))
        self.look()

    def started(self) -> None:
        """Take in that all ranks of a job run here."""
        self.starts.handle(StartedWell())

    def notes(self) -> list[str]:
        """Notes for `agentctl status`: that starts fail here, and yet the host is not cordoned."""
        return [f"starts fail: {self.starts.stays_open}"] if self.starts.stays_open else []

    def look(self) -> None:
        """Cordon this host if it is time: once a second, and when a start failed."""
        me = self.host.id
        alive = sum(view.state == "alive" and view.host != me for view in self.host.hosts())
        if self._closes or self.log.behind:
            return
        for action in self.starts.handle(HostLooked(1 + alive, len(self.queue.drained), me in self.queue.drained)):
            if isinstance(action, StayOpen):
                self.host.note(f"host/{me}", "starts fail", action.why)
                self.host.env.log.error("starts of jobs fail one after another", why=action.why)
            else:
                self._closes = True
                self.host.env.spawn("cordon this host", self._close(action))

    async def _close(self, action: CloseHost) -> None:
        """Ask the log once; what it does not do is asked for again at the next look."""
        me = self.host.id
        why = action.why[:1000]
        try:
            await self.log.propose(
                HostDrained(wall_s=0.0, host=me, by=ITSELF, cordon=True, why=why, closed=action.closed)
            )
            await self.log.until(lambda: me in self.queue.drained, SHOWN_S)
        except (NoLeader, OutcomeUnknown) as error:
            self.host.env.log.debug("not cordoned yet", why=str(error))
        finally:
            self._closes = False


def in_gossip(drain: Drain | None, jobs: int) -> DrainedNow:
    """What a host gossips of its being drained or cordoned, cut to what gossip takes. `jobs`: those with ranks here."""
    if drain is None:
        return DrainedNow("")
    return DrainedNow(_cut(drain.by), jobs, drain.cordon, _cut(drain.why), drain.wall_s if drain.why else 0.0)


def _cut(text: str) -> str:
    return text.encode()[:GOSSIP_BYTES_MAX].decode(errors="ignore")
