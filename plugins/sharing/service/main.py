"""The plugin on one host: it takes pages, devices and facts in, and gives limits, signals and facts out. It decides
nothing."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, ClassVar, assert_never

from covey.core.events import Fact, LogEvent
from covey.core.ids import JobId
from covey.core.metrics import MetricSeries
from covey.ports.processes import LetsGo
from plugins.base import Command, Host, PluginService, RankPages
from plugins.facts import (
    GpusMeasured,
    JobUnplaced,
    KindChanged,
    PairHarms,
    RankReplaced,
    RanksComing,
    RanksEnded,
    RankShares,
    RanksMayStart,
    RanksStarted,
    RanksUnfit,
)
from plugins.sharing.machine.events import HardLimited, Suspended
from plugins.sharing.machine.host import HostSharing
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
from plugins.sharing.policy.settings import SharingSettings
from plugins.sharing.service import metrics, views
from plugins.sharing.service.watch import DeviceWatch, holders
from plugins.views import InterferenceView, SharedGpuView

TICK_S = 0.05
"""Seconds between two looks at the pages."""
LOOK_S = 1.0
"""Seconds between two looks at the devices."""


class SharingService(PluginService):
    """The sharing service; see the plugin's essay in `plugins/sharing/__init__.py`."""

    name: ClassVar[str] = "sharing"

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.settings = host.settings(SharingSettings)
        self.machine = HostSharing(self.settings.reserve_bytes, self.settings.tolerance)
        self.watch = DeviceWatch(host.env)
        self.pids: dict[JobId, dict[int, int]] = {}
        """The main process of each rank, of jobs with GPUs here: job -> rank -> pid."""
        self.counters = {"limits": 0, "garbage": 0, "missed": 0, "pressed": 0, "given_back": 0}
        self._awake = asyncio.Event()
        self._garbage: dict[tuple[JobId, int], int] = {}
        self._begun: dict[tuple[JobId, int], int] = {}
        """Main process of each rank that finished a mini-batch."""

    async def start(self) -> None:
        kept = await self.host.runner.kept()
        self._feed(JobsBefore(frozenset(spec.job for spec in kept if any(rank.gpus for rank in spec.ranks))))
        self._see_gpus()
        self.env.spawn("pages", self._read_pages())
        self.env.spawn("devices", self._look_at_devices())
        self.env.spawn("device events", self._hear_devices())

    # ---- loops ----

    async def _read_pages(self) -> None:
        """Read the pages of ranks, only while there is a rank whose pages could say something."""
        while True:
            if not self.machine.gangs:
                self._awake.clear()
                await self._awake.wait()
            await asyncio.sleep(TICK_S)
            self._read()

    def _read(self) -> None:
        idle: set[tuple[JobId, int]] = set()
        for gang in list(self.machine.gangs.values()):
            for peer in self.host.peers(gang.job):
                if peer.epoch != gang.epoch or peer.pages is None or not peer.pages.mapped:
                    continue
                if peer.pages.busy is False:
                    idle.add((gang.job, peer.rank))
                report = peer.pages.report.fresh()
                self._count_garbage((gang.job, peer.rank), peer.pages)
                if report is not None:
                    if report.batches:
                        self._has_begun(gang.job, peer.rank)
                    self._feed(RankReported(gang.job, gang.epoch, peer.rank, report))
        self._feed(HostTick(frozenset(idle)))

    def _count_garbage(self, rank: tuple[JobId, int], pages: RankPages) -> None:
        """Say once for each rank that its page is garbage: such a page is ignored, and its rank goes by its lease."""
        count = pages.report.garbage
        if count and rank not in self._garbage:
            self.log.warning("the page of a rank has impossible values", job=rank[0], rank=rank[1])
            self.host.note(rank[0], "page ignored", f"the values rank {rank[1]} writes into its page are not a report")
        if count > self._garbage.get(rank, 0):
            self.counters["garbage"] += count - self._garbage.get(rank, 0)
            self._garbage[rank] = count

    async def _look_at_devices(self) -> None:
        while True:
            self._see_gpus()
            for uuid in list(self.machine.gpus):
                sample = await self.watch.look(uuid)
                if sample is None and await self._is_lost(uuid):
                    self._feed(GpuLooked(uuid, frozenset()))  # nothing of it is left to be held
                if sample is not None:
                    health = self.watch.healths[uuid]
                    self._feed(GpuHealth(uuid, health.condition, health.why))
                    pids = {job: frozenset(ranks.values()) for job, ranks in self.pids.items()}
                    self._feed(GpuLooked(uuid, holders(sample, pids)))
            self._keep_suspended()
            gpus = self.machine.gpus.values()
            uses = tuple(self.watch.use(gpu.uuid, gpu.ledger.free_bytes, gpu.use.why, len(gpu.members)) for gpu in gpus)
            self.host.publish(GpusMeasured(uses))
            self._forget_ended()
            await asyncio.sleep(LOOK_S)

    async def _is_lost(self, uuid: str) -> bool:
        """Whether the device is gone with all that was on it. A device that does not answer may still hold
        everything."""
        try:
            health = self.watch.healths[uuid] = await self.watch.port.health(uuid)
        except (OSError, TimeoutError):
            return uuid not in self.watch.devices()
        return health.condition == "lost"

    def _keep_suspended(self) -> None:
        """Renew suspensions: one ends by itself when it is not asked for any more."""
        for gpu in self.machine.gpus.values():
            for member in gpu.members.values():
                pid = self.pids.get(member.job, {}).get(self.machine.gangs[member.job].gpus[gpu.uuid])
                if member.stage == "suspended" and pid is not None:
                    self.env.spawn(f"keep {member.job} suspended", self._suspended_again(member.job, pid))

    async def _suspended_again(self, job: JobId, pid: int) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            await self._suspend(job, pid)

    async def _suspend(self, job: JobId, pid: int) -> bool:
        """Suspend a rank; whether it is suspended. One that was asked to end is not: it has its grace to save."""
        gang = self.machine.gangs.get(job)
        if gang is None or self.host.runner.is_ending(job, gang.epoch):
            await self.watch.port.resume(pid)
            return False
        return await self.watch.port.suspend(pid)

    async def _hear_devices(self) -> None:
        while True:
            try:
                found = await self.watch.port.events()
            except (OSError, TimeoutError) as error:
                self.log.warning("devices do not answer", why=str(error))
                await asyncio.sleep(LOOK_S)
                continue
            for uuid, health in found:
                self.watch.healths[uuid] = health
                self._feed(GpuHealth(uuid, health.condition, health.why))

    def _see_gpus(self) -> None:
        devices = self.watch.devices()
        self.watch.forget(devices)
        self._feed(GpusHere({uuid: device.memory_bytes for uuid, device in devices.items()}))

    def _forget_ended(self) -> None:
        here = self.machine.gangs
        self.pids = {job: pids for job, pids in self.pids.items() if job in here}
        self._garbage = {rank: count for rank, count in self._garbage.items() if rank[0] in here}
        self._begun = {rank: pid for rank, pid in self._begun.items() if rank[0] in here}

    # ---- what is heard ----

    def on_fact(self, fact: Fact) -> None:
        match fact:
            case RanksComing():
                of = (fact.job, fact.epoch, fact.kind, fact.gpus, fact.memory_bytes, fact.running)
                self._feed(GangComing(*of))
                if fact.running:
                    self._began(fact.job, fact.epoch)
            case KindChanged():
                self._feed(GangChanged(fact.job, fact.epoch, fact.kind, fact.grant))
                if fact.kind == "guaranteed":  # also one that has no channel and never will
                    for rank in self.pids.get(fact.job, {}):
                        self._let_go(fact.job, rank)
            case RanksStarted():
                if fact.job in self.machine.gangs:
                    self.pids[fact.job] = dict(fact.pids)
            case RankReplaced():
                if fact.job in self.pids:
                    self.pids[fact.job][fact.rank] = fact.pid
            case RanksEnded():
                self._feed(GangGone(fact.job, fact.epoch))
            case JobUnplaced():
                if not self.host.runner.knows(fact.job, fact.epoch):  # otherwise its ranks end, and that is told
                    self._feed(GangGone(fact.job, fact.epoch))
            case RankShares():
                self._shares(fact.job, fact.epoch, fact.rank)
            case _:
                pass

    def _began(self, job: JobId, epoch: int) -> None:
        """Begin with a gang from before this agent: its processes and pages may be known already."""
        self.pids.setdefault(job, dict(self.host.runner.running().get((job, epoch), {})))
        for peer in self.host.peers(job):
            if peer.epoch == epoch and peer.pages is not None and peer.pages.mapped:
                self._shares(job, epoch, peer.rank)

    def _shares(self, job: JobId, epoch: int, rank: int) -> None:
        pages = self._pages(job, rank)
        if pages is not None:
            self._feed(PagesMade(job, epoch, rank, pages.asked.epoch, pages.asked.memory_limit_bytes))

    def _has_begun(self, job: JobId, rank: int) -> None:
        """A rank that finished a mini-batch goes by its limits from now on. Before, it imports modules and builds its
        model, which no gate holds back."""
        pid = self.pids.get(job, {}).get(rank)
        if pid is not None and self._begun.get((job, rank)) != pid:
            self._begun[job, rank] = pid
            self._let_go(job, rank)

    def _let_go(self, job: JobId, rank: int) -> None:
        """Give the rank its share of the cores; it began on what others left of them."""
        pid, processes = self.pids.get(job, {}).get(rank), self.env.processes
        if pid is not None and isinstance(processes, LetsGo):
            self.env.spawn(f"let {job} go", self._lets_go(processes, job, rank, pid))

    async def _lets_go(self, processes: LetsGo, job: JobId, rank: int, pid: int) -> None:
        if not await processes.let_go(pid):
            self.log.warning("a rank stays throttled", job=job, rank=rank, next="LimitNICE=+0 in covey.service")

    def _pages(self, job: JobId, rank: int) -> RankPages | None:
        """The pages of the process of this rank that joined last and mapped them."""
        found = [peer.pages for peer in self.host.peers(job) if peer.rank == rank and peer.pages is not None]
        mapped = [pages for pages in found if pages.mapped]
        return mapped[-1] if mapped else None

    # ---- what is done ----

    def _feed(self, event: HostEvent) -> None:
        for action in self.machine.handle(event, self.env.clock.now_s()):
            self._perform(action)
        if self.machine.gangs:
            self._awake.set()

    def _perform(self, action: HostAction) -> None:
        match action:
            case WriteLimits():
                pages = self._pages(action.job, action.rank)
                if pages is not None:
                    pages.limits.write(action.limits)
                    self.counters["limits"] += 1
            case ShowNeighbour():
                self._show(action)
            case LetStart():
                self.host.publish(RanksMayStart(action.job, action.epoch))
            case GiveBack():
                self.counters["given_back"] += 1
                self.host.publish(RanksUnfit(action.job, action.epoch, action.why))
            case PressRank():
                self.counters["pressed"] += 1
                self.env.spawn(f"{action.how} {action.job}", self._press(action))
            case EndGang():
                self.env.spawn(f"end {action.job}", self.host.runner.stop(action.job, action.epoch, 0.0, action.why))
            case PairFound():
                of = (action.job, action.beside, action.slowdown, action.error)
                self.host.publish(PairHarms(*of))
            case LogEvent():
                self.perform(action, lambda _event: None)
            case _:
                assert_never(action)

    def _show(self, action: ShowNeighbour) -> None:
        pages = self._pages(action.job, action.rank)
        if pages is not None:
            pages.show(self._pages(*action.neighbour) if action.neighbour is not None else None)

    async def _press(self, action: PressRank) -> None:
        """Press a rank by the driver; whatever the driver cannot do has failed, and the next means is tried."""
        pid, done = self.pids.get(action.job, {}).get(action.rank), False
        if pid is not None:
            with contextlib.suppress(OSError, TimeoutError):
                done = await self._pressed(action, pid)
        if action.how == "limit":
            self._feed(GpuAnswer(action.uuid, HardLimited(action.job, action.limit_bytes or 0, done)))
        elif action.how == "suspend":
            self._feed(GpuAnswer(action.uuid, Suspended(action.job, done)))

    async def _pressed(self, action: PressRank, pid: int) -> bool:
        if action.how == "limit":
            return await self.watch.port.set_hard_limit(action.uuid, pid, action.limit_bytes)
        if action.how == "suspend":
            return await self._suspend(action.job, pid)
        return await self.watch.port.resume(pid)

    # ---- what people ask ----

    def commands(self) -> Mapping[str, Command]:
        return {"gpus": self._gpus, "interference": self._interference}

    async def _gpus(self, _given: Mapping[str, Any]) -> list[SharedGpuView]:
        return views.gpus(self.host.id, self.machine, self.watch, self.env.clock.now_s())

    async def _interference(self, given: Mapping[str, Any]) -> list[InterferenceView]:
        rows = views.interference(self.host.id, self.machine, self.env.clock.now_s())
        job = given.get("job")
        return [row for row in rows if not job or row.job == job]

    def metrics(self) -> Mapping[MetricSeries, float]:
        found = {metrics.SHARING.of(kind): float(count) for kind, count in self.counters.items()}
        found[metrics.DEVICE_FAILURES.of()] = float(self.watch.failures)
        for uuid, gpu in self.machine.gpus.items():
            found[metrics.GPU_JOBS.of(uuid)] = float(len(gpu.members))
            found[metrics.GPU_MEMORY_FREE_BYTES.of(uuid)] = float(gpu.ledger.free_bytes)
        for row in views.interference(self.host.id, self.machine, self.env.clock.now_s()):
            if row.slowdown is not None:
                found[metrics.INTERFERENCE_RATIO.of(row.job, row.gpu)] = row.slowdown
        return found
