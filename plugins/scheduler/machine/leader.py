"""What the elected leader decides: who runs, who stops for it, and what happens to jobs whose host is gone.

It is thin. Everything that must survive it stands in the log; what it remembers by itself (since when a grant is being
placed, how long a job waits, when to try one again) begins anew with the next leader, which only makes that one slower
to act. It proposes; `Queue.apply` decides whether that still holds.
"""

from collections.abc import Sequence, Set

import msgspec

from covey.core import HostId, JobId
from covey.units import format_seconds
from plugins.scheduler.machine.jobs import HOLDING, Job, row_of
from plugins.scheduler.machine.queue import Queue
from plugins.scheduler.messages.commands import AboutJob, Command, Granted, Promoted, QuotaSet, TakenBack, TimeUp
from plugins.scheduler.policy import order, words
from plugins.scheduler.policy.settings import Settings

RETRY_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Wait after the 1st, 2nd, ... failure to place a job, or after it asked to be started again."""


class RackHost(msgspec.Struct, frozen=True):
    """One host as gossip shows it to the leader."""

    host: HostId
    gpus: int
    gone_s: float | None = None
    """Seconds since it was last known alive; None while it is."""


class Look(msgspec.Struct, frozen=True):
    """Event: look at the queue and the rack and decide."""

    rack: tuple[RackHost, ...]
    wall_s: float


class Propose(msgspec.Struct, frozen=True):
    """Action: offer this command to the log."""

    command: Command


class Leader:
    """The soft state of whoever leads."""

    def __init__(self, queue: Queue, settings: Settings) -> None:
        self.queue = queue
        self.settings = settings
        self.placing_since: dict[tuple[JobId, int], float] = {}
        self.waiting_since: dict[JobId, float] = {}
        self.missing_since: dict[HostId, float] = {}
        self.failures: dict[JobId, int] = {}
        self.retry_at: dict[JobId, float] = {}

    def forget(self) -> None:
        """This host leads no more, or only now."""
        self.placing_since, self.waiting_since, self.missing_since = {}, {}, {}
        self.failures, self.retry_at = {}, {}

    def handle(self, event: Look, now_s: float) -> Sequence[Propose]:
        live = self.queue.live()
        self._remember(live, now_s)
        gone = self._gone(event.rack, live, now_s)
        about: list[AboutJob] = [*self._lost(live, gone, event.wall_s, now_s), *self._timed_out(live, event.wall_s)]
        about += self._starved(live, event.wall_s, now_s)
        settled = {command.job for command in about}
        rest = [job for job in live if job.id not in settled]
        alive = [host for host in event.rack if host.gone_s is None]
        commands = [*self._initial_quotas(event.wall_s), *about, *self._order(rest, alive, event.wall_s)]
        return [Propose(command) for command in commands]

    def check(self) -> None:
        """Nothing is remembered about jobs that are over."""
        for id in [*self.waiting_since, *self.retry_at, *self.failures]:
            job = self.queue.jobs.get(id)
            assert job is not None, f"{id} is remembered and unknown"

    # ---- what it remembers ----

    def _remember(self, live: list[Job], now_s: float) -> None:
        placing = {(job.id, job.epoch) for job in live if job.state == "placing"}
        self.placing_since = {key: self.placing_since.get(key, now_s) for key in sorted(placing)}
        waiting = [job.id for job in live if job.state == "queued"]
        self.waiting_since = {id: self.waiting_since.get(id, now_s) for id in waiting}
        for job in live:
            failures = job.place_failures + job.requeues
            if failures > self.failures.get(job.id, 0):
                self.retry_at[job.id] = now_s + RETRY_S[min(failures, len(RETRY_S)) - 1]
            self.failures[job.id] = failures
        known = {job.id for job in live}
        self.failures = {id: count for id, count in self.failures.items() if id in known}
        self.retry_at = {id: at for id, at in self.retry_at.items() if id in known and at > now_s}

    def _gone(self, rack: Sequence[RackHost], live: list[Job], now_s: float) -> dict[HostId, float]:
        """Seconds for which each host that matters is gone; one that gossip never named counts from now."""
        named = {host.host: host.gone_s for host in rack}
        wanted = {place.host for job in live if job.placed for place in job.places if job.awaits(place.host)}
        wanted |= {job.home for job in live if job.state == "placing" and job.home is not None}
        missing = sorted(wanted - set(named))
        self.missing_since = {host: self.missing_since.get(host, now_s) for host in missing}
        gone = {host: gone_s for host, gone_s in named.items() if gone_s is not None}
        return gone | {host: now_s - since_s for host, since_s in self.missing_since.items()}

    # ---- what it decides ----

    def _initial_quotas(self, wall_s: float) -> list[QuotaSet]:
        wanted: dict[str, int] = dict(self.settings.quotas)
        if self.settings.default_quota is not None:
            wanted.setdefault("*", self.settings.default_quota)
        absent = [(tenant, gpus) for tenant, gpus in sorted(wanted.items()) if tenant not in self.queue.quotas]
        return [QuotaSet(wall_s=wall_s, tenant=tenant, gpus=gpus, if_absent=True) for tenant, gpus in absent]

    def _lost(self, live: list[Job], gone: dict[HostId, float], wall_s: float, now_s: float) -> list[TakenBack]:
        commands: list[TakenBack] = []
        for job in live:
            if job.placed:
                lost = [place.host for place in job.places if job.awaits(place.host)]
                lost = [host for host in lost if gone.get(host, -1.0) >= self.settings.host_lost_after_s]
                if lost:
                    said = ", ".join(f"{host} is gone for {format_seconds(gone[host])}" for host in lost)
                    commands.append(_taken(job, "host lost", said, wall_s, tuple(lost)))
            elif job.state == "placing" and job.home is not None:
                if gone.get(job.home, -1.0) >= self.settings.home_lost_after_s:
                    said = f"{job.home}, which looked for its GPUs, is gone"
                    commands.append(_taken(job, "home lost", said, wall_s))
                elif now_s - self.placing_since[job.id, job.epoch] > self.settings.placing_limit_s:
                    commands.append(_taken(job, "placing took too long", f"{job.home} did not place it", wall_s))
        return commands

    def _timed_out(self, live: list[Job], wall_s: float) -> list[TimeUp]:
        """Running time is attained service over the gang's width, so it counts across attempts and leaders."""
        over = [
            job
            for job in live
            if job.state == "running"
            and job.spec.time_limit_s is not None
            and job.attained_gpu_s / job.spec.width >= job.spec.time_limit_s
        ]
        return [TimeUp(wall_s=wall_s, job=job.id, epoch=job.epoch) for job in over]

    def _starved(self, live: list[Job], wall_s: float, now_s: float) -> list[Promoted]:
        limit_s = self.settings.starve_limit_s
        if limit_s is None:
            return []
        rows = {job.id: row_of(job, self.settings.queue_thresholds_gpu_s) for job in live if job.state == "queued"}
        return [
            Promoted(wall_s=wall_s, job=job.id, epoch=job.epoch)
            for job in live
            if job.id in rows and rows[job.id].promoted is None and now_s - self.waiting_since[job.id] >= limit_s
        ]

    def _order(self, live: list[Job], alive: list[RackHost], wall_s: float) -> list[AboutJob]:
        """2DAS over everything that may run now. Jobs that are stopping, or wait for a host that is away, keep what
        they hold and are neither ordered nor preempted: only what lies beside them is given out. A job that just
        failed to be placed sits some decisions out and holds nothing up."""
        queue, jobs, hosts = self.queue, {job.id: job for job in live}, {host.host for host in alive}
        thresholds, default = self.settings.queue_thresholds_gpu_s, queue.quotas.get("*")
        apart = [job for job in live if _away(job, hosts)]
        fixed = {job.id for job in apart} | {job.id for job in live if job.state == "stopping"}
        may_run = [job for job in live if job.id not in fixed and job.id not in self.retry_at]
        total = sum(host.gpus for host in alive)
        held = sum(_held(job, hosts) for job in queue.live())
        within = total - sum(_held(job, hosts) for job in apart)
        quotas = self._quotas_beside(apart, live)
        rows = [row_of(job, thresholds) for job in may_run]
        rows = order.ordered(rows, thresholds, queue.quotas, default, self.settings.narrow_first)
        chosen = order.select(rows, within, quotas, default)
        commands, blocked = self._grants([jobs[id] for id in chosen.run], alive, total - held, wall_s)
        able = [job for job in blocked if not job.place_failures]
        if self.settings.preemption and able:
            needs = words.gpus(able[0].spec.gpus)
            for id in chosen.preempt:
                if jobs[id].state == "running":
                    said = f"{able[0].id} (tenant {able[0].spec.tenant}, {needs}) comes first"
                    commands.append(_taken(jobs[id], "preempted", said, wall_s))
        return commands

    def _quotas_beside(self, apart: list[Job], live: list[Job]) -> dict[str, int | None]:
        """What is left of each tenant's quota beside its jobs that wait for a host."""
        quotas = {job.spec.tenant: self.queue.quota(job.spec.tenant) for job in live}
        for job in apart:
            quota = quotas[job.spec.tenant]
            if quota is not None and job.counts:
                quotas[job.spec.tenant] = max(0, quota - job.spec.gpus)
        return quotas

    def _grants(
        self, chosen: list[Job], alive: list[RackHost], free: int, wall_s: float
    ) -> tuple[list[AboutJob], list[Job]]:
        """Grants for what fits into the GPUs that are free in truth, and the chosen jobs that must wait for more."""
        homes = {host.host: 0 for host in alive}
        for job in self.queue.live():
            if job.state == "placing" and job.home in homes:
                homes[job.home] += 1
        spent: dict[str, int] = {}
        commands: list[AboutJob] = []
        blocked: list[Job] = []
        for job in chosen:
            if job.state != "queued":
                continue
            tenant, gpus = job.spec.tenant, job.spec.gpus
            quota = self.queue.quota(tenant) if job.counts else None
            used = self.queue.used(tenant) + spent.get(tenant, 0)
            if (gpus > free and gpus) or not homes or (quota is not None and used + gpus > quota):
                blocked.append(job)
                continue
            free -= gpus
            spent[tenant] = spent.get(tenant, 0) + gpus * job.counts
            home = min((count, host) for host, count in homes.items())[1]
            homes[home] += 1
            commands.append(Granted(wall_s=wall_s, job=job.id, epoch=job.epoch + 1, home=home))
        return commands, blocked


def _away(job: Job, alive: Set[HostId]) -> bool:
    """Whether a running gang waits for a host that is not alive."""
    return job.state == "running" and any(place.host not in alive for place in job.places if job.awaits(place.host))


def _held(job: Job, alive: Set[HostId]) -> int:
    """GPUs of living hosts that the job holds, or is about to."""
    if not job.placed:
        return job.spec.gpus if job.state in HOLDING else 0
    return sum(len(place.gpus) for place in job.places if place.host in alive and job.awaits(place.host))


def _taken(job: Job, cause: str, reason: str, wall_s: float, lost: tuple[HostId, ...] = ()) -> TakenBack:
    return msgspec.convert(
        {"wall_s": wall_s, "job": job.id, "epoch": job.epoch, "cause": cause, "reason": reason, "lost": lost}, TakenBack
    )
