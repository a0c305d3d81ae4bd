"""Remote memory at work: `borrowing` and `lending` feed their machines; this file is what the agent calls.

`process` keeps the byte processes alive, `record` remembers them across restarts of the agent.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import msgspec

from covey.core.errors import Refused
from covey.core.events import Fact, Heard
from covey.core.ids import ID_PATTERN, HostId
from covey.core.metrics import Measured, Risen
from covey.core.units import parse_size
from covey.wire.job import Frame, Make, Refusal, RemoveVolume, VolumeAt, VolumeComing, VolumeRemoved, VolumeWanted
from plugins.askers import OwnerUser, asker_of
from plugins.base import Command, Host, JobPeer, PluginService
from plugins.facts import (
    HostAway,
    HostGone,
    HostNeverBack,
    HostSeen,
    JobPlaced,
    JobUnplaced,
    MemoryPromised,
    SecondPassed,
)
from plugins.memory.datapath.wire.control import PageCounts
from plugins.memory.machine.borrowing.events import LenderLost
from plugins.memory.machine.lending.events import BorrowerAway
from plugins.memory.machine.rack_accounts import RackAccounts
from plugins.memory.messages import (
    SlabsAre,
    SlabsHeld,
    SlabsHere,
    ToBorrower,
    ToLender,
    VolumeHeld,
)
from plugins.memory.policy import mirroring
from plugins.memory.policy.settings import MemorySettings
from plugins.memory.service import measured, one_sided
from plugins.memory.service.borrowing import Borrowing
from plugins.memory.service.forming import NOBODY, Kind, Payer
from plugins.memory.service.lending import Lending
from plugins.memory.service.open_volume import lacking, stalls
from plugins.memory.service.record import SlabRecord
from plugins.memory.service.views import account_views, byte_path_told, swap_told
from plugins.views import AccountView, SlabView, VolumeView

ASK_S = 2.0
"""Seconds that other hosts may take to list their slabs."""
WHY_MAX = 400
"""Most characters of the reason why a volume is not ready."""
_NAME = re.compile(ID_PATTERN)


class MemoryService(PluginService):
    """The plugin `memory` of one host."""

    name: ClassVar[str] = "memory"

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        settings = self._settings = host.settings(MemorySettings)
        self.accounts = RackAccounts(host.id, settings.lease_s, settings.budget_bytes)
        self._record = SlabRecord(self.env.disk, self.env.log)
        self.borrowing = Borrowing(host, settings, self._record, self.perform, self.accounts)
        self.lending = Lending(host, settings, self._record, self.perform, self.accounts)
        self._second_passes = False
        self._risen = Risen()

    async def start(self) -> None:
        await self._record.load(self.host.boot)
        await self.lending.start()
        await self.borrowing.start()

    def reconfigure(self, settings: MemorySettings) -> None:
        """Budgets and numbers of volumes count for what is asked for from now on."""
        self._settings = self.borrowing.settings = settings
        self.accounts.budget_of = settings.budget_bytes

    # ---- what happens ----

    def on_fact(self, fact: Fact) -> None:
        match fact:
            case SecondPassed():
                if not self._second_passes:
                    self._second_passes = True
                    self.env.spawn("memory second", self._second())
            case JobPlaced():
                self.accounts.placed(fact.job, fact.tenant, fact.remote_memory)
            case JobUnplaced():
                if fact.ended:
                    self.accounts.over(fact.job)
            case MemoryPromised():
                self.lending.promised_bytes = fact.promised_bytes
            case HostAway():
                self.lending.dispatch(BorrowerAway(fact.host, fact.for_s))
            case HostSeen():
                self.lending.dispatch(BorrowerAway(fact.host, 0.0))
                self.borrowing.unsure.never_back.pop(fact.host, None)
            case HostGone():
                self.borrowing.dispatch(LenderLost(fact.host))
            case HostNeverBack():
                self.borrowing.unsure.never_back[fact.host] = fact.boot
            case _:
                pass

    async def _second(self) -> None:
        """Pass one second to both halves, one at a time: a process that is slow to answer makes seconds longer, not
        more."""
        try:
            self.accounts.heard(self.borrowing.peers(), self.env.clock.now_s())
            await self.lending.second()
            await self.borrowing.second()
        finally:
            self._second_passes = False

    async def on_message(self, sender: HostId, message: Any) -> None:
        if isinstance(message, ToLender):
            self.lending.dispatch(Heard(sender, message))
        elif isinstance(message, ToBorrower):
            self.borrowing.dispatch(Heard(sender, message))
        else:
            self.log.warning("not a message but a question or an answer", sender=sender, message=str(message)[:200])

    async def answer(self, sender: HostId, question: Any) -> msgspec.Struct:
        if isinstance(question, SlabsHere):
            return SlabsAre(tuple(self.borrowing.slab_views()))
        if isinstance(question, SlabsHeld):
            return self.lending.machine.held(sender, question.slabs)
        if isinstance(question, VolumeHeld):
            return self.lending.volume_held(sender, question)
        return await super().answer(sender, question)

    # ---- processes of this host ----

    async def frame(self, peer: JobPeer, frame: Frame) -> None:
        """Answer a frame of a process of this host. A process whose user is not known gets no volume and ends none: uid
        -1 stands for a person at agentctl."""
        try:
            if isinstance(frame, VolumeWanted | RemoveVolume) and peer.uid < 0:
                verb = "open" if isinstance(frame, VolumeWanted) else "remove"
                what = f"cannot {verb} volume {_volume_name(frame.volume)}"
                why = "the kernel of this host does not tell which user's process asks"
                raise Refused(4, what, why, "as the agent's user: agentctl volume create --help")
            match frame:
                case VolumeWanted():
                    peer.send(await self._attach_for(peer, frame))
                case RemoveVolume():
                    await self.borrowing.detach(_volume_name(frame.volume), peer.uid)
                    peer.send(VolumeRemoved(frame.volume))
                case _:
                    pass
        except Refused as refused:
            peer.send(Refusal(refused.what, refused.why, refused.next))

    async def _attach_for(self, peer: JobPeer, frame: VolumeWanted) -> VolumeAt:
        """Open a volume for a rank; it counts against the budget of the job's tenant."""
        job = self.accounts.jobs.get(peer.of_job) if peer.of_job is not None else None
        account = NOBODY if peer.of_job is None else Payer("" if job is None else job.tenant, peer.of_job)
        name = _volume_name(frame.volume)
        if frame.scratch is not None:
            if self.env.processes.find(frame.scratch) is None:
                why = f"process {frame.scratch.pid}, with which it is to go, does not run on this host"
                raise Refused(2, f"cannot open volume {name}", why, "open it without scratch=")
            account = account._replace(scratch=frame.scratch)
        waits = partial(self._say_coming, peer, name)
        kind, make = Kind(frame.mirror, frame.parity), frame.make
        volume = await self.borrowing.attach(
            name, frame.size_bytes, peer.uid, kind=kind, by=account, make=make, waits=waits
        )
        known = volume.known
        path = self.borrowing.path(known.volume)
        return VolumeAt(known.volume, known.size_bytes, known.page_bytes, path, known.token)

    def _say_coming(self, peer: JobPeer, name: str, why: str) -> None:
        """Tell a waiting process why its volume is not ready. Refused when that process is gone."""
        if peer.gone:
            raise Refused(
                1,
                f"nobody waits for volume {name}",
                "the process that asked for it has closed its connection",
                "open it again",
            )
        peer.send(VolumeComing(name, why[:WHY_MAX]))

    # ---- what people ask ----

    def commands(self) -> Mapping[str, Command]:
        return {
            "create": self._create,
            "remove": self._remove,
            "export": self._export,
            "swap": self._swap,
            "give_up": self._give_up,
            "volumes": self._volumes,
            "slabs": self._slabs,
            "accounts": self._accounts,
        }

    async def _create(self, arguments: Mapping[str, Any]) -> VolumeView:
        """`volume`, and `size_bytes` or `size` (bytes, or text such as `64 MiB`); `uid`: whose it is, if it is new;
        `tenant`: whose budget it counts against; `mirror`: 2 for one without a disk, on two other hosts each;
        `parity`: `K+1` for one on K + 1; `create`: true makes it anew, empty, whatever other hosts know of it."""
        name = _volume_name(arguments.get("volume"))
        size = _size(arguments.get("size_bytes", arguments.get("size")))
        owner = arguments.get("uid", -1)
        if isinstance(owner, bool) or not isinstance(owner, int) or not -1 <= owner < 1 << 31:
            raise Refused(2, f"{owner!r} is not a user", "expected a uid: a number from 0 on", "give --user NAME")
        account = Payer(_tenant(arguments.get("tenant", "")))
        kind = Kind(arguments.get("mirror", 0), arguments.get("parity", ""))
        make: Make = "anew" if arguments.get("create") is True else ""
        volume = await self.borrowing.attach(name, size, _asks_as(arguments), owner, kind, account, make)
        return self.borrowing.volume_view(volume)

    async def _remove(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """`volume`."""
        name = _volume_name(arguments.get("volume"))
        await self.borrowing.detach(name, _asks_as(arguments))
        return {"volume": name}

    async def _export(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Arguments: `volume`, `socket` (absolute path), `end` (true: stop serving it there)."""
        name, path = _volume_name(arguments.get("volume")), str(arguments.get("socket", ""))
        await self.borrowing.doors.export(name, path, arguments.get("end") is True)
        return {"volume": name, "socket": path}

    async def _swap(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Arguments: `volume`, `end` (true: end it). Answer: `swap` is `on`, `ending` (it takes longer: see `volumes`)
        or `off`."""
        name = _volume_name(arguments.get("volume"))
        if arguments.get("end") is True:
            return {"volume": name, "swap": await self.borrowing.doors.end_swap(name)}
        await self.borrowing.doors.begin_swap(name)
        return {"volume": name, "swap": "on"}

    async def _give_up(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Arguments: `volume`."""
        name = _volume_name(arguments.get("volume"))
        given_up = await self.borrowing.unsure.give_up(name)
        volume = self.borrowing.volumes.get(name)
        if volume is None:
            return {"volume": name, "slabs": [], "lenders": sorted(place.lender for place in given_up), "members": 0}
        members = volume.known.members
        return {"volume": name, "slabs": sorted({mirroring.slab_of(place.index, members) for place in given_up}),
                "lenders": sorted({place.lender for place in given_up}), "members": members}  # fmt: skip

    async def whose(self, name: str) -> OwnerUser:
        """The owner of this host's volume of that name."""
        volume = self.borrowing.volumes.get(_volume_name(name))
        if volume is None:
            raise Refused(3, f"no volume {name}", "this host has none of that name", "agentctl volume ls")
        return OwnerUser(uid=volume.known.uid if volume.known.uid >= 0 else None)

    async def _volumes(self, arguments: Mapping[str, Any]) -> list[VolumeView]:
        views = self.borrowing.volume_views()
        return [measured.completed(view, self.borrowing.volumes[view.volume], self.accounts) for view in views]

    async def _accounts(self, arguments: Mapping[str, Any]) -> list[AccountView]:
        """The memory of the rack that tenants and jobs have, as this host hears it."""
        return account_views(self.accounts, self.borrowing.volumes.values(), self._settings.budgets)

    async def _slabs(self, arguments: Mapping[str, Any]) -> list[SlabView]:
        """This host's slabs; with `all` those of every host that answers."""
        mine = self.borrowing.slab_views()
        if not arguments.get("all"):
            return mine
        others = [view.host for view in self.host.hosts() if view.host != self.host.id and view.state == "alive"]
        answers = await asyncio.gather(*(self._slabs_of(host) for host in others))
        return [*mine, *(slab for answer in answers for slab in answer)]

    async def _slabs_of(self, host: HostId) -> tuple[SlabView, ...]:
        """The slabs of another host's volumes; none if it does not answer in time, or does not lend or borrow."""
        try:
            answer = await self.host.ask(self.name, host, SlabsHere(), ASK_S)
        except (TimeoutError, Refused):
            return ()
        return answer.slabs if isinstance(answer, SlabsAre) else ()

    def notes(self) -> Sequence[str]:
        return [*self.lending.notes(), *lacking(self.borrowing.volumes.values())]

    def status(self) -> Mapping[str, str]:
        settings = self.host.settings(MemorySettings)
        swap = swap_told(self.borrowing.volumes.values(), self.env.probes.swap_lacks(settings.swap_helper))
        running = [*self.lending.byte_paths(), *(("vold", counts.byte_path) for counts in self._counts())]
        byte_path = byte_path_told(self.env.byte_path, running)
        said = {"swap": swap, **({"byte path": byte_path} if byte_path else {})}
        if settings.rdma == "off":
            return {"pages": one_sided.told_without_rdma(self._counts()), **said}
        found = self.env.verbs.look(settings.slab_bytes)
        return {"pages": one_sided.told(found, self._counts(), self.lending.rdma), **said}

    def _counts(self) -> list[PageCounts]:
        return [volume.counts for volume in self.borrowing.volumes.values() if volume.counts is not None]

    def metrics(self) -> Measured:
        volumes = self.borrowing.volumes.values()
        counted = one_sided.mapped_metrics(self._counts())
        accounts = measured.accounts(volumes, self.lending.machine.lent.values())
        rows = account_views(self.accounts, volumes, self._settings.budgets)
        accounts |= measured.account_metrics(rows, self.borrowing.refused_for_budget)
        found = {**self.lending.metrics(), **self.borrowing.metrics(), **measured.volume_metrics(volumes, self._risen)}
        return {**found, **counted, **accounts, **stalls(self._counts())}


def _volume_name(name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        why = "use a-z, 0-9, '-' and '.', starting with a letter or digit, at most 63 characters"
        raise Refused(2, f"{name!r} is not a valid name for a volume", why, "choose such a name")
    return name


def _asks_as(arguments: Mapping[str, Any]) -> int:
    """The user as whom the borrower is asked: -1 for an operator, who may do so with everybody's volumes."""
    asker = asker_of(arguments)
    return -1 if asker.role == "operator" else asker.uid


def _tenant(name: object) -> str:
    if name == "" or (isinstance(name, str) and _NAME.fullmatch(name)):
        return name
    raise Refused(
        2, f"{name!r} is not a tenant", "expected a name as in agentctl submit --tenant", "give --tenant NAME"
    )


def _size(size: object) -> int:
    try:
        if isinstance(size, str):
            return parse_size(size)
        if isinstance(size, int) and not isinstance(size, bool):
            return size
        raise ValueError(f"size = {size!r}: expected bytes, or text such as '64 MiB'")
    except ValueError as error:
        raise Refused(2, "invalid size for a volume", str(error), "give a size such as 64 MiB") from error
