"""Lenders that measure their headroom, and slabs that are given back when they turn cold: lenders that suddenly grow
take slabs back though more is free than the paper's eighth, and without any paging all slabs are given back."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import lenders
from chaos.story import ended
from covey.units import GIB

SETTINGS = {"memory": {"headroom": "auto", "hot_requests_per_s": "auto", "cold_share": 0.25, "drawn": 3}}


def play(rack: SimRack) -> None:
    rack.settle()
    pager = rack.pager("h1", "vol1", 1 << 20, 60.0)
    rack.until(lambda: bool(lenders(rack, "h1")), 20.0, "a slab is lent")
    for _ in range(3):
        for host in lenders(rack, "h1"):
            faults.strike(rack.world, faults.FillMemory(host, 48 * GIB, rack.rng.uniform(12.0, 25.0)))
            rack.run(rack.rng.uniform(0.5, 6.0))
        rack.run(12.0)
    rack.until(lambda: not pager.alive, 150.0, "the pager reads everything back")
    assert pager.code == 0
    plugins = [plugin for host in sorted(rack.hosts) if (plugin := rack.plugin(host, "memory")) is not None]
    assert sum(plugin.lending.machine.evictions["pressure"] for plugin in plugins) > 0, "a lender was short"
    rack.until(lambda: not lenders(rack, "h1"), 120.0, "cold slabs are given back")
    ended(rack, {})
