"""The power of a host that runs ranks fails for minutes: its job is taken back, placed elsewhere under the next epoch,
and ends there; the ranks that lived on elsewhere are stopped. A host that is back within its grace (60 s) says that it
lost its ranks: that job is taken back at once."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import train, working
from chaos.story import ended


def play(rack: SimRack) -> None:
    rack.settle()
    job = train(rack, rounds=60)
    rack.until(lambda: len(working(rack)) >= 1, 20.0, "ranks run")
    rack.run(rack.rng.uniform(0.0, 5.0))
    host = rack.rng.choice(working(rack))
    off_s = rack.rng.choice((20.0, 90.0, 150.0))
    faults.strike(rack.world, faults.Kill("host", host, off_s))
    rack.run(160.0)
    ended(rack, {job: ("done",)})
