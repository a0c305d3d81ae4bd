"""Members of slabs that have no disk (`policy.mirroring`): each is a `BorrowedSlab` with a place, a search and a
life of its own. Here is what makes it one of several."""

from collections.abc import Mapping, Sequence

from covey.core import HostId, SetTimer
from plugins.memory.machine.borrower_events import GraceOver, SearchOver
from plugins.memory.machine.slab import BorrowedSlab, BorrowedVolume, Cold
from plugins.memory.policy import mirroring
from plugins.memory.policy.mirroring import SEARCHES_MAX
from plugins.memory.policy.placement import LenderPeer


def others(volume: BorrowedVolume, slab: BorrowedSlab) -> list[BorrowedSlab]:
    """The other members of its slab; none where the second copy is the disk."""
    return [volume.slabs[number] for number in mirroring.siblings(slab.index, volume.members)]


def kept_apart(
    volume: BorrowedVolume, slab: BorrowedSlab, free: Mapping[HostId, int], peers: Sequence[LenderPeer]
) -> dict[HostId, int]:
    """Of hosts with room, those that may be asked for this member."""
    if volume.members == 1:
        return dict(free)
    held = {host for other in others(volume, slab) for host in (*other.hosts(), *other.left.values())}
    return mirroring.apart(free, held, {peer.host: peer.rack for peer in peers})


def homeless(volume: BorrowedVolume, now_s: float) -> list[BorrowedSlab]:
    """Members without a place that begin to look for one now. One of a slab at a time: the second must not lie where
    the first will."""
    under_way = sum(slab.search is not None for slab in volume.slabs)
    found: list[BorrowedSlab] = []
    chosen: set[int] = set()
    for slab in volume.slabs:
        if under_way + len(found) >= SEARCHES_MAX:
            break
        which = mirroring.slab_of(slab.index, volume.members)
        if not isinstance(slab.phase, Cold) or now_s < slab.retry_at_s or which in chosen:
            continue
        if all(other.search is None for other in others(volume, slab)):
            found.append(slab)
            chosen.add(which)
    return found


def together(volume: BorrowedVolume) -> list[str]:
    """Slabs of which two members lie on one host, which must never be; empty: none."""
    found: list[str] = []
    for slab in volume.slabs if volume.members > 1 else ():
        mine = {place.lender for place in slab.places}
        theirs = {place.lender for other in others(volume, slab) for place in other.places}
        if mine & theirs:
            found.append(f"{slab.subject} has two members on {sorted(mine & theirs)[0]}")
    return found


def instead(volume: BorrowedVolume) -> str:
    """Where the pages are of a place that is lost, for people."""
    return "the disk serves it" if volume.members == 1 else "its other member serves it"


def search_timer(slab: BorrowedSlab, epoch: int, step: str, after_s: float) -> SetTimer[SearchOver | GraceOver]:
    """A step of a search may take so long."""
    return SetTimer(after_s, SearchOver(slab.volume, slab.index, epoch, step))
