"""Counts the slabs of a volume on each host, updated as slabs change: a volume has thousands, and each search for a
place asks where all the others are."""

from collections import Counter
from typing import NamedTuple

from covey.core.ids import HostId


class Whereabouts(NamedTuple):
    """Where one slab is, in the two senses of `SlabsByHost`."""

    chosen: list[HostId]
    near: list[HostId]


NOWHERE = Whereabouts([], [])


class SlabsByHost:
    """`chosen`: slabs that each host holds or was chosen for. `near`: slabs that it holds or is being asked for. Only
    this class writes to them; a host with none is not in them."""

    __slots__ = ("chosen", "near")

    def __init__(self) -> None:
        self.chosen: Counter[HostId] = Counter()
        self.near: Counter[HostId] = Counter()

    def changed(self, before: Whereabouts, now: Whereabouts) -> None:
        """Update the counts for one slab that moved."""
        if before.chosen != now.chosen:
            _moved(self.chosen, before.chosen, now.chosen)
        if before.near != now.near:
            _moved(self.near, before.near, now.near)


def _moved(slabs: Counter[HostId], before: list[HostId], now: list[HostId]) -> None:
    for host in now:
        slabs[host] += 1
    for host in before:
        if slabs[host] == 1:
            del slabs[host]
        else:
            slabs[host] -= 1
