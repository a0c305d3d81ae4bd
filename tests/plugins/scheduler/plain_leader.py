"""The leader's decision, plain: it looks at every job and sorts them all anew at every look. `machine/leader.py` has to
propose the same; it was written from this."""

from collections.abc import Callable, Mapping, Sequence, Set

import msgspec

from covey.core import HostId, JobId
from covey.units import format_seconds
from plugins.scheduler.machine.admission import packlimit, taken_back
from plugins.scheduler.machine.capacity import Gpus, fits_whole, held_by
from plugins.scheduler.machine.jobs import Job, row_of
from plugins.scheduler.machine.leader import RETRY_S, ProposeCommand, RackHost, ScheduleTick
from plugins.scheduler.machine.queue import Queue
from plugins.scheduler.messages.commands import (
    AboutJob,
    Command,
    Demoted,
    Elapsed,
    GpusKept,
    Granted,
    Leads,
    Promoted,
    QuotaSet,
    TakenBack,
    TimeLimitReached,
    Upgraded,
)
from plugins.scheduler.policy import classes, explain, order
from plugins.scheduler.policy.leases import terms
from plugins.scheduler.policy.place import place
from plugins.scheduler.policy.settings import SchedulerSettings
from plugins.scheduler.policy.starve import due_second, promoted_after


class PlainLeader:
    """The soft state of whoever leads."""

    def __init__(self, queue: Queue, settings: SchedulerSettings) -> None:
        self.queue = queue
        self.settings = settings
        self.placing_since: dict[tuple[JobId, int], float] = {}
        self.waiting_since: dict[JobId, float] = {}
        self.missing_since: dict[HostId, float] = {}
        self.failures: dict[JobId, int] = {}
        self.retry_at: dict[JobId, float] = {}
        self.clock_s = 0.0
        """The log's clock, counted on since `clock_at`."""
        self.clock_at: float | None = None
        self.over_s = terms(settings.host_lost_after_s).over_s
        self.led_s: float | None = None
        self.earlier_s = 0.0
        self.confirmed_s: dict[HostId, float] = {}
        """When the leases of each host's ranks were last confirmed."""
        self.closed: set[tuple[HostId, JobId, int]] = set()
        """What is being taken back."""

    def forget(self) -> None:
        """This host leads no more, or only now."""
        self.placing_since, self.waiting_since, self.missing_since = {}, {}, {}
        self.failures, self.retry_at = {}, {}
        self.clock_s, self.clock_at = 0.0, None
        self.led_s = None
        self.confirmed_s, self.closed = {}, set()

    def confirm(self, host: HostId, grants: Sequence[tuple[JobId, int]], now_s: float) -> list[tuple[JobId, int]]:
        """Leases of this host's ranks."""
        if self.led_s is None:
            self.led_s, self.earlier_s = now_s, max(self.queue.leases_over_s, self.over_s)
        found = [grant for grant in grants if (host, *grant) not in self.closed and self._on(host, *grant)]
        if found:
            self.confirmed_s[host] = now_s
        return found

    def _on(self, host: HostId, id: JobId, epoch: int) -> bool:
        job = self.queue.jobs.get(id)
        return job is not None and job.epoch == epoch and job.awaits(host)

    def _over(self, host: HostId, now_s: float) -> bool:
        assert self.led_s is not None
        until_s = max(self.led_s + self.earlier_s, self.confirmed_s.get(host, -1e9) + self.over_s)
        return now_s >= until_s

    def handle(self, event: ScheduleTick, now_s: float) -> Sequence[ProposeCommand]:
        self.confirm(HostId("nobody"), (), now_s)
        live = self.queue.live()
        self._remember(live, now_s)
        gone = self._gone(event.rack, live, now_s)
        about: list[AboutJob] = [
            *self._lost(live, gone, event.wall_s, now_s),
            *self._time_limit_reached(live, event.wall_s),
        ]
        promoted = self._starved(live, event.wall_s, now_s)
        about += promoted
        settled = {command.job for command in about}
        rest = [job for job in live if job.id not in settled]
        moved = self._moved(rest, event.rack, event.wall_s, now_s)
        starts = self._order(rest, event.rack, event.wall_s) if not moved and not promoted else []
        commands: list[Command] = [*self._initial_quotas(event.wall_s), *self._elapsed(live, event.wall_s, now_s)]
        commands += [*self._shorter_leases(event, now_s), *about]
        return [ProposeCommand(command) for command in [*commands, *moved, *starts]]

    def check(self) -> None:
        """Nothing is remembered about jobs that are over."""
        for id in [*self.waiting_since, *self.retry_at, *self.failures]:
            job = self.queue.jobs.get(id)
            assert job is not None, f"{id} is remembered and unknown"

    # ---- what it remembers ----

    def _remember(self, live: list[Job], now_s: float) -> None:
        placing = {(job.id, job.epoch) for job in live if job.state == "placing"}
        self.placing_since = {key: self.placing_since.get(key, now_s) for key in sorted(placing)}
        waiting = [job for job in live if job.state in ("queued", "placing")]
        known_s = {job.id: self.queue.clock_s - job.queued_s if self.clock_at is None else 0.0 for job in waiting}
        self.waiting_since = {id: self.waiting_since.get(id, now_s - max(0.0, s)) for id, s in known_s.items()}
        for job in live:
            failures = job.place_failures + job.requeues + job.failures
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
        wanted |= {job.coordinator for job in live if job.state == "placing" and job.coordinator is not None}
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
                lost = [host for host in lost if self._is_lost(job, host, gone.get(host, -1.0), now_s)]
                if lost:
                    self.closed |= {(host, job.id, job.epoch) for host in lost}
                    said = ", ".join(f"{host} is gone for {format_seconds(gone.get(host, 0.0))}" for host in lost)
                    commands.append(taken_back(job, "host lost", said, wall_s, tuple(lost)))
            elif job.state == "placing" and job.coordinator is not None:
                if gone.get(job.coordinator, -1.0) >= self.settings.coordinator_lost_after_s:
                    said = f"{job.coordinator}, which looked for its GPUs, is gone"
                    commands.append(taken_back(job, "home lost", said, wall_s))
                elif now_s - self.placing_since[job.id, job.epoch] > self.settings.placing_limit_s:
                    commands.append(
                        taken_back(job, "placing took too long", f"{job.coordinator} did not place it", wall_s)
                    )
        return commands

    def _shorter_leases(self, event: ScheduleTick, now_s: float) -> list[Leads]:
        assert self.led_s is not None
        over = now_s >= self.led_s + self.earlier_s
        if not over or self.queue.leases_over_s <= self.over_s:
            return []
        return [Leads(wall_s=event.wall_s, term=event.term, leases_over_s=self.over_s)]

    def _is_lost(self, job: Job, host: HostId, gone_s: float, now_s: float) -> bool:
        if (host, job.id, job.epoch) in self.closed:
            return True
        gone = gone_s >= self.settings.host_lost_after_s
        return gone and job.spec.on_lost == "stop" and self._over(host, now_s)

    def _time_limit_reached(self, live: list[Job], wall_s: float) -> list[TimeLimitReached]:
        """Running time is attained service over the gang's width, so it counts across attempts and leaders."""
        over = [
            job
            for job in live
            if job.state == "running"
            and job.spec.time_limit_s is not None
            and job.attained_gpu_s / job.spec.width >= job.spec.time_limit_s
        ]
        return [TimeLimitReached(wall_s=wall_s, job=job.id, epoch=job.epoch) for job in over]

    def _starved(self, live: list[Job], wall_s: float, now_s: float) -> list[Promoted]:
        """STARVELIMIT and PROMOTEKNOB, for guaranteed jobs: the others have no place in the order."""
        waiting = [job for job in live if job.state == "queued" and job.counts]
        since_s = self.waiting_since
        after_s = {job.id: self._starved_after(job) for job in waiting}
        starved = [
            (due_second(since_s[job.id], after), job.number, job)
            for job in waiting
            if (after := after_s[job.id]) is not None and now_s - since_s[job.id] >= after
        ]
        starved.sort(key=lambda each: each[:2])
        return [Promoted(wall_s=wall_s, job=job.id, epoch=job.epoch) for *_, job in starved]

    def _starved_after(self, job: Job) -> float | None:
        thresholds = self.settings.queue_thresholds_gpu_s
        row = row_of(job, thresholds)
        ran_s = row.attained_gpu_s / job.spec.width
        queue = order.queue_of(row.attained_gpu_s, thresholds)
        after_s = promoted_after(queue, ran_s, job.waited_s, self.settings.knob, self.settings.starve_limit_s)
        return after_s if row.promoted is None else None

    def _moved(
        self, live: list[Job], rack: Sequence[RackHost], wall_s: float, now_s: float
    ) -> list[Demoted | Upgraded]:
        """Jobs of class auto that waited too long for their quota, and demoted ones whose quota has room by now. They
        come before any start, so nothing else is decided in the same look. A tenant without a quota has none to wait
        for: its jobs stay what they are."""
        moved: list[Demoted | Upgraded] = []
        for job in live:
            waited_s = now_s - self.waiting_since.get(job.id, now_s)
            late = classes.is_late(job.job_class, waited_s, self.settings.demote_after_s)
            if job.state == "queued" and late and self.queue.quota(job.spec.tenant) is not None:
                moved.append(Demoted(wall_s=wall_s, job=job.id, epoch=job.epoch, waited_s=round(waited_s, 3)))
        guests = [job for job in live if job.state == "running" and job.demoted is not None and not job.counts]
        ground = (
            PlainGround(self.queue, {host.host: host.gpus for host in rack if host.gone_s is None}) if guests else None
        )
        spent: dict[str, int] = {}
        for job in guests:
            tenant, gpus = job.spec.tenant, job.spec.gpus
            free = self.queue.free_quota(tenant)
            left = None if free is None else free - spent.get(tenant, 0)
            if ground is not None and classes.may_upgrade(gpus, left, ground.closed(job)):
                spent[tenant] = spent.get(tenant, 0) + gpus
                ground.count(job)
                moved.append(Upgraded(wall_s=wall_s, job=job.id, epoch=job.epoch))
        return moved

    def _elapsed(self, live: list[Job], wall_s: float, now_s: float) -> list[Elapsed]:
        """Tell the log from time to time for how long somebody has been waiting, so that the next leader knows."""
        passed_s = 0.0 if self.clock_at is None else now_s - self.clock_at
        waits = any(job.state in ("queued", "placing") for job in live)
        self.clock_s = max(self.clock_s, self.queue.clock_s) + (passed_s if waits else 0.0)
        self.clock_at = now_s
        if self.clock_s - self.queue.clock_s < self.settings.checkpoint_s:
            return []
        return [Elapsed(wall_s=wall_s, clock_s=round(self.clock_s, 3))]

    def _order(self, live: list[Job], rack: Sequence[RackHost], wall_s: float) -> list[AboutJob]:
        """Who starts and who stops. A job that just failed to be placed sits some decisions out."""
        totals = {host.host: host.gpus for host in rack if host.gone_s is None}
        return PlainAdmission(self.queue, self.settings, totals, set(self.retry_at), wall_s).decide(live)


class PlainAdmission:
    """One look. `pausing`: jobs that sit this decision out and hold nothing up."""

    def __init__(
        self,
        queue: Queue,
        settings: SchedulerSettings,
        totals: Mapping[HostId, int],
        pausing: Set[JobId],
        wall_s: float,
    ) -> None:
        self.queue, self.settings, self.wall_s = queue, settings, wall_s
        self.capacity = PlainGround(queue, totals)
        self.pausing = pausing
        self.packlimit = packlimit(queue, settings)
        self.coordinators = dict.fromkeys(totals, 0)
        """Gangs that each host looks for a place for."""
        self.spent: dict[str, int] = {}
        """Quota given away in this look, per tenant."""
        self.commands: list[AboutJob] = []
        self.short: list[Job] = []
        """Chosen, and not granted for want of GPUs or quota."""
        self.lacks_gpus: list[Job] = []
        """Those of them that are within their quota."""
        self.placing = [job for job in queue.live() if job.state == "placing"]
        for job in queue.live():
            if job.state == "placing" and job.coordinator in self.coordinators:
                self.coordinators[job.coordinator] += 1

    def decide(self, live: Sequence[Job]) -> list[AboutJob]:
        """`live`: jobs that are not over and that nothing else was decided about."""
        jobs = {job.id: job for job in live}
        apart = [job for job in live if _away(job, self.capacity.totals)]
        fixed = {job.id for job in apart} | {job.id for job in live if job.state == "stopping"}
        may_run = [job for job in live if job.id not in fixed and job.id not in self.pausing]
        guaranteed = [job for job in may_run if job.counts]
        chosen = self._choose(guaranteed, apart, live)
        self.unchosen = [jobs[id] for id in chosen.preempt if jobs[id].state == "running"]
        if self.coordinators:
            self._give_back_if_stale(chosen.run)
            for id in chosen.run:
                if jobs[id].state == "queued":
                    self._admit(jobs[id])
            self._preempt()
            for job in may_run:
                if not job.counts and job.state == "queued" and not self._would_be_in_the_way() and self._fits(job):
                    self._grant(job)
        return self.commands

    def _would_be_in_the_way(self) -> bool:
        """Gangs count on GPUs, and the log keeps some for another one."""
        granted = {command.job for command in self.commands if isinstance(command, Granted)}
        count = {id for id, _ in self.capacity.claims}
        count |= {
            job.id
            for job in self.queue.live()
            if job.counts and job.place_failures and (job.state == "placing" or job.id in granted)
        }
        keeper = self.capacity.keeper
        return keeper is not None and bool(count - {keeper})

    def _choose(self, guaranteed: Sequence[Job], apart: Sequence[Job], live: Sequence[Job]) -> order.Selection:
        queue, thresholds = self.queue, self.settings.queue_thresholds_gpu_s
        default = queue.quotas.get("*")
        totals = self.capacity.totals
        within = sum(totals.values()) - sum(sum(held_by(job, totals).values()) for job in apart if job.counts)
        rows = [row_of(job, thresholds) for job in guaranteed]
        if not self.settings.preemption:  # whoever runs stays, also beside those of a higher queue
            rows = [msgspec.structs.replace(row, attained_gpu_s=0.0) if row.running else row for row in rows]
        rows = order.ordered(rows, thresholds, queue.quotas, default, self.settings.narrow_first)
        return classes.choose(rows, within, self._quotas_beside(apart, live), default)

    def _quotas_beside(self, apart: Sequence[Job], live: Sequence[Job]) -> dict[str, int | None]:
        """What is left of each tenant's quota beside its jobs that wait for a host."""
        quotas = {job.spec.tenant: self.queue.quota(job.spec.tenant) for job in live}
        for job in apart:
            quota = quotas[job.spec.tenant]
            if quota is not None and job.counts:
                quotas[job.spec.tenant] = max(0, quota - job.spec.gpus)
        return quotas

    # ---- one job ----

    def _admit(self, job: Job) -> None:
        """A guaranteed job that should run: grant it, or see to it that it can be granted."""
        quota = self.queue.quota(job.spec.tenant)
        used = self.queue.used(job.spec.tenant) + self.spent.get(job.spec.tenant, 0)
        if quota is not None and used + job.spec.gpus > quota:
            self.short.append(job)
        elif self._fits(job):
            self._grant(job)
        elif job.spec.gpus:
            self.short.append(job)
            self.lacks_gpus.append(job)
            self._clear_the_way(job)

    def _fits(self, job: Job) -> bool:
        if not job.spec.gpus and job.spec.pack == "apart":
            return len(self.capacity.totals) >= job.spec.workers
        free = self.capacity.free_for(job)
        return job.spec.gpus <= max(0, sum(free.values()) - self.capacity.placing) and fits_whole(job, free)

    def _plan(self, job: Job, free: Mapping[HostId, int]) -> dict[HostId, int]:
        """GPUs by host where its coordinator would put it; empty when it does not fit whole."""
        spec = job.spec
        if not spec.gpus_per_worker:
            return {}
        skew = self.queue.models.shown_skew(spec, job.tensors)
        workers = place(free, spec.workers, spec.gpus_per_worker, skew, self.packlimit, spec.pack) or {}
        return {host: count * spec.gpus_per_worker for host, count in workers.items()}

    def _grant(self, job: Job) -> None:
        self.capacity.take(self._plan(job, self.capacity.free_for(job)), job.counts)
        if job.counts:
            self.spent[job.spec.tenant] = self.spent.get(job.spec.tenant, 0) + job.spec.gpus
        coordinator = min((count, host) for host, count in self.coordinators.items())[1]
        self.coordinators[coordinator] += 1
        self.commands.append(Granted(wall_s=self.wall_s, job=job.id, epoch=job.epoch + 1, coordinator=coordinator))

    def _clear_the_way(self, job: Job) -> None:
        """It is within its quota, and no place is free: stop opportunistic jobs when that helps, or keep what is
        there."""
        ground, spec = self.capacity, job.spec
        for other in sorted(self.placing, key=lambda other: other.granted):
            plan = self._plan(other, ground.free_for(other))
            ground.take(plan, other.counts)
            ground.placing -= sum(plan.values())
        self.placing = []
        if ground.keeper != job.id and not fits_whole(job, ground.free_for(job)):
            soon = self._soon_free(job)
            if fits_whole(job, soon):
                ground.claims.append((job.id, self._plan(job, soon)))
                return
        open_gpus, unclaimed = ground.open_for(job), ground._unclaimed()
        rival = self.queue.jobs.get(ground.keeper) if ground.keeper not in (None, job.id) else None
        if rival is not None and self._outranks(job, rival) and not fits_whole(job, ground.free_for(job)):
            open_gpus = unclaimed
        coming = {host: unclaimed[host] - ground.staying[host] for host in open_gpus}
        stop = victims(coming, ground.opportunistic, lambda free: fits_whole(job, _least(free, open_gpus)))
        if stop is None:
            mine = ground.kept if ground.keeper == job.id else {}
            kept = classes.gpus_to_keep(mine, open_gpus, ground.totals, spec.workers, spec.gpus_per_worker, spec.pack)
            self._keep(job, kept)
            return
        for id, held in [guest for guest in ground.opportunistic if guest[0] in stop]:
            said = f"{job.id} (tenant {spec.tenant}, {explain.gpus(spec.gpus)}) is guaranteed and comes first"
            self.commands.append(taken_back(self.queue.jobs[id], "preempted", said, self.wall_s))
            for host, gpus in held.items():
                coming[host] += gpus
                ground.staying[host] -= gpus
        ground.opportunistic = [guest for guest in ground.opportunistic if guest[0] not in stop]
        plan = self._plan(job, _least(coming, open_gpus))
        if stop or not fits_whole(job, ground.free_for(job)):
            self._keep(job, plan)
            ground.claims.append((job.id, plan))
        else:
            ground.take(plan, True)

    def _soon_free(self, job: Job) -> Gpus:
        """Free, of jobs that stop, and of those that stop for it."""
        ground = self.capacity
        soon = {host: gpus - ground.staying[host] for host, gpus in ground.open_for(job).items()}
        able = self.settings.preemption and not job.place_failures
        for other in [other for other in self.unchosen if able and self._may_displace(job, other)]:
            soon = _plus(soon, held_by(other, ground.totals), 1)
        return {host: max(0, gpus) for host, gpus in soon.items()}

    def _keep(self, job: Job, gpus: Mapping[HostId, int]) -> None:
        """Keep these, all that the gang has, unless another gang keeps some. A promise outdoes a tenant without."""
        ground = self.capacity
        other = self.queue.jobs.get(ground.keeper) if ground.keeper not in (None, job.id) else None
        if gpus and other is not None and self._outranks(job, other):
            self._give_back(other)
        if gpus and classes.may_keep(job.id, ground.keeper) and gpus != ground.kept:
            self.commands.append(GpusKept(wall_s=self.wall_s, job=job.id, epoch=job.epoch, gpus=dict(gpus)))
            ground.keeper, ground.kept = job.id, dict(gpus)

    def _outranks(self, job: Job, other: Job) -> bool:
        return other.state == "queued" and self._has_quota(job) and not self._has_quota(other)

    def _give_back(self, job: Job) -> None:
        self.commands.append(GpusKept(wall_s=self.wall_s, job=job.id, epoch=job.epoch, gpus={}))
        self.capacity.keeper, self.capacity.kept = None, {}

    def _give_back_if_stale(self, chosen: Sequence[JobId]) -> None:
        """Whoever keeps GPUs and should not run any more, because its tenant's other jobs come first now."""
        id = self.capacity.keeper
        job = self.queue.jobs.get(id) if id is not None else None
        if job is not None and job.state == "queued" and job.id not in chosen and job.id not in self.pausing:
            self._give_back(job)

    def _has_quota(self, job: Job) -> bool:
        return self.queue.quota(job.spec.tenant) is not None

    def _preempt(self) -> None:
        """Guaranteed jobs that the order passed over stop for those it chose: of the same tenant, or, without a quota,
        for anybody's. Not for one that could not be placed before: what it lacks is not GPUs."""
        able = [job for job in self.short if not job.place_failures]
        if not self.settings.preemption:
            return
        for other in self.unchosen:
            first = next((job for job in able if self._may_displace(job, other)), None)
            if first is not None:
                said = f"{first.id} (tenant {first.spec.tenant}, {explain.gpus(first.spec.gpus)}) comes first"
                self.commands.append(taken_back(other, "preempted", said, self.wall_s))

    def _may_displace(self, job: Job, other: Job) -> bool:
        return job.spec.tenant == other.spec.tenant or (job in self.lacks_gpus and not self._has_quota(other))


class PlainGround:
    """At one look. `totals`: GPUs of each host that is alive."""

    def __init__(self, queue: Queue, totals: Mapping[HostId, int]) -> None:
        self.queue = queue
        self.totals = dict(sorted(totals.items()))
        self.free: Gpus = dict(self.totals)
        """Nobody's."""
        self.open: Gpus = dict(self.totals)
        """No guaranteed job's."""
        self.staying: Gpus = dict.fromkeys(self.totals, 0)
        """Held by opportunistic jobs that nobody told to stop."""
        self.opportunistic: list[tuple[JobId, Gpus]] = []
        """Opportunistic jobs that run, newest first, and the GPUs of each."""
        self.keeper = queue.keeper
        self.kept = dict(queue.kept)
        self.claims: list[tuple[JobId, Gpus]] = []
        """What gangs of this look count on once it is free."""
        self.placing = 0
        """GPUs of gangs that are being placed, wherever."""
        for job in queue.live():
            self._count(job)
        self.opportunistic.reverse()
        for gpus in (self.free, self.open):
            gpus.update({host: 0 for host, count in gpus.items() if count < 0})  # a host whose GPU broke

    def _count(self, job: Job) -> None:
        if job.state == "placing":
            self.placing += job.spec.gpus
        held = held_by(job, self.totals)
        for host, gpus in held.items():
            self.free[host] -= gpus
            if job.counts and job.state != "stopping":
                self.open[host] -= gpus
            elif job.state == "running":
                self.staying[host] += gpus
        if held and not job.counts and job.state == "running":
            self.opportunistic.append((job.id, held))

    @property
    def kept_whole(self) -> bool:
        """Whether all GPUs of a gang are reserved: it is about to start on them."""
        gang = self.queue.jobs.get(self.keeper) if self.keeper is not None else None
        return gang is not None and sum(self.kept.values()) == gang.spec.gpus

    def free_for(self, job: Job) -> Gpus:
        """GPUs that this job may start on now."""
        mine = classes.may_keep(job.id, self.keeper) or (not job.counts and not self.kept_whole)
        if mine and not self.claims:
            return self.free
        stay = self.kept_whole or self.claims
        kept = {} if mine else self._reserved_and_unclaimed()
        left = {host: gpus - (self.staying[host] if stay else 0) for host, gpus in self._unclaimed().items()}
        return {host: max(0, min(free, left[host] - kept.get(host, 0))) for host, free in self.free.items()}

    def _unclaimed(self) -> Gpus:
        claimed = {host: sum(gpus.get(host, 0) for _, gpus in self.claims) for host in self.open}
        return {host: max(0, gpus - claimed[host]) for host, gpus in self.open.items()}

    def _reserved_and_unclaimed(self) -> Gpus:
        return {} if any(id == self.keeper for id, _ in self.claims) else self.kept

    def open_for(self, job: Job) -> Gpus:
        """GPUs that a guaranteed job may wait for: opportunistic ones would stop for it."""
        if classes.may_keep(job.id, self.keeper):
            return self._unclaimed()
        kept = self._reserved_and_unclaimed()
        return {host: max(0, gpus - kept.get(host, 0)) for host, gpus in self._unclaimed().items()}

    def closed(self, job: Job) -> bool:
        """Whether a job that runs holds a GPU that is kept for a gang: counting it would break the reservation."""
        held = held_by(job, self.totals)
        return any(self.open[host] - gpus < self.kept.get(host, 0) for host, gpus in held.items())

    def count(self, job: Job) -> None:
        """An opportunistic job that runs is guaranteed from now on."""
        for host, gpus in held_by(job, self.totals).items():
            self.open[host] -= gpus
            self.staying[host] -= gpus

    def take(self, gpus: Mapping[HostId, int], counts: bool) -> None:
        """From now on these are somebody's."""
        for host, count in gpus.items():
            self.free[host] = max(0, self.free[host] - count)
            if counts:
                self.open[host] = max(0, self.open[host] - count)


def victims(
    free: Mapping[HostId, int],
    guests: Sequence[tuple[JobId, Mapping[HostId, int]]],
    fits: Callable[[Mapping[HostId, int]], bool],
) -> list[JobId] | None:
    """Newest first until the gang fits, then back whoever was not needed; every host is counted anew each time."""
    have, stopped = dict(free), 0
    while not fits(have):
        if stopped == len(guests):
            return None
        have = _plus(have, guests[stopped][1], 1)
        stopped += 1
    chosen = list(guests[:stopped])
    for guest in reversed(guests[:stopped]):
        without = _plus(have, guest[1], -1)
        if fits(without):
            have = without
            chosen.remove(guest)
    return [guest for guest, _ in chosen]


def _plus(free: Mapping[HostId, int], more: Mapping[HostId, int], sign: int) -> dict[HostId, int]:
    return dict(free) | {host: free.get(host, 0) + sign * gpus for host, gpus in more.items()}


def _least(one: Mapping[HostId, int], other: Mapping[HostId, int]) -> dict[HostId, int]:
    return {host: max(0, min(gpus, other.get(host, 0))) for host, gpus in one.items()}


def _away(job: Job, alive: Mapping[HostId, int]) -> bool:
    """Whether a running gang waits for a host that is not alive."""
    return job.state == "running" and any(place.host not in alive for place in job.places if job.awaits(place.host))
