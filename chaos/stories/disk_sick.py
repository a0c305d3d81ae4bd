"""The disk of a host fills up or fails some of its operations for a while, under a volume in use and a job in
training. What is refused is refused; when the disk is well again everything continues, and no acknowledged page is
lost."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import train
from chaos.story import ended


def play(rack: SimRack) -> None:
    rack.settle()
    pager = rack.pager("h2", "vol1", 1 << 20, 40.0)
    job = train(rack, rounds=20)
    rack.run(rack.rng.uniform(3.0, 8.0))
    sick = rack.rng.choice((0.0, 0.05, 0.5))
    faults.strike(rack.world, faults.FillDisk("h2", sick, rack.rng.uniform(1.0, 12.0)))
    rack.run(20.0)
    ended(rack, {job: ("done", "failed")})
    rack.until(lambda: not pager.alive, 150.0, "the pager reads everything back")
    assert pager.code == 0
    before = len(rack.stale)
    again = rack.pager("h2", "vol2", 1 << 18, 3.0)
    rack.until(lambda: not again.alive, 90.0, "a new volume works once the disk works again")
    assert (again.code, len(rack.stale)) == (0, before)
