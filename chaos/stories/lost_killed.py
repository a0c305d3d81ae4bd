"""A link to a lender is lost for good while its pages wait for a slow disk, the lender is reached again, and then the
volume's process dies. The lender still has them: it is told that it may forget them when the disk has them, not
before."""

from chaos import faults
from chaos.actors.pager import LONG_RUNS
from chaos.rackworld import SimRack
from chaos.stories import lenders
from chaos.story import ended

APART_S = 9.0
"""Seconds for which the lender is cut off: longer than a lost link is tried again."""


def play(rack: SimRack) -> None:
    rack.settle()
    pager = rack.pager("h3", "vol1", 1 << 20, 120.0, pace=LONG_RUNS)
    rack.until(lambda: bool(lenders(rack, "h3")), 20.0, "a slab is lent")
    for _ in range(rack.rng.randint(4, 6)):
        rack.run(rack.rng.uniform(1.0, 4.0))
        faults.strike(rack.world, faults.SlowDisk("h3", rack.rng.choice((1000.0, 3000.0)), APART_S + 6.0))
        rack.run(rack.rng.uniform(0.2, 1.0))
        lender = rack.rng.choice(lenders(rack, "h3") or ["h1"])
        faults.strike(rack.world, faults.Partition(("h3",), (lender,), False, rack.rng.uniform(6.0, APART_S)))
        rack.run(rack.rng.uniform(APART_S - 2.0, APART_S + 5.0))
        faults.strike(rack.world, faults.Kill("program", "h3", 0.0, "vol"))
        if rack.rng.random() < 0.7:  # and what stood in its ring is gone
            faults.strike(rack.world, faults.Kill("program", "h3", 0.0, "spill"))
        rack.run(rack.rng.uniform(8.0, 12.0))
    rack.until(lambda: not pager.alive, 200.0, "the pager reads everything back")
    assert pager.code == 0
    ended(rack, {})
