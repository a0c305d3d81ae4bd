"""kill -9 of the process that sums, in the middle of rounds, alone or with its agent: every sum stays exact."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import train
from chaos.story import ended

SETTINGS = {"aggregator": {"direct": "never"}}


def play(rack: SimRack) -> None:
    rack.settle()
    job = train(rack, rounds=30)
    rack.run(rack.rng.uniform(0.5, 5.0))
    for _ in range(rack.rng.randint(1, 3)):
        hosts = [name for name, host in rack.hosts.items() if host.find("aggd")]
        host = rack.rng.choice(hosts or ["h1"])
        faults.strike(rack.world, faults.Kill("program", host, 0.0, "aggd"))
        if rack.rng.random() < 0.4:
            faults.strike(rack.world, faults.Kill("agent", host, rack.rng.uniform(0.5, 5.0)))
        rack.run(rack.rng.uniform(0.5, 8.0))
    ended(rack, {job: ("done",)})
