"""A volume of slabs of the default size is filled, and then idle: its connections to the lenders are reset, lenders'
programs die, its host's agent starts again. A slab that is called mapped has a connection again within seconds, or is
not called mapped any more; and every page is there when it is used again."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import lenders, unconnected
from chaos.story import ended, not_stale

SETTINGS = {"memory": {"slab": "64 MiB", "hot_requests_per_s": "auto"}}
CONNECTED_S = 10.0
"""Seconds after the end of a fault within which what is called mapped is connected: the agent may have to come back
first."""


def play(rack: SimRack) -> None:
    rack.settle()
    pager = rack.pager("h2", "vol1", 64 << 20, 20.0, used_bytes=1 << 18)
    rack.until(lambda: bool(lenders(rack, "h2")), 40.0, "a slab is lent")
    rack.until(lambda: not pager.alive, 60.0, "the volume is filled")
    for _ in range(3):
        rack.run(rack.rng.uniform(2.0, 20.0))
        host = rack.rng.choice(["h2", *lenders(rack, "h2")])
        fault = rack.rng.choice(
            (
                faults.CutLinks(host),
                faults.CutLinks(host),
                faults.Kill("program", host, 0.0, "slabd"),
                faults.Restart(host, rack.rng.uniform(0.5, 3.0)),
                faults.Kill("agent", host, rack.rng.uniform(0.5, 3.0)),
            )
        )
        faults.strike(rack.world, fault)
        rack.run(fault.for_s)
        rack.until(lambda: not unconnected(rack, "h2"), CONNECTED_S, "what is called mapped is connected")
    reading = rack.readers()
    rack.until(lambda: not any(process.alive for process in reading), 60.0, "every page is read back")
    not_stale(rack)
    ended(rack, {})
