"""The shared GPUs of one host: gangs come and go, their ranks are told limits, their reports reach the right machine.

    GangComing ---> each of its GPUs: RankArrived ... all said StartRank ---> LetStart
               '--> one said Refuse: the others forget it ------------------> GiveBack
    running before the agent: wait for what its pages say, then Found      (nothing else comes before that)

    reports of a rank ---> the machine of each of its GPUs ---> Limits ---> the strictest of them, into its page

It decides nothing about one GPU, which is `machine.gpu`'s; it knows which rank is on which.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, assert_never

from covey.core.events import LogEvent
from covey.core.ids import JobId
from covey.kernel.pages import MiniBatch, RankLimits, RankReport
from covey.ports.devices import TAKES_JOBS
from plugins.facts import JobKind
from plugins.sharing.machine import events
from plugins.sharing.machine.events import GpuAction, GpuEvent
from plugins.sharing.machine.gpu import SharedGpu
from plugins.sharing.machine.host_events import (
    EndGang,
    GangChanged,
    GangComing,
    GangGone,
    GiveBack,
    GpuAnswer,
    GpuHealth,
    GpuLooked,
    GpusHere,
    HostAction,
    HostEvent,
    HostTick,
    JobsBefore,
    LetStart,
    PagesMade,
    PairFound,
    PressRank,
    RankReported,
    ShowNeighbour,
    WriteLimits,
)
from plugins.sharing.machine.ladder import Ladder
from plugins.sharing.messages import Limits, Report
from plugins.sharing.policy.lease import NS, combined, same_but_for_time

FOUND_S = 5.0
"""Seconds that a gang that ran before the agent may take to say by which limits it goes."""
GangStage = Literal["finding", "arriving", "running", "ended"]


@dataclass
class SharingRank:
    """One rank here that has GPUs."""

    rank: int
    gpus: tuple[str, ...]
    limits: dict[str, Limits] = field(default_factory=dict)
    """The newest limits from each of its GPUs."""
    page: RankLimits | None = None
    """The newest page that was written for it."""
    sent: dict[int, dict[str, int]] = field(default_factory=dict)
    """Pages sent: epoch of the page -> epoch of each GPU's limits in it."""
    asked: tuple[int, int] | None = None
    """The epoch and the memory limit by which the rank said that it goes, once it has pages."""
    retries: int = 0
    neighbour: tuple[JobId, int] | None = None


@dataclass
class SharingGang:
    job: JobId
    epoch: int
    kind: JobKind
    memory_bytes: int
    ranks: dict[int, SharingRank]
    stage: GangStage
    since_s: float
    ready: set[str] = field(default_factory=set)
    """The GPUs that are ready for the gang."""
    given_back: bool = False

    @property
    def gpus(self) -> dict[str, int]:
        """The gang's GPUs: UUID -> rank."""
        return {gpu: rank.rank for rank in self.ranks.values() for gpu in rank.gpus}


class HostSharing:
    """The shared GPUs of one host. `reserve_bytes` of each GPU belong to no job; `controller`: what makes the law for
    opportunistic jobs beside a guaranteed one."""

    def __init__(self, reserve_bytes: int, tolerance: float, controller: type[Ladder] = Ladder) -> None:
        self.reserve_bytes, self.tolerance, self.controller = reserve_bytes, tolerance, controller
        self.gpus: dict[str, SharedGpu] = {}
        self.gangs: dict[JobId, SharingGang] = {}
        self._expected: set[JobId] = set()
        """Jobs that ran here before the agent and have not come yet."""
        self._began_s = 0.0
        self._harmful: set[tuple[JobId, JobId]] = set()
        self._out: list[HostAction] = []
        self._now_s = 0.0

    def handle(self, event: HostEvent, now_s: float) -> Sequence[HostAction]:
        self._out, self._now_s = [], now_s
        self._handle(event)
        self._look_at_ranks()
        return self._out

    def _handle(self, event: HostEvent) -> None:
        match event:
            case GpusHere():
                self._gpus_here(event)
            case JobsBefore():
                self._expected, self._began_s = set(event.jobs), self._now_s
            case GangComing():
                self._coming(event)
            case PagesMade():
                self._pages_made(event)
            case RankReported():
                self._reported(event)
            case GangChanged():
                self._changed(event)
            case GangGone():
                self._gone(event)
            case GpuLooked():
                self._looked(event)
            case GpuHealth():
                self._health(event)
            case HostTick():
                self._tick(event)
            case GpuAnswer():
                if event.uuid in self.gpus:
                    self._feed(event.uuid, event.answer)
            case _:
                assert_never(event)

    def check(self) -> None:
        for gpu in self.gpus.values():
            gpu.check()
            for job in gpu.members:
                assert gpu.uuid in self.gangs[job].gpus, f"{job} is on {gpu.uuid} and nobody knows"
        for gang in self.gangs.values():
            for rank in gang.ranks.values():
                if (page := rank.page) is not None and page.lease_ns == 0:
                    assert page.free and page.failsafe >= 1, f"{gang.job} goes on for ever without an agent"

    # ---- what comes and goes ----

    def _gpus_here(self, event: GpusHere) -> None:
        """Take in which GPUs are here. A device that is missing is not forgotten while jobs are on it: its driver may
        be silent for a while."""
        for uuid, memory_bytes in event.memory_bytes.items():
            known = self.gpus.get(uuid)
            if known is None or (not known.members and known.ledger.capacity_bytes != memory_bytes):
                self.gpus[uuid] = self._gpu(uuid, memory_bytes)
        held = {uuid for gang in self.gangs.values() for uuid in gang.gpus}
        for uuid in [uuid for uuid in self.gpus if uuid not in event.memory_bytes and uuid not in held]:
            del self.gpus[uuid]

    def _gpu(self, uuid: str, memory_bytes: int) -> SharedGpu:
        reserve = min(self.reserve_bytes, memory_bytes // 4)
        return SharedGpu(uuid, memory_bytes, reserve, self.tolerance, self.controller)

    def _coming(self, event: GangComing) -> None:
        """Take in a gang. The scheduler says it again until it is answered, so nothing is remembered of a gang that has
        to wait."""
        known = self.gangs.get(event.job)
        if known is not None and known.stage == "arriving" and known.epoch < event.epoch:
            self._end(known)  # it never started here
        known = self.gangs.get(event.job)
        if known is not None:
            if (known.epoch, known.stage) == (event.epoch, "running"):
                self._out.append(LetStart(known.job, known.epoch))
            return
        unknown = sorted({gpu for gpus in event.gpus.values() for gpu in gpus} - set(self.gpus))
        if unknown:
            self._out.append(GiveBack(event.job, event.epoch, f"there is no GPU {unknown[0]} here now"))
            return
        self._expected.discard(event.job)
        if not event.running and self._finding:
            return
        gang = self.gangs[event.job] = _gang(event, self._now_s)
        if not event.running:
            arrived = events.RankArrived(gang.job, gang.kind, gang.memory_bytes)
            for uuid in gang.gpus:
                if gang.stage == "arriving":
                    self._feed(uuid, arrived)

    def _pages_made(self, event: PagesMade) -> None:
        rank = self._rank(event.job, event.epoch, event.rank)
        if rank is None:
            return
        rank.asked = (event.limits_epoch, event.memory_limit_bytes)
        if rank.page is not None:
            epoch = max(rank.page.epoch, event.limits_epoch)
            self._write(self.gangs[event.job], rank, epoch + 1)
        rank.neighbour = None
        self._find()

    @property
    def _finding(self) -> bool:
        """Whether jobs from before the agent may still have to be found."""
        awaits = bool(self._expected) and self._now_s - self._began_s < FOUND_S
        return awaits or any(gang.stage == "finding" for gang in self.gangs.values())

    def _find(self) -> None:
        """Find the gangs from before this agent all together, once their ranks have said by what they go, or after a
        while: one that is found alone would be given what is another's."""
        finding = [gang for gang in self.gangs.values() if gang.stage == "finding"]
        if not finding or (self._expected and self._now_s - self._began_s < FOUND_S):
            return
        silent = any(rank.asked is None for gang in finding for rank in gang.ranks.values())
        if silent and self._now_s - max(gang.since_s for gang in finding) < FOUND_S:
            return
        gpus = [self.gpus[uuid] for gang in finding for uuid in gang.gpus]
        for gpu in gpus:
            gpu.adopting = True
        for gang in sorted(finding, key=_unlimited):
            self._found(gang)
        for gpu in gpus:
            gpu.adopting = False

    def _found(self, gang: SharingGang) -> None:
        gang.stage = "running"
        for uuid, number in gang.gpus.items():
            epoch, limit = gang.ranks[number].asked or (0, 0)
            free = self.gpus[uuid].ledger.free_bytes
            limit = limit or min(free, gang.memory_bytes or free)
            self._feed(uuid, events.Found(gang.job, gang.kind, gang.memory_bytes, limit, epoch))
        if not gang.given_back:
            self._out.append(LetStart(gang.job, gang.epoch))

    def _changed(self, event: GangChanged) -> None:
        gang = self.gangs.get(event.job)
        if gang is None or gang.epoch != event.epoch or gang.stage == "ended":
            return
        gang.kind = event.kind
        for uuid in gang.gpus if gang.stage != "finding" else ():
            self._feed(uuid, events.Retagged(event.job, event.kind, event.grant))

    def _gone(self, event: GangGone) -> None:
        gang = self.gangs.get(event.job)
        if gang is not None and gang.epoch == event.epoch and gang.stage != "ended":
            self._end(gang)

    def _end(self, gang: SharingGang) -> None:
        never_started, gang.stage = gang.stage == "arriving", "ended"
        for uuid in gang.gpus:
            self._feed(uuid, events.RankEnded(gang.job))
            if never_started:
                self._feed(uuid, events.Freed(gang.job))
        if never_started:
            del self.gangs[gang.job]

    def _looked(self, event: GpuLooked) -> None:
        for gang in [gang for gang in self.gangs.values() if gang.stage == "ended" and event.uuid in gang.gpus]:
            if gang.job not in event.holders:
                self._feed(event.uuid, events.Freed(gang.job))
            if not any(gang.job in self.gpus[uuid].members for uuid in gang.gpus):
                del self.gangs[gang.job]
                self._harmful = {pair for pair in self._harmful if gang.job not in pair}

    def _health(self, event: GpuHealth) -> None:
        gpu = self.gpus.get(event.uuid)
        if gpu is None:
            return
        if event.condition in TAKES_JOBS and gpu.use.why and not gpu.members:
            self.gpus[event.uuid] = self._gpu(event.uuid, gpu.ledger.capacity_bytes)  # it was reset, or replaced
            self._out.append(
                LogEvent(gpu.subject, "in use again", f"its driver reports no trouble; before: {gpu.use.why}")
            )
        elif event.condition == "lost":
            self._feed(event.uuid, events.DeviceLost(event.why))
        elif event.condition == "drain":
            self._feed(event.uuid, events.DeviceDraining(event.why))

    # ---- mini-batches and time ----

    def _reported(self, event: RankReported) -> None:
        rank, report = self._rank(event.job, event.epoch, event.rank), event.report
        if rank is None or self.gangs[event.job].stage != "running":
            return
        acked = self._acked(rank, report.acked)
        if not report.batches:
            for uuid in rank.gpus:
                self._feed(uuid, events.Acked(event.job, acked.get(uuid, 0), report.gate > 0, report.says_idle))
        for number, batch in enumerate(report.batches):
            last = number == len(report.batches) - 1
            for uuid in rank.gpus:
                told = _report(
                    event.job, acked.get(uuid, 0) if last else 0, batch, report, report.retries - rank.retries
                )
                self._feed(uuid, events.Reported(told))
            rank.retries = report.retries

    def _acked(self, rank: SharingRank, epoch: int) -> dict[str, int]:
        """Epochs of its GPUs' limits that a rank has applied, by what it says of its page's epoch."""
        applied = max((sent for sent in rank.sent if sent <= epoch), default=None)
        if applied is None:
            return {}
        rank.sent = {sent: epochs for sent, epochs in rank.sent.items() if sent >= applied}
        return rank.sent[applied]

    def _tick(self, event: HostTick) -> None:
        self._find()
        for uuid, gpu in self.gpus.items():
            holder = gpu.guaranteed
            rank = None if holder is None else self.gangs[holder.job].gpus.get(uuid)
            idle = holder is not None and rank is not None and (holder.job, rank) in event.idle
            self._feed(uuid, events.TimePassed(not idle))
            self._pairs(gpu)

    def _pairs(self, gpu: SharedGpu) -> None:
        ladder, holder = gpu.ladder, gpu.guaranteed
        if ladder is None or holder is None or not ladder.hopeless:
            return
        for member in gpu.opportunistic:
            if (holder.job, member.job) not in self._harmful:
                self._harmful.add((holder.job, member.job))
                self._out.append(PairFound(holder.job, member.job, ladder.found.excess, ladder.found.error))

    # ---- the machines of GPUs ----

    def _feed(self, uuid: str, event: GpuEvent) -> None:
        for action in self.gpus[uuid].handle(event, self._now_s):
            self._perform(uuid, action)

    def _perform(self, uuid: str, action: GpuAction) -> None:
        if isinstance(action, LogEvent):
            self._out.append(action)
            return
        gang = self.gangs[action.limits.job if isinstance(action, events.SetLimits) else action.job]
        rank = gang.ranks[gang.gpus[uuid]]
        match action:
            case events.SetLimits():
                rank.limits[uuid] = action.limits
            case events.StartRank():
                gang.ready.add(uuid)
                if gang.stage == "arriving" and gang.ready >= set(gang.gpus):
                    gang.stage = "running"
                    self._out.append(LetStart(gang.job, gang.epoch))
            case events.Refuse():
                self._refused(gang, action.why)
            case events.Terminate():
                self._give_back(gang, action.why)
            case events.Kill():
                self._out.append(EndGang(gang.job, gang.epoch, action.why))
            case events.HardLimit():
                self._out.append(PressRank(uuid, gang.job, rank.rank, action.limit_bytes, "limit"))
            case events.Suspend():
                self._out.append(PressRank(uuid, gang.job, rank.rank, None, "suspend"))
            case events.Resume():
                self._out.append(PressRank(uuid, gang.job, rank.rank, None, "resume"))
            case _:
                assert_never(action)

    def _refused(self, gang: SharingGang, why: str) -> None:
        """Give a gang back that a GPU refused: it is on none of its GPUs, or on all."""
        self._give_back(gang, why)
        self._end(gang)

    def _give_back(self, gang: SharingGang, why: str) -> None:
        if not gang.given_back:
            gang.given_back = True
            self._out.append(GiveBack(gang.job, gang.epoch, why))

    # ---- what ranks are told ----

    def _rank(self, job: JobId, epoch: int, rank: int) -> SharingRank | None:
        gang = self.gangs.get(job)
        return gang.ranks.get(rank) if gang is not None and gang.epoch == epoch else None

    def _look_at_ranks(self) -> None:
        for gang in self.gangs.values():
            for rank in gang.ranks.values():
                if gang.stage in ("arriving", "running") and len(rank.limits) == len(rank.gpus):
                    self._tell(gang, rank)
                self._point(gang, rank)

    def _tell(self, gang: SharingGang, rank: SharingRank) -> None:
        old = rank.page
        new = self._page(gang, rank, 0 if old is None else old.epoch)
        epochs = {uuid: limits.epoch for uuid, limits in rank.limits.items()}
        newest = rank.sent[max(rank.sent)] if rank.sent else {}
        if not same_but_for_time(old, new) or epochs != newest:
            asked = rank.asked[0] if rank.asked is not None else 0
            self._write(gang, rank, max(asked, 0 if old is None else old.epoch) + 1)
        elif old is not None and 0 < old.lease_ns < new.lease_ns - NS // 2:
            self._write(gang, rank, old.epoch)

    def _page(self, gang: SharingGang, rank: SharingRank, epoch: int) -> RankLimits:
        alone = all(len(self.gpus[uuid].members) == 1 for uuid in rank.gpus)
        return combined(list(rank.limits.values()), epoch, gang.kind == "guaranteed", alone, self._now_s)

    def _write(self, gang: SharingGang, rank: SharingRank, epoch: int) -> None:
        limits = rank.page = self._page(gang, rank, epoch)
        rank.sent[epoch] = {uuid: limit.epoch for uuid, limit in rank.limits.items()}
        self._out.append(WriteLimits(gang.job, rank.rank, limits))

    def _point(self, gang: SharingGang, rank: SharingRank) -> None:
        """Let an opportunistic rank read the flag of the guaranteed rank beside it."""
        found = None
        if gang.kind != "guaranteed" and gang.stage == "running" and rank.asked is not None:
            found = next(filter(None, map(self._guaranteed_on, rank.gpus)), None)
        if found != rank.neighbour:
            rank.neighbour = found
            self._out.append(ShowNeighbour(gang.job, rank.rank, found))

    def _guaranteed_on(self, uuid: str) -> tuple[JobId, int] | None:
        holder = self.gpus[uuid].guaranteed
        if holder is None or holder.stage != "running":
            return None
        gang = self.gangs[holder.job]
        number = gang.gpus[uuid]
        return (holder.job, number) if gang.ranks[number].asked is not None else None


def _gang(event: GangComing, now_s: float) -> SharingGang:
    ranks = {number: SharingRank(number, gpus) for number, gpus in event.gpus.items() if gpus}
    stage: GangStage = "finding" if event.running else "arriving"
    return SharingGang(event.job, event.epoch, event.kind, event.memory_bytes, ranks, stage, now_s)


def _unlimited(gang: SharingGang) -> int:
    """The number of ranks that did not say what memory they may hold: they share what the others leave."""
    return sum(rank.asked is None or rank.asked[1] == 0 for rank in gang.ranks.values())


def _report(job: JobId, acked: int, batch: MiniBatch, report: RankReport, retries: int) -> Report:
    return Report(
        job,
        acked,
        batch.number,
        batch.step_ns / NS,
        batch.idle_ns / NS,
        report.peak_bytes,
        report.stable_bytes,
        report.spill_bytes,
        max(0, retries),
        report.gate > 0,
        report.says_idle,
        batch.ended_ns / NS if batch.ended_ns else None,
        report.fixed,
    )
