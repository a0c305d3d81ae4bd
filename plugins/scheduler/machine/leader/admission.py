"""Who starts and who stops, at one look of the leader: 2DAS within quotas, then GPUs that are really there.

First the order says who should run (`machine/leader/run_queues.py`): guaranteed jobs, each tenant within its quota.
Then, down that order, each of them that waits

- is granted, when there is room for it on free GPUs;
- has elastic jobs give back what they have over their lower number, when there is room for it then, and keeps and
  claims these GPUs;
- claims GPUs of guaranteed jobs that stop, when there is room for it once they have stopped;
- has opportunistic jobs stopped for it, when there is room for it without them, and keeps and claims these GPUs;
- keeps the open GPUs that there are, when it does not fit even so. One gang at a time keeps GPUs.

Opportunistic jobs come last, oldest first, on what is left. No job stops for them: they lose their GPUs to guaranteed
jobs only, as often as that happens (where GPUs are shared no job loses one: `machine/leader/shared_capacity.py`). No
opportunistic job starts while one gang claims GPUs and another gang keeps some: a claim is not in the log, so placement
could give the job exactly those GPUs and preempt it again at the next look, for ever. (Where no other gang keeps GPUs,
this one keeps them when it stops others.)
"""

import heapq
import math
from collections.abc import Collection, Mapping, Sequence, Set
from typing import NamedTuple

import msgspec

from covey.core.ids import HostId, JobId
from plugins.scheduler.machine.leader.capacity import Capacity, Gpus, add, held_by
from plugins.scheduler.machine.leader.defragmenting import Defragmenting
from plugins.scheduler.machine.leader.elastic import (
    Shrinks,
    leaving,
    most_shrinks,
    scale_asked,
    to_shrink,
    with_freed,
)
from plugins.scheduler.machine.leader.run_queues import Choice, RunQueues
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.commands import AboutJob, GpusKept, Granted, TakenBack
from plugins.scheduler.policy import classes, explain
from plugins.scheduler.policy.defragment import Departure
from plugins.scheduler.policy.settings import SchedulerSettings


class JobsSeen(NamedTuple):
    """What one look of the leader goes by, beside the order and the GPUs."""

    apart: Sequence[Job]
    """Running jobs that wait for a host."""
    pausing: Set[JobId]
    """Jobs that this look leaves out, and that no other job waits for."""
    placing: Collection[JobId]
    """Gangs that are being placed."""
    coordinators: Mapping[HostId, int]
    """The number of these gangs whose coordinator each host is."""
    may_move: Sequence[Job]
    """Running gangs that can continue without some of their hosts."""
    elastic: Sequence[Job]
    """Elastic jobs that run."""


class Admission:
    """One look of the leader. It decides on `capacity`, a draft that is thrown away afterwards."""

    def __init__(
        self,
        queue: JobTable,
        settings: SchedulerSettings,
        run_queues: RunQueues,
        capacity: Capacity,
        defragmenting: Defragmenting,
        seen: JobsSeen,
        wall_s: float,
    ) -> None:
        """`run_queues`: jobs that may run."""
        self.defragmenting, self.may_move = defragmenting, seen.may_move
        self.elastic = [job for job in seen.elastic if all(place.host in capacity.totals for place in job.start.places)]
        """Elastic jobs that may give processes back: not while one of their hosts is away, and may be lost with the
        only processes that would be left."""
        self.shrunk: list[Job] | None = None
        """Elastic jobs that give processes back for a job that waits; None: no job waits for that."""
        self.queue, self.settings, self.run_queues, self.capacity = queue, settings, run_queues, capacity
        self.apart, self.pausing, self.placing, self.wall_s = seen.apart, seen.pausing, tuple(seen.placing), wall_s
        self.coordinators = NextCoordinator(capacity.totals, seen.coordinators)
        self.spent: dict[str, int] = {}
        """Tenant -> GPUs of its quota granted in this look."""
        self.commands: list[AboutJob] = []
        self.short: list[Job] = []
        """Jobs that should run, and are not granted for want of GPUs or quota."""
        self.lacks_gpus: dict[JobId, None] = {}
        """Jobs of `short` that are within their quota."""
        self.unchosen: Sequence[Job] = ()
        """Guaranteed jobs that run and that the order passed over."""
        self.set_aside = False
        """Whether gangs that are being placed hold their GPUs in `capacity` by now."""
        self.claimants: list[JobId] = []
        """Guaranteed gangs that claim GPUs, or are granted after they could not be placed."""

    def decide(self) -> list[AboutJob]:
        """The decisions: grants, kept GPUs and stops, in this order for each job."""
        if not self.capacity.totals:
            return []
        jobs = self.queue.jobs
        start, stop = self._choose()
        self.unchosen = [jobs[id] for id in stop if jobs[id].state == "running"]
        self._give_back_if_not_chosen(start)
        for id in start:
            self._admit(jobs[id])
        self._preempt()
        if not self._would_be_in_the_way():
            for id in self.run_queues.oldest_opportunistic(self.capacity.vacant, lambda id: self._has_room(jobs[id])):
                self._grant(jobs[id])
        self._move_one_together()
        return self.commands

    def _would_be_in_the_way(self) -> bool:
        """Whether the coordinator of an opportunistic job that starts now could put it on GPUs that a guaranteed gang
        counts on: the log keeps GPUs for another gang, and not these."""
        keeper, jobs = self.capacity.keeper, self.queue.jobs
        if keeper is None or not self.capacity.stops:
            return False
        again = [id for id in self.placing if jobs[id].counts and jobs[id].tally.place_failures]
        return any(id != keeper for id in [*self.claimants, *again])

    def _choose(self) -> Choice:
        """The jobs that the order chooses. A guaranteed job that waits for a host keeps its part of the rack and its
        quota."""
        totals, size, apart = self.capacity.totals, self.capacity.size, dict[str, int]()
        for job in self.apart:
            if job.counts:
                size -= sum(held_by(job, totals).values())
                apart[job.spec.tenant] = apart.get(job.spec.tenant, 0) + job.spec.gpus

        def quota_left(tenant: str) -> int:
            return max(0, (self.queue.quota(tenant) or 0) - apart.get(tenant, 0))

        return self.run_queues.choose(size, quota_left, self.queue.tenant_use)

    # ---- one job ----

    def _admit(self, job: Job) -> None:
        """Grant a guaranteed job that should run, or see to it that it can be granted."""
        if not self._is_within_quota(job):
            self.short.append(job)
        elif self._has_room(job):
            if not self._others_move_together_for(job):
                self._grant(job)
        elif job.spec.gpus and not self._others_shrink_for(job) and not self._others_move_for(job):
            self.short.append(job)  # one without GPUs waits for hosts, and no job that stops makes more of them
            self.lacks_gpus[job.id] = None
            self._wait_for_gpus(job)

    def _is_within_quota(self, job: Job) -> bool:
        tenant = job.spec.tenant
        quota, used = self.queue.quota(tenant), self.queue.used(tenant) + self.spent.get(tenant, 0)
        return quota is None or used + job.spec.gpus <= quota

    def _has_room(self, job: Job) -> bool:
        """Whether the job fits whole on GPUs that it may start on now, and these suffice for it beside all gangs that
        are being placed."""
        spec, capacity = job.spec, self.capacity
        if not spec.gpus:
            return capacity.has_hosts(job)
        free = capacity.free_for(job)
        return spec.gpus <= sum(free.values()) - capacity.placing and capacity.fits(job, free)

    def _plan(self, job: Job, free: Mapping[HostId, int]) -> Gpus:
        """GPUs where the job's coordinator would put it; empty when it does not fit whole."""
        skew = self.queue.models.shown_skew(job.spec, job.measured.tensors)
        return self.capacity.plan(job, free, skew, packlimit(self.queue, self.settings))

    def _grant(self, job: Job) -> None:
        self.capacity.take(self._plan(job, self.capacity.free_for(job)), job.counts)
        if job.counts:
            self.spent[job.spec.tenant] = self.spent.get(job.spec.tenant, 0) + job.spec.gpus
            if job.tally.place_failures:
                self.claimants.append(job.id)
        coordinator = self.coordinators.pick()
        self.commands.append(
            Granted(wall_s=self.wall_s, job=job.id, epoch=job.grant.epoch + 1, coordinator=coordinator)
        )

    # ---- a job that lacks GPUs ----

    def _others_shrink_for(self, job: Job) -> bool:
        """Whether the job fits once elastic jobs have given back processes over their lower number, so that none need
        stop or move. One job at a time has that; it keeps what is free where it is to run."""
        capacity = self.capacity
        if not self.elastic or self.shrunk is not None or not capacity.stops or capacity.keeper not in (None, job.id):
            return False
        self._set_aside()
        free = dict(capacity.free_for(job))
        add(free, leaving(self.elastic, capacity.totals))
        shrinks = to_shrink(self.elastic, free, lambda gpus: capacity.fits(job, gpus))
        if shrinks is None:
            return self._others_shrink_and_stop_for(job)
        self._shrink(job, shrinks)
        plan = self._plan(job, with_freed(free, shrinks))
        keeps = _smaller(plan, capacity.open_for(job))
        self._keep(job, {host: gpus for host, gpus in keeps.items() if gpus})
        self._claim(job, plan)
        return True

    def _others_shrink_and_stop_for(self, job: Job) -> bool:
        """Whether fewer opportunistic jobs have to stop for the job, or it fits at all, once guaranteed elastic jobs
        have given back processes over their lower number: these come first. It keeps what is open."""
        capacity, giving = self.capacity, [other for other in self.elastic if other.counts]
        open_gpus = self._open_for(job)
        coming = {host: capacity.open[host] - capacity.staying.get(host, 0) for host in open_gpus}
        ending = leaving(giving, capacity.totals)

        def stops(shrinks: Shrinks, ended: Gpus) -> float:
            """The number of jobs that stop when these processes are given back; inf: it does not fit even so."""
            there, soon = with_freed(open_gpus, shrinks), with_freed(coming, shrinks)
            add(there, ended)
            add(soon, ended)
            found = capacity.victims(job, soon, there) if capacity.fits(job, there) else None
            return math.inf if found is None else len(found)

        shrinks = most_shrinks(giving)
        fewest = stops(shrinks, ending)
        if fewest >= stops([], {}):
            return False
        for shrink in list(shrinks):
            rest = [other for other in shrinks if other is not shrink]
            shrinks = rest if stops(rest, ending) == fewest else shrinks
        self._shrink(job, shrinks)
        self._keep(job, capacity.to_keep(job, open_gpus))
        return True

    def _shrink(self, job: Job, shrinks: Shrinks) -> None:
        """Let these jobs give processes back for a job that waits."""
        self.shrunk, said = [], f"{_named(job)} is guaranteed and waits for GPUs"
        for other, count in shrinks:
            command = scale_asked(other, other.processes - count, said, self.capacity.totals, self.wall_s)
            if command is not None:
                self.shrunk.append(other)
                self.commands.append(command)

    def _others_move_for(self, job: Job) -> bool:
        """Whether gangs that heal make room for the job by moving elsewhere, so that none need stop. The job keeps what
        is free where it is to run."""
        capacity, moves = self.capacity, self.defragmenting
        if not self.settings.defragment or not capacity.stops or capacity.keeper not in (None, job.id):
            return False
        keeps = moves.kept_by(job)
        if keeps is None:
            self._set_aside()
            steps = moves.steps(job, capacity.free_for(job), capacity.takers(job), self.may_move)
            if not steps:
                return False
            keeps = self._ask(job, steps)
        self._keep(job, _smaller(keeps, capacity.open_for(job)))
        return True

    def _others_move_together_for(self, job: Job) -> bool:
        """Whether a job that has room on several hosts, and is slower there, waits until others have moved, so that it
        fits on one. Not while gangs are being placed: where they go is not known."""
        spec, capacity, moves = job.spec, self.capacity, self.defragmenting
        if not self.settings.defragment or not capacity.stops or capacity.keeper not in (None, job.id):
            return False
        if not spec.gpus_per_worker or spec.pack != "few" or not self.may_move:
            return False
        keeps = moves.kept_by(job)
        if keeps is None:
            hosts = len(self._plan(job, capacity.free_for(job)))
            loss = self.queue.models.spread_loss(spec, job.measured.tensors, packlimit(self.queue, self.settings))
            if hosts < 2 or not loss or self.placing:
                return False
            steps = moves.steps_together(job, loss, capacity.free_for(job), capacity.takers(job), self.may_move)
            if not steps:
                return False
            keeps = self._ask(job, steps, hosts)
        self._keep(job, _smaller(keeps, capacity.open_for(job)))
        return True

    def _move_one_together(self) -> None:
        """Move a gang that runs on several hosts, and is slower there, onto one of them once that has room, where no
        other job waits for it."""
        capacity = self.capacity
        if not self.settings.defragment or capacity.keeper is not None or self.short or self.placing or self.commands:
            return
        for job in self.may_move:
            if len(job.start.places) < 2 or not job.spec.gpus_per_worker or job.spec.elastic:
                continue
            loss = self.queue.models.spread_loss(job.spec, job.measured.tensors, packlimit(self.queue, self.settings))
            free = capacity.free_for(job)
            move = self.defragmenting.merge(job, loss, free, capacity.takers(job), self.wall_s) if loss else None
            if move is not None:
                self.commands.append(move)
                return

    def _ask(self, job: Job, steps: Sequence[Departure], spread: int = 0) -> Gpus:
        """Ask for these moves, to GPUs that are taken from now on, and return where the job is to run then."""
        capacity = self.capacity
        after = dict(capacity.free_for(job))
        for place, to in steps:
            after[place.host] = after.get(place.host, 0) + place.gpus
            after[to] -= place.gpus
            capacity.take({to: place.gpus}, True)
        keeps = self._plan(job, after)
        self.commands += self.defragmenting.ask(job, steps, keeps, capacity.totals, self.wall_s, spread)
        return keeps

    def _wait_for_gpus(self, job: Job) -> None:
        """Let a job within its quota for which there is no room wait for GPUs of guaranteed jobs that stop when these
        suffice, stop opportunistic jobs when that helps, or let it keep the GPUs that there are."""
        self._set_aside()
        if self._claim_coming(job):
            return
        capacity = self.capacity
        open_gpus = self._open_for(job)
        coming = {host: capacity.open[host] - capacity.staying.get(host, 0) for host in open_gpus}
        stop = capacity.victims(job, coming, open_gpus) if capacity.fits(job, open_gpus) else None
        if stop is None:
            self._keep(job, capacity.to_keep(job, open_gpus))
            return
        if stop:
            add(coming, self._stop_opportunistic(stop, job))
        plan = self._plan(job, _smaller(coming, open_gpus))
        if not stop and capacity.fits(job, capacity.free_for(job)):
            capacity.take(plan, True)
            return
        self._keep(job, plan)
        self._claim(job, plan)

    def _open_for(self, job: Job) -> Mapping[HostId, int]:
        """GPUs that the job may wait for, with those of a gang that gives them back for it (unless it fits on free
        ones)."""
        capacity, keeper = self.capacity, self._keeper_beside(job)
        gives_back = keeper is not None and self._outranks(job, keeper)
        if gives_back and not capacity.fits(job, capacity.free_for(job)):
            return capacity.usable(job, capacity.open)
        return capacity.open_for(job)

    def _claim(self, job: Job, plan: Mapping[HostId, int]) -> None:
        self.capacity.claim(job, plan)
        self.claimants.append(job.id)

    def _claim_coming(self, job: Job) -> bool:
        """Claim GPUs if the job fits once the guaranteed jobs have stopped that stop for it or for others, and say
        whether it does. It keeps none, so that others, also some that precede it by then, may start meanwhile on GPUs
        that it does not need. The gang that keeps GPUs keeps them."""
        capacity = self.capacity
        if capacity.keeper == job.id or capacity.fits(job, capacity.free_for(job)):
            return False
        coming = {host: gpus - capacity.staying.get(host, 0) for host, gpus in capacity.open_for(job).items()}
        if self.settings.preemption and not job.tally.place_failures:
            for other in self.unchosen:
                if self._may_displace(job, other):
                    add(coming, capacity.held_by(other))
        plan = self._plan(job, {host: gpus for host, gpus in coming.items() if gpus > 0})
        if plan:
            self._claim(job, plan)
        return bool(plan)

    def _stop_opportunistic(self, stop: Sequence[JobId], job: Job) -> Gpus:
        """Stop these opportunistic jobs for this guaranteed one, and return the GPUs that they hold."""
        said = f"{_named(job)} is guaranteed and comes first"
        ids = set(stop)
        stopping = [guest for guest in self.capacity.opportunistic if guest.id in ids]
        for guest in stopping:
            self.commands.append(taken_back(self.queue.jobs[guest.id], "preempted", said, self.wall_s))
        return self.capacity.stop_opportunistic(stopping)

    def _set_aside(self) -> None:
        """Take, for gangs that are being placed, the GPUs where their coordinators would put them, in the order of
        their grants: no job keeps these GPUs, or has others stopped for them. A gang that fits nowhere stays in
        `capacity.placing`."""
        if self.set_aside:
            return
        self.set_aside = True
        jobs, capacity = [self.queue.jobs[id] for id in self.placing], self.capacity
        for job in sorted(jobs, key=lambda job: job.grant.index):
            plan = self._plan(job, capacity.free_for(job))
            capacity.take(plan, job.counts)
            capacity.placing -= sum(plan.values())

    # ---- the gang that keeps GPUs ----

    def _keep(self, job: Job, gpus: Mapping[HostId, int]) -> None:
        """Let the job keep these GPUs, and no others, unless another gang keeps some and need not give them back.
        Without GPUs to keep, that gang keeps its own."""
        if not gpus:
            return
        capacity, keeper = self.capacity, self._keeper_beside(job)
        if keeper is not None and self._outranks(job, keeper):
            self._give_back(keeper)
        if classes.may_keep(job.id, capacity.keeper) and gpus != capacity.kept:
            self.commands.append(GpusKept(wall_s=self.wall_s, job=job.id, epoch=job.grant.epoch, gpus=dict(gpus)))
            capacity.keep(job.id, gpus)

    def _keeper_beside(self, job: Job) -> Job | None:
        """The gang that keeps GPUs, if it is another one than this job."""
        keeper = self.capacity.keeper
        return self.queue.jobs.get(keeper) if keeper is not None and keeper != job.id else None

    def _outranks(self, job: Job, keeper: Job) -> bool:
        """Whether the gang that keeps GPUs, and still waits, gives them back for this one."""
        has_quota = self.queue.has_quota
        return keeper.state == "queued" and has_quota(job.spec.tenant) and not has_quota(keeper.spec.tenant)

    def _give_back(self, job: Job) -> None:
        self.commands.append(GpusKept(wall_s=self.wall_s, job=job.id, epoch=job.grant.epoch, gpus={}))
        self.capacity.keep(None, {})

    def _give_back_if_not_chosen(self, chosen: Sequence[JobId]) -> None:
        """Let the gang that keeps GPUs give them back when other jobs of its tenant come first now."""
        id = self.capacity.keeper
        job = self.queue.jobs.get(id) if id is not None else None
        if job is not None and job.state == "queued" and job.id not in chosen and job.id not in self.pausing:
            self._give_back(job)

    # ---- guaranteed jobs that stop ----

    def _preempt(self) -> None:
        """Stop guaranteed jobs that the order passed over for those that it chose. None stops for a job that could not
        be placed before: what that one lacks is not GPUs."""
        if not self.settings.preemption:
            return
        able = [job for job in self.short if not job.tally.place_failures]
        for other in self.unchosen:
            first = next((job for job in able if self._may_displace(job, other)), None)
            if first is not None:
                said = f"{_named(first)} comes first"
                self.commands.append(taken_back(other, "preempted", said, self.wall_s))

    def _may_displace(self, job: Job, other: Job) -> bool:
        """Whether a running job may stop for this one: for one of the same tenant, or, if its tenant has no quota, for
        any job that lacks GPUs and not quota."""
        if job.spec.tenant == other.spec.tenant:
            return True
        return job.id in self.lacks_gpus and not self.queue.has_quota(other.spec.tenant)


class NextCoordinator:
    """Which host becomes the coordinator of the next grant: the one that is the coordinator of the fewest gangs being
    placed."""

    def __init__(self, hosts: Mapping[HostId, int], coordinators: Mapping[HostId, int]) -> None:
        """`hosts`: all that are alive; `coordinators`: for how many gangs each host is the coordinator."""
        self.hosts = hosts
        self.counts = {host: count for host, count in coordinators.items() if host in hosts}
        self._fewest: list[tuple[int, HostId]] = []
        """Heap of count and host, once every host is the coordinator of some gang."""

    def pick(self) -> HostId:
        if not self._fewest and len(self.counts) < len(self.hosts):
            host = next(host for host in self.hosts if not self.counts.get(host))
            self.counts[host] = 1
            return host
        if not self._fewest:
            self._fewest = sorted((self.counts[host], host) for host in self.hosts)
        count, host = self._fewest[0]
        heapq.heapreplace(self._fewest, (count + 1, host))
        return host


def packlimit(queue: JobTable, settings: SchedulerSettings) -> float:
    """The packing limit that placement goes by: the one that was set, or one fitted to earlier gangs."""
    return queue.models.packlimit(settings.packlimit) if settings.packlimit_refit else settings.packlimit


def taken_back(
    job: Job, cause: str, reason: str, wall_s: float, lost: tuple[HostId, ...] = (), term: int = 0
) -> TakenBack:
    """The command that takes a grant back; `cause` is one of `TakenBack.cause`."""
    told = {"wall_s": wall_s, "job": job.id, "epoch": job.grant.epoch, "cause": cause, "reason": reason}
    return msgspec.convert({**told, "lost": lost, "term": term}, TakenBack)


def _named(job: Job) -> str:
    """The job in words: `j7 (tenant alice, 4 GPUs)`."""
    return f"{job.id} (tenant {job.spec.tenant}, {explain.gpus(job.spec.gpus)})"


def _smaller(one: Mapping[HostId, int], other: Mapping[HostId, int]) -> Gpus:
    """The smaller of two counts for each host, and at least 0; `other` has 0 where it names no host."""
    return {host: max(0, min(gpus, other.get(host, 0))) for host, gpus in one.items()}
