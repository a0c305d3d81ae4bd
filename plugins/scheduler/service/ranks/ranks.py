"""This host's part in every job: make what runs here be what the log says, and say in the log what became of it.

    log says placed here, copy current --> hold GPUs, write that down --> runner.start (again and again: idempotent)
    log says stopping, or the grant is over --> runner.stop
    RanksEnded --> RanksReported to the log until it answers --> runner.forget, GPUs free

Every look starts from the log's state, not from its events, so a restart, a replay of the log or a lost wake-up changes
nothing of what it finds. A start is fenced twice: by an epoch on disk here, and by the runner's own.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import assert_never

import msgspec

from covey.core.errors import NoLeader, OutcomeUnknown
from covey.core.events import Heard, Send
from covey.core.ids import HostId, JobId
from covey.wire.checked import Damaged
from plugins.base import Host
from plugins.facts import GpusMeasured, JobPlaced, JobUnplaced, MemoryPromised, Place, RanksEnded, TunerAsked
from plugins.scheduler.machine.host.parts import Hold
from plugins.scheduler.machine.host.reservations import (
    Action,
    Event,
    GpusSeen,
    GrantNews,
    HeldReservations,
    KeepPort,
    MemorySeen,
    RanksGone,
    ReleasePort,
    Reservations,
    Save,
    SecondWent,
    Starting,
    UseSeen,
)
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.machine.log.replacing import waits_for
from plugins.scheduler.messages.commands import Attained, RanksReported
from plugins.scheduler.messages.spec import GRACE_S
from plugins.scheduler.messages.wire import NotReserved, Release, Reserve, Reserved
from plugins.scheduler.policy import explain
from plugins.scheduler.policy.settings import SchedulerSettings
from plugins.scheduler.service.gpus.gpus_here import memory_here
from plugins.scheduler.service.journal import ReservationFile, ReservationJournal
from plugins.scheduler.service.leases import HostLeases
from plugins.scheduler.service.log import QueueLog
from plugins.scheduler.service.ranks.beside import RanksBeside
from plugins.scheduler.service.ranks.envs import Envs
from plugins.scheduler.service.ranks.rankspec import hold_of, ranks_spec
from plugins.scheduler.service.ranks.reach import unreachable
from plugins.scheduler.service.ranks.reports import KillsSeen, report_of, with_late_ranks
from plugins.scheduler.service.ranks.step_times import StepTimes
from plugins.scheduler.service.ranks.sure_of_state import SureOfState
from plugins.scheduler.service.ranks.telling_ranks import TellingRanks
from plugins.scheduler.service.ranks.uses import GpuUseSums
from plugins.scheduler.service.views import sharing_of

LAG_S = 1.0
"""Seconds between two looks whether this copy of the log caught up with a report."""
SIGTERM = 15


class LocalRanks:
    """The ranks of this host: what it holds, runs and reports."""

    def __init__(
        self,
        host: Host,
        queue: JobTable,
        log: QueueLog,
        settings: SchedulerSettings,
        leases: HostLeases,
        envs: Envs,
        send: Callable[[Send], None],
    ) -> None:
        self.host, self.queue, self.log, self.settings, self._send = host, queue, log, settings, send
        self.leases, self.envs = leases, envs
        self.sharing = sharing_of(settings)
        self.beside = RanksBeside(host, queue, log, self.sharing is not None)
        self.journal = ReservationJournal(host.env)
        self.fences: dict[JobId, int] = {}
        self.told: dict[JobId, int] = {}
        self.told_since: dict[JobId, int] = {}
        """`JobHealing.healed` when the job's places were last told; 0: not known."""
        self.told_tuned: dict[JobId, int] = {}
        """`JobHealing.tuned` when it was last told."""
        self.asked: dict[tuple[JobId, int], None] = {}
        self.ends: dict[tuple[JobId, int], RanksEnded] = {}
        """The ends of ranks here that are not in the log yet."""
        self.steps = StepTimes()
        self.uses = GpuUseSums(host.id)
        self.service_gpu_s: dict[JobId, float] = {}
        """What this host's GPUs have done for each job that runs here, GPU·s."""
        self.reported: dict[JobId, float] = {}
        """The part of `service_gpu_s` that the log knows."""
        self.told_by = TellingRanks(host, self.steps)
        self.sure = SureOfState(host, log)
        self.kills = KillsSeen()
        self.dirty: dict[JobId, None] = {}
        """Jobs that are to be looked at."""
        self.sick = ""
        """Why the journal cannot be written."""
        self.numbers = 0
        """Job ids below this number were given out (`ReservationFile.numbers`)."""
        self._last_s: float | None = None
        self._promised_bytes = 0
        """What the other plugins were told last that jobs may take of this host's memory."""
        self.used_by_others: Callable[[], Mapping[str, str]] = dict
        """GPUs that processes use which no job started, and which, in words."""
        self.why_failed: Callable[[JobId, int, Mapping[int, int]], str] = lambda job, epoch, codes: ""
        """Why the first rank here that failed did so, for people, by the exit statuses of all; empty: not known."""
        self.may_leave: Callable[[Job, Place], bool] = lambda job, place: True
        """Whether ranks that continue elsewhere may end here now, for example since what takes their place has
        started."""

    async def load(self) -> None:
        found = await self._found()
        now_s = self.host.env.clock.now_s()
        self.reservations = Reservations(found.kept, self.settings.reservation_lease_s, now_s, self.sharing)
        self.fences, self.told = dict(found.fences), dict(found.told)
        self.asked = dict.fromkeys((JobId(job), epoch) for job, epoch in found.asked)
        self.numbers = found.numbers
        self.see_gpus()
        self._tell_promised()

    async def _found(self) -> ReservationFile:
        """What this host wrote down; where that is damaged, what really runs. A yes to a gang that has not started is
        forgotten: the log refuses its start on GPUs of another one."""
        try:
            return await self.journal.load()
        except Damaged as error:
            known = sorted(await self.host.runner.kept(), key=lambda spec: (spec.job, spec.epoch))
            held = HeldReservations(tuple(hold_of(spec, self.sharing is not None) for spec in known))
            self.host.env.log.error("started from what runs here", why=str(error), found=[spec.job for spec in known])
            fences = {spec.job: spec.epoch for spec in known}
            return ReservationFile(held, fences, numbers=_above(fences))

    async def save(self) -> bool:
        """Write the journal; whether it is on disk now."""
        now = (self.reservations.held(), dict(self.fences), dict(self.told), list(self.asked), self.numbers)
        try:
            await self.journal.save(ReservationFile(*now))
        except OSError as error:
            if not self.sick:
                self.host.env.log.error("journal cannot be written", why=str(error))
            self.sick = str(error)
            return False
        self.sick = ""
        return True

    # ---- reservations ----

    def see_gpus(self) -> None:
        gpus = self.host.env.probes.gpus()
        refused = {gpu.uuid: gpu.why or gpu.condition for gpu in gpus if not gpu.takes_jobs}
        refused |= {uuid: why for uuid, why in self.used_by_others().items() if uuid not in refused}
        seen = GpusSeen(tuple(gpu.uuid for gpu in gpus), refused)
        self.reservations.handle(seen, self.host.env.clock.now_s())
        probes = self.host.env.probes
        memory = memory_here(probes.memory(), probes.cores())
        self.reservations.handle(MemorySeen(memory), self.host.env.clock.now_s())

    def _tell_promised(self) -> None:
        """Tell the other plugins what jobs may take of this host's memory, when it has changed."""
        promised_bytes = self.reservations.promised_bytes()
        if promised_bytes != self._promised_bytes:
            self._promised_bytes = promised_bytes
            self.host.publish(MemoryPromised(promised_bytes))

    async def on_message(self, sender: HostId, message: Reserve | Release) -> None:
        refusal = self._refusal(message) if isinstance(message, Reserve) else ""
        if refusal:
            self._send(Send(sender, NotReserved(message.job, message.epoch, message.attempt, 0, refusal[:1000])))
            return
        await self.dispatch(Heard(sender, message))

    def _refusal(self, ask: Reserve) -> str:
        """Why no rank can start here, or join those that run, whatever is free; empty when they can."""
        runner = self.host.runner
        if ask.joins and (ask.job, ask.epoch) in runner.running() and not runner.may_join(ask.job, ask.epoch):
            return "its ranks here are ending, or their supervisor is not running now"
        job = self.queue.jobs.get(ask.job)
        owner = None if job is None else job.spec.owner
        return runner.refusal or ("" if owner is None else runner.refusal_as(owner.user, owner.uid))

    async def dispatch(self, event: Event) -> None:
        actions = self.reservations.handle(event, self.host.env.clock.now_s())
        self._tell_promised()
        await self._perform(actions)

    async def _perform(self, actions: Sequence[Action]) -> None:
        saved = True
        for action in actions:
            match action:
                case Save():
                    saved = await self.save()
                case Send():
                    self._send(action if saved else self._no_instead_of(action))
                case KeepPort():
                    await self._keep_port(action, saved)
                case ReleasePort():
                    self.host.runner.release_port(action.job, action.epoch)
                case _:
                    assert_never(action)

    async def _keep_port(self, action: KeepPort, saved: bool) -> None:
        yes = action.reserved
        if not saved:
            self._send(self._no_instead_of(Send(action.to, yes)))
            return
        port = await self.host.runner.reserve_port(yes.job, yes.epoch)
        self._send(Send(action.to, msgspec.structs.replace(yes, address=self.host.advertise, port=port)))

    def _no_instead_of(self, send: Send) -> Send:
        """Turn a yes that is not on disk into a no, and free the GPUs again."""
        yes = send.message
        if not isinstance(yes, Reserved):
            return send
        self.reservations.handle(Heard(send.to, Release(yes.job, yes.epoch, yes.attempt)), self.host.env.clock.now_s())
        return Send(send.to, NotReserved(yes.job, yes.epoch, yes.attempt, 0, f"its disk fails: {self.sick}"[:1000]))

    # ---- looking at what the log says ----

    async def look(self, changed: Sequence[JobId]) -> None:
        """Make this host be what the log says, as far as the log is known here."""
        self.dirty |= dict.fromkeys(changed)
        self.dirty |= dict.fromkeys(hold.job for hold in self.reservations.all())
        self.dirty |= dict.fromkeys(job for job, _ in self.host.runner.running())
        self.dirty |= dict.fromkeys(job for job, _ in self.ends)
        if not self.log.behind:
            self.dirty |= dict.fromkeys(self.told)
        for id in list(self.dirty):
            behind = self.log.behind
            await self._look_at(id, behind)
            if not behind:
                self.dirty.pop(id, None)

    async def _look_at(self, id: JobId, behind: bool) -> None:
        await self._reservations_of(id)
        await self._stop_old(id, behind)
        newest = self.queue.jobs.get(id)
        if behind:
            return
        job = newest.as_sure() if newest is not None else None
        if newest is not None and newest.healing.sure is not None:
            self.sure.look(newest)
        await self._tell(id, job)
        if job is not None and job.placed and job.awaits(self.host.id):
            place = job.place_on(self.host.id)
            waits = not job.spec.elastic and place is not None and waits_for(job, place) is not None
            if place is not None and (id, job.grant.epoch) not in self.ends and not waits:
                await self._run(job, place)
            elif place is None:
                self._end_unstarted(job)
        elif job is None or not job.placed:
            await self._unfence(id)

    async def _reservations_of(self, id: JobId) -> None:
        job = self.queue.jobs.get(id)
        for hold in list(self.reservations.holds.get(id, [])):
            mine = job is not None and job.grant.epoch == hold.epoch
            here = mine and job is not None and (job.state == "placing" or job.awaits(self.host.id))
            here = here and not hold.joins
            elsewhere = mine and not here and job is not None and job.placed and job.place_on(self.host.id) is None
            # what is held for a wish, or for who looks for more hosts, ends with its lease: whoever asked may be gone
            asked = job is not None and (job.spec.elastic or job.seeks) and not hold.started
            over = (elsewhere and not asked) or self.queue.over(id, hold.epoch)
            guaranteed = mine and job is not None and job.counts
            await self.dispatch(
                GrantNews(id, hold.epoch, live=here, over=over, guaranteed=guaranteed, joins=hold.joins)
            )
            if hold.started and over and not self.log.behind and not self._heard_of(id, hold.epoch):
                await self.dispatch(RanksGone(id, hold.epoch))  # its end was told, before a disk failed

    def _heard_of(self, id: JobId, epoch: int) -> bool:
        """Whether ranks of this grant run here, or their end will be told."""
        return (id, epoch) in self.ends or self.host.runner.knows(id, epoch)

    async def _stop_old(self, id: JobId, behind: bool) -> None:
        """End ranks whose grant is over, or whose job is stopping. Not those that the log does not know (yet), nor,
        when it is `behind`, those that it knows elsewhere: they may have come here since."""
        for job_id, epoch in list(self.host.runner.running()):
            if job_id != id:
                continue
            job = self.queue.jobs.get(id)
            state = job.state if job is not None and job.grant.epoch == epoch else ""
            if self.queue.over(id, epoch) or state == "stopping":
                await self._stop(id, epoch, job)
            elif state == "running" and not behind and job is not None and self._are_replaced(job.as_sure()):
                await self._note_asked(id, epoch)
                await self.host.runner.stop(id, epoch, 0.0, f"they move to another host, away from {self.host.id}")

    def _end_unstarted(self, job: Job) -> None:
        """Report the end of ranks that were to leave this host before they had started here: nobody else will."""
        left, epoch = job.left_on(self.host.id), job.grant.epoch
        if left is None or self.host.runner.knows(job.id, epoch) or (job.id, epoch) in self.ends:
            return
        codes, why = dict.fromkeys(left.ranks, -SIGTERM), "they were to leave before they had started here"
        self.ended(RanksEnded(job.id, epoch, codes, why, since=left.since))

    def _are_replaced(self, job: Job) -> bool:
        """Whether the job's ranks here continue elsewhere, or are to: nothing that they could save is needed."""
        place, left = job.place_on(self.host.id), job.left_on(self.host.id)
        if left is not None and self.host.id not in job.healing.missing:
            return self.may_leave(job, left)
        return place is None or self.host.id in job.healing.missing

    async def _note_asked(self, id: JobId, epoch: int) -> None:
        if (id, epoch) not in self.asked:
            self.asked[id, epoch] = None
            await self.save()

    async def _stop(self, id: JobId, epoch: int, job: Job | None) -> None:
        await self._note_asked(id, epoch)
        why = job.reason if job is not None and job.grant.epoch == epoch else "its grant is over"
        grace_s = GRACE_S if job is None else job.grace_s
        await self.host.runner.stop(id, epoch, grace_s, why)

    async def _tell(self, id: JobId, job: Job | None) -> None:
        """Tell the other plugins of a gang, of every one in the rack: when it is placed, and once it is over."""
        before = self.told.get(id)
        placed = job.grant.epoch if job is not None and job.placed else None
        if before == placed:
            if job is not None and placed is not None and self.told_since.get(id, 0) != job.healing.healed:
                self._tell_placed(job)  # some of its ranks go on on another host
            elif job is not None and placed is not None and self.told_tuned.get(id, 0) != job.healing.tuned[1]:
                self._tell_tuned(job)
            return
        if before is not None:
            ended = job is None or job.ending.exit_code is not None
            self.host.publish(JobUnplaced(id, before, ended))
            del self.told[id]
            self.told_since.pop(id, None)
            self.told_tuned.pop(id, None)
        if job is not None and placed is not None:
            self.told[id] = placed
            self._tell_placed(job)
        await self.save()

    def _tell_placed(self, job: Job) -> None:
        self.told_since[job.id] = job.healing.healed
        of = job.id, job.grant.epoch, job.spec.tenant, job.spec.world_size, job.start.places, job.start.tables
        how = job.healing.healed, dict(job.start.carried), job.start.owners, job.start.owners_since
        shares = job.spec.share_host, job.spec.workers if job.spec.elastic else 0
        self.host.publish(JobPlaced(*of, job.spec.remote_memory, *how, *shares))
        if job.spec.elastic:
            self._tell_tuned(job)

    def _tell_tuned(self, job: Job) -> None:
        self.told_tuned[job.id] = job.healing.tuned[1]
        self.host.publish(TunerAsked(job.id, job.grant.epoch, job.healing.tuned[1]))

    def tell_again(self) -> None:
        """Tell the plugins again, after a restart of the agent: those that start anew may have forgotten what was
        told."""
        for id, epoch in sorted(self.told.items()):
            job = self.queue.jobs.get(id)
            if job is not None and job.placed and job.grant.epoch == epoch:
                self._tell_placed(job.as_sure())

    async def _run(self, job: Job, place: Place) -> None:
        hold = self.reservations.find(job.id, job.grant.epoch)
        started = hold is not None and hold.started
        if job.state == "stopping" and not started:
            why = "it was stopped before it started here"
            codes = dict.fromkeys(place.ranks, -SIGTERM)
            self.ended(RanksEnded(job.id, job.grant.epoch, codes, why))
            return
        runs = (job.id, job.grant.epoch) in self.host.runner.running()
        known = self.host.runner.spec(job.id, job.grant.epoch)
        joins = runs and known is not None and known.since < place.since
        changes = joins or (runs and known is not None and job.spec.elastic and known.config < job.healing.healed)
        if runs:
            self.beside.run(job, place)
        env = (known.env if changes and known is not None else {}) if runs else await self.envs.here(job)
        if env is None:
            self._fetch(job, place)
            return
        if (joins or not runs) and not self._may_start(job, place):
            return
        cpus = job.spec.cpus * len(place.ranks)
        gpus = self._gpus_here(place, hold, changes) if job.spec.elastic and hold is not None else place.gpus
        if hold is not None and started and (hold.gpus != gpus or joins):
            await self.dispatch(Starting(job.id, job.grant.epoch, gpus, job.counts, job.spec.host_memory, cpus))
        if not started or self.fences.get(job.id, 0) < job.grant.epoch:
            if self.fences.get(job.id, 0) > job.grant.epoch:
                self.host.env.log.error("an older grant does not start", job=job.id, epoch=job.grant.epoch)
                return
            self.fences[job.id] = job.grant.epoch
            await self.dispatch(Starting(job.id, job.grant.epoch, place.gpus, job.counts, job.spec.host_memory, cpus))
        if self.sick and not await self.save():
            return
        if self.queue.over(job.id, job.grant.epoch) or (job.id, job.grant.epoch) in self.ends:
            return
        changes = changes and job.state == "running"
        runs = (job.id, job.grant.epoch) in self.host.runner.running()
        if (changes or not runs) and not await self._start(job, place, env):
            return
        if job.state == "stopping":
            await self._stop(job.id, job.grant.epoch, job)

    def _gpus_here(self, place: Place, hold: Hold, changes: bool) -> tuple[str, ...]:
        """GPUs that an elastic job has here: those of its place, and those of processes that left it and may still run.
        `changes`: whether others are in the place by now than run here."""
        leaving = changes or self.host.runner.leaving(hold.job, hold.epoch)
        return tuple(dict.fromkeys((*place.gpus, *hold.gpus))) if leaving else place.gpus

    def _may_start(self, job: Job, place: Place) -> bool:
        """Whether these ranks may be on their GPUs, beside others there. Ranks of a job that stops meanwhile never
        start."""
        if self.beside.may_start(job, place):
            return True
        if job.state == "stopping" and not self.host.runner.knows(job.id, job.grant.epoch):
            why = "it was stopped before it could share GPUs here"
            self.ended(RanksEnded(job.id, job.grant.epoch, dict.fromkeys(place.ranks, -SIGTERM), why))
        return False

    def measured(self, fact: GpusMeasured) -> None:
        """Take in how this host's GPUs are used, as its sharing says."""
        self.beside.measured()
        self.reservations.handle(UseSeen(fact.gpus), self.host.env.clock.now_s())

    async def _start(self, job: Job, place: Place, env: Mapping[str, str]) -> bool:
        """Start the job's ranks, under a lease unless the job is to be kept whatever happens; whether they may start
        now."""
        lease = None
        if job.spec.on_lost != "keep":
            lease = self.leases.valid((job.id, job.grant.epoch))
            if lease is None:
                return False
        spec = ranks_spec(job, place, env, self.beside.shares, self.log.rack_clock.now_s())
        await self.host.runner.start(msgspec.structs.replace(spec, lease=lease))
        return True

    def _fetch(self, job: Job, place: Place) -> None:
        """Fetch the job's environment from another host, once at a time; nothing starts here before."""
        if job.state == "stopping":
            why = "it was stopped before its environment arrived here"
            self.ended(RanksEnded(job.id, job.grant.epoch, dict.fromkeys(place.ranks, -SIGTERM), why))
        else:
            self.envs.fetch_soon(job)

    async def _unfence(self, id: JobId) -> None:
        job = self.queue.jobs.get(id)
        stale = [key for key in self.asked if key[0] == id and key not in self.host.runner.running()]
        stale = [key for key in stale if key not in self.ends and self.queue.over(*key)]
        for key in stale:
            del self.asked[key]
        if (job is None or job.ending.exit_code is not None) and not self.reservations.holds.get(id):
            self.fences.pop(id, None)
            self.service_gpu_s.pop(id, None)
            self.reported.pop(id, None)
            self.told_by.forget(id)

    # ---- what happens here ----

    def ended(self, fact: RanksEnded) -> None:
        """Report an end, once. The runner repeats this fact after every restart until it is told to forget the
        ranks."""
        if (fact.job, fact.epoch) not in self.ends:
            self.ends[fact.job, fact.epoch] = fact
            self.host.env.spawn(f"report {fact.job}.{fact.epoch}", self.report(fact))

    async def second_passed(self, now_s: float) -> None:
        self.kills.second(now_s, self.host.env.probes.memory().oom_kills)
        self._serve(now_s)
        self.see_gpus()
        if self.queue.next_number > self.numbers:
            self.numbers = self.queue.next_number
            await self.save()
        await self.dispatch(SecondWent())
        for id in self._time_limit_reached():
            await self.checkpoint(id)

    def _time_limit_reached(self) -> list[JobId]:
        """Jobs here that reached their time limit since the log last heard of them: the leader ends them by what the
        log knows, so it hears at once. Their other hosts have run for as long as this one."""
        found: list[JobId] = []
        for id, done in self.service_gpu_s.items():
            job = self.queue.jobs.get(id)
            place = job.place_on(self.host.id) if job is not None else None
            if job is None or place is None or job.state != "running" or (limit_s := job.spec.runs_for_s) is None:
                continue
            untold_s = (done - self.reported.get(id, 0.0)) / (len(place.gpus) or len(place.ranks))
            more_s = 0.0 if job.spec.elastic else untold_s
            if untold_s > 0 and job.ran_of_limit_s(self.log.rack_clock.now_s()) + more_s >= limit_s:
                found.append(id)
        return found

    def _serve(self, now_s: float) -> None:
        """Count what the GPUs here did since the last look: GPU·s, or worker·s for a job without GPUs."""
        passed_s = 0.0 if self._last_s is None else max(0.0, now_s - self._last_s)
        self._last_s = now_s
        for (id, epoch), pids in self.host.runner.running().items():
            job = self.queue.as_it_runs(id)
            if job is None or job.grant.epoch != epoch or not pids or not (width := self._width(job)):
                continue
            known = max(self.service_gpu_s.get(id, 0.0), job.measured.attained.get(self.host.id, 0.0))
            self.service_gpu_s[id] = known + passed_s * width
            self.uses.served(job, passed_s * width if job.spec.gpus else 0.0, self.steps.of(id, epoch))

    def _width(self, job: Job) -> int:
        """What the job's service here grows by per second. GPUs of an elastic job's processes that are ending are
        counted as long as they hold them."""
        place, hold = job.place_on(self.host.id), self.reservations.find(job.id, job.grant.epoch)
        if job.spec.elastic and job.spec.gpus_per_worker and hold is not None and hold.started:
            return len(hold.gpus)
        return 0 if place is None else len(place.gpus) or len(place.ranks)

    # ---- saying it in the log ----

    async def checkpoint(self, only: JobId | None = None) -> None:
        """Tell the log what this host's GPUs did; without a leader, at the next call: the numbers only grow."""
        news = {id: round(done, 3) for id, done in self.service_gpu_s.items() if only is None or id == only}
        news = {id: done for id, done in news.items() if done > self.reported.get(id, 0.0)}
        jobs = {id: self.queue.jobs.get(id) for id in self.told_by.tensors if only in (None, id)}
        tensors = {
            id: seen
            for id, seen in self.told_by.tensors.items()
            if (job := jobs.get(id)) and job.measured.tensors[::-1] < seen[::-1]
        }
        heals = self.told_by.heals_news(only)
        saved = self.steps.saved_news(
            {id: job.measured.saved for id, job in self.queue.jobs.items() if only is None or id == only}
        )
        if not news and not tensors and not heals and not saved:
            return
        steps = self.steps.news({id: job.grant.epoch for id in news if (job := self.queue.jobs.get(id)) is not None})
        uses = self.uses.news({id: self.queue.jobs.get(id) for id in news})
        attained = Attained(
            wall_s=0.0,
            host=self.host.id,
            service_gpu_s=news,
            tensors=tensors,
            steps=steps,
            heals=heals,
            saved=saved,
            uses=uses,
        )
        try:
            await self.log.propose(attained)
        except (NoLeader, OutcomeUnknown):
            return
        self.reported |= news
        self.uses.told(uses)
        self.told_by.heals_told(heals)

    async def report(self, fact: RanksEnded) -> None:
        """Report an end until the log knows it, however long there is no leader; then the runner may forget it."""
        key = (fact.job, fact.epoch)
        await self.checkpoint(fact.job)
        silent = await unreachable(self.host, self.queue.jobs.get(fact.job), fact)
        await self.log.insist(self._report_of(fact, silent))
        while not await self.log.until(lambda: not self.log.behind and not self._awaited(*key), LAG_S):
            self.host.env.log.debug("the report is not in this copy of the log yet", job=fact.job, epoch=fact.epoch)
            joined = with_late_ranks(fact, self.queue.jobs.get(fact.job), self.host.id)
            if joined is not None:
                fact = self.ends[key] = joined
                await self.log.insist(self._report_of(fact, silent))
        await self.checkpoint(fact.job)  # what it could not tell before, without a leader
        await self.dispatch(RanksGone(*key))
        await self._saved()
        self.ends.pop(key, None)
        self.asked.pop(key, None)
        self.steps.forget(*key)
        self.uses.forget(key)
        self.beside.forget(*key)
        self.host.runner.forget(*key)
        self.dirty[fact.job] = None

    async def _saved(self) -> None:
        """Return once it is on disk that these GPUs are free: after a restart they would be held for ever."""
        while self.sick:
            if await self.save():
                return
            await asyncio.sleep(LAG_S)

    def _report_of(self, fact: RanksEnded, silent: tuple[HostId, ...]) -> RanksReported:
        asked = (fact.job, fact.epoch) in self.asked
        said = report_of(self.host.id, fact, self.steps.of(fact.job, fact.epoch), asked, silent)
        why = self.why_failed(fact.job, fact.epoch, fact.codes)
        if not (why or asked or fact.reason or fact.oom):
            memory = self.steps.of(fact.job, fact.epoch).memory
            killed = self.kills.recent(self.host.env.probes.memory().oom_kills)
            why = explain.host_killed(fact.codes, killed, 0 if memory is None else memory.peak_bytes)
        return msgspec.structs.replace(said, reason=f"{why}; {said.reason}".removesuffix("; ")[:1000]) if why else said

    def _awaited(self, id: JobId, epoch: int) -> bool:
        """Whether this copy of the log still waits for the report: then the ranks must not be forgotten, or the next
        look would start them again."""
        job = self.queue.jobs.get(id)
        return job is not None and job.grant.epoch == epoch and job.awaits(self.host.id)


def _above(jobs: Iterable[JobId]) -> int:
    """A number that none of these jobs has, nor one before them."""
    return 1 + max((int(job[1:]) for job in jobs if job[1:].isdecimal()), default=-1)
