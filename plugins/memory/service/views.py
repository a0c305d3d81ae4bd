"""Views of volumes and their slabs for people."""

from collections import Counter
from collections.abc import Iterable, Sequence

from covey.core.ids import HostId
from covey.core.units import format_size
from covey.wire.swap_wire import SwapCounts
from plugins.facts import HostView
from plugins.gossiped import LentNow, Spare
from plugins.memory.datapath.wire.control import OpenPlace, SlabCounts
from plugins.memory.machine.borrowing.slab import BorrowedSlab
from plugins.memory.machine.rack_accounts import RackAccounts
from plugins.memory.policy import mirroring
from plugins.memory.policy.budgets import BudgetAccount, as_told
from plugins.memory.policy.placement import LenderPeer
from plugins.memory.service.open_volume import OpenVolume
from plugins.views import AccountView, SlabView, SwapView, VolumeView, WaitView


def peers(hosts: Iterable[HostView], me: HostId) -> tuple[LenderPeer, ...]:
    """The other hosts, as a borrower sees them. A value gossiped by another version that cannot be read counts as not
    said."""
    found: list[LenderPeer] = []
    for view in hosts:
        if view.host != me:
            spare, lent = view.value("spare", Spare), view.value("lent", LentNow)
            room: tuple[int | None, int, str] = (None, 0, "")
            if isinstance(spare, Spare):
                room = spare.slabs_free, spare.slab_bytes, spare.rack
            told = as_told(lent.accounts) if isinstance(lent, LentNow) else None
            found.append(LenderPeer(view.host, view.state, *room, told))
    return tuple(found)


def account_views(accounts: RackAccounts, volumes: Iterable[OpenVolume], named: Iterable[str]) -> list[AccountView]:
    """Views of every account that this host can name and that something is lent on, has volumes here, or has a budget
    of its own (`named` tenants); and of accounts whose number alone it knows."""
    mine: Counter[BudgetAccount] = Counter()
    for known in (volume.known for volume in volumes):
        for account in (BudgetAccount("tenant", known.tenant), BudgetAccount("job", known.job)):
            if account.name:
                mine[account] += known.taken_bytes
    jobs = {job: known.tenant for job, known in accounts.jobs.items()}
    found = {*mine, *accounts.here, *(BudgetAccount("tenant", tenant) for tenant in (*named, *jobs.values()) if tenant)}
    found |= {BudgetAccount("job", job) for job in jobs}
    rows = [
        AccountView(
            kind=account.kind,
            name=account.name,
            tenant=jobs.get(account.name, "") if account.kind == "job" else account.name,
            budget_bytes=accounts.budget(account),
            used_bytes=sum(lenders.values()),
            lenders=lenders,
            volumes_bytes=mine[account],
        )
        for account in sorted(found)
        if (lenders := accounts.used(account)) or mine[account] or accounts.budget(account) is not None
    ]
    for number, lenders in accounts.unnamed({account.number for account in found}).items():
        rows.append(AccountView("", f"{number:08x}", "", None, sum(lenders.values()), lenders, 0))
    return rows


def volume_view(
    volume: OpenVolume, host: HostId, slabs: Sequence[BorrowedSlab], path: str, waits_for: tuple[WaitView, ...]
) -> VolumeView:
    """The view of a volume. `slabs`: as the machine knows them, one for each member of a mirrored slab."""
    known, counts = volume.known, volume.counts
    return VolumeView(
        volume=known.volume,
        host=host,
        size_bytes=known.size_bytes,
        page_bytes=known.page_bytes,
        slab_bytes=known.slab_bytes,
        slabs_mapped=_served(slabs, known.members, known.data),
        slabs=volume.slabs,
        read_bytes=counts.read_bytes if counts else 0,
        written_bytes=counts.written_bytes if counts else 0,
        remote_read_bytes=counts.remote_read_bytes if counts else 0,
        disk_read_bytes=counts.disk_read_bytes if counts else 0,
        process_alive=volume.process.ready.is_set(),
        path=path,
        waits_for=waits_for,
        trouble=volume.process.died or volume.trouble,
        tenant=known.tenant,
        job=known.job,
        taken_bytes=known.taken_bytes,
        members=known.members,
        slabs_whole=volume.formed() if known.members > 1 else 0,
        parity=known.parity,
        swap=swap_view(volume),
        uid=known.uid,
    )


def swap_view(volume: OpenVolume) -> SwapView:
    if not volume.known.swap:
        return SwapView()
    now = volume.counts.swap if volume.counts is not None else SwapCounts("waits")
    return SwapView(now.word, now.device, now.used_bytes, now.why)


def swap_told(volumes: Iterable[OpenVolume], lacks: str) -> str:
    """Line of `agentctl status` about swap."""
    said = [
        f"{view.device or volume.known.volume} {view.word}, {format_size(view.used_bytes)} used"
        for volume in volumes
        if (view := swap_view(volume)).word != "off"
    ]
    return "; ".join(said) or (f"not offered: {lacks}" if lacks else "no volume is swap of this host")


def byte_path_told(expected: str, running: Iterable[tuple[str, str]]) -> str:
    """Line of `agentctl status` about how the byte path runs. `expected`: how programs that start now run it;
    `running`: those that run, by name, with what they say of themselves."""
    others: dict[str, set[str]] = {}
    for program, said in running:
        if said and said != expected:
            others.setdefault(said, set()).add(program)
    return next((f"{', '.join(sorted(others[said]))}: {said}" for said in others), expected)


def _served(slabs: Sequence[BorrowedSlab], members: int, data: int) -> int:
    """Number of slabs that lenders serve: `data` of the members are enough, whichever they are."""
    served = Counter(mirroring.slab_of(slab.index, members) for slab in slabs if slab.is_served)
    return sum(count >= data for count in served.values())


def slab_view(slab: BorrowedSlab, volume: OpenVolume, borrower: HostId, requests_per_s: float) -> SlabView:
    """The view of one slab, or of one member."""
    counts = volume.counted.get(slab.index) or SlabCounts(slab.index, 0, 0, 0)
    known, index = volume.known, mirroring.slab_of(slab.index, slab.members)
    return SlabView(
        volume=slab.volume,
        index=index,
        borrower=borrower,
        state=slab.state,
        lender=HostId(slab.place.lender) if slab.place else None,
        size_bytes=min(known.slab_bytes, -(-known.size_bytes // known.data) - index * known.slab_bytes),
        pages_written=counts.written,
        pages_remote=counts.remote,
        requests_per_s=round(requests_per_s, 3),
        epoch=slab.place.epoch if slab.place else 0,
        member=slab.index % slab.members,
        members=slab.members,
    )


def trouble_told(trouble: str, members: int) -> tuple[str, str]:
    """Event and reason for the event log of a volume when its trouble begins, changes or ends."""
    if members == 1:
        return ("disk refuses", trouble) if trouble else ("disk works again", "it takes pages")
    return ("not whole", trouble) if trouble else ("whole again", f"every slab in use has {members} whole members")


def given_up_told(place: OpenPlace, members: int) -> str:
    """Line for the event log of a volume when a person does not want to wait for a lender."""
    slab = mirroring.slab_of(place.index, members)
    cost = "pages written there last may read older" if members == 1 else "pages that no other member has are lost"
    return f"slab {slab} no longer waits for {place.lender}; {cost}"
