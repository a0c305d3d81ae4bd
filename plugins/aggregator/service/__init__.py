"""The aggregator plugin at work: gives events to its machines, keeps `aggd` alive, tells the ranks.

`aggd` is looked for before it is started (by its process id in this plugin's state on disk, then at its control
socket), so a restarted agent finds the one that ran on without it. It is asked for its numbers once a second; when it
no longer answers, or its process ends, every job it served is dropped, the job's coordinator is told, and a new `aggd`
is started. Ranks that own tables of their jobs themselves are in `owning_ranks`.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from covey.core.errors import Refused
from covey.core.events import Fact, Heard, LogEvent, Publish, Send
from covey.core.ids import HostId, JobId
from covey.core.metrics import MetricSeries
from covey.ports.addresses import joined
from covey.ports.streams import ByteStream
from covey.tensors.aggregator.present_owner import HANDOVER_S
from covey.tensors.numbers.blocks import TABLES_MAX, job_of, number_of, table_id
from covey.tensors.numbers.tensor_wire import grant_of
from covey.wire import checked
from covey.wire.frames import read_frame, write_frame
from covey.wire.job import AggregatorAt, AggregatorLost, Frame, SumsNow
from covey.wire.sums import DropJob, GetStatus, Now, Order, Quit, Serve, answers
from plugins import facts
from plugins.aggregator import messages, policy
from plugins.aggregator.machine.coordinator import JobCoordinator, JobStepped
from plugins.aggregator.machine.direct_tables import DirectTables, ForgetByRank, ServeByRank
from plugins.aggregator.machine.directory import Directory, RankJoined, RankLost
from plugins.aggregator.machine.events import (
    AskQuestion,
    GangPlaced,
    Keep,
    QuestionAnswered,
    RackUpdated,
    TellRanks,
    Unplaced,
)
from plugins.aggregator.machine.owner import Owner
from plugins.aggregator.machine.process_words import ForgetJob, LoadChanged, ProcessDown, ProcessUp, Served, ServeJob
from plugins.aggregator.machine.served_job import ServedJob
from plugins.aggregator.policy import Candidate
from plugins.aggregator.service import metrics
from plugins.aggregator.service.away import RanksAwayNow
from plugins.aggregator.service.kept import AggregatorState, kept_states
from plugins.aggregator.service.lanes import lanes_here
from plugins.aggregator.service.moves import move_of
from plugins.aggregator.service.owning_ranks import OwningRanks
from plugins.aggregator.service.paces import paces
from plugins.aggregator.service.process import AggdProcess
from plugins.aggregator.service.rdma import told as rdma_told
from plugins.aggregator.service.tables import JobTables
from plugins.aggregator.service.view import awaited, direct_view, view, worked
from plugins.base import Command, Host, JobPeer, PluginService
from plugins.facts import HostView
from plugins.gossiped import AggregatorNow, drained, is_drained
from plugins.starting import Pauses
from plugins.views import AggregatorJobView

Machine = JobCoordinator | Owner | DirectTables | Directory
STATE = "aggregator/state"
ORDER_S = 5.0
"""Seconds that aggd may take to answer an order."""
WAKE_S = 3.0
"""Seconds that an offer waits for aggd to come up; its coordinator waits 4 s for an answer."""
ASLEEP = "asleep"
"""Address published by a host that would sum, and does not yet."""
POLL_S = 1.0
ITERATION_S = HANDOVER_S / 2
"""Seconds within which aggd finds a moment between two iterations of a job that another host is to sum; before that it
gives the next owner up to half that time to get ready."""
SAVE_AGAIN_S = 2.0
"""Seconds between two tries to write to a failing disk."""
STRANGER_S = 10.0
"""Seconds after which a host of a job that gossip has never shown since this agent started counts as gone."""
ASK_ALL_S = 2.0
STEP_S_MAX = 86_400.0
"""Most seconds of a step that are believed: a script that says it took longer is not."""


class AggregatorService(PluginService):
    name: ClassVar[str] = "aggregator"

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.settings = host.settings(messages.AggregatorSettings)
        self.coordinator = JobCoordinator(host.id, host.env.entropy, self.settings)
        self.owner = Owner(self.settings, me=host.id)
        self.direct = DirectTables(self.settings, host.id)
        self.directory = Directory(host.id)
        self.now: Now | None = None
        """Last status of aggd; None while it is down."""
        self._control: ByteStream | None = None
        self._turn = asyncio.Lock()
        self._wanted, self._up = asyncio.Event(), asyncio.Event()
        """Set once aggd is to run, and while it does."""
        self._doubted = asyncio.Event()
        """Set when aggd should be asked at once whether it lives."""
        self._aggd = AggdProcess(self.env, self._save, self._doubted.set)
        self._disk_turn = asyncio.Lock()
        self._published: AggregatorNow | None = None
        self._tables, self._away = JobTables(self.settings.direct == "auto"), RanksAwayNow()
        self._ranks = OwningRanks(host, self.settings, self._away, lambda event: self.dispatch(event, self.direct))
        self._started_s = 0.0
        self._measured: tuple[float, float, float] = (0.0, 0.0, 0.0)
        self._load = 0.0

    # ---- life ----

    async def start(self) -> None:
        self._started_s = self.env.clock.now_s()
        kept = await self._load_kept()
        self.owner = Owner(self.settings, kept.held, self.host.id, lanes_here(self.settings.lanes, self.env.probes))
        self.direct = DirectTables(self.settings, self.host.id, kept.direct)
        self.directory = Directory(self.host.id, kept.known)
        self._aggd.id = kept.process
        if self.settings.serve:
            if kept.held or self._aggd.find() is not None:
                self.wake()
            self._publish()
            self.env.spawn("aggregator keeps aggd", self._keep_aggd())
        elif kept.process is not None:
            self.env.spawn("aggregator ends aggd", self._end_aggd())

    def wake(self) -> None:
        """Start aggd for the first offer: where no job is summed there is none."""
        self._wanted.set()

    async def stop(self) -> None:
        """Stop the plugin. aggd is left running, since its jobs continue."""
        if self._control is not None:
            self._control.close()

    async def _load_kept(self) -> AggregatorState:
        """Load the state on disk. It is empty when the file is damaged: coordinators offer their tensors again, and the
        workers know the sums."""
        try:
            return await checked.load(self.env.disk, STATE, kept_states) or AggregatorState()
        except checked.Damaged as error:
            self.log.error("the record of assignments is damaged, and starts empty", why=str(error))
            return AggregatorState()

    async def _save(self) -> None:
        async with self._disk_turn:
            held, known, direct = self.owner.jobs, self.directory.known, self.direct.tables
            kept = AggregatorState(self._aggd.id, list(held.values()), list(known.values()), list(direct.values()))
            await checked.save(self.env.disk, STATE, kept)

    async def _keep(self) -> None:
        """Save the state. A write that fails is repeated until one succeeds: the state is only needed after a
        restart."""
        while True:
            try:
                await self._save()
                return
            except OSError as error:
                self.log.error("the record of assignments cannot be written", why=str(error))
                await asyncio.sleep(SAVE_AGAIN_S)

    # ---- aggd ----

    async def _end_aggd(self) -> None:
        """End aggd, since this host served before its settings changed: the coordinators of its jobs are told, and the
        process ends."""
        try:
            self._control = await self._aggd.connect()
            await self._order(Quit())
        except (OSError, TimeoutError):
            pass  # it is gone already
        self._aggd.id = None
        self._lost_aggd(f"{self.host.id} no longer sums tensors (serve = false)")
        await self._keep()

    async def _keep_aggd(self) -> None:
        await self._wanted.wait()
        pauses = Pauses(self.env.rng)
        while True:
            reached_s = None
            try:
                bind, lanes = joined(self.host.advertise, 0), lanes_here(self.settings.lanes, self.env.probes)
                self._control = await self._aggd.reach(bind, self.settings.memory_bytes_max, lanes)
                reached_s = self.env.clock.now_s()
                await self._watch_aggd()
            except (OSError, TimeoutError) as error:
                why = await self._aggd.why_ended() or str(error) or type(error).__name__
                self._lost_aggd(f"aggd on {self.host.id}: {why}")
            await asyncio.sleep(pauses.after(0.0 if reached_s is None else self.env.clock.now_s() - reached_s))

    async def _watch_aggd(self) -> None:
        """Ask aggd for its numbers until it no longer answers: always ends by an exception."""
        self.now = await self._order(GetStatus())
        self._measured = (self.env.clock.now_s(), self.now.busy_s, self.now.lanes_s)
        now, serves = self.now, {job.job: job.epoch for job in self.now.jobs}
        self.dispatch(ProcessUp(now.address, serves, now.lanes), self.owner)
        self._up.set()
        self._publish()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._doubted.wait()
            self._doubted.clear()
            before, self.now = self.now.jobs, await self._order(GetStatus())
            for fact in worked(before, self.now.jobs):
                self.host.publish(fact)
            orders: list[Order] = [*paces(self.owner, self.now), *self._away.orders(self.now)]
            for order in orders:
                await self._order(order)
            self._measure(self.now)
            self._publish()

    def _measure(self, now: Now) -> None:
        then_s, busy_s, lanes_s = self._measured
        now_s = self.env.clock.now_s()
        spent = now.busy_s - busy_s, now_s - then_s, now.lanes, now.lanes_s - lanes_s
        self._load = policy.load_now(self._load, *spent)
        self._measured = (now_s, now.busy_s, now.lanes_s)
        for job in now.jobs:
            if job.iterations:
                self.host.publish(awaited(job))
        idle = frozenset(job.job for job in now.jobs if not job.iterations)
        self.dispatch(LoadChanged(self._load, idle), self.owner)

    async def _order(self, order: Order) -> Now:
        """Give aggd an order. OSError, TimeoutError when it does not obey; the connection is then closed."""
        async with self._turn:
            if self._control is None:
                raise ConnectionError("is not connected")
            control, self._control = self._control, None  # kept only if the order is answered in time
            try:
                async with asyncio.timeout(ORDER_S):
                    await write_frame(control, order)
                    answer = await read_frame(control, answers)
                self._control = control
                return answer
            finally:
                if self._control is None:
                    control.close()

    def _lost_aggd(self, why: str) -> None:
        if self._control is not None:
            self._control.close()
        self._control = self.now = None
        self._up.clear()
        self.log.warning("aggd is down", why=why)
        self.dispatch(ProcessDown(why), self.owner)
        self._publish()

    def _publish(self) -> None:
        asleep = ASLEEP if self.settings.serve and not self._wanted.is_set() else ""
        address = self.now.address if self.now is not None else asleep
        cycle = self.owner.ledger.cycle
        load = round(self._load, 1)
        value = AggregatorNow(address, len(self.owner.jobs), load, cycle.us, cycle.used_us, cycle.lanes)
        if value != self._published:
            self._published = value
            self.host.spread("aggregator", value)

    # ---- facts, frames, messages ----

    def on_fact(self, fact: Fact) -> None:
        match fact:
            case facts.JobPlaced():
                self._placed(fact)
            case facts.RanksLeft():
                if self._away.left(fact):  # who sums is told at once
                    self._doubted.set()
                    self._ranks.poll(self.direct)
            case facts.JobUnplaced():
                self._away.forget(fact.job)
                held = (*self.owner.jobs, *self.direct.tables, *self.directory.known)
                kept = (table for table in held if job_of(table) == fact.job)
                for table in dict.fromkeys((*self._tables.unplace(fact.job), *kept)):
                    self._feed_all(Unplaced(table, fact.epoch, fact.ended))
            case facts.HostGone() | facts.HostSeen() | facts.SecondPassed():
                rack = self._rack()
                for machine in (self.coordinator, self.directory, self.owner, self.direct):
                    self.dispatch(rack, machine)
                if isinstance(fact, facts.SecondPassed):
                    self._ranks.poll(self.direct)
            case facts.StepTimed():
                self._stepped(fact)
            case facts.JobJoined():
                self.dispatch(RankJoined(fact.job), self.directory)
            case facts.TableUsed():
                table = table_id(fact.job, fact.table)
                self._ranks.may_own(fact.job, fact.epoch)
                self._tables.use(table, fact.epoch)
                if fact.epoch == self._tables.grant(fact.job):
                    self._open(table)
                self.dispatch(RankJoined(table), self.directory)
            case facts.RankDisconnected():
                self._ranks.disconnected()
            case _:
                pass

    def _placed(self, fact: facts.JobPlaced) -> None:
        """The log says where a gang runs. A table that the disk knows was open before this agent started."""
        for table, known in self.directory.known.items():
            if job_of(table) == fact.job and grant_of(known.epoch) == fact.epoch:
                self._tables.use(table, fact.epoch)
        opened, others = self._tables.place(fact)
        for gang in opened:
            self._feed_all(gang)
        for gang in others:
            self.dispatch(gang, self.owner)
            self.dispatch(gang, self.direct)
        for peer in self.host.peers(fact.job):
            self._tell_superseded(peer)

    def _stepped(self, fact: facts.StepTimed) -> None:
        """Pass on a step of the job: that of the lowest rank here counts, since rounds keep the ranks in step."""
        here = [min(place.ranks) for place in self._tables.places(fact.job) if place.host == self.host.id]
        if here == [fact.rank] and 0 < fact.step_s < STEP_S_MAX:
            period_us = max(1, round(fact.step_s * 1e6))
            for table in self._tables.ids(fact.job):
                self.dispatch(JobStepped(table, fact.epoch, fact.step, period_us), self.coordinator)

    async def frame(self, peer: JobPeer, frame: Frame) -> None:
        if isinstance(frame, SumsNow) and frame.over:
            self._ranks.done(peer)
        elif isinstance(frame, SumsNow):
            self._ranks.said(peer, frame.now)
        if not isinstance(frame, AggregatorLost) or peer.job is None or not 0 <= frame.table < TABLES_MAX:
            return
        table = table_id(peer.job, frame.table)
        self.log.info("aggregator lost by a rank", job=table, rank=peer.rank, why=frame.why)
        if not self._tell_superseded(peer):
            self._open(table)
            self.dispatch(RankLost(table, frame.epoch, frame.why), self.directory)

    def _open(self, table: JobId) -> None:
        """Open a table: a rank here has Blocks in it, or another host asks which host sums it."""
        for gang in self._tables.open(table):
            self._feed_all(gang)

    def _tell_superseded(self, peer: JobPeer) -> bool:
        """Tell a rank of a run that was taken back, by an epoch of the present one, that its run is over."""
        if peer.job is None or peer.epoch >= self._tables.grant(peer.job):
            return False
        peer.send(AggregatorAt(peer.job, self._tables.grant(peer.job) << 32, self.host.id, "", b""))
        return True

    async def on_message(self, sender: HostId, message: Any) -> None:
        """Give each message to the machines that take it."""
        if not isinstance(message, messages.Heard):
            return
        for_aggd = isinstance(message, messages.ReserveCycle) or (
            isinstance(message, messages.Offer) and not message.direct
        )
        if for_aggd and self.settings.serve:
            await self._woken()
        if isinstance(message, messages.OwnerWanted | messages.Lost):
            self._open(message.job)
        machines: Sequence[Machine] = (self.owner, self.direct, self.directory, self.coordinator)
        for machine in machines:
            if isinstance(message, machine.takes):
                self.dispatch(Heard(sender, message), machine)

    async def _woken(self) -> None:
        """Wait until aggd runs, for a part of the coordinator's patience; after that the owner says that it is not
        up."""
        self.wake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAKE_S):
                await self._up.wait()

    async def answer(self, sender: HostId, question: Any) -> msgspec.Struct:
        match question:
            case messages.GetOwner():
                return messages.KnownOwner(self.directory.known.get(question.job))
            case messages.Probe():
                return messages.Serving(await self._serves(question.job, question.epoch))
            case messages.WorkOf():
                return await self._work_of(question.job, question.epoch)
            case messages.CycleHere():
                return self.owner.promised()
            case messages.TensorsHere():
                return messages.Tensors(self.tensors_here())
            case _:
                return await super().answer(sender, question)

    async def _serves(self, table: JobId, epoch: int) -> bool:
        """Whether aggd, or a rank here, sums the table under this epoch right now."""
        if self.direct.serves(table, epoch):
            rank = self._ranks.of(self.direct.process_of(table))
            return rank is not None and await self._ranks.ask(rank) is not None and self.direct.serves(table, epoch)
        return self.owner.serves(table, epoch) and await self._obeyed(GetStatus())

    async def _work_of(self, name: JobId, epoch: int) -> messages.WorkCounters:
        """The counters of a job, as aggd or its rank has them now."""
        if self.direct.serves(name, epoch):
            rank = self._ranks.of(self.direct.process_of(name))
            now = await self._ranks.ask(rank) if rank is not None else None
            for job in now.jobs if now is not None else ():
                if (job.job, job.epoch) == (name, epoch):
                    return messages.WorkCounters(True, job.busy_us, job.iterations, job.largest_bytes, job.bytes)
            return messages.WorkCounters(False)
        known = self.owner.serves(name, epoch) and await self._obeyed(GetStatus())
        jobs = self.now.jobs if known and self.now is not None else []
        for job in jobs:
            if (job.job, job.epoch) == (name, epoch) and self.owner.serves(name, epoch):
                beside = len(self.owner.jobs.keys() - {name})
                demand, changes = self.owner.jobs[name].demand, self.owner.changes
                sizes = job.largest_bytes, job.bytes
                return messages.WorkCounters(True, job.busy_us, job.iterations, *sizes, beside, changes, demand)
        return messages.WorkCounters(False)

    def _rack(self) -> RackUpdated:
        views = self.host.hosts()
        gone = {view.host for view in views if view.state in ("gone", "left")} - {self.host.id}
        if self.env.clock.now_s() - self._started_s > STRANGER_S:
            gone |= self._tables.hosts() - {view.host for view in views} - {self.host.id}
        candidates = filter(None, (self._candidate(view) for view in views if view.host not in gone))
        return RackUpdated(frozenset(gone), tuple(candidates), is_drained(self.host.id, views))

    def _candidate(self, view: HostView) -> Candidate | None:
        now = view.value("aggregator", AggregatorNow)
        if not isinstance(now, AggregatorNow) or not now.address or view.state == "away" or drained(view):
            return None
        plan = now.cycle_us, now.used_us, max(1, now.lanes)
        return Candidate(view.host, view.state == "suspect", now.load, now.jobs, view.age_s, *plan)

    # ---- machines ----

    def _feed_all(self, event: GangPlaced | Unplaced) -> None:
        for machine in (self.owner, self.direct, self.directory, self.coordinator):
            self.dispatch(event, machine)

    def dispatch(self, event: Any, machine: Machine) -> None:
        for action in machine.handle(event, self.env.clock.now_s()):
            self.perform(action, lambda back: self.dispatch(back, machine))

    def perform(self, action: Any, feed: Callable[[Any], None]) -> None:
        match action:
            case AskQuestion():
                self.env.spawn("aggregator asks", self._ask(action, feed))
            case Keep():
                self.env.spawn("aggregator saves", self._keep())
            case TellRanks():
                self.env.spawn("aggregator tells ranks", self._tell_ranks(action.assigned))
            case ServeJob():
                self.env.spawn("aggregator serves", self._serve(action.held, feed))
            case ForgetJob():
                within_s = ITERATION_S if action.handed_over else 0.0
                order = DropJob(action.job, action.epoch, action.instead, within_s, action.to)
                self.env.spawn("aggregator forgets", self._obeyed(order))
            case ServeByRank():
                self.env.spawn("aggregator serves by a rank", self._serve_by_rank(action, feed))
            case ForgetByRank():
                within_s = ITERATION_S if action.order.handed_over else 0.0
                self._ranks.forget(action.process, action.order, within_s)
            case Publish(fact=facts.TensorsSeen() as seen):
                self.host.publish(self._tables.seen(seen))
            case LogEvent() if number := number_of(JobId(action.subject)):
                self.host.note(
                    job_of(JobId(action.subject)), action.event, f"table {number}: {action.reason}", action.key
                )
            case _:
                super().perform(action, feed)

    async def _ask(self, action: AskQuestion, feed: Callable[[Any], None]) -> None:
        answer: msgspec.Struct | None = None
        with contextlib.suppress(TimeoutError, Refused):
            answer = await self.host.ask(self.name, action.to, action.question, action.deadline_s)
        feed(QuestionAnswered(action.to, action.question, answer))

    async def _tell_ranks(self, assigned: messages.Assigned) -> None:
        """Tell ranks their assignment once it is on disk, so that no rank is ever sent back."""
        await self._keep()
        if self.directory.current(assigned.job) != assigned:
            return
        grant, job, number = grant_of(assigned.epoch), job_of(assigned.job), number_of(assigned.job)
        if not number:
            self.host.publish(facts.TensorsAssigned(job, grant, assigned.epoch, assigned.owner))
        to = assigned.owner, assigned.address, assigned.secret
        rdma = assigned.direct and self.settings.rdma == "auto"
        at = AggregatorAt(job, assigned.epoch, *to, number, assigned.handed_over, self._near(assigned), rdma)
        for peer in self.host.peers(job):
            if peer.epoch == grant:
                peer.send(at)

    def _near(self, assigned: messages.Assigned) -> str:
        """Path of the owner's unix socket; empty on another host."""
        if assigned.owner != self.host.id:
            return ""
        rank = self._ranks.of(self.direct.process_of(assigned.job)) if assigned.direct else None
        now = rank.now if rank is not None else None if assigned.direct else self.now
        return now.near if now is not None else ""

    async def _serve_by_rank(self, action: ServeByRank, feed: Callable[[Any], None]) -> None:
        await self._keep()
        if self.direct.tables.get(action.table.job) == action.table:
            feed(await self._ranks.serve(action))

    async def _serve(self, held: ServedJob, feed: Callable[[Any], None]) -> None:
        await self._keep()
        if self.owner.jobs.get(held.job) != held:
            return
        if await self._obeyed(Serve(held.job, held.epoch, held.workers, held.secret, held.size_bytes)):
            feed(Served(held.job, held.epoch))
            self._publish()

    async def _obeyed(self, order: Order) -> bool:
        """Give aggd an order. False when it is down: the task that watches it drops its jobs."""
        try:
            self.now = await self._order(order)
        except (OSError, TimeoutError):
            self._doubted.set()
            return False
        return True

    # ---- what people ask ----

    def owner_of(self, job: JobId) -> HostId | None:
        """Host that sums a job's tensors, as the ranks of this host were told."""
        known = self.directory.current(job)
        return known.owner if known is not None else None

    def tensors_here(self) -> list[AggregatorJobView]:
        """Tables summed on this host, as aggd and ranks that own some reported within the last second or so."""
        now_s, found = self.env.clock.now_s(), list[AggregatorJobView]()
        for rank in self._ranks.all:
            each = [direct_view(self.direct, job, rank.number, now_s - rank.heard_s) for job in rank.jobs]
            found += [row for row in each if row is not None]
        age_s = max(0.0, now_s - self._measured[0])
        return [*found, *(view(self.owner, job, age_s) for job in (self.now.jobs if self.now is not None else ()))]

    def commands(self) -> Mapping[str, Command]:
        return {"tensors": self._tensors, "move": self._move}

    async def _move(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        move = move_of(arguments, self.host.hosts(), self._tables.hosts_of_ranks)
        self.perform(Send(move.owner, move.order), lambda back: None)
        return {"job": move.order.job, "from": move.owner, "to": move.order.to}

    async def _tensors(self, arguments: Mapping[str, Any]) -> list[AggregatorJobView]:
        """The jobs summed on this host; with `host` those of another one."""
        host = arguments.get("host", self.host.id)
        if host == self.host.id:
            return self.tensors_here()
        if host not in {view.host for view in self.host.hosts()}:
            raise Refused(3, f"there is no host {host!r}", "gossip knows no host of that name", "agentctl hosts")
        try:
            answer = await self.host.ask(self.name, HostId(host), messages.TensorsHere(), ASK_ALL_S)
        except TimeoutError:
            what = f"{host} does not answer"
            raise Refused(
                6, what, f"no answer within {ASK_ALL_S:g} s", "agentctl hosts shows whether it is up"
            ) from None
        return answer.jobs if isinstance(answer, messages.Tensors) else []

    def status(self) -> Mapping[str, str]:
        return {"tensors": rdma_told(self.settings, self.env.verbs, [rank.now for rank in self._ranks.all])}

    def metrics(self) -> Mapping[MetricSeries, float]:
        jobs: Sequence[Any] = self.now.jobs if self.now is not None else ()
        return {
            metrics.DIRECT.of(): float(len(self.direct.tables)),
            metrics.UP.of(): float(self.now is not None),
            metrics.JOBS.of(): float(len(self.owner.jobs)),
            metrics.LOAD.of(): self._load,
            metrics.PROMISED.of(): float(self.owner.ledger.cycle.load),
            metrics.STARTS.of(): float(self._aggd.starts),
            metrics.ROUNDS.of(): float(sum(job.rounds for job in jobs)),
            metrics.RECEIVED_BYTES.of(): float(sum(job.received_bytes for job in jobs)),
            metrics.SENT_BYTES.of(): float(sum(job.sent_bytes for job in jobs)),
            metrics.NOT_FINITE.of(): float(sum(job.not_finite for job in jobs)),
            metrics.MEMORY_BYTES.of(): float(self.now.memory_bytes if self.now is not None else 0),
            metrics.BAD_FRAMES.of(): float(self.now.bad_frames if self.now is not None else 0),
            metrics.REFUSED.of(): float(self.now.refused if self.now is not None else 0),
            metrics.COPIED.of(): float(self.now.copied if self.now is not None else 0),
            metrics.COPIES_FAILED.of(): float(self.now.copies_failed if self.now is not None else 0),
        }
