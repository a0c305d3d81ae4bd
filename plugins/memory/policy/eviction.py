"""Taking slabs back: how much, which, how many borrowers to ask for that, and where an evicted slab goes (§2.5.2).

A lender cannot see who uses its slabs: pages come and go without it. So it asks. Asking the borrowers of E + E' slabs
and evicting the E least active of them is the power of many choices: with E = 10 and 40 % of all slabs busy, ten slabs
drawn blindly are all lightly active once in 165 times; the ten least active of twenty are so seven times in eight.

The paper has slabs of one size. Borrowers choose theirs here, so the plan is in bytes; for slabs of one size it is the
paper's. Two things it does not have: the formula turned round (how large must E' be?), and where an evicted slab moves.
"""

import math
import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

from covey.core.ids import HostId
from plugins.memory.policy.lending import PRESSURE_MAX, Budget
from plugins.memory.policy.placement import LenderPeer, LenderPeers, in_slabs_of

CHANCE_WANTED = 0.95
"""How sure a lender wants to be that it evicts no busy slab. Ours: the paper fixes E' and reads the chance off."""

Slab = TypeVar("Slab")


def chance_all_lightly_active(evict: int, extra: int, busy_share: float) -> float:
    """Chance that E slabs evicted out of E + E' asked are all lightly active, when each is busy with probability
    `busy_share`: at least E of E + E' must be (Infiniswap §2.5.2, the formula of Figure 2.7)."""
    asked = evict + extra
    idle = 1.0 - busy_share
    return math.fsum(math.comb(asked, n) * idle**n * busy_share ** (asked - n) for n in range(evict, asked + 1))


def extra_for(evict: int, busy_share: float, wanted: float = CHANCE_WANTED) -> int:
    """The smallest E' with which the E evicted are all lightly active with the chance wanted; E, the most that §2.5.2
    allows, when even that is not enough. Lenders always ask about E: one more question costs them next to nothing."""
    return next((e for e in range(evict) if chance_all_lightly_active(evict, e, busy_share) >= wanted), evict)


def bytes_to_free(budget: Budget, pressure_max: float = PRESSURE_MAX) -> int:
    """Bytes of lent slabs to take back, 0 to all that is lent: what headroom lacks, or what lies over the cap
    (Infiniswap §2.5.2); under memory pressure at least an eighth of what is lent, even with headroom intact, because
    tasks that wait for memory are what headroom is there to prevent (ours)."""
    pressed = -(-budget.lent_bytes // 8) if budget.pressure > pressure_max else 0
    return min(budget.lent_bytes, max(pressed, bytes_lacking(budget)))


def bytes_lacking(budget: Budget) -> int:
    """Bytes that headroom lacks, or that lie over the cap: what a host has to have back, whatever it costs. Tasks may
    wait for memory because their own group may have no more, while much of the host's memory is free."""
    missing = math.ceil(budget.headroom_bytes - budget.free_at_best_bytes)
    return max(0, missing, budget.lent_bytes - budget.lend_bytes)


def candidates_for(
    sizes: Mapping[Slab, int], needed_bytes: int, rng: random.Random, extra: int | None = None
) -> list[Slab]:
    """E + E' slabs drawn at random, whose borrowers are asked how busy they are. E: as many as hold the bytes needed;
    E' <= E, by default E (Infiniswap §2.5.2). The mapping's order must not depend on chance."""
    drawn = rng.sample(list(sizes), len(sizes))
    evict = held_bytes = 0
    while evict < len(drawn) and held_bytes < needed_bytes:
        held_bytes += sizes[drawn[evict]]
        evict += 1
    return drawn[: evict + (evict if extra is None else min(extra, evict))]


def slabs_to_evict(activities: Mapping[Slab, float], sizes: Mapping[Slab, int], needed_bytes: int) -> list[Slab]:
    """The least active slabs that together hold the bytes needed, or all of them; the least active first, and of equals
    the one drawn first. For slabs of one size these are the E least active of E + E' (Infiniswap §2.5.2). With several
    sizes no slab is taken that can be spared; the most active is spared first."""
    order = sorted(activities, key=lambda slab: activities[slab])
    held_bytes = sum(sizes[slab] for slab in order)
    spared: set[Slab] = set()
    for slab in reversed(order):
        if held_bytes - sizes[slab] >= needed_bytes:
            spared.add(slab)
            held_bytes -= sizes[slab]
    return [slab for slab in order if slab not in spared]


def slabs_at_once(
    leaving: Mapping[Slab, int], staying: Mapping[Slab, int], needed_bytes: int, rng: random.Random
) -> list[Slab]:
    """Slabs to free when tasks wait for memory now, until they hold the bytes needed: slabs whose borrowers were asked
    to let go first, then any, since there is no time to ask who uses them (ours). Sizes in bytes; the order of
    `staying` must not depend on chance."""
    chosen: list[Slab] = []
    sizes = {**leaving, **staying}
    for slab in (*leaving, *rng.sample(list(staying), len(staying))):
        if needed_bytes <= 0:
            break
        chosen.append(slab)
        needed_bytes -= sizes[slab]
    return chosen


def movable_to(peers: Sequence[LenderPeer], leaving: HostId, me: HostId, slabs: int = 1) -> list[HostId]:
    """Hosts that a slab leaving a lender may be moved to, sorted: alive, neither that lender nor its borrower, and with
    room for two slabs for each of the `slabs` on the move, so that it is not evicted there in the next second; if there
    is no such host, with room for one. Which of them to ask is decided as for any slab; the paper maps an evicted slab
    anew, empty, and asks any host (Infiniswap §2.4.4)."""
    others = [peer for peer in peers if peer.state == "alive" and peer.host not in (leaving, me) and peer.slabs_free]
    roomy = [peer for peer in others if (peer.slabs_free or 0) >= 2 * slabs]
    return sorted(peer.host for peer in (roomy or others))


def free_at_others(
    peers: LenderPeers, slab_bytes: int, me: HostId, leaving: HostId | None = None, slabs: int = 1
) -> dict[HostId, int]:
    """Hosts that may be asked to lend to `me` -> slabs of this size that gossip says they could. With `leaving`, the
    lender that one or more slabs have to leave, those of `movable_to`. Sorted."""
    room = peers.room(slab_bytes)
    room.pop(me, None)
    if leaving is None:
        return room
    return {host: room[host] for host in movable_to(in_slabs_of(peers, slab_bytes), leaving, me, max(1, slabs))}
