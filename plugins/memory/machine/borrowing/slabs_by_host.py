"""On which hosts the slabs of a volume are, kept as each of them changes: a volume has thousands, and whenever one of
them looks for a place it is asked where all the others are."""

from collections import Counter
from typing import NamedTuple

from covey.core.ids import HostId


class Whereabouts(NamedTuple):
    """Where one slab is, in the two senses of `SlabsByHost`."""

    chosen: list[HostId]
    near: list[HostId]


NOWHERE = Whereabouts([], [])


class SlabsByHost:
    """`chosen`: how many each host holds or was chosen for. `near`: how many it holds or is being asked for. Nobody
    else writes to them; a host that has none is not in them."""

    __slots__ = ("chosen", "near")

    def __init__(self) -> None:
        self.chosen: Counter[HostId] = Counter()
        self.near: Counter[HostId] = Counter()

    def changed(self, before: Whereabouts, now: Whereabouts) -> None:
        """One slab."""
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
