"""Processes that hold pages are stopped, or their disk takes nothing, for longer than any process waits for their
answer: a lender's while it is to free a slab, a volume's disk while a place is to be closed, all lenders after the
volume's process died. What was asked is asked again, reads that wait too long fail, and no acknowledged page is
older."""

from chaos import faults
from chaos.actors.pager import LONG_RUNS
from chaos.rackworld import SimRack
from chaos.stories import lenders
from chaos.stories.closing_killed import closing
from chaos.story import ended
from covey.core.units import GIB

FREE_S, CLOSE_S, SURE_S = 5.0, 60.0, 30.0
"""Seconds that a lender's process, a volume's process, and lenders after a death are waited for."""


def play(rack: SimRack) -> None:
    rack.settle()
    pager = rack.pager("h3", "vol1", 1 << 20, 170.0, pace=LONG_RUNS)
    for step in (_lender_stops, _disk_stops, _lenders_stop):
        rack.until(lambda: bool(lenders(rack, "h3")), 60.0, "a slab is lent")
        rack.run(rack.rng.uniform(1.0, 4.0))
        step(rack)
    rack.until(lambda: not pager.alive, 200.0, "the pager reads everything back")
    assert pager.code == 0
    ended(rack, {})


def _evicted(rack: SimRack) -> str:
    """Fill a lender's memory, and run until the borrower closes the first slab; returns the lender."""
    lender = rack.rng.choice(lenders(rack, "h3"))
    faults.strike(rack.world, faults.FillMemory(lender, 59 * GIB, 4.0))
    rack.world.run(rack.world.now + 10.0, stop=lambda: closing(rack, "h3"))
    return lender


def _lender_stops(rack: SimRack) -> None:
    rack.hosts["h3"].disk.slow = 20.0
    faults.strike(rack.world, faults.Pause(_evicted(rack), FREE_S + 3.0, "slabd"))
    rack.run(FREE_S + 6.0)
    rack.hosts["h3"].disk.slow = 1.0


def _disk_stops(rack: SimRack) -> None:
    faults.strike(rack.world, faults.FillDisk("h3", 0.0, CLOSE_S + 8.0, read_only=True))
    _evicted(rack)
    rack.run(CLOSE_S + 10.0)


def _lenders_stop(rack: SimRack) -> None:
    rack.hosts["h3"].disk.slow = 500.0
    rack.run(rack.rng.uniform(1.0, 3.0))
    faults.strike(rack.world, faults.Kill("program", "h3", 0.0, "vol"))
    if rack.rng.random() < 0.7:  # and what stood in its ring is gone
        faults.strike(rack.world, faults.Kill("program", "h3", 0.0, "spill"))
    for lender in lenders(rack, "h3"):
        faults.strike(rack.world, faults.Pause(lender, SURE_S + 8.0, "slabd"))
    rack.run(SURE_S + 10.0)
    rack.hosts["h3"].disk.slow = 1.0
