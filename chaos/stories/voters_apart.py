"""The voters lose one another for longer than every lease, and every other host reaches them all: there is no leader,
so nothing is granted, and what runs on those hosts continues. A voter cannot tell itself from one that is cut off: its
ranks end there, and begin again once there is a leader."""

import itertools

from chaos import faults
from chaos.faults import Partition
from chaos.rackworld import SimRack
from chaos.stories.classes import known
from chaos.stories.cut_off import ranks
from chaos.story import ended

APART_S = 70.0


def play(rack: SimRack) -> None:
    rack.settle()
    spec = {"argv": ["sleeper", "90"], "workers": 2, "class": "opportunistic", "pack": "host", "cwd": "/"}
    jobs = [rack.submit(spec, f"full-{rack.world.seed}-{number}") for number in range(len(rack.hosts))]
    rack.until(lambda: all(len(ranks(rack, job)) == 2 for job in jobs), 60.0, "every host runs a job")
    rack.run(rack.rng.uniform(0.0, 10.0))
    voters = [str(voter) for voter in rack.agents["h1"].voters]
    untouched = [job for job in jobs if not {*ranks(rack, job)} & {*voters}]
    for one, other in itertools.combinations(voters, 2):
        faults.strike(rack.world, Partition((one,), (other,), False, APART_S))
    rack.run(5.0)
    assert rack.leader() is None, "a voter alone is no majority"
    rack.run(APART_S)
    assert untouched and all(len(ranks(rack, job)) == 2 for job in untouched), "no host could have run them elsewhere"
    ended(rack, dict.fromkeys(jobs, ("done",)), over_s=400.0)
    assert all(known(rack, job).tally.attempt == 1 for job in untouched), "they were started again for nothing"
