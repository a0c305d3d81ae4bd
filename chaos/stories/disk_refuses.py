"""The disk of a host with a volume is full, or read-only, and then a lender or the volume's process dies. No places,
processes or pages can be written down meanwhile; the volume serves what it has, and loses nothing."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import lenders
from chaos.story import ended


def play(rack: SimRack) -> None:
    rack.settle()
    pager = rack.pager("h4", "vol1", 1 << 20, 40.0)
    rack.until(lambda: bool(lenders(rack, "h4")), 20.0, "a slab is lent")
    rack.run(rack.rng.uniform(2.0, 10.0))
    for_s = rack.rng.uniform(5.0, 20.0)
    faults.strike(rack.world, faults.FillDisk("h4", 0.0, for_s, read_only=rack.rng.random() < 0.5))
    rack.run(rack.rng.uniform(0.1, 3.0))
    if rack.rng.random() < 0.5:
        faults.strike(rack.world, faults.Kill("program", "h4", 0.0, "vold"))
    else:
        lender = rack.rng.choice(lenders(rack, "h4") or ["h1"])
        before = [process.id for process in rack.hosts["h4"].find("vold-vol1")]
        faults.strike(rack.world, faults.Kill("program", lender, 0.0, "slabd"))
        rack.run(for_s)
        after = [process.id for process in rack.hosts["h4"].find("vold-vol1")]
        assert after == before, "the volume's process ended, since a small file could not be written"
    rack.until(lambda: not pager.alive, 150.0, "the pager reads everything back")
    assert pager.code == 0
    ended(rack, {})
