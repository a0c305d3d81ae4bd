"""The network loses, doubles and delays packets all the time, up to one in four: slower, never wrong."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import train
from chaos.story import ended


def play(rack: SimRack) -> None:
    loss = rack.rng.choice((0.02, 0.1, 0.25))
    faults.strike(rack.world, faults.Lose(loss, 0.1, 0.05, 1e6))
    rack.settle(60.0)
    job = train(rack, rounds=15)
    pager = rack.pager("h4", "vol1", 1 << 18, 20.0)
    rack.run(40.0)
    ended(rack, {job: ("done",)})
    rack.until(lambda: not pager.alive, 60.0, "the pager reads everything back")
    assert pager.code == 0
