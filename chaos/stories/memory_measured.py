"""Lenders that measure their headroom, and slabs that are given back when they turn cold: lenders that suddenly grow
take slabs back though more is free than the paper's eighth, and without any paging all slabs are given back."""

from chaos.rackworld import SimRack
from chaos.stories import lenders, short_of_memory
from chaos.story import ended

SETTINGS = {"memory": {"headroom": "auto", "hot_requests_per_s": "auto", "cold_share": 0.25, "drawn": 3}}


def play(rack: SimRack) -> None:
    rack.settle()
    short_of_memory(rack, 3, 48, (12.0, 25.0), 12.0)
    plugins = [plugin for host in sorted(rack.hosts) if (plugin := rack.plugin(host, "memory")) is not None]
    assert sum(plugin.lending.machine.evictions["pressure"] for plugin in plugins) > 0, "a lender was short"
    rack.until(lambda: not lenders(rack, "h1"), 120.0, "cold slabs are given back")
    ended(rack, {})
