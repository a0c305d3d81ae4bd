"""A firewall drops the datagrams of a host that runs jobs: gossip takes it for gone, and nothing else is wrong. Its
ranks are confirmed over the control links all the while, so no leader takes them back: neither the present one, nor
one that is elected meanwhile and knows no more of it than gossip does."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories.classes import known
from chaos.stories.cut_off import ranks, sleep
from chaos.story import ended

UNHEARD_S = 110.0
LOST_S = 62.0
"""Seconds after which gossip would have the host taken for lost."""


def play(rack: SimRack) -> None:
    rack.settle()
    jobs = [sleep(rack, number, "heal") for number in range(2)]
    rack.until(lambda: all(len(ranks(rack, job)) == 2 for job in jobs), 30.0, "all ranks run")
    leader = rack.leader()
    at_work = sorted({host for job in jobs for host in ranks(rack, job)} - {leader})
    if not at_work:
        return ended(rack, dict.fromkeys(jobs, ("done",)))
    host = rack.rng.choice(at_work)
    faults.strike(rack.world, faults.Unheard(host, UNHEARD_S))
    rack.run(rack.rng.uniform(LOST_S, LOST_S + 10.0))
    for _ in range(rack.rng.randint(1, 4)):
        leader = rack.leader()
        if leader is not None and leader != host:
            faults.strike(rack.world, faults.Kill("agent", leader, 3.0))
        rack.run(rack.rng.uniform(4.0, 9.0))
    for job in jobs:
        assert known(rack, job).tally.attempt == 1, f"{job} was taken back from a host that renewed its lease"
    return ended(rack, dict.fromkeys(jobs, ("done",)))
