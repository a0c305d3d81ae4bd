"""The leader's decision, plain: it looks at every job and sorts them all anew at every look. `machine/leader/leader.py`
has to propose what this proposes; it was written from this."""

import math
from collections.abc import Iterable, Sequence, Set

from covey.core.ids import HostId, JobId
from covey.core.units import format_seconds
from plugins.scheduler.machine.leader.admission import taken_back
from plugins.scheduler.machine.leader.leader import RETRY_S, ProposeCommand, RackHost, ScheduleTick
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job, row_of
from plugins.scheduler.messages.arrays import tasks_of
from plugins.scheduler.messages.commands import (
    AboutJob,
    BeginReached,
    Command,
    Demoted,
    Elapsed,
    Leads,
    Promoted,
    QuotaSet,
    TakenBack,
    TaskBegun,
    TimeLimitReached,
    Upgraded,
)
from plugins.scheduler.policy import classes, order
from plugins.scheduler.policy.leases import terms
from plugins.scheduler.policy.order import due_after, due_second, is_calm, promoted_after, stoppable_for, widest_narrow
from plugins.scheduler.policy.settings import SchedulerSettings
from tests.plugins.scheduler.plain_admission import Decided, PlainAdmission
from tests.plugins.scheduler.plain_ground import PlainGround


class PlainLeader:
    """The soft state of the host that leads."""

    def __init__(self, queue: JobTable, settings: SchedulerSettings) -> None:
        self.queue = queue
        self.settings = settings
        self.placing_since: dict[tuple[JobId, int], float] = {}
        self.waiting_since: dict[JobId, float] = {}
        self.missing_since: dict[HostId, float] = {}
        self.failures: dict[JobId, int] = {}
        self.retry_at: dict[JobId, float] = {}
        self.clock_s = 0.0
        """The log's clock as counted on since `clock_at`."""
        self.clock_at: float | None = None
        self.over_s = terms(settings.host_lost_after_s).over_s
        self.paused_s = terms(settings.host_lost_after_s).paused_s
        self.led_s: float | None = None
        self.earlier_s = 0.0
        self.confirmed_s: dict[HostId, float] = {}
        """When the leases of each host's ranks were last confirmed."""
        self.closed: set[tuple[HostId, JobId, int]] = set()
        """The grants that are being taken back."""
        self.clocks, self.saves = PlainClocks(queue, settings), PlainSaves(settings)

    def forget(self) -> None:
        """Forget: this host leads no more, or only now."""
        self.placing_since, self.waiting_since, self.missing_since = {}, {}, {}
        self.failures, self.retry_at = {}, {}
        self.clock_s, self.clock_at = 0.0, None
        self.led_s = None
        self.confirmed_s, self.closed = {}, set()
        self.clocks, self.saves = PlainClocks(self.queue, self.settings), PlainSaves(self.settings)

    def confirm(self, host: HostId, grants: Sequence[tuple[JobId, int]], now_s: float) -> list[tuple[JobId, int]]:
        """Confirm leases of this host's ranks."""
        if self.led_s is None:
            self.led_s, self.earlier_s = now_s, max(self.queue.leases_over_s, self.over_s)
        found = [grant for grant in grants if (host, *grant) not in self.closed and self._on(host, *grant)]
        if found:
            self.confirmed_s[host] = now_s
        return found

    def _on(self, host: HostId, id: JobId, epoch: int) -> bool:
        job = self.queue.jobs.get(id)
        return job is not None and job.grant.epoch == epoch and job.awaits(host)

    def _over(self, host: HostId, now_s: float) -> bool:
        assert self.led_s is not None
        until_s = max(self.led_s + self.earlier_s, self.confirmed_s.get(host, -1e9) + self.over_s)
        return now_s >= until_s

    def handle(self, event: ScheduleTick, now_s: float) -> Sequence[ProposeCommand]:
        self.confirm(HostId("nobody"), (), now_s)
        live = self.queue.live()
        self._remember(live, now_s)
        self.saves.look(self.queue.jobs.values(), live, event.wall_s, now_s)
        gone = self._gone(event.rack, live, now_s)
        about: list[AboutJob] = [
            *self._lost(live, gone, event.wall_s, now_s),
            *self._time_limit_reached(live, event.wall_s),
        ]
        about += self._drained(live, event.rack, {command.job for command in about}, event.wall_s)
        size = sum(self._totals(event.rack).values())
        promoted = self._starved(live, self.clocks.due(live, size, now_s), event.wall_s, now_s)
        about += promoted
        settled = {command.job for command in about}
        rest = [job for job in live if job.id not in settled and (job.may_start or job.state != "queued")]
        moved = self._moved(rest, event.rack, event.wall_s, now_s)
        free = self._freed(live, event.wall_s)
        starts = self._order(rest, event.rack, event.wall_s) if not moved and not promoted and not free else []
        commands: list[Command] = [*self._initial_quotas(event.wall_s), *self._elapsed(live, event.wall_s, now_s)]
        commands += [*self._shorter_leases(event, now_s), *about]
        return [ProposeCommand(command) for command in [*commands, *moved, *free, *starts]]

    def _freed(self, live: list[Job], wall_s: float) -> list[BeginReached | TaskBegun]:
        """Jobs whose time has come, and tasks of arrays that may begin."""
        late = [(job.holds.begin_wall_s, job.id) for job in live if job.state == "queued" and job.holds.begin_wall_s]
        found: list[BeginReached | TaskBegun] = [
            BeginReached(wall_s=wall_s, job=id) for begin_s, id in sorted(late) if begin_s <= wall_s
        ]
        for array in live:
            if array.array is None or not array.is_free or array.array.closed:
                continue
            tasks, record = tasks_of(array.spec.array), array.array
            left = [tasks.at(place) for place in range(record.begun, tasks.count) if not _in(place, record.left_out)]
            waits = any(self.queue.jobs[id].may_start for id in record.live.values())
            if left and left[0] is not None and len(record.live) < tasks.at_once and not waits:
                found.append(TaskBegun(wall_s=wall_s, job=array.id, index=left[0]))
        return found

    def check(self) -> None:
        """Raise AssertionError when something is remembered about jobs that are over."""
        for id in [*self.waiting_since, *self.retry_at, *self.failures]:
            job = self.queue.jobs.get(id)
            assert job is not None, f"{id} is remembered and unknown"

    # ---- what it remembers ----

    def _remember(self, live: list[Job], now_s: float) -> None:
        placing = {(job.id, job.grant.epoch) for job in live if job.state == "placing"}
        self.placing_since = {key: self.placing_since.get(key, now_s) for key in sorted(placing)}
        waiting = [job for job in live if job.may_start or job.state == "placing"]
        known_s = {
            job.id: self.queue.clock_s - job.priority.queued_s if self.clock_at is None else 0.0 for job in waiting
        }
        self.waiting_since = {id: self.waiting_since.get(id, now_s - max(0.0, s)) for id, s in known_s.items()}
        for job in live:
            failures = job.tally.place_failures + job.tally.requeues + job.tally.failures
            if failures > self.failures.get(job.id, 0):
                self.retry_at[job.id] = now_s + RETRY_S[min(failures, len(RETRY_S)) - 1]
            self.failures[job.id] = failures
        known = {job.id for job in live}
        self.failures = {id: count for id, count in self.failures.items() if id in known}
        self.retry_at = {id: at for id, at in self.retry_at.items() if id in known and at > now_s}

    def _gone(self, rack: Sequence[RackHost], live: list[Job], now_s: float) -> dict[HostId, float]:
        """Seconds for which each host that matters is gone; one that gossip never named counts from now."""
        named = {host.host: host.gone_s for host in rack}
        wanted = {place.host for job in live if job.placed for place in job.start.places if job.awaits(place.host)}
        wanted |= {
            job.grant.coordinator for job in live if job.state == "placing" and job.grant.coordinator is not None
        }
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
                lost = [place.host for place in job.start.places if job.awaits(place.host)]
                lost = [host for host in lost if self._is_lost(job, host, gone.get(host, -1.0), now_s)]
                if lost:
                    self.closed |= {(host, job.id, job.grant.epoch) for host in lost}
                    said = ", ".join(f"{host} has been gone for {format_seconds(gone.get(host, 0.0))}" for host in lost)
                    commands.append(taken_back(job, "host lost", said, wall_s, tuple(lost)))
            elif job.state == "placing" and job.grant.coordinator is not None:
                if gone.get(job.grant.coordinator, -1.0) >= self.settings.coordinator_lost_after_s:
                    said = f"{job.grant.coordinator}, which searched for its GPUs, is gone"
                    commands.append(taken_back(job, "coordinator lost", said, wall_s))
                elif now_s - self.placing_since[job.id, job.grant.epoch] > self.settings.placing_limit_s:
                    commands.append(
                        taken_back(job, "placing took too long", f"{job.grant.coordinator} did not place it", wall_s)
                    )
        return commands

    def _drained(self, live: list[Job], rack: Sequence[RackHost], told: Set[JobId], wall_s: float) -> list[TakenBack]:
        """Jobs taken back from hosts that are drained with `stop_jobs`; no job heals here."""
        found: list[TakenBack] = []
        for host, drain in sorted(self.queue.drained.items()):
            alive = any(named.host == host and named.gone_s is None for named in rack)
            for job in live if alive and drain.stop_jobs else ():
                known = {*told, *(command.job for command in found)}
                if job.state == "running" and job.awaits(host) and job.id not in known:
                    found.append(taken_back(job, "preempted", f"{host} is drained, by {drain.by}", wall_s))
        return found

    def _totals(self, rack: Sequence[RackHost]) -> dict[HostId, int]:
        alive = {host.host: host.gpus for host in rack if host.gone_s is None}
        return {host: 0 if host in self.queue.drained else gpus for host, gpus in alive.items()}

    def _shorter_leases(self, event: ScheduleTick, now_s: float) -> list[Leads]:
        assert self.led_s is not None
        over = now_s >= self.led_s + self.earlier_s
        if not over or self.queue.leases_over_s <= self.over_s:
            return []
        return [Leads(wall_s=event.wall_s, term=event.term, leases_over_s=self.over_s, pauses_over_s=self.paused_s)]

    def _is_lost(self, job: Job, host: HostId, gone_s: float, now_s: float) -> bool:
        if (host, job.id, job.grant.epoch) in self.closed:
            return True
        gone = gone_s >= self.settings.host_lost_after_s
        return gone and job.spec.on_lost != "keep" and self._over(host, now_s)

    def _time_limit_reached(self, live: list[Job], wall_s: float) -> list[TimeLimitReached]:
        """Jobs that reached their time limit. Running time is attained service over the gang's width, so it counts
        across attempts and leaders."""
        over = [
            job
            for job in live
            if job.state == "running"
            and job.spec.runs_for_s is not None
            and job.attained_gpu_s / job.spec.width - job.times.limit_from_s >= job.spec.runs_for_s
        ]
        return [TimeLimitReached(wall_s=wall_s, job=job.id, epoch=job.grant.epoch) for job in over]

    def _starved(self, live: list[Job], gangs: list[Job], wall_s: float, now_s: float) -> list[Promoted]:
        """Promotions by STARVELIMIT, PROMOTEKNOB and the clocks of wide gangs, of guaranteed jobs: the others have no
        place in the order."""
        waiting = [job for job in live if job.may_start and job.counts]
        since_s = self.waiting_since
        after_s = {job.id: self._starved_after(job) for job in waiting}
        starved = [
            (due_second(since_s[job.id], after), job.number, job)
            for job in waiting
            if (after := after_s[job.id]) is not None and now_s - since_s[job.id] >= after
        ]
        known = {job.id for *_, job in starved}
        starved += [(due_second(now_s, 0.0), job.number, job) for job in gangs if job.id not in known]
        starved.sort(key=lambda each: each[:2])
        return [Promoted(wall_s=wall_s, job=job.id, epoch=job.grant.epoch, lasts=job in gangs) for *_, job in starved]

    def _starved_after(self, job: Job) -> float | None:
        thresholds = self.settings.queue_thresholds_gpu_s
        row = row_of(job, thresholds)
        ran_s = row.attained_gpu_s / job.spec.width
        queue = order.queue_of(row.attained_gpu_s, thresholds)
        after_s = promoted_after(queue, ran_s, job.priority.waited_s, self.settings.knob, self.settings.starve_limit_s)
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
                moved.append(Demoted(wall_s=wall_s, job=job.id, epoch=job.grant.epoch, waited_s=round(waited_s, 3)))
        guests = [job for job in live if job.state == "running" and job.priority.demoted is not None and not job.counts]
        ground = PlainGround(self.queue, self._totals(rack)) if guests else None
        spent: dict[str, int] = {}
        for job in guests:
            tenant, gpus = job.spec.tenant, job.spec.gpus
            free = self.queue.free_quota(tenant)
            left = None if free is None else free - spent.get(tenant, 0)
            if ground is not None and classes.may_upgrade(gpus, left, ground.closed(job)):
                spent[tenant] = spent.get(tenant, 0) + gpus
                ground.count(job)
                moved.append(Upgraded(wall_s=wall_s, job=job.id, epoch=job.grant.epoch))
        return moved

    def _elapsed(self, live: list[Job], wall_s: float, now_s: float) -> list[Elapsed]:
        """Tell the log from time to time for how long somebody has been waiting, so that the next leader knows."""
        passed_s = 0.0 if self.clock_at is None else now_s - self.clock_at
        waits = any(job.may_start or job.state == "placing" for job in live)
        self.clock_s = max(self.clock_s, self.queue.clock_s) + (passed_s if waits else 0.0)
        self.clock_at = now_s
        if self.clock_s - self.queue.clock_s < self.settings.checkpoint_s:
            return []
        return [Elapsed(wall_s=wall_s, clock_s=round(self.clock_s, 3))]

    def _order(self, live: list[Job], rack: Sequence[RackHost], wall_s: float) -> list[AboutJob]:
        """Decide who starts and who stops. A job that just failed to be placed sits some decisions out."""
        known = Decided(set(self.retry_at), self.saves.firm)
        return PlainAdmission(self.queue, self.settings, self._totals(rack), known, wall_s).decide(live)


def _in(place: int, ranges: Sequence[tuple[int, int]]) -> bool:
    return any(first <= place <= last for first, last in ranges)


class PlainSaves:
    """Which jobs are firm (`machine/leader/firm_jobs.py`), told of everybody at every look."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.seen: dict[tuple[JobId, int], tuple[float, int, float | None]] = {}
        """Job and epoch -> since when it is seen to run, the step of its newest checkpoint, and when that was."""
        self.open: dict[JobId, tuple[tuple[object, ...], float]] = {}
        """What each job has to lose, and until when it may be stopped."""
        self.firm: set[JobId] = set()
        self.stops: dict[JobId, tuple[str, bool, int]] = {}
        """Every job that was there -> its tenant, whether it saved when told to end, and how often it was stopped."""

    def look(self, table: Iterable[Job], live: list[Job], wall_s: float, now_s: float) -> None:
        seen, opened, most = self.seen, self.open, self.settings.unsaved_stops
        self.seen, self.open, self.firm = {}, {}, set()
        for job in table:
            told = job.state == "stopping" and job.ending.cause == "preempted"
            self.stops[job.id] = job.spec.tenant, job.measured.saves_at_stop, job.tally.preemptions - told
        for job in live:
            loses = job.counts and not (job.spec.elastic or job.healing.may_be_lost or job.measured.saves_at_stop)
            if job.state != "running" or not loses:
                continue
            since_s, step, saved_s = seen.get((job.id, job.grant.epoch), (now_s, -1, None))
            saved = job.measured.saved
            if saved is not None and saved.step != step:
                step, saved_s = saved.step, now_s - max(0.0, wall_s - saved.wall_s)
            self.seen[job.id, job.grant.epoch] = since_s, step, saved_s
            restart_s = self.settings.restart_s if job.bill.restart_s is None else job.bill.restart_s
            run = since_s, saved_s, self._spent(job), restart_s
            was = opened.get(job.id)
            until_s = self._until(*run, now_s) if was is None or was[0] != run else was[1]
            self.open[job.id] = run, until_s
            if most is not None and now_s >= until_s:
                self.firm.add(job.id)

    def _spent(self, job: Job) -> bool:
        most = self.settings.unsaved_stops or 0
        stops = [(saves, lost) for tenant, saves, lost in self.stops.values() if tenant == job.spec.tenant]
        lost, saved = sum(lost for saves, lost in stops if not saves), sum(saves for saves, _ in stops)
        own = job.tally.preemptions >= max(1, most) and job.measured.saved is None
        return own or lost >= most * (1 + saved)

    def _until(self, since_s: float, saved_s: float | None, spent: bool, restart_s: float, now_s: float) -> float:
        if saved_s is None:
            return -math.inf if spent else math.inf
        left_s = stoppable_for(now_s - since_s, now_s - max(saved_s, since_s), restart_s)
        return -math.inf if left_s < 0 else now_s + left_s + 1


class PlainClocks:
    """The clocks of wide gangs (`machine/leader/gang_clocks.py`), told of everybody at every look."""

    def __init__(self, queue: JobTable, settings: SchedulerSettings) -> None:
        self.queue, self.settings = queue, settings
        self.waited_s: dict[JobId, float] = {}
        self.pool_of: dict[JobId, str | None] = {}
        self.run: list[JobId] = []
        """Gangs whose clock has run since the last look."""
        self.at_s = 0.0

    def due(self, live: list[Job], size: int, now_s: float) -> list[Job]:
        """Gangs that are to be promoted."""
        for id in self.run:
            self.waited_s[id] = self.waited_s.get(id, 0.0) + now_s - self.at_s
        self.at_s, self.run = now_s, []
        if self.settings.gang_patience_s is None:
            return []
        counted = [job for job in live if job.counts and job.spec.gpus]
        counted = [job for job in counted if job.may_start or job.state != "queued"]
        known = {job.id for job in counted}
        self.waited_s = {id: s for id, s in self.waited_s.items() if id in known}
        self.pool_of = {id: pool for id, pool in self.pool_of.items() if id in known}
        found: list[Job] = []
        pools: dict[str | None, list[Job]] = {}
        for job in counted:
            tenant = job.spec.tenant if self.queue.quota(job.spec.tenant) is not None else None
            pools.setdefault(tenant, []).append(job)
            if self.pool_of.get(job.id, tenant) != tenant:
                self.waited_s.pop(job.id, None)
            self.pool_of[job.id] = tenant
        taken = sum(self.queue.used(tenant) for tenant in pools if tenant is not None)
        for tenant, jobs in pools.items():
            pool = max(0, size - taken if tenant is None else min(size, self.queue.quota(tenant) or 0))
            found += self._of_pool(jobs, pool, self.settings.gang_patience_s)
        return found

    def _of_pool(self, jobs: list[Job], pool: int, patience_s: float) -> list[Job]:
        left, front = pool, []
        for job in sorted(jobs, key=lambda job: job.number):
            left -= job.spec.gpus
            if left < 0:
                break
            front.append(job)
        promoted = {job.id for job in jobs if row_of(job, self.settings.queue_thresholds_gpu_s).promoted is not None}
        for id in promoted:
            self.waited_s.pop(id, None)
        wide = [job for job in front if job.spec.gpus > widest_narrow(pool) and job.state == "queued"]
        wide = [job for job in wide if job.id not in promoted]
        asked = sum(job.spec.gpus for job in jobs) - sum(job.spec.gpus for job in wide)
        self.run += [job.id for job in wide if is_calm(asked, pool)]
        return [
            job
            for job in wide
            if not due_after(patience_s, job.ran_since_promotion_s(0.0), self.waited_s.get(job.id, 0.0))
        ]
