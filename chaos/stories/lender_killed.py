"""A lender dies while its slabs are in use: its slab process, or the power of its whole host. Every acknowledged page
is read back, and afterwards no lender holds an unused slab."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import leaked, lenders
from chaos.story import ended


def play(rack: SimRack) -> None:
    rack.settle()
    pager = rack.pager("h2", "vol1", 1 << 20, 45.0)
    rack.until(lambda: bool(lenders(rack, "h2")), 20.0, "a slab is lent")
    rack.run(rack.rng.uniform(0.0, 10.0))
    victim = rack.rng.choice(lenders(rack, "h2") or ["h1"])
    if rack.rng.random() < 0.5:
        faults.strike(rack.world, faults.Kill("program", victim, 0.0, "slabd"))
    else:
        faults.strike(rack.world, faults.Kill("host", victim, rack.rng.uniform(3.0, 30.0)))
    rack.until(lambda: not pager.alive, 120.0, "the pager reads everything back")
    assert pager.code == 0
    ended(rack, {})
    rack.until(lambda: not leaked(rack), 180.0, "no lender holds an unused slab")
