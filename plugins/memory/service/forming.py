"""A volume without a disk begins with a place for everything: a client that attaches it waits until each slab has all
of its members on hosts of their own, or is told that there is no room for them. This module also checks whose volume it
is."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from covey.core.errors import Refused
from covey.core.ids import HostId
from covey.core.units import format_size
from covey.ports.processes import ProcessId
from plugins.base import Host
from plugins.memory.machine.borrowing.borrower import Borrower
from plugins.memory.machine.borrowing.budgets import places_of
from plugins.memory.machine.borrowing.lender_search import Opening, Requesting
from plugins.memory.machine.borrowing.slab import BorrowedVolume, counted
from plugins.memory.machine.rack_accounts import RackAccounts
from plugins.memory.policy import mirroring, parity
from plugins.memory.policy.budgets import BudgetHeld, over_budget
from plugins.memory.policy.mirroring import MEMBERS
from plugins.memory.policy.placement import LenderPeer
from plugins.memory.policy.settings import MemorySettings
from plugins.memory.service import views
from plugins.memory.service.earlier import Waits
from plugins.memory.service.open_volume import OpenVolume
from plugins.memory.service.record import KnownVolume, SlabRecord

FORMED_S = 15.0
"""Most seconds that a client waits, for the volume's process too (a command takes 20 s at most); forming continues
after."""
STUCK_S = 7.0
"""Seconds without one more slab, while all lenders have declined, after which there is no room."""
LATE_S = 30.0
"""Seconds for which a lender that did not answer in time may have room, unless it declines."""
QUIET_S, LOOK_S = 1.0, 0.1
LOOK_AT_S = 1.0
"""Seconds between two messages to a waiting client."""


class Payer(NamedTuple):
    """For whom a volume is made: its tenant and job; empty: none in particular."""

    tenant: str = ""
    job: str = ""
    scratch: ProcessId | None = None
    """The process with which the volume goes; None: it stays."""


class Kind(NamedTuple):
    """The way in which a client asks to keep a volume's pages safe, unchecked. Neither field: as the volume is, or this
    host's disk."""

    mirror: object = 0
    """Members of each slab."""
    parity: object = ""
    """Number of members as `K+1`, with parity."""


NOBODY, AS_IS = Payer(), Kind()


def refuse_over_budget(
    accounts: RackAccounts, volumes: Iterable[OpenVolume], borrower: Borrower, by: Payer, more: int, what: str
) -> None:
    """Refuse if the tenant or the job would have more than its budget, counting all that its volumes on this host may
    take and all that the rack lends to those of other hosts."""
    mine = [volume.known for volume in volumes]
    for account, budget in accounts.limited(by.tenant, by.job):
        of = [known for known in mine if account.name == (known.tenant if account.kind == "tenant" else known.job)]
        places = places_of(borrower.volumes.values(), account)
        others = {host: max(0, size - places[host]) for host, size in accounts.used(account).items()}
        held = BudgetHeld(account, budget, 0, others, asked=sum(known.taken_bytes for known in of))
        if why := over_budget(held, more):
            step = f"raise budgets.{by.tenant} in agent.toml of all hosts"
            if account.kind == "job":
                step = "submit it with more --remote-memory"
            raise Refused(4, what, why, f"remove one of its volumes (agentctl memory lists them), or {step}")


def refuse_too_many(settings: MemorySettings, volumes: Iterable[OpenVolume], by: Payer, what: str) -> None:
    """Refuse if this host has as many volumes as it may, or as one job may have here. Each volume is a process."""
    mine = [volume.known for volume in volumes]
    of_job = sum(1 for known in mine if by.job and known.job == by.job)
    if by.job and of_job >= settings.volumes_per_job_max:
        most = f"{settings.volumes_per_job_max} (volumes_per_job_max in [memory])"
        why = f"job {by.job} has {of_job} volumes on this host, and may have {most}"
        step = "use one volume for many steps, at offsets; remove() what is not needed, or raise it in agent.toml"
        raise Refused(4, what, why, step)
    if len(mine) >= settings.volumes_max:
        why = f"this host has {len(mine)} volumes, and may have {settings.volumes_max} (volumes_max in [memory])"
        raise Refused(4, what, why, "remove one (agentctl volume ls, agentctl volume rm), or raise it in agent.toml")


def checked_members(kind: Kind, what: str) -> tuple[int, bool]:
    """How many members the client asks for, and whether one has parity. Refused when there is no such volume."""
    members, parity_ = kind
    if parity_:
        if members:
            why = "--mirror keeps every page twice, --parity keeps pages once and their parity; choose one of them"
            raise Refused(2, what, why, f"give --mirror {MEMBERS} or --parity 2+1")
        try:
            return parity.parsed(parity_) + 1, True
        except ValueError as error:
            step = f"give --parity 2+1 or 4+1, or --mirror {MEMBERS}"
            raise Refused(2, what, f"--parity {error}", step) from None
    if isinstance(members, bool) or members not in (0, 1, MEMBERS):
        why = f"--mirror {members!r}: a mirrored slab is on exactly {MEMBERS} hosts"
        raise Refused(2, what, why, f"give --mirror {MEMBERS}, or leave it out")
    assert isinstance(members, int)
    return max(1, members), False


class Former:
    """Finds a place for everything of this host's volumes without a disk, or gives back what was found. There is one
    task for each volume, however many clients wait, and also when none does any more. `changing` is held while volumes
    come and go; `forget` is called with it held."""

    def __init__(
        self,
        host: Host,
        record: SlabRecord,
        machine: Borrower,
        volumes: Mapping[str, OpenVolume],
        changing: asyncio.Lock,
        forget: Callable[[OpenVolume], Awaitable[None]],
    ) -> None:
        self._host, self._env, self._record = host, host.env, record
        self._machine, self._volumes, self._changing, self._forget = machine, volumes, changing, forget

    def begin(self, volume: OpenVolume) -> None:
        """Begin to find places, unless the volume has them or a task looks for them already."""
        if volume.known.members > 1 and not volume.known.formed and volume.settled is None:
            volume.settled, volume.refused = asyncio.Event(), None
            self._env.spawn(f"memory forms {volume.known.volume}", self._form(volume))

    async def wait(self, volume: OpenVolume, began_s: float, waits: Waits | None = None) -> None:
        """Wait for all places. Refused: there is no room (4), or not yet (1). `began_s`: when the client began to wait
        for the volume. With `waits` it waits for as long as places are looked for."""
        self.begin(volume)
        what, settled = f"volume {volume.known.volume} is not ready", volume.settled
        assert settled is not None
        while not settled.is_set():
            left_s = LOOK_AT_S if waits is not None else began_s + FORMED_S - self._env.clock.now_s()
            try:
                async with asyncio.timeout(left_s):
                    await settled.wait()
            except TimeoutError:
                why = f"{volume.formed()} of {volume.slabs} slabs have {hosts(volume.known)} hosts so far"
                if waits is None:
                    raise Refused(1, what, f"{why}; it is still being formed", "try again in a few seconds") from None
                waits(why)
        if volume.refused is not None:
            raise volume.refused
        if not volume.known.formed:
            raise Refused(1, what, "it was removed meanwhile", "open it again")

    async def _form(self, volume: OpenVolume) -> None:
        settled = volume.settled
        assert settled is not None
        try:
            has_all = await self._until_placed(volume)
            async with self._changing:
                if self._is_ours(volume) and has_all:
                    await self._formed(volume)
                elif self._is_ours(volume):
                    await self._give_up(volume)
        except OSError as error:
            what, step = f"volume {volume.known.volume} is not ready", "make room on this host's disk and try again"
            volume.refused = Refused(1, what, f"its record cannot be written: {error}", step)
            volume.settled = None
        settled.set()

    async def _formed(self, volume: OpenVolume) -> None:
        volume.known = msgspec.structs.replace(volume.known, formed=True)
        try:
            await self._record.set_volume(volume.known)
        except OSError:
            volume.known = msgspec.structs.replace(volume.known, formed=False)
            raise
        if why := shared_racks(self._placed(volume), views.peers(self._host.hosts(), self._host.id)):
            self._host.note(f"volume/{volume.known.volume}", "racks shared", why)

    async def _give_up(self, volume: OpenVolume) -> None:
        """Give the volume up, unless it may hold pages."""
        name = volume.known.volume
        if volume.known.exports or volume.known.swap or any(each.written for each in volume.counted.values()):
            which = f"{volume.formed()} of {volume.slabs} slabs are whole"
            why = f"there is no room for all of it, but it may hold pages, so it is kept; {which}"
            volume.settled, volume.refused = None, Refused(1, f"volume {name} is not ready", why, "agentctl slabs")
            self._host.note(f"volume/{name}", "kept", why)
            return
        volume.refused = no_room(volume, self._placed(volume))
        self._host.note(f"volume/{name}", "no room", volume.refused.why)
        await self._forget(volume)

    def _is_ours(self, volume: OpenVolume) -> bool:
        """True unless the volume was detached; another one may have its name then."""
        return self._volumes.get(volume.known.volume) is volume

    def _placed(self, volume: OpenVolume) -> BorrowedVolume | None:
        return self._machine.volumes.get(volume.known.volume)

    async def _until_placed(self, volume: OpenVolume) -> bool:
        """Wait for places. True once every slab has its members; False when there is no room for them, or it was
        detached."""
        clock = self._env.clock
        seen, began_s = -1, clock.now_s()
        seen_s = moved_s = looked_s = began_s
        while (formed := volume.formed()) < volume.slabs and self._is_ours(volume):
            now_s = clock.now_s()
            if formed != seen:
                seen, seen_s, moved_s = formed, now_s, now_s
            elif now_s - looked_s >= QUIET_S:
                looked_s = now_s
                if not volume.process.ready.is_set() or _may_have_room(self._placed(volume), seen_s, now_s):
                    moved_s = now_s
            if now_s - moved_s >= STUCK_S:
                return False
            await asyncio.sleep(LOOK_S if now_s - began_s < FORMED_S else QUIET_S)
        return self._is_ours(volume)


def _may_have_room(volume: BorrowedVolume | None, seen_s: float, now_s: float) -> bool:
    """Is a lender still asked for a member without a place, was one late when asked last, or was none asked since
    another slab was formed (`seen_s`)? A lender's first slab is there when its process has started; until it has freed
    slabs that were not waited for, it offers no room."""
    homeless = [slab for slab in volume.slabs if not slab.places] if volume is not None else []
    return any(
        slab.declined_s < seen_s or now_s < slab.late_s + LATE_S or isinstance(slab.search, Requesting | Opening)
        for slab in homeless
    )


def no_room(volume: OpenVolume, placed: BorrowedVolume | None) -> Refused:
    """Why the volume could not be made."""
    found = sum(1 for slab in placed.slabs if slab.place is not None) if placed is not None else 0
    trouble = f" ({volume.trouble})" if volume.trouble else ""
    known = volume.known
    why = (
        f"it needs {volume.numbers} slabs at lenders ({counted(volume.slabs)}, each on {hosts(known)} other hosts), and"
        f" only {found} were found{trouble}; those were given back"
    )
    without = "--parity" if known.parity else "--mirror"
    next_step = f"agentctl hosts shows who lends; ask for less, or create it without {without}"
    return Refused(4, f"cannot create volume {volume.known.volume}", why, next_step)


def shared_racks(volume: BorrowedVolume | None, peers: Iterable[LenderPeer]) -> str:
    """Slabs that have two members in one rack, for people; empty: none, as far as hosts have labels."""
    rack_of = {peer.host: peer.rack for peer in peers}
    lenders: dict[int, list[HostId]] = {}
    for slab in volume.slabs if volume is not None else ():
        place = slab.place
        if place is not None:
            lenders.setdefault(mirroring.slab_of(slab.index, slab.members), []).append(place.lender)
    shared = sorted(index for index, found in lenders.items() if mirroring.share_a_rack(found, rack_of))
    if not shared:
        return ""
    which = ", ".join(map(str, shared[:8])) + (" ..." if len(shared) > 8 else "")
    return (
        f"two members of slab {which} are in one rack, since no other rack had room: the loss of that rack loses both"
    )


def hosts(known: KnownVolume) -> str:
    """Number of hosts that hold each slab, for people."""
    return "two" if known.members == MEMBERS else str(known.members)


def in_words(known: KnownVolume) -> str:
    """The way in which the volume's pages are kept safe, for people; empty: on this host's disk."""
    if known.parity:
        return f", on {known.data} hosts and their parity on one more, and no disk"
    return "" if known.members == 1 else f", {known.members} members each and no disk"


def check_same(known: KnownVolume, size_bytes: int, asked: tuple[int, bool] | None, what: str) -> None:
    """Refuse if the volume exists and differs. `asked`: members, and whether with parity; None: as it is."""
    if -(-size_bytes // known.page_bytes) * known.page_bytes != known.size_bytes:
        why = f"it exists with {known.size_bytes} bytes, not {size_bytes}"
        raise Refused(4, what, why, f"ask for {format_size(known.size_bytes)}, or remove it first")
    if asked is not None and asked != (known.members, known.parity):
        why = f"it exists with {known.members} lenders for each slab, not {asked[0]}"
        if asked[0] == known.members:
            why = f"it exists {'with' if known.parity else 'without'} parity"
        raise Refused(4, what, why, "ask for it as it is, or remove it first")


def check_owner(known: KnownVolume, uid: int, what: str) -> None:
    """Refuse if the volume belongs to another user. `uid` -1: a person asks, by agentctl."""
    if known.uid != -1 and uid not in (known.uid, -1, 0):
        raise Refused(4, what, f"it belongs to another user (uid {known.uid})", "choose another name")
