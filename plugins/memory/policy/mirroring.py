"""A volume without a disk keeps each slab at several lenders: its members. Decides what may be done with which of them.

Members have numbers of their own, next to one another for each slab, so that everything that names a slab between hosts
(`messages`) names one member: member m of slab s, of c members each, is number s * c + m.

A member is *whole* when every acknowledged write is there. Which members are whole is on this host's disk, a few bytes
each, and changes there before a write is acknowledged without one of them: whichever whole member answers after a crash
has everything that was acknowledged, and one that is not whole is never asked.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from covey.core.ids import HostId
from plugins.memory.policy import placement

if TYPE_CHECKING:
    from numpy.typing import NDArray

MEMBERS = 2
"""Members of each slab of a mirrored volume (`--mirror 2`)."""
ORPHAN_LEASES = 10
"""Leases for which a member that is not renewed is kept: the agent that renews it may be away while programs use it,
and there is no disk to fall back on. A lender that is short of memory does not wait for them."""
SEARCHES_MAX = 256
"""Most searches of one volume that may be under way: a new volume looks for all of its places at once."""
REBUILD_BYTES_S = 64 << 20
"""Bytes per second that one volume copies at most to members that are being filled; requests share the links with
it."""
HEDGE_S = (0.02, 0.5)
"""Least and most seconds that a read waits for one member before the other is asked too."""
HEDGE_TIMES = 8.0
"""A member is late after this many times its usual answer."""
PACE_NEWEST = 0.1
"""Weight of the newest answer in a member's pace."""
LOOK_AGAIN = 64
"""One of this many reads is sent to the slower lender, to notice when it has become the faster one."""


def member_number(slab: int, member: int, members: int) -> int:
    """The number by which lenders know that member."""
    return slab * members + member


def slab_of(number: int, members: int) -> int:
    """The slab of which this number is a member."""
    return number // members


def siblings(number: int, members: int) -> list[int]:
    """The other members of its slab."""
    first = number - number % members
    return [other for other in range(first, first + members) if other != number]


def apart(free: Mapping[HostId, int], others: Collection[HostId], rack_of: Mapping[HostId, str]) -> dict[HostId, int]:
    """The hosts with room where one more member may be placed: none of `others`, where its siblings are or are looked
    for, and in another rack as long as there is one with room (`placement.hosts_apart`)."""
    return {host: free[host] for host in placement.hosts_apart(list(free), others, rack_of)}


def share_a_rack(lenders: Collection[HostId], rack_of: Mapping[HostId, str]) -> bool:
    """Are two members of a slab that is on these hosts in one rack? A host without a label is a rack of its own."""
    labels = [label for host in lenders if (label := rack_of.get(host, ""))]
    return len(set(labels)) < len(labels)


def newest(versions: Sequence["NDArray[np.uint64]"]) -> "NDArray[np.uint64]":
    """Version of each page of a slab, from what its whole members report; shape (pages,). A write that had reached only
    some of them was not acknowledged: taking the newest is right either way, once all members have it."""
    found: NDArray[np.uint64] = np.maximum.reduce(list(versions))
    return found


def unequal(found: "NDArray[np.uint64]", newest_: "NDArray[np.uint64]") -> "NDArray[np.int64]":
    """Pages that a member must be given before any of them is read: a page read here and lost there would go back in
    time."""
    return np.flatnonzero(found < newest_)


def acknowledged(whole: Collection[int], has: Collection[int]) -> list[int] | None:
    """The whole members that must be called not whole, on disk, before a write that is at the members `has` is
    acknowledged; None: it is at no whole member, so it cannot be acknowledged."""
    if not set(whole) & set(has):
        return None
    return sorted(set(whole) - set(has))


def orphan_after_s(lease_s: float, members: int) -> float:
    """Seconds without a renewal by its borrower's agent after which a slab is an orphan."""
    return lease_s if members == 1 else ORPHAN_LEASES * lease_s


def next_pace(old_s: float | None, answered_s: float) -> float:
    """Seconds within which a lender answers, smoothed."""
    return answered_s if old_s is None else PACE_NEWEST * answered_s + (1 - PACE_NEWEST) * old_s


def nearest(paces: Iterable[tuple[int, float | None]], count: int) -> list[int]:
    """Members ordered by how soon they answer (epoch, pace in seconds; None: never asked), the one to read from first.
    `count`: reads so far."""
    order = [epoch for epoch, _ in sorted(paces, key=lambda each: (each[1] is not None, each[1] or 0.0, each[0]))]
    return order[::-1] if count % LOOK_AGAIN == LOOK_AGAIN - 1 else order


def hedge_after_s(pace_s: float | None) -> float:
    """Seconds that a read waits for its member before the other is asked too."""
    least_s, most_s = HEDGE_S
    return least_s if pace_s is None else min(most_s, max(least_s, HEDGE_TIMES * pace_s))


def rebuild_pause_s(copied_bytes: int) -> float:
    """Seconds to pause before the next part is copied."""
    return copied_bytes / REBUILD_BYTES_S
