"""The slabs that deserve remote memory, and the hosts that lend it (Infiniswap §2.4.1, §2.4.2)."""

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from covey.core.ids import HostId
from covey.core.units import GIB
from plugins.facts import HostState

ALPHA = 0.2
"""Weight of the newest second in a slab's activity (Infiniswap §2.4.1)."""
HOT_SLAB = 20.0
"""Page requests per second above which a slab is worth mapping (Infiniswap §2.4.1)."""
HOT_SLAB_BYTES = GIB
"""The size of the slabs that `HOT_SLAB` was chosen for (Infiniswap §2.7)."""
CHOICES = 2
"""Hosts that are asked for one slab (Infiniswap §2.4.2: the power of two choices)."""
DRAWN = 6
"""Hosts that are drawn when gossip decides which `CHOICES` of them are asked. Ours, measured by `covey-sim memory`: in
the paper's cluster six come within a tenth of full knowledge's balance, and with more, on views 10 s old, borrowers
choose the same hosts."""


class HostsDrawn(NamedTuple):
    """How many hosts a borrower looks at for one slab."""

    drawn: int = DRAWN
    """Hosts that are drawn at random."""
    asked: int = CHOICES
    """The freest of these by gossip, which are asked. Where no more are drawn than asked, gossip decides nothing."""


class LenderPeer(msgspec.Struct, frozen=True):
    """Another host as a borrower sees it by gossip."""

    host: HostId
    state: HostState
    slabs_free: int | None
    """Slabs that it says it could lend; None when it lends nothing or has not said so yet."""
    slab_bytes: int = 0
    """Bytes of the slabs in which it counts; 0: the size of the host that asks."""
    rack: str = ""
    """Label of its rack, by its own word; empty: it has none."""
    lent: Mapping[int, int] | None = None
    """Bytes that it says it lends on each account (`policy.budgets`); None: it does not say."""


class LenderPeers(tuple[LenderPeer, ...]):
    """All known hosts at one time. A volume with many slabs asks it again and again."""

    def room(self, slab_bytes: int) -> dict[HostId, int]:
        """Hosts worth asking -> slabs of this size that they say they could lend; sorted. A copy."""
        memo: dict[int, dict[HostId, int]] = self.__dict__.setdefault("_room", {})
        if slab_bytes not in memo:
            sized = in_slabs_of(self, slab_bytes)
            free = {peer.host: peer.slabs_free or 0 for peer in sized}
            memo[slab_bytes] = {host: free[host] for host in askable(sized)}
        return memo[slab_bytes].copy()


def activity(old: float, measured: float, alpha: float = ALPHA) -> float:
    """Page requests per second, smoothed over seconds: EWMA with one second period (Infiniswap §2.4.1)."""
    return alpha * measured + (1 - alpha) * old


def activities(old: Sequence[float], measured: Sequence[float], alpha: float = ALPHA) -> list[float]:
    """The `activity` of many slabs at once: a host has thousands, and measures all of them each second."""
    kept = 1 - alpha
    return [alpha * now + kept * before for before, now in zip(old, measured, strict=True)]


def hot_slabs(requests_per_s: Sequence[float], hot: float) -> list[int]:
    """Numbers of the slabs that are hot: `is_hot` for many at once."""
    return [number for number, rate in enumerate(requests_per_s) if rate > hot]


def is_hot(requests_per_s: float, hot: float = HOT_SLAB) -> bool:
    """Has this slab crossed the threshold above which it is mapped? (Infiniswap §2.4.1)"""
    return requests_per_s > hot


def hot_for(slab_bytes: int, hot: float = HOT_SLAB) -> float:
    """The threshold for slabs of another size, in proportion to the paper's 20 requests per second per GiB. The paper
    has one slab size and needs no such rule; 20 for a slab of 64 MiB leaves memory idle that its 1 GB slab would have
    used, since one sixteenth of the pages gets one sixteenth of the requests."""
    if slab_bytes <= 0:
        raise ValueError(f"a slab of {slab_bytes} bytes: expected more than 0")
    return hot * slab_bytes / HOT_SLAB_BYTES


EMPTY_SHARE = 0.5
"""Share of HotSlab below which a slab of which everything was discarded is given back. Infiniswap cannot know which
pages its swap area holds (§2.4.1), so it has no such rule."""


def is_cold(requests_per_s: float, cold: float | None = None, hot: float = HOT_SLAB) -> bool:
    """Should a mapped slab be given back unasked? (Infiniswap §2.4.1, ColdSlab.) With `cold` None never, as in the
    paper's own implementation. `cold` must be below `hot`, or a slab would be mapped and given back every second."""
    if cold is None:
        return False
    if not 0 <= cold < hot:
        raise ValueError(f"ColdSlab {cold:g} is not between 0 and HotSlab {hot:g}")
    return requests_per_s < cold


def hosts_apart(candidates: Sequence[HostId], group: Collection[HostId], rack_of: Mapping[HostId, str]) -> list[HostId]:
    """Candidates for one more member of a mirror or parity group whose other members are (or are being asked for) on
    the hosts `group`. No candidate is one of these hosts; racks with fewest members of the group come first, so another
    rack is chosen as long as there is a candidate in one. Sorted. A host without a label is a rack of its own.

    Ours: the paper's second copy is the local disk; a volume without one must survive the loss of a rack.
    """
    members = Counter(_rack(host, rack_of) for host in set(group))
    others = sorted(set(candidates) - set(group))
    fewest = min((members[_rack(host, rack_of)] for host in others), default=0)
    return [host for host in others if members[_rack(host, rack_of)] == fewest]


def _rack(host: HostId, rack_of: Mapping[HostId, str]) -> tuple[bool, str]:
    label = rack_of.get(host, "")
    return (True, label) if label else (False, host)


def in_slabs_of(peers: Sequence[LenderPeer], slab_bytes: int) -> list[LenderPeer]:
    """These hosts, with the memory of each counted in slabs of this size. Hosts count in slabs of their own size."""
    return [
        peer
        if peer.slabs_free is None or peer.slab_bytes in (0, slab_bytes)
        else LenderPeer(peer.host, peer.state, peer.slabs_free * peer.slab_bytes // slab_bytes, rack=peer.rack)
        for peer in peers
    ]


def askable(peers: Sequence[LenderPeer]) -> list[HostId]:
    """Hosts worth asking, sorted: alive, neither suspected nor gone, and not full by their own word."""
    return sorted(peer.host for peer in peers if peer.state == "alive" and peer.slabs_free)


def hosts_to_ask(
    candidates: Sequence[HostId], holding: Collection[HostId], rng: random.Random, count: int = CHOICES
) -> tuple[HostId, ...]:
    """`count` different hosts to ask for room, in random order: those without any slab of this volume first, the others
    only when these do not suffice (Infiniswap §2.4.2, M_new and M_old).

    `holding` are hosts that hold a slab of this volume *or are being asked for one*: slabs that turn hot in the same
    second would otherwise choose the same hosts, since none of them holds anything yet.
    """
    unique = set(candidates)
    hosts = sorted(candidates if len(unique) == len(candidates) else unique)  # sorted already as a rule: linear then
    return _drawn(hosts, sorted(unique.intersection(holding)), rng, count)


def _drawn(hosts: list[HostId], known: Sequence[HostId], rng: random.Random, count: int) -> tuple[HostId, ...]:
    """Draw `count` of these hosts, a sorted list that is used up; `known`, sorted hosts of the same list, are drawn
    last."""
    for host in known:
        del hosts[bisect_left(hosts, host)]
    first = rng.sample(hosts, min(count, len(hosts)))
    return (*first, *rng.sample(known, min(count - len(first), len(known))))


def hosts_to_ask_by_view(
    slabs_free: Mapping[HostId, int],
    holding: Collection[HostId],
    rng: random.Random,
    count: int = CHOICES,
    drawn: int = DRAWN,
) -> tuple[HostId, ...]:
    """Draw `drawn` hosts as `hosts_to_ask` does and ask the `count` that are freest by gossip: nearly the balance of
    asking all of them for the messages of asking two. An old view does no harm: it only ranks a few hosts drawn at
    random, and a host that is asked answers what is true now. The freest of the *whole* view would be chosen by all
    borrowers at once. Hosts without a slab of this volume stay first. `slabs_free`: slabs that each says it could lend.
    Ours."""
    held = frozenset(holding)
    known = sorted(host for host in held if host in slabs_free)
    found = _drawn(sorted(slabs_free), known, rng, max(count, drawn))
    return tuple(sorted(found, key=lambda host: (host in held, -slabs_free[host]))[:count])


def freest(
    asked: Sequence[HostId], offers: Mapping[HostId, int], ours: Mapping[HostId, int] | None = None
) -> HostId | None:
    """The freest of the hosts that answered, or None when no host has room (Infiniswap §2.4.2). Of equals the one with
    the fewest slabs of this volume (`ours`), then the one that was drawn first."""
    with_room = [host for host in asked if offers.get(host, 0) > 0]
    held = ours or {}
    return max(with_room, key=lambda host: (offers[host], -held.get(host, 0)), default=None)
