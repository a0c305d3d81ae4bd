"""kill -9 of the leader's agent while a job trains; it is back some seconds later. Only the log may show it."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import train
from chaos.story import ended


def play(rack: SimRack) -> None:
    rack.settle()
    job = train(rack, rounds=25)
    rack.run(rack.rng.uniform(0.0, 6.0))
    leader = rack.leader()
    assert leader is not None, "a rack that nothing disturbed has a leader"
    faults.strike(rack.world, faults.Kill("agent", leader, rack.rng.uniform(0.5, 8.0)))
    took_s = rack.until(lambda: rack.leader() not in (None, leader), 10.0, "another host leads")
    rack.world.mark("failover", "story", f"{took_s:.2f} s")
    second = train(rack, rounds=3, workers=2, key="second")
    rack.run(30.0)
    ended(rack, {job: ("done",), second: ("done",)})
