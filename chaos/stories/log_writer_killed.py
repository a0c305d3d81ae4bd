"""The writer of a volume's log is killed or stopped, alone or with the volume's process, its disk slow, full or sick.
The next writer completes what it left, and no acknowledged page is older."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import lenders
from chaos.story import ended


def play(rack: SimRack) -> None:
    rack.settle()
    pager = rack.pager("h3", "vol1", 1 << 20, 60.0)
    if rack.rng.random() < 0.7:
        rack.until(lambda: bool(lenders(rack, "h3")), 20.0, "a slab is lent")
    for _ in range(rack.rng.randint(3, 6)):
        disk = rack.rng.choice(("well", "slow", "full", "sick"))
        if disk == "slow":
            faults.strike(rack.world, faults.SlowDisk("h3", 300.0, 6.0))
        elif disk != "well":
            faults.strike(rack.world, faults.FillDisk("h3", 0.3 if disk == "sick" else 0.0, 6.0))
        rack.run(rack.rng.uniform(0.5, 4.0))
        if rack.rng.random() < 0.3:
            faults.strike(rack.world, faults.Pause("h3", rack.rng.uniform(1.0, 6.0), "spill-vol1"))
            rack.run(rack.rng.uniform(0.0, 3.0))
        if rack.rng.random() < 0.4:
            faults.strike(rack.world, faults.Kill("program", "h3", 0.0, "vold"))
        faults.strike(rack.world, faults.Kill("program", "h3", 0.0, "spill"))
        rack.run(rack.rng.uniform(0.0, 6.0))
    rack.until(lambda: not pager.alive, 200.0, "the pager reads everything back")
    assert pager.code == 0
    ended(rack, {})
