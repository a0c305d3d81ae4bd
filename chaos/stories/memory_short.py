"""Lenders need their memory back, one after the other, under load: slabs move or go to the disk, no page is lost."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import lenders
from chaos.story import ended
from covey.units import GIB


def play(rack: SimRack) -> None:
    rack.settle()
    pager = rack.pager("h1", "vol1", 1 << 20, 60.0)
    rack.until(lambda: bool(lenders(rack, "h1")), 20.0, "a slab is lent")
    for _ in range(4):
        for host in lenders(rack, "h1"):
            faults.strike(rack.world, faults.FillMemory(host, 58 * GIB, rack.rng.uniform(4.0, 20.0)))
            rack.run(rack.rng.uniform(0.5, 6.0))
        rack.run(5.0)
    rack.until(lambda: not pager.alive, 150.0, "the pager reads everything back")
    assert pager.code == 0
    ended(rack, {})
