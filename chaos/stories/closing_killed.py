"""A volume's process dies while a place is being closed: its disk is slow, so that the newest pages are at the lender
for long, the lender needs its memory back, and the process dies while it writes down which lenders to ask. No
acknowledged page is older afterwards: a lender is asked until the disk has everything."""

from chaos import faults
from chaos.actors.pager import LONG_RUNS
from chaos.rackworld import SimRack
from chaos.stories import lenders
from chaos.story import ended
from covey.core.units import GIB


def play(rack: SimRack) -> None:
    rack.settle()
    pager = rack.pager("h3", "vol1", 1 << 20, 140.0, pace=LONG_RUNS)
    rack.until(lambda: bool(lenders(rack, "h3")), 20.0, "a slab is lent")
    rack.run(rack.rng.uniform(1.0, 4.0))
    for _ in range(rack.rng.randint(8, 12)):
        rack.hosts["h3"].disk.slow = rack.rng.choice((20.0, 60.0, 150.0))
        rack.run(rack.rng.uniform(0.5, 2.0))
        lender = rack.rng.choice(lenders(rack, "h3") or ["h1"])
        faults.strike(rack.world, faults.FillMemory(lender, 59 * GIB, 4.0))
        rack.world.run(rack.world.now + 10.0, stop=lambda: closing(rack, "h3"))
        faults.strike(rack.world, faults.DieWriting("h3", "places", for_s=5.0))
        rack.run(rack.rng.uniform(3.0, 6.0))
        rack.hosts["h3"].disk.slow = 1.0
    rack.until(lambda: not pager.alive, 150.0, "the pager reads everything back")
    assert pager.code == 0
    ended(rack, {})


def closing(rack: SimRack, borrower: str) -> bool:
    """Whether one of the borrower's slabs is being closed."""
    memory = rack.plugin(borrower, "memory")
    return memory is not None and any(slab.is_closing for slab in memory.borrowing.machine._all())
