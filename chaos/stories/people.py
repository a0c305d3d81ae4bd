"""The faults of `mischief`, with people who ask every agent everything all the time, half of it wrong; who submit and
cancel jobs with environments, read what ranks write, and make and forget a volume of their own. Covey's own programs
are stopped for longer than people and agents wait for them. Every question got an answer or a refusal in words.

Seed 3046 once broke: a leader that had committed nothing in its own term called old copies of the log the newest.
"""

from chaos import faults
from chaos.actors.people import People
from chaos.rackworld import SimRack
from chaos.stories import swarm

STOPPED_S = (2.0, 9.0)
"""Least and most seconds that a program is stopped; an order to `aggd` takes 5 s at most."""
PROGRAMS = ("slabd", "vold-theirs", "vold-vol1", "aggd")


def play(rack: SimRack) -> None:
    rack.settle()
    until_s = rack.world.now + swarm.FAULTS_S
    rack.world.at(until_s, rack.world.mischief.end)
    people = People(rack, until_s)
    at_s = rack.world.now + rack.rng.uniform(5.0, 15.0)
    while at_s < until_s:
        host, name = rack.rng.choice(sorted(rack.hosts)), rack.rng.choice(PROGRAMS)
        faults.schedule(rack.world, [(at_s, faults.Pause(host, rack.rng.uniform(*STOPPED_S), name))])
        rack.world.at(at_s + rack.rng.uniform(0.0, 5.0), lambda: _told_to_end(rack))
        at_s += rack.rng.uniform(5.0, 20.0)
    swarm.play(rack, mischief=True, others=people.jobs)


def _told_to_end(rack: SimRack) -> None:
    """Send SIGTERM to a supervisor."""
    running = [process for host in rack.hosts.values() for process in host.processes.values()]
    supervisors = [process for process in running if process.name.partition("/")[2].startswith("sup-")]
    if supervisors and rack.world.mischief.on:
        rack.rng.choice(supervisors).signal(faults.SIGTERM)
