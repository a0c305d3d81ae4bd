"""Voters die between a vote and its being written: the leader is removed, and the voter that writes to its log next
dies in the middle of that, by itself or with its host; again and again. No term has two leaders and nothing committed
is lost."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import train
from chaos.story import ended


def play(rack: SimRack) -> None:
    rack.settle()
    job = train(rack, rounds=15)
    for _ in range(3):
        rack.run(rack.rng.uniform(1.0, 6.0))
        leader = rack.leader()
        for name in sorted(rack.hosts):
            if name != leader and rack.rng.random() < 0.7:
                power, back_s = rack.rng.random() < 0.4, rack.rng.uniform(0.2, 4.0)
                faults.strike(rack.world, faults.DieWriting(name, "consensus/", power, back_s, for_s=5.0))
        if leader is not None:
            faults.strike(rack.world, faults.Kill("agent", leader, rack.rng.uniform(0.5, 5.0)))
    second = train(rack, rounds=3, workers=2, key="second")
    ended(rack, {job: ("done", "failed"), second: ("done", "failed")})
