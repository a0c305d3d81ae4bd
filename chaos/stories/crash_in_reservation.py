"""Power fails, or an agent is killed, at a random moment of the few milliseconds between a submission and its start:
whatever step it hits, the gang starts whole or not at all, and no GPU stays reserved."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import train
from chaos.story import ended


def play(rack: SimRack) -> None:
    rack.settle()
    host = rack.rng.choice(sorted(rack.hosts))
    what = rack.rng.choice(("agent", "host"))
    kill = faults.Kill("host" if what == "host" else "agent", host, rack.rng.uniform(0.5, 10.0))
    rack.world.at(rack.world.now + rack.rng.expovariate(1 / 0.03), lambda: faults.strike(rack.world, kill))
    job = train(rack, rounds=5)
    rack.run(10.0)
    ended(rack, {job: ("done",)})
