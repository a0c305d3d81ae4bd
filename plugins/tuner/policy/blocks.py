"""Whole blocks from shares, and their moves between hosts (Cruise §3.3.1)."""

import heapq
from collections.abc import Mapping, Sequence

from covey.core.ids import HostId
from plugins.tuner.policy.steps import Kind, Move

Owned = Mapping[HostId, Sequence[int]]
"""Host -> blocks of one kind that it owns."""


def whole(total: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Split `total` blocks by `shares` (>= 0, not all 0), by largest remainder; of equals the earlier one gets more."""
    weight = sum(shares)
    if total < 0 or weight <= 0:
        raise ValueError("blocks are counted from 0 and shares are together more than 0")
    exact = [total * share / weight for share in shares]
    counts = [int(each) for each in exact]
    missing = total - sum(counts)
    by_remainder = sorted(range(len(shares)), key=lambda n: (counts[n] - exact[n], n))
    for n in by_remainder[:missing]:
        counts[n] += 1
    return tuple(counts)


def moves(kind: Kind, owned: Owned, wanted: Mapping[HostId, int]) -> tuple[Move, ...]:
    """Moves after which every host has as many blocks as `wanted`: from the host with the most too many to the host
    that lacks the most, again and again (Cruise §3.3.1: greedily, the largest change first). There is at most one move
    less than hosts that change; no block moves twice. The blocks with the highest ids go. ValueError when the sums
    differ."""
    if sum(map(len, owned.values())) != sum(wanted.values()):
        raise ValueError(f"{kind}: {sum(map(len, owned.values()))} blocks owned, {sum(wanted.values())} wanted")
    left = {host: sorted(blocks) for host, blocks in owned.items()}
    change = {host: wanted.get(host, 0) - len(left.get(host, ())) for host in {**left, **wanted}}
    giving = [(count, host) for host, count in sorted(change.items()) if count < 0]
    taking = [(-count, host) for host, count in sorted(change.items()) if count > 0]
    heapq.heapify(giving)
    heapq.heapify(taking)
    found = []
    while giving:
        more, source = heapq.heappop(giving)
        lack, target = heapq.heappop(taking)
        count = min(-more, -lack)
        keep = len(left[source]) - count
        found.append(Move(kind, source, target, tuple(left[source][keep:])))
        del left[source][keep:]
        if -more > count:
            heapq.heappush(giving, (more + count, source))
        if -lack > count:
            heapq.heappush(taking, (lack + count, target))
    return tuple(found)
