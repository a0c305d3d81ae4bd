"""What people and programs see of jobs and quotas, from this host's copy of the log and what gossip says."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec

from covey.core.carried import for_people
from covey.core.errors import Refused
from covey.core.ids import HostId, JobId
from plugins.facts import HostView, StepTiming
from plugins.gossiped import GpusNow, MemoryHere
from plugins.scheduler.machine.books.job_record import ended_as
from plugins.scheduler.machine.gang.rank_signs import is_beside
from plugins.scheduler.machine.leader.capacity import Capacity
from plugins.scheduler.machine.leader.firm_jobs import TenantStops, is_spent, never_saved
from plugins.scheduler.machine.leader.leader import RackHost
from plugins.scheduler.machine.leader.promises import HostPromises
from plugins.scheduler.machine.leader.shared_capacity import SharedCapacity, SharedGpus, Sharing
from plugins.scheduler.machine.log.beside import beside
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import HOLDING, Cause, Job, row_of
from plugins.scheduler.machine.log.replacing import why_not
from plugins.scheduler.machine.log.waiting.array_tasks import told
from plugins.scheduler.machine.log.waiting.dependents import parts_of
from plugins.scheduler.messages.options import AUTO
from plugins.scheduler.messages.wire import CurvePoint, JobNowAnswer
from plugins.scheduler.policy import explain, order
from plugins.scheduler.policy.carrying import is_equal, shares_of
from plugins.scheduler.policy.classes import choose
from plugins.scheduler.policy.eligible import GangShape, capped, open_to, shape_of
from plugins.scheduler.policy.explain import QueuePositions
from plugins.scheduler.policy.fair import NO_USE, FairTurns
from plugins.scheduler.policy.hang import unseen
from plugins.scheduler.policy.settings import SchedulerSettings
from plugins.scheduler.policy.shared import device_of
from plugins.scheduler.service.gpus import shared_gpus
from plugins.start_views import TurnView
from plugins.views import (
    BesideView,
    ElasticView,
    JobLossesView,
    JobSeenView,
    JobTallyView,
    JobTimesView,
    JobView,
    QuotaView,
    RankView,
)

ARGV_LISTED = 4096
"""The most characters of a job's command in a list of jobs."""


class LogPart(msgspec.Struct, frozen=True):
    """Answer of `logs`: a part of one rank's output."""

    data: bytes
    offset: int
    """Position of the first byte of `data` in the output, bytes."""
    end: bool
    """Whether the rank has ended and nothing follows `data`."""
    host: HostId
    size: int
    """Bytes of output that there are now."""
    timed: bool | None = None
    """Whether all before `offset` is known to be older than `since_s`; None: that was not given."""


class CurvePointView(msgspec.Struct, frozen=True):
    """A step of a job, as the lowest rank reported it that one host has."""

    step: int
    step_s: float | None
    """Seconds; None: not known."""
    rank: int
    epoch: int
    metrics: dict[str, float]


class CurveView(msgspec.Struct, frozen=True):
    """Answer of `curve`."""

    id: JobId
    points: tuple[CurvePointView, ...]
    """In order of their steps: at most 512, evenly apart."""
    unanswered: tuple[HostId, ...]
    """Hosts that did not say what they know."""


def curve_view(id: JobId, points: Sequence[CurvePoint], silent: Sequence[HostId]) -> CurveView:
    each = (CurvePointView(it.step, it.step_s or None, it.rank, it.epoch, it.metrics) for it in points)
    return CurveView(id, tuple(each), tuple(silent))


def unknown(id: JobId, was: bool, host: HostId, caught_up: bool, age_s: float, current_s: float) -> Refused:
    """The refusal of a job that this host's copy of the log does not have. A copy that is not current cannot say that
    there never was such a job."""
    if was:
        return Refused(3, f"{id} is no longer kept", "it ended long ago", "agentctl jobs --all shows what is kept")
    what = f"{str(id)[:80]!r}"
    if not caught_up or age_s > current_s:
        why = f"its copy of the log is {age_s:.0f} s old" if caught_up else "it has just started"
        return Refused(75, f"{host} does not know {what}", why, "ask again, or another host (--agent)")
    return Refused(3, f"there is no job {what}", "no job ever had this id", "agentctl jobs --all")


def output_gone(job: Job, rank: int, host: HostId) -> Refused:
    """The refusal of output of a rank that has ended, and of which its host has no file."""
    why = f"{host} has none of it: it was removed for its age, number or size, or the rank never started there"
    limits = f"keep_ended_for, keep_ended and output_host_max of [jobs] in agent.toml of {host} say what is kept"
    what = f"the output of rank {rank} of {job.id} is no longer kept"
    return Refused(3, what, why, f"agentctl job {job.id} says how it ended; {limits}")


class CapacityView(msgspec.Struct, frozen=True):
    """Answer of `rack`: the hosts and GPUs that there are to run on."""

    hosts: int
    gpus_total: int
    gpus_free: int
    largest_host_gpus: int


class QueueSnapshot:
    """The order of all jobs at one moment, for saying what each of them waits for. Each part of it is computed once,
    when it is asked for, and only as long as the queue has the same `index`."""

    def __init__(
        self,
        queue: JobTable,
        settings: SchedulerSettings,
        totals: Mapping[HostId, int],
        shared: Mapping[HostId, SharedGpus] | None = None,
        out: Mapping[HostId, explain.GpusOut] | None = None,
        memory: Mapping[HostId, MemoryHere] | None = None,
    ) -> None:
        """`totals`: GPUs that take jobs, of each host that is alive; `shared`: what these say of their GPUs, where they
        are shared; `out`: GPUs of theirs that take none; `memory`: what hosts say of their memory, None: nobody
        asks."""
        self.queue, self.settings, self.totals, self.index = queue, settings, totals, queue.index
        self.shared, self.out, self.memory = shared, dict(out or {}), memory
        self._fits: dict[GangShape, bool] = {}
        """Whether there is room now for each shape of a gang."""
        self._scattered: dict[GangShape, str] = {}
        """Shape of a gang -> how the free GPUs lie that are too scattered for it, in words."""

    def holds(
        self,
        totals: Mapping[HostId, int],
        shared: Mapping[HostId, SharedGpus] | None = None,
        out: Mapping[HostId, explain.GpusOut] | None = None,
        memory: Mapping[HostId, MemoryHere] | None = None,
    ) -> bool:
        """Whether nothing changed since: neither the queue nor the rack."""
        same = self.totals == totals and self.shared == shared and self.out == (out or {}) and self.memory == memory
        return same and self.index == self.queue.index

    @cached_property
    def _rows(self) -> list[order.Row]:
        live = (job for job in self.queue.live() if job.may_start or job.state != "queued")
        return [row_of(job, self.settings.queue_thresholds_gpu_s) for job in live]

    @cached_property
    def capacity(self) -> int:
        """GPUs of hosts that are alive, or more where guaranteed jobs hold more than that."""
        held = sum(job.spec.gpus for job in self.queue.live() if job.state in HOLDING and job.counts)
        return max(sum(self.totals.values()), held)

    @cached_property
    def guaranteed(self) -> list[order.Row]:
        """Guaranteed jobs, whoever may run first at the front."""
        queue, settings = self.queue, self.settings
        rows = [row for row in self._rows if row.job_class != "opportunistic"]
        thresholds, default = settings.queue_thresholds_gpu_s, queue.quotas.get("*")
        rows = order.ordered(rows, thresholds, queue.quotas, default, settings.narrow_first)
        turns = FairTurns(thresholds, queue.tenant_use({row.tenant for row in rows}))
        return turns.ordered(rows, queue.quotas, default, self.capacity)

    @cached_property
    def opportunistic(self) -> list[order.Row]:
        """Opportunistic jobs, oldest first."""
        return [row for row in self._rows if row.job_class == "opportunistic"]

    @cached_property
    def gpu_capacity(self) -> Capacity:
        """Free GPUs by host; where GPUs are shared, each GPU for itself."""
        sharing = sharing_of(self.settings)
        found = (
            Capacity(self.queue, self.totals)
            if sharing is None
            else SharedCapacity(self.queue, self.totals, None, sharing, self.shared or {})
        )
        found.promises.heard(self.memory)
        return found

    @cached_property
    def _walk(self) -> QueuePositions:
        return QueuePositions(self.guaranteed)

    @cached_property
    def _guests_walk(self) -> QueuePositions:
        return QueuePositions(self.opportunistic)

    @cached_property
    def _over_quota(self) -> frozenset[JobId]:
        queue = self.queue
        return frozenset(choose(self.guaranteed, self.capacity, queue.quotas, queue.quotas.get("*")).over_quota)

    @cached_property
    def _nobodys(self) -> int:
        return sum(self.gpu_capacity.free.values())

    @cached_property
    def _tenant_stops(self) -> TenantStops:
        stops = TenantStops(self.settings.unsaved_stops)
        for job in self.queue.jobs.values():
            stops.put(job)
        return stops

    def reason(self, job: Job) -> str:
        """Why the job is in its state."""
        if job.state == "running" and is_spent(job, self.settings.unsaved_stops):
            return f"{job.reason}; {explain.not_stopped_again(job.tally.preemptions)}"
        if job.state == "running" and never_saved(job) and self._tenant_stops.lose(job.spec.tenant):
            return f"{job.reason}; {explain.not_stopped_for_tenant(job.spec.tenant, job.id)}"
        if job.state != "queued":
            return job.reason
        if not job.may_start:
            waits = waits_otherwise(job)
            return f"{waits}{explain.BEFORE}{job.reason}" if job.grant.epoch else waits
        waits = (
            self._waits(job)
            if job.counts
            else explain.waits_as_opportunistic(job.id, self._guests_walk, self._walk, self._nobodys)
        )
        if job.spec.gpus > self._nobodys and (out := explain.gpus_out(self.out)):
            waits = f"{waits}; {out}"
        if lacks := self._lacks_memory(job):
            waits = f"{waits}; {lacks}"
        late_s = self.settings.demote_after_s
        if job.job_class == "auto" and self.queue.quota(job.spec.tenant) is not None and late_s is not None:
            waits = f"{waits}; {explain.demoted_later(late_s)}"
        return f"{waits}{explain.BEFORE}{job.reason}" if job.grant.epoch else waits

    def turn(self, job: Job) -> TurnView | None:
        """The job's place among those that wait; None: it waits for no GPUs."""
        if job.state != "queued" or not job.may_start:
            return None
        walk, order = (self._walk, self._order) if job.counts else (self._guests_walk, None)
        return TurnView(walk.positions[job.id].ahead + 1, explain.ahead_of(job.id, walk, order))

    @cached_property
    def _order(self) -> explain.OrderInForce:
        quotas, thresholds = self.queue.quotas, self.settings.queue_thresholds_gpu_s
        return explain.OrderInForce(thresholds, quotas, quotas.get("*"), self.settings.preemption)

    def _lacks_memory(self, job: Job) -> str:
        """The hosts that have no room for this job's memory, in words; empty: all have."""
        promises = self.gpu_capacity.promises
        found = {host: why for host in sorted(self.totals) if (why := promises.lacks(job, host))}
        return explain.lack_room(job.spec, found)

    def _waits(self, job: Job) -> str:
        hindrance = self._hindrance(job)
        return explain.waits_for(job.id, self._walk, self._over_quota, self.capacity, self._order, hindrance)

    def _hindrance(self, job: Job) -> str:
        """Why a guaranteed job does not start on GPUs that are free, if any are; empty when it may."""
        queue = self.queue
        gang = queue.jobs.get(queue.keeper) if queue.keeper is not None else None
        if gang is not None and gang.id == job.id:
            return explain.keeps_and_waits(job.spec.gpus, queue.kept, self._in_the_way(job))
        if self._may_start(job):
            return ""
        if gang is not None:
            kept = explain.keeps(gang.spec.gpus, queue.kept)
            return f"{gang.id} (tenant {gang.spec.tenant}) has GPUs reserved, {kept}"
        return self._scatter(job) if self._nobodys_for(job) >= job.spec.gpus else ""

    def _may_start(self, job: Job) -> bool:
        """Whether there is room for a guaranteed job other than the gang that keeps GPUs: the same for all of its
        shape."""
        shape = shape_of(job.spec)
        if job.spec.pack == "apart" and len(self.gpu_capacity.takers(job)) < job.spec.workers:
            return False
        if not self.gpu_capacity.has_hosts(job):
            return False
        if shape not in self._fits:
            self._fits[shape] = self.gpu_capacity.fits(job, self.gpu_capacity.free_for(job))
        return self._fits[shape]

    def _nobodys_for(self, job: Job) -> int:
        """GPUs that a guaranteed job could have if they lay where it wants them."""
        capacity = self.gpu_capacity
        shared = isinstance(capacity, SharedCapacity)
        return sum((capacity.free_for(job) if shared else capacity.usable(job, capacity.free)).values())

    def _scatter(self, job: Job) -> str:
        spec, capacity = job.spec, self.gpu_capacity
        shape = shape_of(spec)
        if shape not in self._scattered:
            free = (
                capacity.by_host(capacity.free_for(job))
                if isinstance(capacity, SharedCapacity)
                else capacity.usable(job, capacity.free)
            )
            self._scattered[shape] = explain.scattered(free, spec)
        return self._scattered[shape]

    def _in_the_way(self, job: Job) -> list[order.Row]:
        """The jobs that hold GPUs that a gang waits for: opportunistic jobs that stop for it once all the rest is
        there, or all jobs whose end would help."""
        queue = self.queue
        complete = sum(queue.kept.values()) == job.spec.gpus
        rows = {row.id: row for row in (self.opportunistic if complete else self.guaranteed)}
        return [rows[other.id] for other in queue.live() if other.id in rows and other.placed]


def waits_otherwise(job: Job) -> str:
    """What a queued job waits for that is not GPUs, or how far an array is, in words."""
    holds, parts = job.holds, [told(job)] if job.array is not None else []
    if holds.held:
        parts.append(f"held: {holds.held}; agentctl release {job.id}")
    for after in holds.after:
        kind, id = parts_of(after)
        parts.append(f"waits until {id} {'is done' if kind == 'ok' else 'has ended'}")
    if holds.begin_wall_s is not None:
        parts.append("waits for its time (--begin)")
    return "; ".join(parts)


def devices_in_trouble(hosts: Sequence[HostView]) -> Mapping[JobId, Mapping[HostId, str]]:
    """Jobs with GPUs that are sick or not used, as their hosts gossip, and on which hosts."""
    found: dict[JobId, dict[HostId, str]] = {}
    for view in hosts:
        gpus = view.value("gpus", GpusNow)
        for job, word in gpus.held.items() if isinstance(gpus, GpusNow) else ():
            found.setdefault(job, {})[view.host] = f"a GPU is {word}"
    return found


class Seen(msgspec.Struct, frozen=True):
    """What this host sees of the rack at one moment."""

    gone: Mapping[HostId, float]
    """Hosts that are gone, and for how many seconds."""
    leads: bool
    """Whether the log has a leader."""
    rack_s: float
    """The rack's clock, s."""
    devices: Mapping[JobId, Mapping[HostId, str]] = {}
    """Jobs that hold GPUs which are sick, or which they do not use -> on which hosts, in words."""


CAUSES: tuple[Cause, ...] = ("preempted", "host lost", "exit 75", "failed")


def heals(job: Job) -> bool:
    """Whether the job continues whichever one of its hosts is lost now."""
    return all(job.heals_without((place.host,)) for place in job.start.places if place.host not in job.healing.missing)


def job_view(
    job: Job, standing: QueueSnapshot, age_s: float, seen: Seen, heard: Mapping[HostId, JobNowAnswer] | None = None
) -> JobView:
    """The view of one job. `heard`: what hosts of its places just said about their ranks."""
    heard = heard or {}
    away = {place.host: seen.gone[place.host] for place in job.awaited if place.host in seen.gone}
    now = [answer for answer in heard.values() if answer.epoch == job.grant.epoch]
    step, metrics = progress([(job.start.step, job.start.metrics), *((answer.step, answer.metrics) for answer in now)])
    shown = job.start.places if job.state not in ("queued", "placing") else ()
    attained = max(0.0, job.attained_gpu_s - job.priority.base_gpu_s)
    return JobView(
        id=job.id,
        name=job.spec.called,
        tenant=job.spec.tenant,
        job_class=job.spec.job_class,
        runs_as=job.job_class,
        state=job.state,
        over=job.over,
        reason=_reason(job, standing, away, seen.leads),
        workers=job.spec.workers,
        gpus=job.spec.gpus,
        argv=tuple(map(for_people, job.spec.argv)),
        cwd=for_people(job.spec.cwd),
        times=_times(job, seen.rack_s),
        tally=_tally(job),
        losses=_losses(job, away, now),
        seen=_seen(job, now, heard, seen.devices.get(job.id, {}) if job.placed else {}),
        queue=order.queue_of(attained, standing.settings.queue_thresholds_gpu_s),
        attained_gpu_s=job.attained_gpu_s,
        epoch=job.grant.epoch,
        coordinator=job.grant.coordinator,
        exit_code=job.ending.exit_code,
        ended_as=ended_as(job),
        failed_rank=job.ending.blame.rank if job.state == "failed" and job.ending.blame is not None else None,
        oom_bytes=job.ending.oom_bytes,
        places=shown,
        ranks=tuple(rank for place in shown for rank in _ranks(job, place.host, place.host in away, heard)),
        step=step,
        metrics=metrics,
        beside=_beside(job, standing),
        reserved_gpus=sum(standing.queue.kept.values()) if standing.queue.keeper == job.id else 0,
        age_s=age_s,
        elastic=_elastic(job, bool(shown)),
        share_host=job.spec.share_host,
        image=for_people(job.spec.image),
        user=job.spec.owner.user if job.spec.owner is not None else "",
        uid=job.spec.owner.uid if job.spec.owner is not None else None,
        array=job.spec.array,
        task="" if job.task is None else f"{job.task.array}[{job.task.index}]",
        held=bool(job.holds.held) and not job.over,
        after=job.holds.after,
        begin_wall_s=job.holds.begin_wall_s,
        time_limit_s=job.spec.time_limit_s,
        stdout=for_people(job.spec.stdout),
        turn=standing.turn(job),
    )


def _elastic(job: Job, runs: bool) -> ElasticView | None:
    if not job.spec.elastic:
        return None
    return ElasticView(
        workers_max=job.spec.workers_max,
        processes=job.processes if runs else 0,
        config=job.healing.healed,
        carried=job.start.carried if runs else {},
        have=tuple(sorted(process for each in job.healing.have.values() for process in each)) if runs else (),
        wanted=job.healing.wanted,
        wanted_by=job.healing.wanted_by,
        shares=shares_of(job.start.carried, job.start.places) if runs else {},
        equal=not runs or is_equal(job.start.carried),
        tables=job.start.tables if runs else 0,
        owners=job.start.owners if runs else (),
        tuned_by=job.healing.tuned[0],
        to_end=_to_end(job),
    )


def _to_end(job: Job) -> str:
    """Which processes of an elastic job are to end, and why they still run; empty: none are, or they end now."""
    stay = {place.host: set(place.ranks) for place in job.start.places}
    before = job.as_sure().start.places
    hosts = sorted(place.host for place in before if not set(place.ranks) <= stay.get(place.host, set()))
    return explain.to_end(hosts) if hosts else ""


def _times(job: Job, rack_s: float) -> JobTimesView:
    """When the job was submitted, started and ended. `rack_s`: the rack's clock, s."""
    times = job.times
    began_s = times.submitted_rack_s if times.started_rack_s is None else times.started_rack_s
    return JobTimesView(
        submitted_wall_s=times.submitted_wall_s,
        started_wall_s=times.started_wall_s,
        ended_wall_s=times.ended_wall_s,
        for_s=max(0.0, (rack_s if times.ended_rack_s is None else times.ended_rack_s) - began_s),
    )


def _tally(job: Job) -> JobTallyView:
    tally = job.tally
    return JobTallyView(
        attempt=tally.attempt,
        preemptions=tally.preemptions,
        hosts_lost=tally.hosts_lost,
        requeues=tally.requeues,
        failures=tally.failures,
        retries={cause: job.happened(cause)[1] for cause in CAUSES},
        unfit=tally.unfit,
    )


def _losses(job: Job, away: dict[HostId, float], now: Sequence[JobNowAnswer]) -> JobLossesView:
    """What becomes of the job if hosts or ranks are lost. `away`: those that are gone; `now`: what the others said."""
    return JobLossesView(
        on_lost=job.spec.on_lost,
        heals_not=why_not(job) if job.state == "running" and not heals(job) else "",
        away=away,
        spares=job.spec.spares,
        hang_s=job.spec.hang_s,
        hang_unseen=_hang_unseen(job, now),
        stuck=next((one.stuck for one in now if one.stuck), ""),
    )


def _seen(
    job: Job, now: Sequence[JobNowAnswer], heard: Mapping[HostId, JobNowAnswer], devices: Mapping[HostId, str]
) -> JobSeenView:
    """What these hosts of the job said of its computation. `heard`: all that answered, by name; `devices`: what gossip
    says of its GPUs."""
    known = {host: words for host, words in devices.items() if host not in heard}
    devices = known | {host: answer.devices for host, answer in heard.items() if answer.devices}
    sums = sorted({answer.aggregator for answer in now if answer.aggregator is not None}) if job.placed else []
    return JobSeenView(
        timing=slowest([*job.start.timings.values(), *(answer.timing for answer in now if answer.timing is not None)]),
        hooked={rank: what for answer in now for rank, what in answer.hooked.items()},
        aggregator=sums[0] if sums else None,
        unlike=explain.unlike_kernels({rank: kernel for answer in now for rank, kernel in answer.kernels.items()}),
        host_memory=job.spec.host_memory,
        cpus=job.spec.cpus,
        memory={
            host: answer.memory
            for host, answer in sorted(heard.items())
            if answer.memory is not None and answer.epoch == job.grant.epoch
        },
        devices={host: devices[host] for host in sorted(devices) if job.place_on(host) is not None},
        saved=job.measured.saved,
        limited={host: answer.limited for host, answer in sorted(heard.items()) if answer.limited is not None},
    )


def brief(view: JobView) -> JobView:
    """The view shortened for a list of jobs, where a long command is cut; `agentctl job` shows all of it."""
    room, kept = ARGV_LISTED, []
    for word in view.argv:
        kept.append(word if len(word) <= room else f"{word[: max(0, room)]}...")
        room -= len(word)
        if room <= 0:
            break
    return view if len(kept) == len(view.argv) and room >= 0 else msgspec.structs.replace(view, argv=tuple(kept))


def _hang_unseen(job: Job, now: Sequence[JobNowAnswer]) -> str:
    """Why nothing is done about ranks of the job that hang. `now`: what hosts of it said."""
    awaited = [place for place in job.start.places if place.host not in job.ending.codes]
    if job.spec.hang_s is None or job.state != "running" or len(now) < len(awaited):
        return ""
    return unseen(any(one.reports for one in now), any(one.joined for one in now), is_beside(job))


def _beside(job: Job, standing: QueueSnapshot) -> tuple[BesideView, ...]:
    if not standing.settings.beside:
        return ()
    queue = standing.queue
    found = beside(job, queue.holders)
    return tuple(BesideView(id, queue.jobs[id].job_class, tuple(hosts)) for id, hosts in found.items())


def _reason(job: Job, standing: QueueSnapshot, away: Mapping[HostId, float], leads: bool) -> str:
    """Why the job is in its state; for one whose hosts are gone, what it waits for."""
    reason = standing.reason(job)
    if not away:
        return reason
    waits = explain.away(away, standing.settings.host_lost_after_s, job.spec.on_lost == "keep", leads)
    return waits if job.state == "running" else f"{reason}; {waits}"


def _ranks(job: Job, host: HostId, away: bool, answers: Mapping[HostId, JobNowAnswer]) -> list[RankView]:
    place, heard = job.place_on(host), answers.get(host)
    if place is None:
        return []
    each = len(place.gpus) // len(place.ranks)
    now = heard if heard is not None and heard.epoch == job.grant.epoch else None
    pids, ended = (now.pids, now.codes) if now is not None else ({}, {})
    found = []
    for local, rank in enumerate(place.ranks):
        gpus = place.devices[local * each : (local + 1) * each]
        code = job.ending.codes.get(host, ended).get(rank)
        gone = host in job.ending.codes or host in job.ending.lost or rank in ended
        runs = "away" if away else "running"
        state = "ended" if gone else runs if rank in pids or heard is None else "waiting"
        found.append(RankView(rank, host, gpus, state, pids.get(rank), code))
    return found


def progress(parts: Sequence[tuple[int | None, Mapping[str, float]]]) -> tuple[int | None, dict[str, float]]:
    """The newest step, and each metric's value from the newest step that has it."""
    known = sorted((part for part in parts if part[0] is not None), key=lambda part: part[0] or 0)
    metrics: dict[str, float] = {}
    for _, found in known:
        metrics.update(found)
    return (known[-1][0] if known else None), metrics


def slowest(timings: Sequence[StepTiming]) -> StepTiming | None:
    """The step times of a gang, which is as fast as its slowest host; the memory is that of the rank which uses
    most."""
    if not timings:
        return None
    found = max(timings, key=lambda timing: timing.step_s)
    return msgspec.structs.replace(found, memory_bytes=max(timing.memory_bytes for timing in timings))


def quota_views(queue: JobTable) -> list[QuotaView]:
    """Every tenant that has a quota, a weight or jobs."""
    queued, beyond, tenants = Counter[str](), Counter[str](), {*queue.quotas, *queue.weights}
    for job in queue.live():
        tenant = job.spec.tenant
        tenants.add(tenant)
        queued[tenant] += job.state == "queued"
        beyond[tenant] += job.spec.gpus if job.state in HOLDING and not job.counts else 0
        beyond[tenant] += job.extras * job.spec.gpus_per_worker
    return [
        QuotaView(
            tenant=tenant,
            gpus=queue.quota(tenant),
            used=queue.used(tenant),
            queued_jobs=queued[tenant],
            opportunistic=beyond[tenant],
            weight=queue.weights.get(tenant, 1.0),
            recent_gpus=round(queue.recent.get(tenant, NO_USE).gpus(queue.rack_s), 3),
        )
        for tenant in sorted(tenants)
    ]


def sharing_of(settings: SchedulerSettings) -> Sharing | None:
    """How GPUs are shared; None: a GPU is one job's."""
    return Sharing(beside=settings.beside, busy=settings.busy_max) if settings.beside else None


def rack_of(hosts: Sequence[HostView], now_s: float, shared: bool = False) -> tuple[RackHost, ...]:
    """Hosts that offer GPUs (or none) to jobs, as gossip shows them; `shared`: with what they say of each."""
    found = []
    for view in hosts:
        gpus = view.value("gpus", GpusNow)
        if isinstance(gpus, GpusNow):
            gone_s = None if view.state in ("alive", "suspect") else max(0.0, now_s - view.since_s)
            heard = shared_gpus.heard(view) if shared else None
            signs, memory = (view.state == "away", view.state == "suspect"), memory_in(view)
            found.append(RackHost(view.host, gpus.total, gone_s, heard, *signs, gpus.out, gpus.why, gpus.known, memory))
    return tuple(found)


def speechless(hosts: Sequence[HostView]) -> frozenset[HostId]:
    """Hosts that gossip shows alive and that have not said yet which GPUs they have (`rack_of` leaves them out)."""
    return frozenset(
        view.host for view in hosts if view.state == "alive" and not isinstance(view.value("gpus", GpusNow), GpusNow)
    )


def memory_in(view: HostView) -> MemoryHere | None:
    """What a host says of its memory; None: it is not known."""
    said = view.value("memory", MemoryHere)
    return said if isinstance(said, MemoryHere) and said.total_bytes > 0 else None


def free_of(hosts: Sequence[HostView], queue: JobTable, job: Job | None = None) -> dict[HostId, int]:
    """Free GPUs of hosts that are alive and that this job may use: what gossip says, or less where the log knows of
    more that are held, or that ranks of another job than this one are about to move to."""
    arriving = Counter[HostId]()
    for other in queue.live():
        if other.healing.moving and other is not job:
            arriving.update(other.arriving)
    found = {}
    for view in hosts:
        gpus = view.value("gpus", GpusNow)
        if view.state == "alive" and isinstance(gpus, GpusNow):
            held = len(set(map(device_of, queue.holders.get(view.host, {}))))
            found[view.host] = max(0, min(gpus.free, gpus.total - gpus.out - held) - arriving[view.host])
    if job is None or not (job.spec.host_memory or job.spec.cpus):
        return dict(open_to(None if job is None else job.spec, found, queue.drained))
    said = {view.host: memory for view in hosts if (memory := memory_in(view)) is not None}
    promises = HostPromises(queue.live(), said)
    found = dict(open_to(job.spec, found, queue.drained, None, promises.room_for(job)))
    return dict(capped(job.spec, found, promises.workers_for(job)))


def workers_of(hosts: Sequence[HostView], queue: JobTable, job: Job | None) -> Mapping[HostId, int] | None:
    """How many workers more of this job each host has processors for; None: any number."""
    if job is None or not job.spec.cpus:
        return None
    said = {view.host: memory for view in hosts if (memory := memory_in(view)) is not None}
    return HostPromises(queue.live(), said).workers_for(job)


def free_for(hosts: Sequence[HostView], standing: QueueSnapshot, job: Job | None) -> dict[HostId, int]:
    """Free GPUs of hosts for this job, without GPUs that are kept for another gang than `job`."""
    free = free_of(hosts, standing.queue, job)
    if job is None or standing.queue.keeper in (None, job.id):
        return free
    allowed = standing.gpu_capacity.free_for(job)
    return {host: min(gpus, allowed.get(host, 0)) for host, gpus in free.items()}


def company_of(queue: JobTable, job: Job | None) -> frozenset[HostId]:
    """Hosts where jobs run with which this one takes turns (`JobSpec.share_host`)."""
    group = "" if job is None else job.spec.share_host
    if job is None or not group:
        return frozenset()
    others = (other for other in queue.live() if other.placed and other.id != job.id)
    same = (other for other in others if other.spec.share_host == group)
    ours = (other for other in same if group == AUTO or other.spec.tenant == job.spec.tenant)
    return frozenset(place.host for other in ours for place in other.start.places)


def ranks_of(queue: JobTable) -> dict[HostId, int]:
    """The number of ranks of all running jobs on each host."""
    found: dict[HostId, int] = {}
    for job in queue.live():
        for place in job.start.places if job.placed else ():
            found[place.host] = found.get(place.host, 0) + len(place.ranks)
    return found
