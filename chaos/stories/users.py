"""Users ask for what is theirs and for what is not, at every agent, while agents are killed and hosts are cut off from
one another. Nobody is shown, or changes, what belongs to somebody else."""

from chaos import faults
from chaos.actors.users import UsersAsking
from chaos.rackworld import SimRack
from chaos.story import WHOLE_S, ended

FAULTS_S = 60.0
"""Seconds for which users ask."""


def play(rack: SimRack) -> None:
    rack.settle()
    rack.ask("h1", "scheduler.tenant_set", {"tenant": "ml", "users": ["ann", "bob"], "gpus": 4})
    until_s = rack.world.now + FAULTS_S
    users = UsersAsking(rack, until_s)
    at_s = rack.world.now + rack.rng.uniform(4.0, 8.0)
    while at_s < until_s - 5.0:
        host, away_s = rack.rng.choice(sorted(rack.hosts)), rack.rng.uniform(0.5, 6.0)
        others = tuple(sorted(rack.hosts.keys() - {host}))
        fault = rack.rng.choice((faults.Kill("agent", host, away_s), faults.Partition((host,), others, for_s=away_s)))
        faults.schedule(rack.world, [(at_s, fault)])
        at_s += rack.rng.uniform(5.0, 12.0)
    rack.run(FAULTS_S + 1.0)
    rack.heal()
    rack.settle(WHOLE_S)
    users.check()
    for id in users.jobs:  # a host that runs nothing as other users keeps their jobs waiting
        rack.ask("h1", "scheduler.cancel", {"id": id})
    ended(rack, users.jobs)
    assert users.answered > 20 and users.refused > 20, "users were hardly heard"
