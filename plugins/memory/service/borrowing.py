"""The borrowing half at work: feeds the `Borrower` machine and keeps one process per volume."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from covey.core.errors import Refused
from covey.core.metrics import MetricSeries
from covey.core.units import format_size
from covey.ports.processes import ProcessId
from covey.wire.job import Make
from plugins.base import Host
from plugins.memory.datapath import vold
from plugins.memory.datapath.vold import VoldConfig
from plugins.memory.datapath.wire import control
from plugins.memory.datapath.wire.control import (
    ClientRefused,
    No,
    PageCounts,
    PlaceList,
    SlabCopiedFrame,
    SlabLost,
    Told,
    Yes,
)
from plugins.memory.machine.borrowing import events
from plugins.memory.machine.borrowing.borrower import OPEN_S, Borrower
from plugins.memory.machine.borrowing.events import BorrowerEvent, CloseSlab, OpenSlab
from plugins.memory.machine.borrowing.place import Link, SlabPlace
from plugins.memory.machine.borrowing.slab import BorrowedSlab
from plugins.memory.machine.rack_accounts import RackAccounts
from plugins.memory.policy.placement import HostsDrawn, LenderPeer
from plugins.memory.policy.settings import SLABS_MAX, MemorySettings
from plugins.memory.service import forming, metrics, views
from plugins.memory.service.doors import Doors
from plugins.memory.service.earlier import EarlierElsewhere, Waits
from plugins.memory.service.forming import AS_IS, NOBODY, Former, Kind, Payer
from plugins.memory.service.open_volume import OpenVolume, slab_place
from plugins.memory.service.process import ByteProcess, ByteProgram
from plugins.memory.service.record import KnownProcess, KnownVolume, SlabRecord
from plugins.memory.service.unsure_lenders import UnsureLenders
from plugins.memory.service.views import trouble_told
from plugins.views import SlabView, VolumeView, WaitView

ASK_S = 5.0
READY_S = 10.0
"""Seconds that a person's attach command waits for the volume's process; the process keeps starting after that."""
LOOK_S = 1.0
"""Seconds between two checks whether a volume is still waited for, and whether it is still being worked on."""
DEATHS_MAX = 3
"""Failed starts of a volume's process in a row after which a waiting client is told why."""
CLOSE_S = 60.0
"""Seconds that one question to close a slab waits for the disk; then it is asked again."""
AGAIN_S = 1.0
"""Seconds to pause before a process that could not close a slab is asked again."""
TOKEN_BYTES = 32


class Borrowing:
    """The volumes of this host. `perform` performs the actions that every plugin shares."""

    def __init__(
        self,
        host: Host,
        settings: MemorySettings,
        record: SlabRecord,
        perform: Callable[[Any, Callable[[Any], None]], None],
        accounts: RackAccounts,
    ) -> None:
        self._host, self._env, self.settings, self._record = host, host.env, settings, record
        self._perform_shared = perform
        self.machine = Borrower(
            host.id,
            host.env.rng,
            host.boot,
            settings.hot,
            settings.lease_s,
            cold_share=settings.cold_share,
            hosts=HostsDrawn(settings.drawn),
            accounts=accounts,
        )
        self.accounts = accounts
        self.refused_for_budget = 0
        """Count of volumes that were not attached because a tenant or a job would have been over its budget."""
        self.volumes: dict[str, OpenVolume] = {}
        self.earlier = EarlierElsewhere(host, record)
        self.unsure = UnsureLenders(host, self.volumes, self._slabs, self.earlier)
        self.doors = Doors(host, settings.swap_helper, record, self.volumes)
        self._changing = asyncio.Lock()
        self._former = Former(host, record, self.machine, self.volumes, self._changing, self._forget)

    async def start(self) -> None:
        """Find every volume's process again, or start it."""
        self.machine.awaited.update(known.volume for known in self._record.now.volumes)
        for known in self._record.now.volumes:
            self._keep(known)

    # ---- volumes ----

    async def attach(
        self,
        name: str,
        size_bytes: int,
        uid: int,
        owner: int | None = None,
        kind: Kind = AS_IS,
        by: Payer = NOBODY,
        make: Make = "",
        waits: Waits | None = None,
    ) -> OpenVolume:
        """The volume of this name, made if there is none, for `owner` (default: the user who asks). Refused when it
        cannot be. `uid` -1: asked by agentctl. `waits` is told now and then what the volume waits for, and raises
        Refused when its client is gone; without it the answer comes within the time of a command, ready or not."""
        began_s, whose = self._env.clock.now_s(), uid if owner is None else owner
        if name not in self.volumes:
            self._volume_like(name, size_bytes, whose, kind, by)
            if await self._record.has_files(name):
                whose = await self._who_has_files(name, uid, whose)
            else:
                await self._may_be_made(name, make, waits)
        async with self._changing:
            known = self._volume_like(name, size_bytes, whose, kind, by)
            found = self.volumes.get(name)
            if found is None:
                await self._record.make_volume(known)
                found = self._keep(known)
                size = format_size(known.size_bytes)
                slabs = f"slabs of {format_size(known.slab_bytes)}"
                self._host.note(f"volume/{name}", "created", f"{size} in {slabs}{forming.in_words(known)}")
            elif by.scratch is not None and known.scratch not in (None, by.scratch):  # a later process of the same name
                found.known = msgspec.structs.replace(found.known, scratch=by.scratch)
                await self._record.set_volume(found.known)
        await self._until_ready(found, began_s, waits)
        if found.known.members > 1 and not found.known.formed:
            await self._former.wait(found, began_s, waits)
        return found

    async def _who_has_files(self, name: str, uid: int, whose: int) -> int:
        """The owner of a volume that this agent has no record of, while this host has its files, which say what its
        pages are and where they are: a lost record is no lost volume. `whose`: the owner that the client names. Refused
        to users to whom it is not known to belong."""
        owner = await self._record.owner(name)
        if owner is not None and (owner == -1 or uid in (owner, -1, 0)):
            return owner
        if owner is None and uid in (-1, 0) and whose != -1:
            return whose
        known = "its owner is not known" if owner is None else f"it belongs to another user (uid {owner})"
        why = f"its files are on {self._host.id}, whose agent has lost its record of it, and {known}"
        step = f"choose another name; root may say whose it is: agentctl volume create {name} SIZE --user NAME"
        raise Refused(4, f"cannot open volume {name}", why, step)

    async def _may_be_made(self, name: str, make: Make, waits: Waits | None) -> None:
        """Check that a volume may be made. Refused when it must exist, or when other hosts know of one whose record is
        lost and that was not given up."""
        if make == "never":
            why = f"{self._host.id} has none of that name: it was removed, or is on another host"
            raise Refused(3, f"no volume {name}", why, "agentctl volume ls shows all; RemoteMemory.open creates one")
        if make == "anew":
            await self.earlier.forget(name)
        else:
            await self.earlier.check(name, waits)

    async def _until_ready(self, found: OpenVolume, began_s: float, waits: Waits | None) -> None:
        """Wait until the volume's process answers. Refused when it dies again and again, or takes longer than the
        client waits."""
        name, process = found.known.volume, found.process
        what, logs = f"volume {name} is not ready", f"logs/{vold.control_name(name)}.log"
        while not process.ready.is_set():
            if self.volumes.get(name) is not found:
                raise Refused(1, what, "it was removed meanwhile", "open it again")
            if process.deaths >= DEATHS_MAX:
                step = f"see {logs}; put its files back from a copy, or drop what is in it: agentctl volume rm {name}"
                raise Refused(1, what, f"{process.died}; it keeps dying after each start", step)
            try:
                async with asyncio.timeout(LOOK_S):
                    await process.ready.wait()
            except TimeoutError:
                why = found.trouble or process.died or "its process is still starting"
                if waits is not None:
                    waits(why)
                elif self._env.clock.now_s() >= began_s + READY_S:
                    raise Refused(1, what, f"{why}, after {READY_S:g} s", f"see {logs} and try again") from None

    def _volume_like(self, name: str, size_bytes: int, owner: int, kind: Kind, account: Payer) -> KnownVolume:
        """The record of the volume, or what it will be. Refused: it is another user's, of another size, or
        impossible."""
        settings, what = self.settings, f"cannot open volume {name}"
        count, parity = forming.checked_members(kind, what)
        most = min(settings.volume_max_bytes, SLABS_MAX * settings.slab_bytes)
        if not 1 <= size_bytes <= most:
            why = f"{size_bytes} bytes; a volume may have 1 B to {format_size(most)}"
            raise Refused(2, what, why, "choose another size, or raise volume_max, slab or page in agent.toml")
        found = self.volumes.get(name)
        if found is None:
            pages = -(-size_bytes // settings.page_bytes)
            known = KnownVolume(
                volume=name,
                size_bytes=pages * settings.page_bytes,
                page_bytes=settings.page_bytes,
                slab_bytes=settings.slab_bytes,
                token=self._env.entropy(TOKEN_BYTES),
                uid=owner,
                process=KnownProcess(self._env.entropy(TOKEN_BYTES)),
                sealed=settings.seal,
                tenant=account.tenant,
                job=account.job,
                scratch=account.scratch,
                members=count,
                parity=parity,
            )
            forming.refuse_too_many(settings, self.volumes.values(), account, what)
            self._check_budgets(account, known.taken_bytes, what)
            return known
        known = found.known
        forming.check_owner(known, owner, what)
        forming.check_same(known, size_bytes, (count, parity) if any(kind) else None, what)
        return known

    def _check_budgets(self, payer: Payer, more_bytes: int, what: str) -> None:
        """Check budgets. Refused when the tenant or the job would be over its budget."""
        try:
            forming.refuse_over_budget(self.accounts, self.volumes.values(), self.machine, payer, more_bytes, what)
        except Refused:
            self.refused_for_budget += 1
            raise

    async def detach(self, name: str, uid: int) -> None:
        """Forget the volume, on this host and at its lenders. Refused when there is none."""
        async with self._changing:
            found = self.volumes.get(name)
            if found is None:
                raise Refused(3, f"no volume {name}", "this host has none of that name", "agentctl volume ls")
            forming.check_owner(found.known, uid, f"cannot remove volume {name}")
            if found.known.swap:
                why = "it is swap of this host, and its pages would be lost"
                raise Refused(4, f"cannot remove volume {name}", why, f"agentctl volume unswap {name}")
            await self._forget(found)

    def _outlived(self, volume: OpenVolume) -> bool:
        """Whether the volume was to go with a process, which has ended."""
        return volume.known.scratch is not None and self._env.processes.find(volume.known.scratch) is None

    async def _remove_outlived(self, volume: OpenVolume) -> bool:
        """Remove a volume that its process has left; whether it is gone. False where another process has opened it
        meanwhile, and where the disk refuses: the next second tries again."""
        name = volume.known.volume
        async with self._changing:
            if self.volumes.get(name) is volume and self._outlived(volume):
                try:
                    await self._forget(volume)
                except OSError as error:
                    self._env.log.warning("a volume of a process that has ended stays", volume=name, why=str(error))
        return self.volumes.get(name) is not volume

    async def _forget(self, found: OpenVolume) -> None:
        name = found.known.volume
        del self.volumes[name]
        await found.process.stop(forget=True)
        self.dispatch(events.VolumeForgotten(name))
        for file in await self._env.disk.names(f"{vold.prefix(name)}/"):
            await self._env.disk.delete(file)
        await self._record.forget_volume(name)
        self._host.note(f"volume/{name}", "removed", "from this host and its lenders")

    def _keep(self, known: KnownVolume) -> OpenVolume:
        name, settings = known.volume, self.settings
        config = VoldConfig(
            volume=name,
            size_bytes=known.size_bytes,
            page_bytes=known.page_bytes,
            slab_bytes=known.slab_bytes,
            token=known.token,
            secret=known.process.secret,
            queue_pages=settings.spill_queue_pages,
            deadline_s=settings.remote_deadline_s,
            uid=known.uid,
            sealed=known.sealed,
            members=known.members,
            parity=known.parity,
            rdma=settings.rdma == "auto",
            maps=settings.same_host == "map",
        )

        async def remember(process: ProcessId) -> None:
            volume = self.volumes.get(name)
            if volume is not None:
                old = volume.known
                volume.known = msgspec.structs.replace(old, process=KnownProcess(old.process.secret, process))
                await self._record.set_volume(volume.known)

        async def up(process: ByteProcess) -> None:
            await self._volume_up(known, process)

        control_name = vold.control_name(name)
        program = ByteProgram("vold", control_name, config, control_name, known.process.secret)
        process = ByteProcess(
            self._env,
            program,
            known.process.process,
            remember,
            up,
            lambda why: self._volume_down(name, why),
            lambda told: self._told(name, told),
        )
        self.volumes[name] = OpenVolume(known, process)
        self._env.spawn(f"memory vold {name}", process.keep())
        self._former.begin(self.volumes[name])
        return self.volumes[name]

    async def _volume_up(self, known: KnownVolume, process: ByteProcess) -> None:
        places: list[tuple[int, SlabPlace]] = []
        slabs, after, more = known.slabs, (0, 0), True
        while more:
            answer = await process.ask(lambda id: control.ListPlaces(id, *after), READY_S)  # noqa: B023
            if isinstance(answer, No) and answer.why.startswith(vold.NOT_OPEN):
                self._opens(known.volume, answer.why)
                continue
            if not isinstance(answer, PlaceList):
                raise ConnectionResetError(f"the volume's process answered {answer}")
            more = answer.more
            for place in answer.places:
                after = (place.index, place.epoch)
                if place.index < slabs * known.members:
                    places.append((place.index, slab_place(place)))
        self._opens(known.volume, "")
        await self.doors.open_again(known.volume, process)
        if process.starts > 1:
            self._host.note(f"volume/{known.volume}", "started again", "its process is back")
        sizes = (slabs, known.lent_slab_bytes, known.lent_page_bytes)
        self.dispatch(events.VolumeFound(known.volume, *sizes, tuple(places), known.members, known.tenant, known.job))

    def _opens(self, name: str, why: str) -> None:
        if name in self.volumes and self.volumes[name].opens(why):
            self._host.note(f"volume/{name}", "opens", why)

    def _volume_down(self, name: str, why: str) -> None:
        self._env.log.warning("a volume's process is gone", volume=name, why=why)
        if not self._is_told_again(name, why):
            self._host.note(f"volume/{name}", "process gone", f"{why}; it is started again")

    def _is_told_again(self, name: str, why: str) -> bool:
        """Did the process die of the same cause as before, without having been up between?"""
        volume = self.volumes.get(name)
        told = volume is not None and volume.process.deaths > 1 and volume.died == why
        if volume is not None:
            volume.died = why
        return told

    def _told(self, name: str, told: Told) -> None:
        match told:
            case SlabLost():
                self.dispatch(events.SlabFailed(name, told.index, told.epoch, told.why))
            case SlabCopiedFrame():
                self.dispatch(events.SlabCopied(name, told.index, told.epoch))
            case ClientRefused():
                self._host.note(f"volume/{name}", "client refused", told.why)

    # ---- events and actions ----

    def dispatch(self, event: BorrowerEvent) -> None:
        for action in self.machine.handle(event, self._env.clock.now_s()):
            match action:
                case OpenSlab():
                    self._env.spawn("open slab", self._open(action))
                case CloseSlab():
                    self._env.spawn("close slab", self._close(action))
                case _:
                    self._perform_shared(action, self.dispatch)

    async def second(self) -> None:
        """Once a second, measure how busy each slab is, and which hosts could be asked."""
        requests: dict[str, Sequence[int]] = {}
        links: dict[str, dict[int, Link]] = {}
        empty: dict[str, list[int]] = {}
        for name, volume in list(self.volumes.items()):
            if self._outlived(volume) and await self._remove_outlived(volume):
                continue
            await self._learn_payer(volume)
            counts = await self._count(volume)
            if counts is not None:
                requests[name] = volume.take(counts)
                links[name] = volume.links
                empty[name] = volume.empty()
                self._tell_trouble(volume, counts)
                await self.doors.look(volume, counts.swap)
        self.dispatch(events.BorrowerTick(requests, self.peers(), links, empty))
        self.unsure.ask()

    async def _learn_payer(self, volume: OpenVolume) -> None:
        """Look up a volume's tenant. A rank may open a volume before the log's word of its job is here: its tenant
        counts from when that word comes."""
        known = volume.known
        tenant = self.accounts.payer(known.tenant, known.job)
        if tenant == known.tenant or self.volumes.get(known.volume) is not volume:
            return
        volume.known = msgspec.structs.replace(known, tenant=tenant)
        self._host.note(
            f"volume/{known.volume}",
            "payer",
            f"job {known.job} belongs to tenant {tenant}, and its volume counts there",
        )
        try:
            await self._record.set_volume(volume.known)
        except OSError as error:  # the log says it again to the next agent
            self._env.log.warning("cannot record whose a volume is", volume=known.volume, why=str(error))

    async def _count(self, volume: OpenVolume) -> PageCounts | None:
        if not volume.process.ready.is_set():
            return None
        try:
            life, since = volume.since()
            answer = await volume.process.ask(lambda id: control.CountPages(id, life, since), ASK_S)
        except (ConnectionError, TimeoutError) as error:
            self._env.log.warning("a volume's process does not answer", volume=volume.known.volume, why=str(error))
            return None
        return answer if isinstance(answer, PageCounts) else None

    def _tell_trouble(self, volume: OpenVolume, counts: PageCounts) -> None:
        """Note trouble in the volume's event log when it begins, changes and ends."""
        if counts.trouble != volume.trouble:
            what = trouble_told(counts.trouble, volume.known.members)
            volume.trouble = counts.trouble
            self._host.note(f"volume/{volume.known.volume}", *what)

    # ---- lenders ----

    def peers(self) -> tuple[LenderPeer, ...]:
        """The other hosts, as gossip shows them."""
        return views.peers(self._host.hosts(), self._host.id)

    async def _open(self, action: OpenSlab) -> None:
        place, volume = action.place, self.volumes.get(action.volume)
        try:
            if volume is None:
                raise ConnectionResetError("the volume was removed")
            answer = await volume.process.ask(
                lambda id: control.OpenSlabFrame(
                    id, action.index, place.epoch, place.lender, place.address, place.secret
                ),
                OPEN_S,
            )
        except (ConnectionError, TimeoutError) as error:
            why = f"the volume's process does not answer: {error}"
            self.dispatch(events.SlabNotOpened(action.volume, action.index, place.epoch, why))
            return
        if isinstance(answer, Yes):
            self.dispatch(events.SlabOpened(action.volume, action.index, place.epoch))
        else:
            why = getattr(answer, "why", str(answer))
            self.dispatch(events.SlabNotOpened(action.volume, action.index, place.epoch, why))

    async def _close(self, action: CloseSlab) -> None:
        """Ask the volume's process to close a place until it is certain. A process that died is asked what it has when
        it is back."""
        while True:
            volume = self.volumes.get(action.volume)
            if volume is None:
                return
            try:
                answer = await volume.process.ask(
                    lambda id: control.CloseSlabFrame(id, action.index, action.epoch), CLOSE_S
                )
            except TimeoutError:
                continue
            except ConnectionError:
                return
            if not isinstance(answer, Yes):
                self._env.log.warning("a slab is not closed yet", volume=action.volume, why=str(answer))
                await asyncio.sleep(AGAIN_S)
                continue
            self.dispatch(events.SlabClosed(action.volume, action.index, action.epoch))
            return

    # ---- what people see ----

    def volume_views(self) -> list[VolumeView]:
        return [self.volume_view(volume) for _, volume in sorted(self.volumes.items())]

    def volume_view(self, volume: OpenVolume) -> VolumeView:
        name = volume.known.volume
        return views.volume_view(volume, self._host.id, self._slabs(name), self.path(name), self._waits_for(volume))

    def _waits_for(self, volume: OpenVolume) -> tuple[WaitView, ...]:
        why = {place.epoch: place.why for place in volume.recovering()}
        return tuple(
            WaitView(
                lender,
                tuple(slab.index for slab in mine),
                next((why[slab.epoch] for slab in mine if why.get(slab.epoch)), ""),
            )
            for lender, slabs in sorted(self.unsure.slabs().items())
            if (mine := [slab for slab in slabs if slab.volume == volume.known.volume])
        )

    def path(self, name: str) -> str:
        """Path of the unix socket that processes read and write the volume through."""
        return f"{self._env.run_dir}/{vold.front_name(name)}.sock"

    def slab_views(self) -> list[SlabView]:
        return [
            views.slab_view(slab, volume, self._host.id, self.machine.volumes[name].rates[slab.index])
            for name, volume in sorted(self.volumes.items())
            for slab in self._slabs(name)
        ]

    def _slabs(self, name: str) -> list[BorrowedSlab]:
        volume = self.machine.volumes.get(name)
        return [] if volume is None else volume.slabs

    def metrics(self) -> dict[MetricSeries, float]:
        slabs = [slab for name in self.volumes for slab in self._slabs(name)]
        counted = [volume.counts for volume in self.volumes.values() if volume.counts is not None]
        return {
            metrics.SLABS.of("borrowed"): sum(slab.is_served for slab in slabs),
            metrics.SLABS.of("on_disk"): sum(not slab.is_served for slab in slabs),
            metrics.SLABS.of("recovering"): sum(map(len, self.unsure.slabs().values())),
            metrics.VOLUMES.of(): len(self.volumes),
            metrics.PAGE_QUEUE_PAGES.of(): sum(counts.queued_pages for counts in counted),
            metrics.VOLUMES_IN_TROUBLE.of(): sum(bool(counts.trouble) for counts in counted),
        }
