"""Which slab deserves remote memory, and whose (Infiniswap §2.4.1, §2.4.2)."""

import random
from collections.abc import Collection, Mapping, Sequence

import msgspec

from covey.core import HostId
from plugins.facts import HostState

ALPHA = 0.2
"""Weight of the newest second in a slab's activity (Infiniswap §2.4.1)."""
HOT_SLAB = 20.0
"""Page requests per second above which a slab is worth mapping (Infiniswap §2.4.1)."""
CHOICES = 2
"""How many hosts are asked for one slab (Infiniswap §2.4.2: the power of two choices)."""


class Peer(msgspec.Struct, frozen=True):
    """Another host as a borrower sees it by gossip."""

    host: HostId
    state: HostState
    slabs_free: int | None
    """What it says it could lend, of its own slab size; None when it lends nothing or has not said so yet."""


def activity(old: float, measured: float, alpha: float = ALPHA) -> float:
    """Page requests per second, smoothed over seconds: EWMA with one second period (Infiniswap §2.4.1)."""
    return alpha * measured + (1 - alpha) * old


def is_hot(requests_per_s: float, hot: float = HOT_SLAB) -> bool:
    """Has this slab crossed the threshold above which it is mapped? (Infiniswap §2.4.1)"""
    return requests_per_s > hot


def askable(peers: Sequence[Peer]) -> list[HostId]:
    """Hosts worth asking: alive, neither suspected nor gone, and not full by their own word. Sorted."""
    return sorted(peer.host for peer in peers if peer.state == "alive" and peer.slabs_free)


def hosts_to_ask(
    candidates: Sequence[HostId], holding: Collection[HostId], rng: random.Random, count: int = CHOICES
) -> tuple[HostId, ...]:
    """`count` different hosts to ask for room, in random order: those without any slab of this volume first, the others
    only when these do not suffice (Infiniswap §2.4.2, M_new and M_old).

    `holding` are hosts that hold a slab of this volume *or are being asked for one*: slabs that turn hot in the same
    second would otherwise choose the same hosts, since none of them holds anything yet.
    """
    fresh = sorted(set(candidates) - set(holding))
    known = sorted(set(candidates) & set(holding))
    first = rng.sample(fresh, min(count, len(fresh)))
    return (*first, *rng.sample(known, min(count - len(first), len(known))))


def freest(
    asked: Sequence[HostId], offers: Mapping[HostId, int], ours: Mapping[HostId, int] | None = None
) -> HostId | None:
    """The freer of the hosts that answered, or None when nobody has room (Infiniswap §2.4.2). Between equals the one
    with the fewest slabs of this volume (`ours`), then the one that was drawn first."""
    with_room = [host for host in asked if offers.get(host, 0) > 0]
    held = ours or {}
    return max(with_room, key=lambda host: (offers[host], -held.get(host, 0)), default=None)
