"""The plugin on one host: it takes facts and messages in, answers commands, and, on the leader, decides."""

import asyncio
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from covey.core.errors import Refused
from covey.core.events import Fact, Heard, Send
from covey.core.ids import HostId, JobId
from covey.core.metrics import Distribution, Measured, MetricSeries
from plugins.askers import ASKER, OwnerUser, asker_of
from plugins.base import Command, Host, PluginService
from plugins.facts import (
    ArrangementsWanted,
    GpusMeasured,
    HeartbeatHeard,
    HostGone,
    HostSeen,
    HostSuspected,
    JobHooked,
    JobJoined,
    JobPlaced,
    JobSaved,
    LeaderChanged,
    MemoryMeasured,
    PairHarms,
    RankEndedHere,
    RankLeavesHere,
    RankReplaced,
    RanksAwaited,
    RanksEnded,
    RanksHeal,
    RanksMayStart,
    RanksStarted,
    RanksUnfit,
    RankWaitsInVain,
    SecondPassed,
    SparesReady,
    StepTimed,
    TensorsAssigned,
    TensorsSeen,
)
from plugins.gossiped import DrainedNow
from plugins.scheduler.machine.leader.leader import RackHost, memory_of
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import STATES, Job
from plugins.scheduler.messages.arrays import tasks_of
from plugins.scheduler.messages.commands import Applied, Submitted
from plugins.scheduler.messages.spec import JobSpec, SpecError
from plugins.scheduler.messages.wire import (
    EnvOf,
    GangNow,
    GangStands,
    JobCurveWanted,
    JobNow,
    JobNowAnswer,
    KeepEnv,
    LogTail,
    LogTailAnswer,
    RankHangs,
    RecordsWanted,
    RenewLeases,
    SaveWanted,
    ShownEnvOf,
    SparesWanted,
    SparesWarm,
    StacksWanted,
    ToGang,
    ToHost,
)
from plugins.scheduler.policy import eligible, explain
from plugins.scheduler.policy.settings import SchedulerSettings
from plugins.scheduler.service import asked, metrics, views
from plugins.scheduler.service.arrangements import Arrangements
from plugins.scheduler.service.coordinated_gangs import CoordinatedGangs
from plugins.scheduler.service.drains import Drains, OwnCordon, in_gossip
from plugins.scheduler.service.gpus.gpus_here import OwnGpus
from plugins.scheduler.service.gpus.shared_gpus import GpuGossip
from plugins.scheduler.service.gpus.use_watch import UseWatch
from plugins.scheduler.service.history import JobHistory
from plugins.scheduler.service.job_waits import JobWaits
from plugins.scheduler.service.leadership import Leadership, set_within
from plugins.scheduler.service.leases import HostLeases, relay
from plugins.scheduler.service.log import QueueLog
from plugins.scheduler.service.moves import RunningMoves
from plugins.scheduler.service.people.lists import wanted, wish_of
from plugins.scheduler.service.people.queue_changes import QueueChanges
from plugins.scheduler.service.people.saves import AskedSaves
from plugins.scheduler.service.people.starts import Starts
from plugins.scheduler.service.ranks.curves import Curves
from plugins.scheduler.service.ranks.early_ends import EarlyEnds
from plugins.scheduler.service.ranks.envs import Envs
from plugins.scheduler.service.ranks.hangs import StuckRanks
from plugins.scheduler.service.ranks.ranks import LocalRanks
from plugins.scheduler.service.ranks.spares import JobSpares
from plugins.scheduler.service.tenants import SHOWN_S, Tenants, TenantView
from plugins.views import JobView, QuotaView

ASK_S = 1.0
"""Seconds that a host may take to say what runs there, when a person asks."""
_TASK = re.compile(r"(j[0-9]{1,18})\[([0-9]{1,9})\]")
NEWS_S = 0.5
"""Seconds for which a job that this host has not heard of is waited for: news of the log take milliseconds."""
LOG_PART_BYTES = 64 * 1024
"""The most bytes that one `logs` returns."""
AGE_MAX_S = 1_000_000_000
"""The oldest output that can be asked for by its age, seconds."""


class SchedulerService(PluginService):
    """The scheduler's service; see the plugin's essay in `plugins/scheduler/__init__.py`."""

    name: ClassVar[str] = "scheduler"

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.settings = host.settings(SchedulerSettings)
        self.queue = JobTable()
        self.queue_log = QueueLog(host, self.queue, self.settings.current_s)
        self.leadership = Leadership(host, self.queue, self.queue_log, self.settings)
        self.leases = HostLeases(host, self.queue, self.leadership.leader.terms, self.leadership.renew)
        self.envs = Envs(self.name, host, self.queue, self.queue_log, self.settings.env_copies)
        self.ranks = LocalRanks(
            host, self.queue, self.queue_log, self.settings, self.leases, self.envs, self._send_for_ranks
        )
        self.coordinated_gangs = CoordinatedGangs(
            host, self.queue, self.queue_log, self.settings, self.envs, self._standing, self.perform
        )
        self.gangs = self.coordinated_gangs.gangs
        self.arrangements = Arrangements(
            host, self.queue, self.queue_log, self.settings, self.coordinated_gangs.free_for, self.perform
        )
        self.moves = RunningMoves(host, self.queue, self.queue_log)
        self.drains = Drains(host, self.queue, self.queue_log)
        self.own_cordon = OwnCordon(host, self.queue, self.queue_log)
        self.tenants = Tenants(host, self.queue, self.queue_log)
        self.changes = QueueChanges(self.queue_log, self._seek, self._job)
        self.saves = AskedSaves(self.name, host, self._seek)
        self.history = JobHistory(self.name, host, self.queue, self.queue_log)
        self.starts = Starts(host, self.queue, self.queue_log, self.settings, self.history, self._asked_for)
        self.early = EarlyEnds(host, self.queue, self.queue_log)
        self.ranks.why_failed, self.ranks.told_by.codes_of = self.early.why_failed, self.early.codes
        self.curves = Curves(self.name, host)
        self.stuck = StuckRanks(self.name, host, self.queue, self._send_for_ranks)
        self.stuck.step_s = lambda job, epoch: self.ranks.steps.of(job, epoch).step_s()
        self.ranks.told_by.stuck_of = lambda job, epoch: self.stuck.named.get((job, epoch), "")
        free, look = self.coordinated_gangs.free_for, self.leases.news.set
        self.spares = JobSpares(host, self.queue, self.envs, self._send_for_ranks, free, look)
        self.ranks.may_leave, self.coordinated_gangs.spares_of = self.spares.may_leave, self.spares.machine.kept_by
        self.gossip, self.uses = GpuGossip(host, self.settings), UseWatch(host.env, lambda: self.ranks.reservations)
        self.gpus_here, self.waits = OwnGpus(host, self.uses), JobWaits(host.id, self.queue)
        self.ranks.used_by_others = lambda: self.uses.uses.foreign(host.env.clock.now_s())
        self.ranks.told_by.devices_of = self.uses.words_of
        self.uses.looked = lambda gpus, use, now_s: self.ranks.uses.looked(
            gpus, use, self.ranks.reservations.all(), now_s
        )
        self.counters = {"malformed": 0}
        self._look = self.leases.news
        self._lead = self.leadership.look
        self._second = asyncio.Event()
        self._drained = DrainedNow("")
        self._stood: views.QueueSnapshot | None = None

    async def start(self) -> None:
        await self.ranks.load()
        await self.envs.load()
        self._publish()
        self.queue_log.listeners += [self._look, self._lead]
        self.env.spawn("catch up", self._catch_up())
        self.env.spawn("look", self._look_on())
        self.env.spawn("lead", self.leadership.lead_on())
        self.env.spawn("leases", self.leases.keep())
        self.env.spawn("seconds", self._count_seconds())
        self.env.spawn("checkpoints", self._checkpoints())
        self.env.spawn("uses of GPUs", self.uses.keep_looking())
        self.env.spawn("records of jobs", self.history.keep_on())

    # ---- loops ----

    async def _catch_up(self) -> None:
        await self.queue_log.barrier()
        self.ranks.tell_again()
        self._look.set()

    async def _look_on(self) -> None:
        while True:
            await set_within(self._look, 1.0)
            changed = self.queue.changed()
            self.waits.look(changed, self.env.clock.now_s(), self.queue_log.behind)
            self.coordinated_gangs.look(changed)
            self.early.look(changed)
            self.history.look(changed)
            await self.ranks.look(changed)
            if not self.queue_log.behind:
                await self.envs.forget()
            self._publish()

    async def _count_seconds(self) -> None:
        while True:
            await self._second.wait()
            self._second.clear()
            await self.ranks.second_passed(self.env.clock.now_s())
            self.stuck.second()
            self.own_cordon.look()
            self.early.second()
            await self.spares.second()
            self.ranks.see_gpus()
            self.gpus_here.look()
            self._publish()
            self.gossip.publish([gpu.uuid for gpu in self.env.probes.gpus()])

    async def _checkpoints(self) -> None:
        while True:
            await asyncio.sleep(self.settings.checkpoint_s)
            await self.ranks.checkpoint()
            await self.curves.save()

    # ---- what is heard ----

    def on_fact(self, fact: Fact) -> None:
        if isinstance(fact, SecondPassed):
            self._second.set()
        elif isinstance(fact, RanksEnded):
            self.ranks.ended(fact)
            self.own_cordon.ended(fact)
            self.env.spawn(f"curve of {fact.job}", self.curves.save(fact.job))
            codes = ", ".join(f"{rank}: {code}" for rank, code in fact.codes.items())
            why = f" ({fact.reason})" if fact.reason else ""
            self.host.note(fact.job, "ranks ended here", f"exit status by rank, in order: {codes}{why}")
            self._look.set()
        elif isinstance(fact, JobPlaced):
            self.ranks.told[fact.job] = fact.epoch  # by a life of this plugin before this one, whose disk was sick
        elif isinstance(fact, RanksStarted):
            self.own_cordon.started()
            pids = ", ".join(f"{rank}: {pid}" for rank, pid in sorted(fact.pids.items()))
            self.host.note(fact.job, "ranks run here", f"epoch {fact.epoch}, process by rank: {pids}")
            if (job := self.queue.jobs.get(fact.job)) is not None and job.spec.elastic:
                self._look.set()  # GPUs of processes that left are free
        elif isinstance(fact, RankReplaced):
            said = f"rank {fact.rank} was lost; process {fact.pid} replaces it, and the other ranks wait for it"
            self.host.note(fact.job, "rank replaced", f"{said} (epoch {fact.epoch}, successor {fact.incarnation})")
        elif isinstance(fact, SparesReady):
            self.spares.ready(fact)
        elif isinstance(fact, RanksHeal):
            self.ranks.told_by.may_be_lost(fact)
            self.leases.may_be_lost((fact.job, fact.epoch))
            self.env.spawn(f"{fact.job} may lose ranks here", self.ranks.checkpoint(fact.job))
            if (job := self.queue.jobs.get(fact.job)) is not None and job.healing.sure is not None:
                self._look.set()  # what stays may have the state now, so that others may end
        elif isinstance(fact, JobJoined):
            self.ranks.told_by.joined(fact)
            self.early.on_fact(fact)
        elif isinstance(fact, RanksAwaited):
            self.stuck.awaited(fact)
        elif isinstance(fact, HeartbeatHeard):
            self.stuck.heartbeat(fact)
            self.ranks.told_by.heartbeat(fact)
        elif isinstance(fact, StepTimed):
            self.ranks.steps.stepped(fact)
            self.curves.stepped(fact)
            self.early.on_fact(fact)
        elif isinstance(fact, RankEndedHere | RankLeavesHere | RankWaitsInVain):
            self.early.on_fact(fact)
        elif isinstance(fact, JobHooked):
            self.ranks.steps.hooked(fact)
        elif isinstance(fact, JobSaved):
            self.ranks.steps.wrote(fact)
        elif isinstance(fact, MemoryMeasured):
            self.ranks.steps.measured(fact)
        elif isinstance(fact, TensorsSeen):
            self.ranks.told_by.tensors_seen(fact)
        elif isinstance(fact, TensorsAssigned):
            self.ranks.told_by.assigned(fact)
        elif isinstance(fact, ArrangementsWanted):
            self.arrangements.wanted(fact)
        elif isinstance(fact, GpusMeasured):
            self.gossip.heard(fact)
            self.ranks.measured(fact)
        elif isinstance(fact, RanksMayStart | RanksUnfit | PairHarms):
            if self.ranks.beside.on_fact(fact):
                self._look.set()
        elif isinstance(fact, HostGone | HostSuspected | HostSeen | LeaderChanged):
            self._lead.set()
            self._look.set()
            if isinstance(fact, LeaderChanged):
                self.leases.look()

    async def on_message(self, sender: HostId, message: Any) -> None:
        if isinstance(message, RankHangs | GangStands | StacksWanted):
            self.stuck.on_message(sender, message)
        elif isinstance(message, SparesWanted | SparesWarm):
            await self.spares.on_message(sender, message)
        elif isinstance(message, ToHost):
            await self.ranks.on_message(sender, message)
            self._publish()
        elif isinstance(message, KeepEnv):
            await self.envs.keep(sender, message)
        elif isinstance(message, ToGang) and self.arrangements.wishes.knows(message):
            self.arrangements.feed(Heard(sender, message))
        elif isinstance(message, ToGang):
            self.coordinated_gangs.feed(Heard(sender, message))
        else:
            self.counters["malformed"] += 1

    async def answer(self, sender: HostId, question: Any) -> msgspec.Struct:
        if isinstance(question, JobNow):
            return self.ranks.told_by.job_now(question.job)
        if isinstance(question, JobCurveWanted):
            return await self.curves.answer(question.job)
        if isinstance(question, SaveWanted):
            return await self.saves.answer(question)
        if isinstance(question, GangNow):
            return self.stuck.gang_now(question.job, question.epoch)
        if isinstance(question, EnvOf):
            return await self.envs.give(sender, question)
        if isinstance(question, ShownEnvOf):
            return await self.envs.show(question)
        if isinstance(question, LogTail):
            return await self._log_tail(question)
        if isinstance(question, RecordsWanted):
            return await self.history.answer(question)
        if isinstance(question, RenewLeases):
            return await self.leadership.renew(question) or await relay(self.host, self.queue, question)
        return await super().answer(sender, question)

    async def _log_tail(self, ask: LogTail) -> LogTailAnswer:
        """The part of a rank's output that is on this host. Only a rank number reaches the file's name."""
        runs = any(id == ask.job and ask.rank in ranks for (id, _), ranks in self.host.runner.running().items())
        try:
            limit = min(ask.limit, LOG_PART_BYTES)
            read = await self.host.runner.read_log(ask.job, ask.rank, ask.offset, limit, ask.since_s)
        except OSError as error:  # no reason to stop this plugin, and whatever else it does
            what = f"the output of rank {ask.rank} of {ask.job} cannot be read now"
            next = f"look at {self.host.id}'s disk, and try again"
            raise Refused(75, what, f"its disk fails: {error}", next) from error
        return LogTailAnswer(read.data, read.offset, read.size, not runs, self.host.id, read.kept, read.timed)

    # ---- what this host tells others ----

    def _send_for_ranks(self, action: Send) -> None:
        """Send answers of this host's reservations, and words about ranks that are stuck. A lost one is asked for, or
        told, again: nothing waits for the outcome."""
        self.perform(action, lambda _undelivered: None)

    def _publish(self) -> None:
        self.gpus_here.publish(self.ranks.reservations)
        leaves = in_gossip(self.queue.drained.get(self.host.id), len(self.host.runner.running()))
        if leaves != self._drained:
            self._drained = leaves
            self.host.spread("drained", leaves)

    # ---- what people ask ----

    def notes(self) -> list[str]:
        return [*self.gpus_here.notes(), *self.history.notes(), *self.own_cordon.notes()]

    def commands(self) -> Mapping[str, Command]:
        return {
            "submit": self._submit,
            "jobs": self._jobs,
            "job": self._job,
            **self.changes.commands(),
            **self.saves.commands(),
            **self.starts.commands(),
            "give_up": self._give_up,
            "drain": self._drain,
            "resume": self._resume,
            "forget": self._forget,
            "knows": self._knows,
            "cordon": self._cordon,
            "uncordon": self._uncordon,
            "move": self._move,
            "scale": self._scale,
            "arrange": self._arrange,
            "tune": self._tune,
            "logs": self._logs,
            "curve": self._curve,
            "quotas": self._quotas,
            "quota_set": self._quota_set,
            "tenants": self._tenants,
            "tenant_set": self._tenant_set,
            "rack": self._rack,
            "gpu_uses": self._gpu_uses,
            **self.history.commands(),
            **self.envs.commands(self._seek),
        }

    def metrics(self) -> Measured:
        found: dict[MetricSeries, float | Distribution] = {}
        states = Counter(job.state for job in self.queue.jobs.values())
        for state in STATES:
            found[metrics.JOBS.of(state)] = states[state]
        for id in sorted({id for id, _ in self.host.runner.running()}):
            if (job := self.queue.jobs.get(id)) is not None:
                found[metrics.JOB_INFO.of(id, job.spec.tenant, job.job_class)] = 1
        for uuid, id in self.uses.held().items():
            found[metrics.JOB_GPU_INFO.of(id, uuid)] = 1
        found |= self.waits.metrics(self.queue_log.rack_clock.now_s())
        found |= self.leadership.decisions.measured()
        found[metrics.GPUS_FREE.of()] = len(self.ranks.reservations.free())
        found |= self.gpus_here.metrics()
        found[metrics.GRANTS.of()] = self.leadership.counters["grants"]
        found[metrics.PREEMPTIONS.of()] = self.leadership.counters["preemptions"]
        found[metrics.LOG_MALFORMED_COMMANDS.of()] = self.queue_log.malformed
        return found

    def _asked_for(self, given: Mapping[str, Any]) -> tuple[JobSpec, Submitted]:
        """The job that a request asks for, and its submission. Refused names what it cannot have."""
        asker, said = asker_of(given), {name: value for name, value in given.items() if name != ASKER}
        fields = dict(said["spec"]) if isinstance(said.get("spec"), Mapping) else said
        key = said.get("key") or self.env.entropy(16).hex()
        fields.pop("key", None)
        try:
            spec = self.tenants.owned(JobSpec.parse(fields), fields.get("tenant"), asker)
            submitted = msgspec.convert(
                {
                    "wall_s": 0.0,
                    "key": key,
                    "spec": msgspec.to_builtins(spec),
                    "may_demote": self._demotes,
                    "numbers": self.ranks.numbers,
                    "by": asker.name,
                },
                Submitted,
            )
        except SpecError as error:
            raise Refused(2, error.what, error.why, error.next) from error
        except msgspec.ValidationError as error:
            raise Refused(2, "invalid key", "expected 8 to 64 letters, digits and '-'", "omit key") from error
        self._refuse_the_impossible(spec)
        return spec, submitted

    async def _submit(self, given: Mapping[str, Any]) -> JobView:
        spec, submitted = self._asked_for(given)
        if self.host.runner.refusal:
            next_step = (
                "free some space there, or submit at another host; the limit is [jobs] "
                f"disk_free_min in {self.host.id}'s agent.toml"
            )
            raise Refused(4, f"cannot submit {spec.called} here", self.host.runner.refusal, next_step)
        sealed = await self.envs.seal(spec.env)
        key = self.tenants.key(submitted.key, spec)
        submitted = msgspec.structs.replace(submitted, key=key, spec=msgspec.structs.replace(spec, env={}), env=sealed)
        result = await self.queue_log.change(submitted, f"submit {spec.called}")
        assert isinstance(result, Applied) and result.job is not None
        id = result.job
        if not await self.queue_log.until(lambda: id in self.queue.jobs, SHOWN_S):
            why = f"{id} is in the queue, but this host's copy of the log does not show it yet"
            raise Refused(75, f"{id} was submitted", why, f"agentctl job {id}")
        if over_rack := self._range_over_rack(spec):
            self.host.note(id, "range over the rack", over_rack)
        return await self._job({"id": id})

    def _refuse_the_impossible(self, spec: JobSpec) -> None:
        """Refuse what this rack could never hold. Nothing is refused while the whole rack is not known."""
        rack, never = self._whole_rack(), None
        if rack is not None:
            never = explain.over_rack(spec, self._could_use(spec, rack))
            memory = {host.host: host.memory for host in rack if host.memory is not None}
            if never is None and len(memory) == len(rack):
                never = explain.over_memory(spec, memory) or explain.over_cpus(spec, memory)
        never = never or explain.over_quota(spec, self.queue.quota(spec.tenant), self._demotes)
        if never is not None:
            raise Refused(never.code, never.what, never.why, never.next)

    def _whole_rack(self) -> Sequence[RackHost] | None:
        """What each host has with every host back that went away and every GPU well; None: a voter is missing here, or
        some host has not said yet, or does not know, what it has."""
        hosts = [view for view in self.host.hosts() if view.state != "left"]
        rack = views.rack_of(hosts, self.env.clock.now_s())
        told = len(rack) == len(hosts) and all(host.known for host in rack)
        return rack if told and {host.host for host in rack} >= set(self.host.log.voters) else None

    def _could_use(self, spec: JobSpec, rack: Sequence[RackHost]) -> Mapping[HostId, int]:
        """GPUs of each host that the job could use."""
        return eligible.open_to(spec, {host.host: host.gpus for host in rack}, {})

    def _range_over_rack(self, spec: JobSpec) -> str:
        """Why an elastic job never has as many processes here as its range allows, in words; empty: it could."""
        rack = self._whole_rack() if spec.elastic else None
        return explain.range_over_rack(spec, self._could_use(spec, rack)) if rack is not None else ""

    @property
    def _demotes(self) -> bool:
        after_s = self.settings.demote_after_s
        return after_s is not None and math.isfinite(after_s)

    def _standing(self) -> views.QueueSnapshot:
        """The queue's snapshot now. Nothing is sorted again before the log or the rack changes."""
        shares = self.settings.beside > 0
        rack = views.rack_of(self.host.hosts(), self.env.clock.now_s(), shares)
        drained = self.queue.drained
        alive = [host for host in rack if host.gone_s is None]
        totals = eligible.open_gpus({host.host: host.usable for host in alive}, drained)
        said = {host.host: host.shared for host in rack if host.shared is not None}
        shared = eligible.open_to(None, said, drained) if shares else None
        out = {host.host: explain.GpusOut(host.out, host.why) for host in alive if host.out or not host.known}
        memory = memory_of(alive)
        if self._stood is None or not self._stood.holds(totals, shared, out, memory):
            self._stood = views.QueueSnapshot(self.queue, self.settings, totals, shared, out, memory)
        return self._stood

    def _seen(self) -> views.Seen:
        rack = views.rack_of(self.host.hosts(), self.env.clock.now_s())
        gone = {host.host: host.gone_s for host in rack if host.gone_s is not None}
        leads, rack_s = self.host.log.leader is not None, self.queue_log.rack_clock.now_s()
        return views.Seen(gone, leads, rack_s, views.devices_in_trouble(self.host.hosts()))

    async def _jobs(self, given: Mapping[str, Any]) -> list[JobView]:
        """Jobs that wait or run, in order of admission; with `all` also the ended ones that are remembered. What else a
        list can be asked for: `people/lists.py`."""
        wish = wish_of(given)
        standing, age_s, seen = self._standing(), self.host.log.age_s, self._seen()
        jobs = list(self.queue.jobs.values()) if wish.jobs.everything else self.queue.live()
        jobs = wanted(jobs, wish, asker_of(given) if wish.is_personal else None, seen.rack_s)
        mine = {job.id: self.ranks.told_by.job_now(job.id) for job in jobs if job.placed and job.place_on(self.host.id)}
        return [
            views.brief(
                views.job_view(job, standing, age_s, seen, {self.host.id: mine[job.id]} if job.id in mine else None)
            )
            for job in jobs
        ]

    async def _job(self, given: Mapping[str, Any]) -> JobView:
        job = await self._seek(given)
        given = {**given, "id": job.id}
        answers = await self._ask_places(job, asked.seconds(given, "timeout_s", ASK_S)) if job.placed else {}
        heard = {host: answer for host, answer in answers.items() if answer is not None}
        view = views.job_view(self._find(given), self._standing(), self.host.log.age_s, self._seen(), heard)
        silent = tuple(host for host in sorted(answers) if host not in heard)
        elastic = view.elastic
        if elastic is not None and not job.over and (over_rack := self._range_over_rack(job.spec)):
            elastic = msgspec.structs.replace(elastic, over_rack=over_rack)
        return msgspec.structs.replace(view, unanswered=silent, elastic=elastic)

    async def _ask_places(self, job: Job, wait_s: float) -> dict[HostId, JobNowAnswer | None]:
        """What each host of the gang says about its ranks; None: it has not answered in time."""
        hosts = [place.host for place in job.start.places if place.host not in job.ending.codes]
        answers = await asyncio.gather(*(self._ask_place(host, job.id, wait_s) for host in hosts))
        return dict(zip(hosts, answers, strict=True))

    async def _ask_place(self, host: HostId, job: JobId, wait_s: float) -> JobNowAnswer | None:
        if host == self.host.id:
            return self.ranks.told_by.job_now(job)
        try:
            answer = await self.host.ask(self.name, host, JobNow(job), wait_s)
        except (TimeoutError, Refused):
            return None
        return answer if isinstance(answer, JobNowAnswer) else None

    async def _move(self, given: Mapping[str, Any]) -> JobView:
        await self.moves.move(await self._seek(given), given)
        return await self._job(given)

    async def _scale(self, given: Mapping[str, Any]) -> JobView:
        await self.moves.scale(await self._seek(given), given)
        return await self._job(given)

    async def _arrange(self, given: Mapping[str, Any]) -> JobView:
        await self.arrangements.arrange(await self._seek(given), given)
        return await self._job(given)

    async def _tune(self, given: Mapping[str, Any]) -> JobView:
        await self.moves.tune(await self._seek(given), given)
        return await self._job(given)

    async def _give_up(self, given: Mapping[str, Any]) -> list[JobView]:
        return self._shown(await self.moves.give_up(HostId(str(given.get("id", ""))), given))

    async def _drain(self, given: Mapping[str, Any]) -> list[JobView]:
        return self._shown(await self.drains.drain(HostId(str(given.get("id", ""))), given))

    async def _resume(self, given: Mapping[str, Any]) -> list[JobView]:
        return self._shown(await self.drains.resume(HostId(str(given.get("id", ""))), given))

    async def _forget(self, given: Mapping[str, Any]) -> list[JobView]:
        """Take back the jobs that wait for a host that is gone, and forget the host. `agent.forget_host` asks this."""
        host = HostId(str(given.get("id", "")))
        jobs = await self.moves.give_up(host, given) if self.drains.knows(host) else []
        await self.drains.forget(host, given)
        return self._shown(jobs)

    async def _knows(self, given: Mapping[str, Any]) -> bool:
        return self.drains.knows(HostId(str(given.get("id", ""))))

    async def _cordon(self, given: Mapping[str, Any]) -> list[JobView]:
        return self._shown(await self.drains.cordon(HostId(str(given.get("id", ""))), given))

    async def _uncordon(self, given: Mapping[str, Any]) -> list[JobView]:
        return self._shown(await self.drains.uncordon(HostId(str(given.get("id", ""))), given))

    def _shown(self, jobs: list[Job]) -> list[JobView]:
        return [views.job_view(job, self._standing(), self.host.log.age_s, self._seen()) for job in jobs]

    async def _logs(self, given: Mapping[str, Any]) -> views.LogPart:
        """A part of a rank's output, from whichever host has it. JSON carries `data` in base64."""
        job = await self._seek(given)
        rank, offset = asked.whole(given, "rank", 0), asked.whole(given, "offset", 0)
        limit = max(0, min(asked.whole(given, "limit", LOG_PART_BYTES), LOG_PART_BYTES))
        if job.array is not None:
            why, first = "it is an array, and its tasks write", tasks_of(job.spec.array).first
            raise Refused(3, f"{job.id} has no output of its own", why, f"agentctl logs {job.id}[{first}]")
        if not 0 <= rank < job.spec.world_size:
            why = f"{job.id} has ranks 0 to {job.spec.world_size - 1}"
            raise Refused(3, f"there is no rank {rank}", why, f"agentctl logs {job.id} --rank 0")
        host = next((place.host for place in job.start.places if rank in place.ranks), None)
        if host is None:
            return views.LogPart(b"", offset, job.over, self.host.id, 0)
        since_s = None if given.get("since_s") is None else float(min(asked.whole(given, "since_s", 0), AGE_MAX_S))
        ask = LogTail(job.id, rank, offset, limit, since_s)
        part = await (self._log_tail(ask) if host == self.host.id else self._ask_log(host, ask))
        over = job.over or (part.ended and rank in job.ending.codes.get(host, {}))
        if over and not part.kept:
            raise views.output_gone(job, rank, host)
        end = over and part.offset + len(part.data) >= part.size
        return views.LogPart(part.data, part.offset, end, host, part.size, None if since_s is None else part.timed)

    async def _curve(self, given: Mapping[str, Any]) -> views.CurveView:
        """The steps and metrics of a job over its whole life, from all hosts: it may have run on any of them."""
        job = await self._seek(given)
        hosts = [view.host for view in self.host.hosts() if view.state in ("alive", "suspect")]
        points, silent = await self.curves.ask(job.id, hosts, asked.seconds(given, "timeout_s", ASK_S))
        return views.curve_view(job.id, points, silent)

    async def _ask_log(self, host: HostId, ask: LogTail) -> LogTailAnswer:
        what = f"the output of rank {ask.rank} of {ask.job} cannot be read now"
        try:
            answer = await self.host.ask(self.name, host, ask, 5 * ASK_S)
        except TimeoutError as error:
            why = f"it is on {host}, which does not answer"
            raise Refused(75, what, why, "try again, or see agentctl hosts") from error
        if not isinstance(answer, LogTailAnswer):
            raise Refused(1, what, f"{host} gave an unexpected answer", "upgrade the older host")
        return answer

    async def _quotas(self, given: Mapping[str, Any]) -> list[QuotaView]:
        return views.quota_views(self.queue)

    async def _quota_set(self, given: Mapping[str, Any]) -> QuotaView:
        return await self.tenants.set_quota(given)

    async def _tenants(self, given: Mapping[str, Any]) -> list[TenantView]:
        return self.tenants.rows()

    async def _tenant_set(self, given: Mapping[str, Any]) -> TenantView:
        return await self.tenants.set_users(given)

    def tenants_of(self, user: str) -> list[str]:
        return self.queue.tenants_of(user)

    async def whose(self, name: str) -> OwnerUser:
        """The owner of the job of this id; Refused as `_seek` refuses."""
        owner = (await self._seek({"id": name})).spec.owner
        return OwnerUser() if owner is None else OwnerUser(owner.user, owner.uid)

    async def _gpu_uses(self, given: Mapping[str, Any]) -> dict[str, str]:
        """GPUs of this host that are not used as the log says -> how, in words."""
        return self.uses.notes_of()

    async def _rack(self, given: Mapping[str, Any]) -> views.CapacityView:
        hosts = self.host.hosts()
        alive = [host for host in views.rack_of(hosts, self.env.clock.now_s()) if host.gone_s is None]
        free = views.free_of(hosts, self.queue)
        largest = max((host.gpus for host in alive), default=0)
        return views.CapacityView(len(alive), sum(host.gpus for host in alive), sum(free.values()), largest)

    async def _seek(self, given: Mapping[str, Any]) -> Job:
        """Find a job by its id. A job that another host has just accepted is on its way here, and is waited for."""
        id = JobId(str(given.get("id", "")))
        if not self.host.log.is_leader:
            await self.queue_log.until(lambda: self.queue.was(JobId(id.partition("[")[0])), NEWS_S)
        return self._find(given)

    def _task(self, array: JobId, index: int) -> Job:
        """The job that a task of an array became, by `j12[3]`."""
        whole = self._find({"id": array})
        found = self.queue.jobs.get(self.queue.tasks.get((array, index), JobId("")))
        if found is not None:
            return found
        if whole.array is None or tasks_of(whole.spec.array).place_of(index) is None:
            why = f"{array} has the tasks {whole.spec.array}" if whole.array is not None else f"{array} is no array"
            raise Refused(3, f"there is no {array}[{index}]", why, f"agentctl job {array}")
        why = "it has not begun, was left out, or ended long ago and is no longer kept"
        raise Refused(3, f"{array}[{index}] is no job now", why, f"agentctl job {array}")

    def _find(self, given: Mapping[str, Any]) -> Job:
        id = JobId(str(given.get("id", "")))
        if (task := _TASK.fullmatch(id)) is not None:
            return self._task(JobId(task[1]), int(task[2]))
        job = self.queue.jobs.get(id)
        if job is not None:
            return job
        log = self.host.log
        raise views.unknown(id, self.queue.was(id), self.host.id, log.caught_up, log.age_s, self.settings.current_s)
