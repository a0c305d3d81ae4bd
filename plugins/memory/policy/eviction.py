"""Taking slabs back: how many, which, how many borrowers to ask for that, and where an evicted slab goes (§2.5.2).

A lender cannot see who uses its slabs: pages come and go without it. So it asks. Asking the borrowers of E + E' slabs
and evicting the E least active of them is the power of many choices: with E = 10 and 40 % of all slabs busy, ten slabs
drawn blindly are all lightly active once in 165 times; the ten least active of twenty are so seven times in eight.

`lending` has the paper's own form, where all slabs are of one size. Here are slabs of any size (a plan in bytes), the
paper's formula turned round (how large must E' be?), and what the paper leaves to the disk: moving on.
"""

import math
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, TypeVar

from covey.core import HostId
from plugins.memory.policy.lending import PRESSURE_MAX, Budget
from plugins.memory.policy.placement import HOT_SLAB, Peer, is_hot

CHANCE_WANTED = 0.95
"""How sure a lender wants to be that it evicts no busy slab. Ours: the paper fixes E' and reads the chance off."""
COPY_SHARE = 0.8
"""Part of the grace that copying an evicted slab to its next host may take; the rest is for opening and closing."""

Slab = TypeVar("Slab")


def chance_all_lightly_active(evict: int, extra: int, busy_share: float) -> float:
    """Chance that E slabs evicted out of E + E' asked are all lightly active, when each is busy with probability
    `busy_share`: at least E of E + E' must be (Infiniswap §2.5.2, the formula of Figure 2.7)."""
    asked = evict + extra
    idle = 1.0 - busy_share
    return math.fsum(math.comb(asked, n) * idle**n * busy_share ** (asked - n) for n in range(evict, asked + 1))


def chance_of_finite(evict: int, extra: int, lent: int, busy: int) -> float:
    """The same, exact for a lender with `lent` slabs of which `busy` are busy: drawn without putting back. The paper's
    formula is its limit for many slabs."""
    asked = min(lent, evict + extra)
    ways = sum(math.comb(lent - busy, n) * math.comb(busy, asked - n) for n in range(min(evict, asked), asked + 1))
    return ways / math.comb(lent, asked)


def extra_for(evict: int, busy_share: float, wanted: float = CHANCE_WANTED) -> int:
    """The smallest E' with which the E evicted are all lightly active with the chance wanted; E, the most that §2.5.2
    allows, when even that is not enough."""
    return next((e for e in range(evict) if chance_all_lightly_active(evict, e, busy_share) >= wanted), evict)


def busy_share(activities: Collection[float], hot: float = HOT_SLAB) -> float:
    """Share of slabs above the threshold among those whose activity was told; 0 when none was (§2.5.2, p_b)."""
    return sum(is_hot(told, hot) for told in activities) / len(activities) if activities else 0.0


def bytes_to_free(budget: Budget, pressure_max: float = PRESSURE_MAX) -> int:
    """Bytes of lent slabs to take back, 0 to all that is lent: what headroom lacks, or what lies over the cap
    (Infiniswap §2.5.2); under memory pressure at least an eighth of what is lent, even with headroom intact, because
    tasks that wait for memory are what headroom is there to prevent (ours)."""
    missing = math.ceil(budget.headroom_bytes - budget.free_at_best_bytes)
    over = budget.lent_bytes - budget.lend_bytes
    pressed = -(-budget.lent_bytes // 8) if budget.pressure > pressure_max else 0
    return min(budget.lent_bytes, max(0, missing, over, pressed))


def candidates_for(
    sizes: Mapping[Slab, int], needed_bytes: int, rng: random.Random, extra_share: float = 1.0
) -> list[Slab]:
    """Slabs of any size whose borrowers are asked: drawn at random until they hold the bytes needed, and then until
    `extra_share` (0..1: E'/E) as much again (Infiniswap §2.5.2). The mapping's order must not depend on chance."""
    if needed_bytes <= 0:
        return []
    drawn: list[Slab] = []
    held_bytes, until_bytes = 0, needed_bytes * (1.0 + min(1.0, max(0.0, extra_share)))
    for slab in rng.sample(list(sizes), len(sizes)):
        if held_bytes >= until_bytes:
            break
        drawn.append(slab)
        held_bytes += sizes[slab]
    return drawn


def slabs_to_evict(activities: Mapping[Slab, float], sizes: Mapping[Slab, int], needed_bytes: int) -> list[Slab]:
    """The least active slabs that together hold the bytes needed, or all of them; the least active first. Of slabs of
    one size these are the E least active of E + E' (Infiniswap §2.5.2). Of several sizes none is taken that can be
    spared: the most active of those is spared first."""
    taken: list[Slab] = []
    held_bytes = 0
    for slab in sorted(activities, key=lambda slab: activities[slab]):
        if held_bytes >= needed_bytes:
            break
        taken.append(slab)
        held_bytes += sizes[slab]
    for slab in reversed(taken.copy()):
        if held_bytes - sizes[slab] >= needed_bytes:
            taken.remove(slab)
            held_bytes -= sizes[slab]
    return taken


def fate(
    requests_per_s: float, copy_bytes: int, copy_bytes_per_s: float, grace_s: float, hot: float = HOT_SLAB
) -> Literal["move", "disk"]:
    """What becomes of an evicted slab. It moves to another host's memory when it is hot and can be copied within the
    grace; otherwise the disk, which has everything, serves it. The paper leaves it to the disk always, and maps it
    anew, empty, while it is hot (§2.4.4)."""
    in_time = copy_bytes <= COPY_SHARE * grace_s * copy_bytes_per_s
    return "move" if is_hot(requests_per_s, hot) and in_time else "disk"


def order_of_moves(activities: Mapping[Slab, float]) -> list[Slab]:
    """Slabs evicted together move one after another, the most active first: it loses most by waiting."""
    return sorted(activities, key=lambda slab: -activities[slab])


def movable_to(peers: Sequence[Peer], leaving: HostId, me: HostId, slabs: int = 1) -> list[HostId]:
    """Hosts that a slab leaving a lender may be moved to: alive, neither that lender nor its borrower, and with room
    for two slabs for each of the `slabs` on the move, so that it is not evicted there in the next second; if there is
    no such host, with room for one. Sorted. Whom of them to ask is `placement.hosts_to_ask`, as for any slab."""
    others = [peer for peer in peers if peer.state == "alive" and peer.host not in (leaving, me) and peer.slabs_free]
    roomy = [peer for peer in others if (peer.slabs_free or 0) >= 2 * slabs]
    return sorted(peer.host for peer in (roomy or others))
