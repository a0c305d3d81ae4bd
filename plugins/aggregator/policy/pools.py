"""Pools: the aggregators of a large rack in clusters that never share a job (AutoPS §4.3.3.4).

A job goes to one pool, so only its aggregators are looked at, pools decide beside each other, and a job that comes or
goes disturbs one pool. The price is packing: what is free in two pools cannot be added up.
"""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from covey.core.ids import HostId
from plugins.aggregator.policy.assign import AggregationProfile
from plugins.aggregator.policy.cycle import Cycle

POOL_HOSTS = 64
"""Most aggregators of one pool; ours: from this size on a job of 1,000 tensors needs no new one
(docs/results/aggregator.md)."""


def free_of(cycles: Iterable[Cycle]) -> Fraction:
    """Free capacity of a pool, in lanes."""
    return sum((cycle.lanes * (1 - cycle.load) for cycle in cycles), start=Fraction(0))


def need_of(profile: AggregationProfile) -> Fraction:
    """Lanes that a job keeps busy: its work over its iteration."""
    return Fraction(profile.work_us, profile.period_us)


def best_pool(free: Mapping[str, Fraction | int | float], need: Fraction | int | float) -> str | None:
    """The pool with the least free capacity that suffices, ties by name; None when none suffices."""
    enough = [(what, name) for name, what in free.items() if what >= need]
    return min(enough)[1] if enough else None


def pools_of(hosts: Sequence[HostId], size: int = POOL_HOSTS) -> list[list[HostId]]:
    """The hosts in order, in pools of nearly equal size and none above `size`."""
    count = -(-len(hosts) // size)
    return [list(hosts[len(hosts) * at // count : len(hosts) * (at + 1) // count]) for at in range(count)]
