"""What the elected leader decides: which jobs run, which stop for them, and what happens to jobs whose host is gone.

Everything that must survive the leader is in the log. What it remembers by itself (since when a grant is being placed,
when to try one again, how long jobs have waited since it last told the log) the next leader begins anew, which only
makes that one a little slower to act. The leader proposes; `queue.apply` decides whether a proposal still holds. Which
jobs start, and on which GPUs, is decided in `machine/leader/admission.py`.
"""

import math
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import msgspec

from covey.core.ids import HostId, JobId
from covey.core.units import format_seconds
from plugins.gossiped import MemoryHere
from plugins.scheduler.machine.leader.admission import Admission, JobsSeen, taken_back
from plugins.scheduler.machine.leader.capacity import Capacity
from plugins.scheduler.machine.leader.defragmenting import Defragmenting
from plugins.scheduler.machine.leader.draining import Draining
from plugins.scheduler.machine.leader.elastic import Elastic
from plugins.scheduler.machine.leader.firm_jobs import FirmJobs, JobRun, TenantStops, is_spent, loses
from plugins.scheduler.machine.leader.gang_clocks import PoolClocks
from plugins.scheduler.machine.leader.held_back import HeldBack
from plugins.scheduler.machine.leader.leases import Leases
from plugins.scheduler.machine.leader.run_queues import RunQueues
from plugins.scheduler.machine.leader.shared_capacity import SharedCapacity, SharedGpus, Sharing
from plugins.scheduler.machine.leader.starvation import StarvationTimers
from plugins.scheduler.machine.log.job_index import JobIndex
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.commands import (
    AboutJob,
    Command,
    Demoted,
    Elapsed,
    Leads,
    PlacesLost,
    Promoted,
    QuotaSet,
    TakenBack,
    TimeLimitReached,
    Upgraded,
)
from plugins.scheduler.policy import classes, eligible
from plugins.scheduler.policy.leases import terms
from plugins.scheduler.policy.order import due_second
from plugins.scheduler.policy.settings import SchedulerSettings

RETRY_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Seconds to wait after the 1st, 2nd, ... failure to place a job, or after it asked to be started again."""


QUIET_S = 300.0
"""Seconds after which a host that is gone is counted as none."""


class RackHost(msgspec.Struct, frozen=True):
    """One host as gossip shows it to the leader."""

    host: HostId
    gpus: int
    gone_s: float | None = None
    """Seconds since it was last known alive; None while it is."""
    shared: SharedGpus | None = None
    """What the host says of its GPUs where these are shared; None: nothing, and none is counted then."""
    away: bool = False
    """Whether the host is gone on purpose: its agent restarts, and said when it is back."""
    suspect: bool = False
    """Whether the host is alive as far as is known, but did not answer some host."""
    out: int = 0
    """GPUs among `gpus` that no job holds and that take none."""
    why: str = ""
    """What is wrong with the worst of the GPUs that take no job."""
    known: bool = True
    """Whether the host knows which GPUs it has."""
    memory: MemoryHere | None = None
    """What the host says of its memory; None: it says nothing."""

    @property
    def usable(self) -> int:
        """GPUs that are held, or that a job could have."""
        return max(0, self.gpus - self.out)


def memory_of(rack: Sequence[RackHost]) -> dict[HostId, MemoryHere]:
    """What hosts say of their memory."""
    return {host.host: host.memory for host in rack if host.memory is not None}


class ScheduleTick(msgspec.Struct, frozen=True):
    """Event: look at the queue and the rack, and decide."""

    rack: tuple[RackHost, ...]
    wall_s: float
    term: int = 0
    """The term in which this host leads."""
    speechless: frozenset[HostId] = frozenset()
    """Hosts not in `rack` that gossip shows alive: they have not said yet which GPUs they have."""


class SeenSaves(NamedTuple):
    """What the leader has seen of a running job's checkpoints; times by its own clock."""

    number: int
    epoch: int
    since_s: float
    """Since when it has seen the job run under this grant."""
    step: int
    """The step of the newest checkpoint; -1: there is none."""
    saved_s: float | None
    """When that was complete."""


class ProposeCommand(msgspec.Struct, frozen=True):
    """Action: propose this command to the log."""

    command: Command


class Leader:
    """What the leader remembers outside the log. `handle` looks at the jobs that changed since the last look, at those
    whose time has come, and at those that may start or must stop; at all jobs only after `forget`."""

    def __init__(self, queue: JobTable, settings: SchedulerSettings, sharing: Sharing | None = None) -> None:
        """`sharing`: opportunistic jobs run beside guaranteed ones; None: a GPU is one job's."""
        self.queue = queue
        self.settings = settings
        self.sharing = sharing
        default = {} if settings.default_quota is None else {"*": settings.default_quota}
        self.initial_quotas = sorted((default | settings.quotas).items())
        """The quotas (tenant, GPUs) for the log of a rack that has none yet."""
        self.terms = terms(settings.host_lost_after_s, settings.heal_pause_s)
        self.feed = queue.follow()
        self.forget()

    def forget(self) -> None:
        """Forget all that is not in the log: this host no longer leads, or begins to lead."""
        self.feed.everything()
        self.waits = StarvationTimers(self.queue, self.settings)
        settings = self.settings
        self.pools = PoolClocks(self.queue, settings.gang_patience_s, settings.queue_thresholds_gpu_s)
        self.placing_since: dict[JobId, tuple[int, float]] = {}
        """Gangs that are being placed -> epoch, and since when."""
        self.seeking_since: dict[JobId, tuple[tuple[int, int], float]] = {}
        """Gangs of which some ranks are to move -> (epoch, how often that was so), since when."""
        self.stops = FirmJobs(settings.unsaved_stops)
        self.tenant_stops = TenantStops(settings.unsaved_stops)
        self.seen_saves: dict[JobId, SeenSaves] = {}
        self.running: dict[int, JobId] = {}
        """The jobs of `seen_saves` by their numbers."""
        self.missing_since: dict[HostId, float] = {}
        self.leases = Leases(self.queue, self.terms)
        self.draining, self.defragmenting = Draining(self.queue), Defragmenting(self.queue)
        self.elastic = Elastic(self.queue, self.settings)
        self.held_back = HeldBack(self.queue)
        self.failures: dict[JobId, int] = {}
        self.retry_at: dict[JobId, float] = {}
        self.clock_s = 0.0
        """The log's clock as this leader has counted it on since `clock_at`, in seconds."""
        self.clock_at: float | None = None
        self._begin()

    def _begin(self) -> None:
        """Set up what follows from the queue and the rack, before anything is known of them."""
        self.roll = JobIndex(self.queue)
        self.run_queues = RunQueues(self.settings)
        self.rack: Sequence[RackHost] = ()
        self.drained = self.queue.drained
        self.capacity = self._capacity({}, ())
        self.away: dict[JobId, None] = {}
        """Running gangs that wait for a host that is not alive, or are to leave one."""
        self.gone: dict[HostId, float] = {}
        """Hosts that are gone, and for how many seconds."""
        self.restarting: frozenset[HostId] = frozenset()
        """Hosts in `gone` that announced to be back."""
        self.speechless: frozenset[HostId] = frozenset()
        """Hosts that cannot say that they live, as `ScheduleTick` has them."""
        self.suspects: tuple[HostId, ...] = ()
        self.quotas = dict(self.queue.quotas)

    def handle(self, event: ScheduleTick, now_s: float) -> Sequence[ProposeCommand]:
        self.leases.begin(now_s)
        self.pools.begin(now_s)
        self._read(event.rack, now_s, event.wall_s)
        self.speechless = event.speechless
        gone = self._gone(now_s)
        about: list[AboutJob] = [*self._lost(gone, event, now_s), *self._time_limit_reached(event.wall_s)]
        told = {command.job for command in about}
        about += self.draining.commands(self.roll, self.capacity.totals, told, event.wall_s, now_s)
        self.defragmenting.begin(now_s, self.waits.since, self._is_quiet())
        promoted = self._starved(event.wall_s, now_s)
        about += promoted
        settled = {command.job for command in about}
        for id in settled:
            self.run_queues.drop(id)
        moved = self._moved(settled, event.wall_s, now_s)
        free = self.held_back.commands(event.wall_s, now_s)
        may_start = not (moved or promoted or free)  # what waits no longer has its place in the next look
        starts = self._order(settled, event.wall_s, now_s) if may_start else []
        calm = self.roll.elastic and not (moved or starts or about or free)
        elastic = self.roll.by_age(self.roll.elastic) if calm else []
        grows = self.elastic.commands(elastic, self.capacity, event.wall_s, now_s)
        for id in settled:
            self._entry(self.queue.jobs[id])
        commands: list[Command] = [*self._initial_quotas(event.wall_s), *self.elapsed(event.wall_s, now_s)]
        commands += [*self._shorter_leases(event, now_s), *about]
        return [ProposeCommand(command) for command in [*commands, *moved, *free, *starts, *grows]]

    def wakes_s(self) -> float | None:
        """When the leader decides something even if nothing happens until then; None: only when something happens.
        Leases and hosts that are gone are left out: agents look every second."""
        closes_s = self.stops.next_s()
        times = [*self.waits.next_s(), *self.pools.next_s(), *self.held_back.next_s(), *self.retry_at.values()]
        return min([*times, *([] if closes_s is None else [closes_s])], default=None)

    def check(self) -> None:
        """Raise AssertionError when unknown jobs are remembered, or when what is kept up to date is not what there is.
        What was applied after the last look is read at the next one: until then only the order is checked, against
        itself."""
        self.run_queues.check()
        if self.feed.pending:
            return
        for id in [*self.waits.since, *self.retry_at, *self.failures]:
            job = self.queue.jobs.get(id)
            assert job is not None, f"{id} is remembered and unknown"
        self.capacity.check()
        self.pools.check()

    # ---- what it remembers ----

    def _read(self, rack: Sequence[RackHost], now_s: float, wall_s: float) -> None:
        """Bring everything up to date."""
        changed = self.feed.take()
        if changed is None:
            self._begin()
            known = dict.fromkeys([*self.waits.since, *self.placing_since, *self.failures, *self.retry_at])
            known |= dict.fromkeys([*self.pools.pools, *self.tenant_stops.jobs])
            changed = list(dict.fromkeys([*self.queue.jobs, *known]))
        if self.quotas != self.queue.quotas:
            changed += self._whose_tenant_got_or_lost_its_quota()
            self.pools.quotas_changed()
            self.quotas = dict(self.queue.quotas)
        if self.drained is not self.queue.drained or (rack is not self.rack and rack != self.rack):
            changed += self._heard(rack)
        changed += self._whose_tenants_stops_count_anew(changed)
        for id in changed:
            job = self.queue.jobs.get(id)
            if job is None or job.over:
                self._drop(id)
            else:
                self._watch_saves(job, wall_s, now_s)
                self._put(job, now_s)
        for number in self.stops.closed(now_s):
            self._entry(self.queue.jobs[self.running[number]])
        for id in [id for id, at in self.retry_at.items() if at <= now_s]:
            del self.retry_at[id]
            self._entry(self.queue.jobs[id])

    def _whose_tenant_got_or_lost_its_quota(self) -> list[JobId]:
        """Jobs whose tenant got its first quota, or lost it: they move to another book."""
        entries = self.run_queues.entries
        now = {job: self.queue.has_quota(self.queue.jobs[job].spec.tenant) for job in entries}
        return [job for job, has_quota in now.items() if has_quota != entries[job].has_quota]

    def _whose_tenants_stops_count_anew(self, changed: Sequence[JobId]) -> list[JobId]:
        """Jobs that run, of tenants whose jobs may be stopped from now on, or may not, for what stops did to others."""
        tenants: set[str] = set()
        for id in changed:
            job = self.queue.jobs.get(id)
            if job is None:
                self.tenant_stops.forgotten(id)
            elif self.tenant_stops.put(job):
                tenants.add(job.spec.tenant)
        return [id for id in self.seen_saves if self.queue.jobs[id].spec.tenant in tenants] if tenants else []

    def _heard(self, rack: Sequence[RackHost]) -> list[JobId]:
        """Take in what gossip says of the rack now, and return jobs on hosts that came or went."""
        self.rack, drained, self.drained = rack, self.drained, self.queue.drained
        self.gone = {host.host: host.gone_s for host in rack if host.gone_s is not None}
        self.restarting = frozenset(host.host for host in rack if host.away)
        self.suspects = tuple(host.host for host in rack if host.suspect)
        self.roll.heard({host.host: host.gone_s for host in rack})
        totals = eligible.open_gpus({host.host: host.usable for host in rack if host.gone_s is None}, self.drained)
        moved = (totals.keys() ^ self.capacity.totals.keys()) | (drained.keys() ^ self.drained.keys())
        if moved or totals != self.capacity.totals or not self._same_gpus():
            held = {**self.roll.placing, **_all_of(self.roll.awaited)}
            jobs = [self.queue.jobs[id] for id in held if id in self.queue.jobs]
            self.capacity = self._capacity(totals, jobs)
        self.capacity.promises.heard(memory_of(rack))
        return [id for host in sorted(moved) for id in self.roll.awaited.get(host, ())]

    def _capacity(self, totals: Mapping[HostId, int], jobs: Sequence[Job]) -> Capacity:
        if self.sharing is None:
            return Capacity(self.queue, totals, jobs)
        return SharedCapacity(self.queue, totals, jobs, self.sharing, self._shared_gpus())

    def _same_gpus(self) -> bool:
        """Whether the rack has the same GPUs as before, where they are shared; if so, how busy they are is brought up
        to date."""
        if not isinstance(self.capacity, SharedCapacity):
            return True
        hosts = self._shared_gpus()
        same = self.capacity.names_the_same(hosts)
        if same:
            self.capacity.heard(hosts)
        return same

    def _shared_gpus(self) -> Mapping[HostId, SharedGpus]:
        shared = {host.host: host.shared for host in self.rack if host.shared is not None}
        return eligible.open_to(None, shared, self.drained)

    def _put(self, job: Job, now_s: float) -> None:
        id = job.id
        if job.state != "placing":
            self.placing_since.pop(id, None)
        elif self.placing_since.get(id, (0, 0.0))[0] != job.grant.epoch:
            self.placing_since[id] = job.grant.epoch, now_s
        if not job.seeks:
            self.seeking_since.pop(id, None)
        elif self.seeking_since.get(id, ((0, 0), 0.0))[0] != (job.grant.epoch, job.healing.sought):
            self.seeking_since[id] = (job.grant.epoch, job.healing.sought), now_s
        self.waits.put(job, now_s, self.queue.clock_s - job.priority.queued_s if self.clock_at is None else 0.0)
        failures = job.tally.place_failures + job.tally.requeues + job.tally.failures + job.tally.unfit
        if failures > self.failures.get(id, 0):
            self.retry_at[id] = now_s + RETRY_S[min(failures, len(RETRY_S)) - 1]
        if failures or id in self.failures:
            self.failures[id] = failures
        self.held_back.put(job)
        self.roll.put(job)
        self.capacity.put(job)
        self.pools.put(job)
        self._entry(job)

    def _drop(self, id: JobId) -> None:
        for remembered in (self.placing_since, self.seeking_since, self.failures, self.retry_at, self.away):
            remembered.pop(id, None)
        self.waits.drop(id)
        self.held_back.drop(id)
        self.roll.drop(id)
        self.capacity.drop(id)
        self.pools.drop(id)
        self._forget_saves(id)
        self.run_queues.drop(id)

    def _entry(self, job: Job) -> None:
        """Put the job where it belongs if it may run now. A job that runs on a host that is not alive, or is drained,
        is counted apart: it neither stops for others nor holds GPUs that they could have."""
        self.away.pop(job.id, None)
        open_hosts = eligible.open_to(job.spec, self.capacity.totals, self.drained)
        if job.state == "running" and any(at.host not in open_hosts for at in job.awaited):
            self.away[job.id] = None
        waits = job.state == "queued" and not job.may_start
        if job.state == "stopping" or waits or job.id in self.away or job.id in self.retry_at:
            self.run_queues.drop(job.id)
        else:
            self.run_queues.put(job, self.queue.has_quota(job.spec.tenant), job.number in self.stops.firm)

    def _watch_saves(self, job: Job, wall_s: float, now_s: float) -> None:
        """Take in what the job would lose if it were stopped: nothing where it heals, or is elastic."""
        if job.state != "running" or not loses(job):
            self._forget_saves(job.id)
            return
        saved, seen = job.measured.saved, self.seen_saves.get(job.id)
        if seen is None or seen.epoch != job.grant.epoch:
            seen = SeenSaves(job.number, job.grant.epoch, now_s, -1, None)
        if saved is not None and saved.step != seen.step:
            seen = seen._replace(step=saved.step, saved_s=now_s - max(0.0, wall_s - saved.wall_s))
        self.seen_saves[job.id], self.running[job.number] = seen, job.id
        spent = is_spent(job, self.settings.unsaved_stops) or self.tenant_stops.lose(job.spec.tenant)
        restart_s = self.settings.restart_s if job.bill.restart_s is None else job.bill.restart_s
        self.stops.put(job.number, JobRun(seen.since_s, seen.saved_s, spent, restart_s), now_s)

    def _forget_saves(self, id: JobId) -> None:
        seen = self.seen_saves.pop(id, None)
        if seen is not None:
            del self.running[seen.number]
            self.stops.drop(seen.number)

    def _is_quiet(self) -> bool:
        """Whether no host is drained, suspected, away, or gone since a short while."""
        left = any(gone_s < QUIET_S for gone_s in self.gone.values())
        empties = any(eligible.leaves(host, self.drained) for host in self.drained)
        return not (left or empties or self.restarting or self.suspects or self.missing_since)

    def _gone(self, now_s: float) -> dict[HostId, float]:
        """Seconds for which each host that matters is gone; one that gossip never named counts from now."""
        missing = sorted(self.roll.unnamed)
        self.missing_since = {host: self.missing_since.get(host, now_s) for host in missing}
        return self.gone | {host: now_s - since_s for host, since_s in self.missing_since.items()}

    # ---- what it decides ----

    def _initial_quotas(self, wall_s: float) -> list[QuotaSet]:
        known = self.queue.quotas
        return [
            QuotaSet(wall_s=wall_s, tenant=tenant, gpus=gpus, if_absent=True)
            for tenant, gpus in self.initial_quotas
            if tenant not in known
        ]

    def _lost(self, gone: dict[HostId, float], event: ScheduleTick, now_s: float) -> list[TakenBack | PlacesLost]:
        """Commands about gangs on hosts that are gone where, by the leases, nothing can be left of them, or what is
        left stands still and may be lost; and about gangs without a coordinator."""
        commands: list[TakenBack | PlacesLost] = []
        wall_s, lost_on = event.wall_s, self._lost_on(gone, now_s)
        for job in self.roll.by_age({**lost_on, **self.roll.placing, **self.seeking_since}):
            if job.id in lost_on:
                lost = [place.host for place in job.awaited if place.host in lost_on[job.id]]
                said = ", ".join(self._silence(host, gone) for host in lost)
                self.leases.close(lost, (job.id, job.grant.epoch))
                heir = self._heir(job, lost)
                if heir is None:
                    commands.append(taken_back(job, "host lost", said, wall_s, tuple(lost), event.term))
                else:
                    commands.append(places_lost(job, lost, heir, said, event))
            elif job.placed:
                commands += self._not_found(job, gone, event, now_s)
            elif job.grant.coordinator is not None:
                if gone.get(job.grant.coordinator, -1.0) >= self.settings.coordinator_lost_after_s:
                    said = f"{job.grant.coordinator}, which searched for its GPUs, is gone"
                    commands.append(taken_back(job, "coordinator lost", said, wall_s))
                elif now_s - self.placing_since[job.id][1] > self.settings.placing_limit_s:
                    commands.append(
                        taken_back(job, "placing took too long", f"{job.grant.coordinator} did not place it", wall_s)
                    )
        return commands

    def _silence(self, host: HostId, gone: Mapping[HostId, float]) -> str:
        if host in self.suspects:
            return f"{host} does not answer"
        return f"{host} has been gone for {format_seconds(gone.get(host, 0.0))}"

    def _heir(self, job: Job, lost: Sequence[HostId]) -> HostId | None:
        """The host that finds new places for the ranks of the lost hosts: that of the job's lowest rank that is left
        and alive. None: the gang cannot continue without them. It does not need ranks that are to leave a host
        anyway, unless it waits until others have its state: it stays as it was then (`job_endings.stay_as_was`)."""
        job = job.as_sure() if lost else job
        needed = [host for host in lost if job.left_on(host) is None]
        if needed and not job.heals_without(needed):
            return None
        left = [place.host for place in job.start.places if place.host not in (*lost, *job.healing.missing)]
        alive = [host for host in left if host in self.capacity.totals]
        return min(alive, key=lambda host: host in self.suspects, default=None)

    def _not_found(self, job: Job, gone: Mapping[HostId, float], event: ScheduleTick, now_s: float) -> list[PlacesLost]:
        """Commands about a gang that is to continue elsewhere in part, whose coordinator is gone, or has found no
        places in time."""
        lost = (
            job.grant.coordinator is not None
            and gone.get(job.grant.coordinator, -1.0) >= self.settings.coordinator_lost_after_s
        )
        late = now_s - self.seeking_since[job.id][1] > self.settings.placing_limit_s
        heir = self._heir(job, ()) if lost or late else None
        if heir is None:
            return []
        why = f"{job.grant.coordinator}, which searched for new hosts, {'is gone' if lost else 'found none'}"
        return [places_lost(job, job.healing.missing, heir, why, event)]

    def _lost_on(self, gone: dict[HostId, float], now_s: float) -> dict[JobId, dict[HostId, None]]:
        """The hosts on which each job is lost. What was decided once stays so until the log has it. Where ranks stand
        still for want of a lease, a suspicion is enough: how long one lasts depends on how many hosts confirm it, and
        on a busy rack it lasted for 13 s and more."""
        after_s = self.settings.host_lost_after_s
        over = {host for host, s in gone.items() if s >= after_s and not self.leases.over_in_s(host, now_s)}
        still = [host for host in self._silent(gone) if not self.leases.still_in_s(host, now_s)]
        on_them = [(host, id) for host in (*over, *still) for id in self.roll.awaited.get(host, ())]
        ends = [
            (host, id)
            for host, id in on_them
            if (job := self.queue.jobs[id]).spec.on_lost != "keep"
            and (host in over or self._heir(job, tuple(still)) is not None)
        ]
        found: dict[JobId, dict[HostId, None]] = {}
        for host, id in [*ends, *self.leases.about_to_close()]:
            found.setdefault(id, {})[host] = None
        return found

    def _silent(self, gone: Mapping[HostId, float]) -> list[HostId]:
        """Hosts that are gone or suspected, without having announced it. One that is there and has not spoken yet is
        none of them, though its last answer may be from before a restart: it is about to ask for its leases."""
        excused = self.restarting | self.speechless
        return [host for host in dict.fromkeys([*gone, *self.suspects]) if host not in excused]

    def still_in_s(self, now_s: float) -> float:
        """Seconds until, on the next silent host, all ranks that may be lost stand still; inf: there is none."""
        silent = [host for host in self._silent(self.gone) if self.roll.awaited.get(host)]
        waits_s = [self.leases.still_in_s(host, now_s) for host in silent]
        return min([wait_s for wait_s in waits_s if wait_s > 0], default=math.inf)

    def _shorter_leases(self, event: ScheduleTick, now_s: float) -> list[Leads]:
        """Announce this leader's shorter leases once the longer ones of earlier leaders are over: then the next leader
        need not wait for them."""
        led_s = now_s if self.leases.led_s is None else self.leases.led_s
        queue, terms = self.queue, self.terms
        shortest = queue.leases_over_s <= terms.over_s and queue.pauses_over_s <= terms.paused_s
        if shortest or now_s - led_s < self.leases.earlier_s:
            return []
        leads = Leads(wall_s=event.wall_s, term=event.term, leases_over_s=terms.over_s, pauses_over_s=terms.paused_s)
        return [leads]

    def _time_limit_reached(self, wall_s: float) -> list[TimeLimitReached]:
        """Commands for jobs that ran for their time limit. Running time is attained service over the gang's width, so
        it counts across attempts and leaders."""
        over = self.roll.by_age(self.roll.time_limit_reached)
        return [TimeLimitReached(wall_s=wall_s, job=job.id, epoch=job.grant.epoch) for job in over]

    def _starved(self, wall_s: float, now_s: float) -> list[Promoted]:
        """Promotions by STARVELIMIT, PROMOTEKNOB and the clocks of wide gangs, of guaranteed jobs: the others have no
        place in the order. They come in the order in which they became due. No job starts in the same look: the
        promoted ones come first in the next one."""
        seconds, jobs = dict(self.waits.starved(now_s)), self.queue.jobs
        gangs = dict.fromkeys(self.pools.due(self.capacity.size), due_second(now_s, 0.0))
        seconds = {**gangs, **seconds}
        return [
            Promoted(wall_s=wall_s, job=id, epoch=jobs[id].grant.epoch, lasts=id in gangs)
            for id in sorted(seconds, key=lambda id: (seconds[id], jobs[id].number))
        ]

    def _moved(self, settled: Set[JobId], wall_s: float, now_s: float) -> list[Demoted | Upgraded]:
        """Demotions of jobs of class auto that waited too long for their quota, and upgrades of demoted ones whose
        quota has room by now. They come before any start, so nothing else is decided in the same look. A tenant without
        a quota has none to wait for: its jobs stay what they are."""
        late = [(job, waited_s) for job, waited_s in self.waits.late(now_s) if job.id not in settled]
        moved: list[Demoted | Upgraded] = [
            Demoted(wall_s=wall_s, job=job.id, epoch=job.grant.epoch, waited_s=round(waited_s, 3))
            for job, waited_s in late
        ]
        opportunistic = [job for job in self.roll.by_age(self._upgradable()) if job.id not in settled]
        capacity = self.capacity.draft() if opportunistic else self.capacity
        spent: dict[str, int] = {}
        for job in opportunistic:
            tenant, gpus = job.spec.tenant, job.spec.gpus
            free = self.queue.free_quota(tenant)
            left = None if free is None else free - spent.get(tenant, 0)
            if classes.may_upgrade(gpus, left, capacity.closed(job)):
                spent[tenant] = spent.get(tenant, 0) + gpus
                capacity.upgrade(job)
                moved.append(Upgraded(wall_s=wall_s, job=job.id, epoch=job.grant.epoch))
        return moved

    def _upgradable(self) -> list[JobId]:
        """Demoted jobs that run and whose tenant's free quota is wide enough for each of them alone."""
        found: list[JobId] = []
        for tenant, widths in self.roll.demoted.items():
            free = self.queue.free_quota(tenant)
            found += [id for width, ids in widths.items() if free is None or width <= free for id in ids]
        return found

    def elapsed(self, wall_s: float, now_s: float) -> list[Elapsed]:
        """Tell the log from time to time for how long jobs have been waiting, so that the next leader knows. It is part
        of every look; whoever lets several things happen between two looks asks before each of them."""
        passed_s = 0.0 if self.clock_at is None else now_s - self.clock_at
        self.clock_s = max(self.clock_s, self.queue.clock_s) + (passed_s if self.waits.since else 0.0)
        self.clock_at = now_s
        if self.clock_s - self.queue.clock_s < self.settings.checkpoint_s:
            return []
        return [Elapsed(wall_s=wall_s, clock_s=round(self.clock_s, 3))]

    def _order(self, settled: Set[JobId], wall_s: float, now_s: float) -> list[AboutJob]:
        """Decide who starts and who stops. A job that just failed to be placed sits some decisions out."""
        seen = JobsSeen(
            apart=[job for job in self.roll.by_age(self.away) if job.id not in settled],
            pausing=set(self.retry_at),
            placing=self.roll.placing,
            coordinators=self.roll.coordinators,
            may_move=[job for job in self.roll.by_age(self.roll.healing) if job.id not in settled],
            elastic=[job for job in self.roll.by_age(self.roll.elastic) if job.id not in settled],
        )
        draft, moves = self.capacity.draft(), self.defragmenting
        look = Admission(self.queue, self.settings, self.run_queues, draft, moves, seen, wall_s)
        decided = look.decide()
        self.elastic.shrank(look.shrunk or (), now_s)
        return decided


def places_lost(job: Job, hosts: Sequence[HostId], heir: HostId, said: str, event: ScheduleTick) -> PlacesLost:
    return PlacesLost(
        wall_s=event.wall_s,
        job=job.id,
        epoch=job.grant.epoch,
        hosts=tuple(hosts),
        coordinator=heir,
        reason=said[:1000],
        term=event.term,
    )


def _all_of(awaited: Mapping[HostId, Mapping[JobId, None]]) -> dict[JobId, None]:
    return {id: None for ids in awaited.values() for id in ids}
