"""kill -9 of a volume's own process, with and without its agent, under load. The lenders and the disk still have every
acknowledged page."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import lenders
from chaos.story import ended


def play(rack: SimRack) -> None:
    rack.settle()
    pager = rack.pager("h3", "vol1", 1 << 20, 40.0)
    if rack.rng.random() < 0.7:
        rack.until(lambda: bool(lenders(rack, "h3")), 20.0, "a slab is lent")
    for _ in range(rack.rng.randint(1, 4)):
        slow = rack.rng.random() < 0.5
        if slow:  # what was acknowledged is at the lender, and not on the disk for long
            faults.strike(rack.world, faults.SlowDisk("h3", 300.0, 9.0))
            faults.strike(rack.world, faults.Slow("h3", 50.0, 0.0, 9.0))
        rack.run(rack.rng.uniform(0.5, 8.0))
        faults.strike(rack.world, faults.Kill("program", "h3", 0.0, "vol"))
        if rack.rng.random() < 0.7:  # and what stood in its ring is gone
            faults.strike(rack.world, faults.Kill("program", "h3", 0.0, "spill"))
        if rack.rng.random() < 0.3:
            faults.strike(rack.world, faults.Kill("agent", "h3", rack.rng.uniform(0.2, 4.0)))
    rack.until(lambda: not pager.alive, 150.0, "the pager reads everything back")
    assert pager.code == 0
    ended(rack, {})
