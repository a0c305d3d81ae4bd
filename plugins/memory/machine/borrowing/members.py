"""Members of slabs that have no disk (`policy.mirroring`): each is a `BorrowedSlab` with its own place, search and
life. These functions make it one of several."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from covey.core.events import Send, SetTimer
from covey.core.ids import HostId
from plugins.memory.machine.borrowing.events import Actions, GraceOver, SearchOver, VolumeFound
from plugins.memory.machine.borrowing.leaving import give_back
from plugins.memory.machine.borrowing.slab import BorrowedSlab, BorrowedVolume, Closing, Cold, Mapped, Migrating
from plugins.memory.messages import AboutSlab, FreeMem, MrInfo, Renew, SlabRef, Unrenewed, in_parts
from plugins.memory.policy import mirroring, placement
from plugins.memory.policy.mirroring import SEARCHES_MAX
from plugins.memory.policy.placement import LenderPeer

LOOKED_AT_MAX = 512
"""Members that are considered to find one that may make way."""


def new_volume(found: VolumeFound, hot: float | None, cold_share: float) -> BorrowedVolume:
    """A volume that was not known yet. No member is given back because it is cold: its pages are nowhere else."""
    above = placement.hot_for(found.slab_bytes) if hot is None else hot
    slabs = [BorrowedSlab(found.volume, number, found.members) for number in range(found.slabs * found.members)]
    cold = cold_share * above or None if found.members == 1 else None
    return BorrowedVolume(
        found.slab_bytes,
        found.page_bytes,
        slabs,
        above,
        cold,
        members=found.members,
        tenant=found.tenant,
        job=found.job,
    )


def others(volume: BorrowedVolume, slab: BorrowedSlab) -> list[BorrowedSlab]:
    """The other members of its slab; none where the second copy is the disk."""
    return [volume.slabs[number] for number in mirroring.siblings(slab.index, volume.members)]


def kept_apart(
    volume: BorrowedVolume, slab: BorrowedSlab, free: Mapping[HostId, int], peers: Sequence[LenderPeer]
) -> Mapping[HostId, int]:
    """The hosts with room that may be asked for this member."""
    if volume.members == 1:
        return free
    return mirroring.apart(free, _held(volume, slab), {peer.host: peer.rack for peer in peers})


def _held(volume: BorrowedVolume, slab: BorrowedSlab) -> set[HostId]:
    """Hosts where its siblings are, may be, or are looked for."""
    return {host for other in others(volume, slab) for host in (*other.hosts(), *other.left.values())}


def may_make_way(volume: BorrowedVolume, slab: BorrowedSlab, room: Collection[HostId]) -> BorrowedSlab | None:
    """A member of another slab that may make way for this one, when all hosts with room hold siblings of this one. That
    member moves, with its pages, to a host where this one may not be; this one may take its place. One member of a
    volume moves at a time. None: there is no such member. Such a pattern comes from lenders that were late while a
    volume was attached, and from lost hosts."""
    if volume.members == 1 or not room:
        return None
    held, count = _held(volume, slab), len(volume.slabs)
    for step in range(1, min(count, LOOKED_AT_MAX)):
        other = volume.slabs[(slab.index + step) % count]
        phase = other.phase
        if isinstance(phase, Migrating | Closing):
            return None
        is_settled = isinstance(phase, Mapped) and phase.link == "open" and not phase.evicted
        if is_settled and held.isdisjoint(other.hosts()) and not _held(volume, other).issuperset(room):
            return other
    return None


def homeless(volume: BorrowedVolume, now_s: float) -> list[BorrowedSlab]:
    """Members without a place that begin to look for one now; one of each slab at a time, since the second must not be
    placed where the first will be."""
    cold = [slab for slab in volume.slabs if isinstance(slab.phase, Cold)]
    under_way = sum(slab.search is not None for slab in volume.slabs) if cold else 0
    found: list[BorrowedSlab] = []
    chosen: set[int] = set()
    for slab in cold:
        if under_way + len(found) >= SEARCHES_MAX:
            break
        which = mirroring.slab_of(slab.index, volume.members)
        if now_s >= slab.retry_at_s and which not in chosen and all(o.search is None for o in others(volume, slab)):
            found.append(slab)
            chosen.add(which)
    return found


def together(volume: BorrowedVolume) -> list[str]:
    """Slabs of which two members are on one host, which must never happen; empty: none."""
    found: list[str] = []
    for slab in volume.slabs if volume.members > 1 else ():
        mine = {place.lender for place in slab.places}
        theirs = {place.lender for other in others(volume, slab) for place in other.places}
        if mine & theirs:
            found.append(f"{slab.subject} has two members on {sorted(mine & theirs)[0]}")
    return found


def instead(slab: BorrowedSlab) -> str:
    """Where the pages of a lost place are, for people."""
    return "the disk serves it" if slab.members == 1 else "its other member serves it"


def without(slab: BorrowedSlab) -> str:
    """State of a slab for which no host has room, for people."""
    return "stays on disk" if slab.members == 1 else "it has a member less"


def not_ours(lender: HostId, message: AboutSlab) -> Actions:
    """Answer a lender that speaks of a slab that this host does not know: give it back."""
    unused = not isinstance(message, FreeMem | MrInfo) or (isinstance(message, MrInfo) and not message.refused)
    return [give_back(lender, message)] if unused else []


def still_used(volume: BorrowedVolume, slab: BorrowedSlab, lender: HostId, message: Unrenewed) -> Send:
    """Answer a lender that asks about a place: renew it if this slab still uses it, else give it back."""
    if slab.lenders().get(message.epoch) != lender:
        return give_back(lender, message)
    return Send(lender, Renew((message.ref,), slab.members, volume.tenant, volume.job, volume.page_bytes))


def renewals(volumes: Iterable[BorrowedVolume]) -> list[tuple[HostId, Renew]]:
    """Messages to each lender that renew all that it holds, as many as it takes."""
    by_lender: dict[tuple[HostId, int, str, str, int], list[SlabRef]] = {}
    for volume in volumes:
        alike = (volume.members, volume.tenant, volume.job, volume.page_bytes)
        for slab in volume.slabs:
            for place in slab.places:
                by_lender.setdefault((place.lender, *alike), []).append(slab.ref(place.epoch))
            for epoch, lender in slab.left.items():
                by_lender.setdefault((lender, *alike), []).append(slab.ref(epoch))
    return [
        (lender, Renew(part, members, tenant, job, page_bytes))
        for (lender, members, tenant, job, page_bytes), slabs in sorted(by_lender.items())
        for part in in_parts(slabs)
    ]


def search_timer(slab: BorrowedSlab, epoch: int, step: str, after_s: float) -> SetTimer[SearchOver | GraceOver]:
    """Timer that ends one step of a search."""
    return SetTimer(after_s, SearchOver(slab.volume, slab.index, epoch, step))
