"""kill -9 of a volume's process while its lenders are stopped for 18 s: alive, gossiped alive, and the only hosts that
have the pages which were written last. Reads wait for them; no acknowledged page is older afterwards."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import lenders
from chaos.story import ended

PAUSED_S = 18.0


def play(rack: SimRack) -> None:
    rack.settle()
    pager = rack.pager("h3", "vol1", 1 << 20, 20.0)
    rack.until(lambda: bool(lenders(rack, "h3")), 20.0, "a slab is lent")
    rack.hosts["h3"].disk.slow = rack.rng.choice((1.0, 50.0, 500.0))
    rack.run(rack.rng.uniform(1.0, 8.0))
    faults.strike(rack.world, faults.Kill("program", "h3", 0.0, "vol"))
    if rack.rng.random() < 0.7:  # and what stood in its ring is gone
        faults.strike(rack.world, faults.Kill("program", "h3", 0.0, "spill"))
    for lender in lenders(rack, "h3"):
        faults.strike(rack.world, faults.Pause(lender, PAUSED_S, "slabd"))
    rack.run(rack.rng.uniform(5.0, PAUSED_S))
    rack.hosts["h3"].disk.slow = 1.0
    rack.until(lambda: not pager.alive, 150.0, "the pager reads everything back")
    assert pager.code == 0
    ended(rack, {})
