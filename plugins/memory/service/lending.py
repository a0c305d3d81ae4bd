"""The lending half at work: feeds the `Lender` machine, keeps the slab process, publishes what this host can spare."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from covey.core.ids import HostId
from covey.core.metrics import MetricSeries
from covey.ports.addresses import joined, reached_at
from covey.ports.probes import MemoryNow
from covey.ports.processes import ProcessId
from plugins.base import Host
from plugins.facts import SpareChanged
from plugins.gossiped import LentNow, Spare, is_drained
from plugins.memory.datapath.lending import slab_keeper
from plugins.memory.datapath.lending.slabd import SlabdConfig
from plugins.memory.datapath.wire import control
from plugins.memory.datapath.wire.control import SLABS_TOLD, RdmaLent, SlabList, Yes
from plugins.memory.machine.lending import events as machine
from plugins.memory.machine.lending.earlier_volumes import EarlierVolumes
from plugins.memory.machine.lending.events import FreeSlab, LenderAction, LenderEvent, RegisterSlab
from plugins.memory.machine.lending.lender import Lender, react_s
from plugins.memory.machine.loan import LoanedSlab
from plugins.memory.machine.rack_accounts import RackAccounts
from plugins.memory.messages import SlabRef, VolumeHeld, VolumeIsHeld
from plugins.memory.policy import headroom
from plugins.memory.policy.settings import MemorySettings
from plugins.memory.service import metrics
from plugins.memory.service.process import ByteProcess, ByteProgram
from plugins.memory.service.record import KnownProcess, SlabRecord

CONTROL = "slabd"
ASK_S = 5.0
SECRET_BYTES = 32


class Lending:
    """Lends this host's memory. `perform` performs the actions that every plugin shares."""

    def __init__(
        self,
        host: Host,
        settings: MemorySettings,
        record: SlabRecord,
        perform: Callable[[Any, Callable[[Any], None]], None],
        accounts: RackAccounts,
    ) -> None:
        self._host, self._env, self._settings, self._record = host, host.env, settings, record
        self._perform_shared = perform
        self.lend_bytes = _lend_bytes(host.env.probes.memory(), settings)
        self.machine = Lender(
            host.env.rng,
            host.env.entropy,
            settings.headroom_kept,
            self.lend_bytes,
            settings.grace_s,
            settings.lease_s,
            accounts,
        )
        self.process: ByteProcess | None = None
        self._published: Spare | None = None
        self._told_accounts: tuple[int, ...] | None = None
        self._untold = ""
        """Why the others are not told what is lent to whom; empty: they are."""
        self._touched_bytes = 0
        self.promised_bytes = 0
        """What jobs may take of this host's memory by their `--mem`."""
        self._told: SlabList | None = None
        self.rdma = RdmaLent()
        self._awake = False

    async def start(self) -> None:
        """Start lending. A slab process that lent before keeps running until its slabs are back, even if nothing is
        lent any more."""
        if why := self._env.probes.watch_memory(self._stalls):
            self._env.log.info("memory is looked at once a second", why=why)
        self.machine.earlier = EarlierVolumes(self._record.now.earlier)
        known = self._record.now.lending
        if known is None and self.lend_bytes < self._settings.slab_bytes:
            self._publish()
            return
        if known is None:
            known = KnownProcess(self._env.entropy(SECRET_BYTES))
            await self._record.set_lending(known)
        self.process = self._process(known)
        if await self._lent_before(known):
            self.wake(self.process)
        else:
            self.dispatch(machine.StoreAsleep())

    async def _lent_before(self, known: KnownProcess) -> bool:
        """Is there a slab process, or a keeper that has the slabs of one?"""
        if known.process is None:
            return False
        if self._env.processes.find(known.process) is not None:
            return True
        try:
            (await self._env.bytes.connect(f"unix:{self._env.run_dir}/{slab_keeper.SOCKET}.sock")).close()
        except ConnectionError:
            return False
        return True

    def wake(self, process: ByteProcess) -> None:
        """Start the slab process for the first loan: where nothing is borrowed there is none."""
        if not self._awake:
            self._awake = True
            self._env.spawn("memory slabd", process.keep())

    def _process(self, known: KnownProcess) -> ByteProcess:
        config = SlabdConfig(
            bind=self._settings.bind or joined(self._host.advertise, 0),
            secret=known.secret,
            lend_bytes=self.lend_bytes,
            control=CONTROL,
            rdma=self._settings.rdma == "auto",
        )

        async def remember(process: ProcessId) -> None:
            await self._record.set_lending(msgspec.structs.replace(known, process=process))

        program = ByteProgram("slabd", CONTROL, config, CONTROL, known.secret)
        return ByteProcess(self._env, program, known.process, remember, self._up, self._down, lambda told: None)

    # ---- the slab process ----

    async def _up(self, process: ByteProcess) -> None:
        slabs: list[LoanedSlab] = []
        after, more = ("", "", 0), True
        while more:
            listed = await self._list(process, after)
            more = listed.more
            for slab in listed.slabs:
                ref = SlabRef(slab.volume, slab.index, slab.epoch)
                slabs.append(LoanedSlab(HostId(slab.borrower), ref, slab.slab_bytes, slab.secret))
                after = (slab.borrower, slab.volume, slab.index)
        self.dispatch(machine.StoreFound(self._reached_at(listed.address), tuple(slabs)))

    def _down(self, why: str) -> None:
        self._touched_bytes, self._told, self.rdma = 0, None, RdmaLent()
        self._env.log.warning("the slab process is gone", why=why)
        self.dispatch(machine.StoreLost(why))

    async def _list(
        self, process: ByteProcess, after: tuple[str, str, int] = ("", "", 0), most: int = SLABS_TOLD
    ) -> SlabList:
        """Ask the slab process for its slabs. ConnectionError when it is not there or answers something else."""
        answer = await process.ask(lambda id: control.ListSlabs(id, after, most), ASK_S)
        if not isinstance(answer, SlabList):
            raise ConnectionResetError(f"the slab process answered {answer}")
        self._touched_bytes = answer.touched_bytes
        self._told, self.rdma = answer, answer.rdma
        return answer

    def _reached_at(self, address: str) -> str:
        """Address at which the slab process is reached: if it is bound to all addresses, the advertised one."""
        return reached_at(address, self._host.advertise)

    # ---- events and actions ----

    def dispatch(self, event: LenderEvent) -> None:
        self._act(self.machine.handle(event, self._env.clock.now_s()))

    def _act(self, actions: Iterable[LenderAction]) -> None:
        for action in actions:
            match action:
                case RegisterSlab():
                    self._env.spawn("register slab", self._register(action))
                case FreeSlab():
                    self._env.spawn("free slab", self._free(action))
                case _:
                    self._perform_shared(action, self.dispatch)

    async def second(self) -> None:
        """Once a second: measure, decide, publish."""
        if self.process is not None and self.process.ready.is_set():
            try:
                await self._list(self.process, most=0)
            except (ConnectionError, TimeoutError) as error:
                self._env.log.warning("the slab process does not answer", why=str(error))
        leaves = is_drained(self._host.id, self._host.hosts())
        self.dispatch(machine.LenderTick(self._env.probes.memory(), self._touched_bytes, leaves, self.promised_bytes))
        self._publish()
        await self._remember_earlier()

    async def _remember_earlier(self) -> None:
        """Record volumes of others whose slabs were freed here without their word."""
        earlier = self.machine.earlier
        if earlier.changed:
            earlier.changed = False
            try:
                await self._record.set_earlier(earlier.all())
            except OSError as error:
                earlier.changed = True
                self._env.log.warning("cannot record which volumes had slabs here", why=str(error))

    def volume_held(self, borrower: HostId, question: VolumeHeld) -> VolumeIsHeld:
        """Answer with all that this host knows of a volume of which its borrower has no record."""
        found = self.machine.earlier.of(borrower, question.volume, self.machine.lent.values())
        known = self.process is None or bool(self.machine.address)
        if question.forget:
            self._act(self.machine.given_up(borrower, question.volume, question.since, question.boot))
        return VolumeIsHeld(known, found)

    def _stalls(self) -> None:
        """Tasks of this host wait for memory: tell the machine at once."""
        self.dispatch(machine.MemoryStalls(self._env.probes.memory()))

    async def _register(self, action: RegisterSlab) -> None:
        slab = action.slab
        try:
            assert self.process is not None
            self.wake(self.process)
            async with asyncio.timeout(ASK_S):
                await self.process.ready.wait()
            answer = await self.process.ask(
                lambda id: control.RegisterSlabFrame(
                    id,
                    borrower=action.borrower,
                    volume=slab.volume,
                    index=slab.index,
                    epoch=slab.epoch,
                    slab_bytes=action.size_bytes,
                    page_bytes=action.page_bytes,
                    secret=action.secret,
                ),
                ASK_S,
            )
        except (ConnectionError, TimeoutError) as error:
            why = f"the slab process does not answer: {error}"
            self.dispatch(machine.SlabNotRegistered(action.borrower, slab, why, late=True))
            return
        if isinstance(answer, Yes):
            self.dispatch(machine.SlabRegistered(action.borrower, slab, self.machine.address))
        else:
            self.dispatch(machine.SlabNotRegistered(action.borrower, slab, getattr(answer, "why", str(answer))))

    async def _free(self, action: FreeSlab) -> None:
        """Free a slab, asking until it is certain: what a process that died did not free, the next one takes up."""
        slab, process = action.slab, self.process
        assert process is not None
        while True:
            try:
                await process.ask(
                    lambda id: control.FreeSlabFrame(id, action.borrower, slab.volume, slab.index, slab.epoch), ASK_S
                )
                break
            except TimeoutError:
                continue
            except ConnectionError:
                await process.ready.wait()
        self.dispatch(machine.SlabFreed(action.borrower, slab))

    # ---- what others see ----

    def _publish(self) -> None:
        slab_bytes = self._settings.lent_slab_bytes
        spare_bytes = self.machine.spare_bytes()
        spare = Spare(slab_bytes, spare_bytes // slab_bytes, len(self.machine.lent), self._settings.rack)
        if self._published is None or _worth_telling(self._published, spare):
            self._published = spare
            self._host.spread("spare", spare)
            self._host.publish(SpareChanged(spare_bytes))
        self._tell_accounts()

    def _tell_accounts(self) -> None:
        """Gossip what is lent once the tenant of every slab is known: until then the others count what this host told
        last."""
        accounts = self.machine.told_accounts()
        if accounts is not None and accounts != self._told_accounts:
            untold, self._untold = self._untold, ""
            try:
                self._host.spread("lent", LentNow(accounts))
                self._told_accounts = accounts
            except ValueError as error:  # the other values of this host are too long
                self._untold = str(error)
                if not untold:  # said once: it is tried again each second
                    self._env.log.warning("budgets are not told", why=self._untold)

    def notes(self) -> list[str]:
        """Notes for people: privileges that the slab process lacks, and facts that other hosts are not told."""
        lacks = [f"slabd: {self._told.lacks}"] if self._told is not None and self._told.lacks else []
        return [*lacks, f"other hosts do not learn to whom this host lends: {self._untold}"] if self._untold else lacks

    def byte_paths(self) -> list[tuple[str, str]]:
        """How the slab process runs the byte path, if it answers."""
        return [] if self._told is None else [("slabd", self._told.byte_path)]

    def metrics(self) -> dict[MetricSeries, float]:
        lent = self.machine.lent.values()
        budget, said = self.machine.budget, self._told or SlabList(0, "", (), 0)
        return {
            metrics.SLABS.of("lent"): len(lent),
            metrics.SLAB_LENT_BYTES.of(): sum(slab.size_bytes for slab in lent),
            metrics.SLAB_TOUCHED_BYTES.of(): self._touched_bytes,
            metrics.SLAB_CONNECTIONS_REFUSED.of(): said.refused,
            metrics.SLAB_QUEUE_PAIRS.of(): self.rdma.pairs,
            metrics.SLAB_UNLOCKED_BYTES.of(): said.unlocked_bytes,
            metrics.STALLS.of("slabd"): said.stalls,
            metrics.STALL_LONGEST_SECONDS.of("slabd"): said.stall_s_longest,
            metrics.PROCESSOR_WAITS.of("slabd"): said.waits,
            metrics.PROCESSOR_WAIT_LONGEST_SECONDS.of("slabd"): said.wait_s_longest,
            metrics.SPARE_BYTES.of(): self.machine.spare_bytes(),
            metrics.BUDGET_REFUSED.of("lender"): self.machine.refused_for_budget,
            metrics.HEADROOM_BYTES.of(): 0 if budget is None else budget.headroom_bytes,
            **{metrics.SLAB_EVICTIONS.of(reason): count for reason, count in self.machine.evictions.items()},
        }


def _lend_bytes(memory: MemoryNow, settings: MemorySettings) -> int:
    """Most bytes that are ever lent, until the agent starts again."""
    if settings.lend_max_bytes is not None:
        return settings.lend_max_bytes
    return headroom.lent_at_most(memory, settings.headroom_kept, react_s(settings.grace_s))


def _worth_telling(old: Spare, new: Spare) -> bool:
    """Is the new offer worth gossiping? It is a hint: a slab more or less among hundreds is not news, the first and the
    last one are."""
    lent_or_size = (old.slab_bytes, old.slabs_lent) != (new.slab_bytes, new.slabs_lent)
    edge = (old.slabs_free == 0) != (new.slabs_free == 0)
    return lent_or_size or edge or abs(new.slabs_free - old.slabs_free) > old.slabs_free // 10
