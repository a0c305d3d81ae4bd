"""Nothing goes wrong: a gang of four trains, a volume is written and read back, two tenants share the rack."""

from chaos.rackworld import SimRack
from chaos.stories import train
from chaos.story import ended


def play(rack: SimRack) -> None:
    rack.settle()
    pager = rack.pager("h2", "vol1", 1 << 20, 30.0)
    jobs = {train(rack, rounds=20): ("done",), train(rack, rounds=8, tenant="blue", workers=2): ("done",)}
    rack.run(45.0)
    ended(rack, jobs)
    assert pager.code == 0, "the pager did not end"
