"""Gangs whose coordinator is this host: from the log's grant to a proposal of where it starts."""

import asyncio
from collections.abc import Callable, Mapping

from covey.core.errors import NoLeader, OutcomeUnknown
from covey.core.events import Send, SetTimer
from covey.core.ids import HostId, JobId
from plugins.base import Host
from plugins.scheduler.machine.gang import gang
from plugins.scheduler.machine.leader.admission import packlimit
from plugins.scheduler.machine.leader.shared_capacity import SharedCapacity
from plugins.scheduler.machine.log import replacing
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.commands import PlaceFailed
from plugins.scheduler.messages.wire import APART_MAX
from plugins.scheduler.policy.settings import SchedulerSettings
from plugins.scheduler.service import views
from plugins.scheduler.service.gpus import shared_gpus
from plugins.scheduler.service.log import RETRY_S, QueueLog
from plugins.scheduler.service.ranks.envs import Envs, Missing

Perform = Callable[[Send | SetTimer[gang.AttemptOver | gang.TryAgain], Callable[[gang.Event], None]], None]


class CoordinatedGangs:
    """The gangs whose coordinator is this host. `standing`: the queue at this moment; `perform`: sends and sets
    timers."""

    def __init__(
        self,
        host: Host,
        queue: JobTable,
        log: QueueLog,
        settings: SchedulerSettings,
        envs: Envs,
        standing: Callable[[], views.QueueSnapshot],
        perform: Perform,
    ) -> None:
        self.host, self.queue, self.queue_log, self.settings, self.envs = host, queue, log, settings, envs
        self.env = host.env
        self._standing, self._perform = standing, perform
        self.gangs = gang.Gangs(settings)
        self.spares_of: Callable[[Job], HostId | None] = lambda job: None
        """The other host where processes wait for a job, if there is one."""
        self._unseen: dict[JobId, None] = {}
        """Jobs that changed while the copy of the log was old."""
        self._fetching: dict[tuple[JobId, int], None] = {}
        """Grants whose environment is on its way here."""
        self._kept: dict[HostId, int] = {}
        """GPUs that were kept for a gang when this host last looked."""

    def look(self, changed: list[JobId]) -> None:
        self._unseen |= dict.fromkeys(changed)
        if self.queue_log.behind:
            return
        seen, self._unseen = self._unseen, {}
        for id in sorted({**seen, **dict.fromkeys(self.gangs.searches)}):
            job = self.queue.jobs.get(id)
            search = self.gangs.searches.get(id)
            mine = job is not None and job.grant.coordinator == self.host.id and (job.state == "placing" or job.seeks)
            if search is not None and (job is None or not mine or search.key != (job.grant.epoch, job.healing.sought)):
                found = (
                    search.proposed is not None and job is not None and job.placed and job.grant.epoch == search.epoch
                )
                self.feed(gang.GrantOver(id, search.epoch, found))
            if job is not None and mine and id not in self.gangs.searches:
                self._see_grant(job)
        self._look_at_what_is_kept()

    def _see_grant(self, job: Job) -> None:
        """Look for a job's GPUs, once its environment is here: a gang that could not start keeps no GPUs. A gang that
        runs has its environment on each of its hosts."""
        if job.env is None or job.seeks:
            self._begin(job)
        elif (job.id, job.grant.epoch) not in self._fetching:
            self._fetching[job.id, job.grant.epoch] = None
            self.env.spawn(f"environment of {job.id}.{job.grant.epoch}", self._fetch_and_place(job, job.grant.epoch))

    async def _fetch_and_place(self, job: Job, epoch: int) -> None:
        try:
            await self.envs.fetch(job)
        except Missing as missing:
            failed = PlaceFailed(wall_s=0.0, job=job.id, epoch=epoch, reason=str(missing)[:1000])
            await self.queue_log.insist(failed)
            return
        finally:
            del self._fetching[job.id, epoch]
        now = self.queue.jobs.get(job.id)
        if now is not None and now.state == "placing" and now.grant.epoch == epoch:
            self._begin(now)

    def _begin(self, job: Job) -> None:
        skew = self.queue.models.shown_skew(job.spec, job.measured.tensors)
        apart_from = tuple(self.queue.apart_from(job)[:APART_MAX])
        sought = sought_places(job, self.spares_of(job)) if job.seeks else None
        self.feed(gang.GrantSeen(job.id, job.grant.epoch, job.spec, skew, not job.counts, apart_from, sought))

    def _look_at_what_is_kept(self) -> None:
        """Tell gangs that look for GPUs here of kept GPUs that are newer than their plans."""
        by, kept = self.queue.keeper, self.queue.kept
        if kept == self._kept:
            return
        self._kept = dict(kept)
        for id, search in sorted(self.gangs.searches.items()):
            job = self.queue.jobs.get(id)
            if by is not None and by != id and job is not None:
                free = shared_gpus.left_where_kept(self._standing().gpu_capacity, job, kept)
                self.feed(gang.KeptForAnother(id, search.epoch, by, free))

    def feed(self, event: gang.Event) -> None:
        now_s = self.env.clock.now_s()
        if isinstance(event, gang.GrantSeen | gang.TryAgain):
            job, limit = self.queue.jobs.get(event.job), packlimit(self.queue, self.settings)
            free = self._free_now(job, limit, now_s)
            ranks = views.ranks_of(self.queue)
            company = views.company_of(self.queue, job)
            most = views.workers_of(self.host.hosts(), self.queue, job)
            ranks_now = {host: ranks.get(host, 0) for host in free}
            seen = gang.RackSeen(free, ranks_now, limit, company, None if most is None else dict(most))
            self.gangs.handle(seen, now_s)
        for action in self.gangs.handle(event, now_s):
            match action:
                case gang.ProposePlacement():
                    self.env.spawn(f"propose {gang.job_of(action.command)}", self._propose_for_gang(action.command))
                case Send() | SetTimer():
                    self._perform(action, self.feed)

    def free_for(self, job: Job) -> Mapping[HostId, int]:
        """GPUs of each host that this job may have; for a job without GPUs, the ranks of each host."""
        if job.spec.gpus:
            return self._free_now(job, packlimit(self.queue, self.settings), self.env.clock.now_s())
        ranks = views.ranks_of(self.queue)
        hosts = views.free_for(self.host.hosts(), self._standing(), job)
        return {host: ranks.get(host, 0) for host in hosts}

    def _free_now(self, job: Job | None, limit: float, now_s: float) -> dict[HostId, int]:
        """GPUs of each host that a gang may have."""
        standing = self._standing()
        capacity = standing.gpu_capacity
        if job is None or not job.spec.gpus or not isinstance(capacity, SharedCapacity):
            return views.free_for(self.host.hosts(), standing, job)
        skew = self.queue.models.shown_skew(job.spec, job.measured.tensors)
        said = self.gangs.said(not job.counts, now_s)
        return shared_gpus.where(capacity, job, skew, limit, said)

    async def _propose_for_gang(self, command: gang.Placement) -> None:
        try:
            result = await self.queue_log.propose(command)
        except (NoLeader, OutcomeUnknown):
            await asyncio.sleep(RETRY_S)
            self.feed(gang.PlacementProposed(command, None))
            return
        self.feed(gang.PlacementProposed(command, result))


def sought_places(job: Job, spares_on: HostId | None = None) -> gang.PlacesSought:
    """The places that a gang seeks which has lost hosts, is to leave some, or is to grow. `spares_on`: where processes
    wait for it."""
    avoid = tuple(dict.fromkeys(place.host for place in (*job.start.places, *job.healing.leaving)))
    places, since, number = replacing.sought_places(job), job.healing.healed + 1, job.healing.sought
    if not places:
        more = job.healing.wanted - job.processes
        return gang.PlacesSought((), avoid, since, number, None, job.start.places, more, job.start.carried)
    return gang.PlacesSought(places, avoid, since, number, spares_on, tuple(replacing.joinable(job)))
