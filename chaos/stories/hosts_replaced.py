"""A host of a gang that heals is cut off, its agent stopped or killed besides, with clocks that drift, in one
direction only, or its power fails; now and then it is the leader, or is back while others look for a place, or a
person has just asked to move its ranks, or a host was drained before; spares wait, or do not. Another host takes its
ranks over within seconds, under the same grant, and no rank runs twice at any moment (`RanksOnce`): the old processes
are suspended by then. No rank begins anew.

Seeds that once broke: 7 (ranks were suspended for 3 s while one host after the other was asked who leads), 16, 17, 21
(ranks that were moved from a host that fell silent were replaced after 60 s only).
"""

from chaos import faults
from chaos.faults import Kill
from chaos.rackworld import SimRack
from chaos.stories.classes import known, state
from chaos.stories.cut_off import TROUBLES, ranks, troubles
from chaos.story import ended
from covey.core.ids import HostId, JobId
from plugins.scheduler.messages.commands import HostDrained, MoveAsked

SETTINGS = {"scheduler": {"heal_pause_s": 12.0}}
"""A pause longer than gossip needs to find a host dead: only this fence keeps others from starting too early."""
LOST_S = 50.0
"""Seconds after which others run in its place, even when the leader was lost with it; 14 s when nothing else
happens."""
DRAINED_S = 20.0
"""Seconds after which nothing is left on a host that is drained; 2 s when nothing else happens."""
LASTS_S = 225.0


def play(rack: SimRack) -> None:
    rack.settle()
    workers = rack.rng.randint(2, len(rack.hosts) - 1)
    spec = {"argv": ["healer", str(int(rack.world.now + LASTS_S))], "tenant": "red", "workers": workers, "cwd": "/"}
    spares = rack.rng.choice((0, 0, 1, 2))
    job = rack.submit({**spec, "pack": "apart", "spares": spares}, f"healer-{rack.world.seed}")
    rack.until(lambda: len(known(rack, job).healing.may_be_lost) == workers, 30.0, "all its hosts may be lost")
    rack.run(rack.rng.uniform(0.0, 15.0))
    host = rack.rng.choice(ranks(rack, job))
    if rack.rng.random() < 0.25:
        drained(rack, job, workers, host)
        host = rack.rng.choice(ranks(rack, job))
    if rack.rng.random() < 0.4:
        move(rack, job, host)
        rack.run(rack.rng.uniform(0.0, 0.1))
    kind = rack.rng.choice((*(each for each in TROUBLES if each != "with a voter"), "power"))
    for fault in [Kill("host", host, 100.0)] if kind == "power" else troubles(rack, host, kind):
        faults.strike(rack.world, fault)
    rack.until(lambda: whole(rack, job, workers, host), LOST_S, f"{job} goes on without {host} ({kind})")
    rack.run(rack.rng.uniform(0.0, 60.0))
    ended(rack, {job: ("done",)})
    assert known(rack, job).tally.attempt == 1, f"it was started {known(rack, job).tally.attempt} times"


def drained(rack: SimRack, job: JobId, workers: int, host: str) -> None:
    """Drain a host, perhaps the leader's: its rank continues elsewhere, and none comes before the host is resumed."""
    drain(rack, host, True)
    rack.until(lambda: whole(rack, job, workers, host), DRAINED_S, f"{job} leaves {host}, which is drained")
    rack.run(rack.rng.uniform(0.0, 10.0))
    assert host not in ranks(rack, job), f"{host} is drained, and {job} came to it"
    rack.until(lambda: len(known(rack, job).healing.may_be_lost) == workers, 30.0, "all its hosts may be lost again")
    drain(rack, host, False)
    rack.run(rack.rng.uniform(0.0, 2.0))


def drain(rack: SimRack, host: str, begins: bool) -> None:
    """Do what `agentctl hosts drain` and `resume` do, at any agent."""
    scheduler = rack.plugin(rack.rng.choice(rack.alive()), "scheduler")
    command = HostDrained(wall_s=0.0, host=HostId(host), drained=begins)
    if scheduler is not None:
        scheduler.env.spawn("drain", scheduler.queue_log.insist(command))


def move(rack: SimRack, job: JobId, host: str) -> None:
    """Do what `agentctl move` does, at any agent."""
    scheduler = rack.plugin(rack.rng.choice(rack.alive()), "scheduler")
    asked = known(rack, job)
    first = next(place.host for place in asked.start.places)
    command = MoveAsked(wall_s=0.0, job=job, epoch=asked.grant.epoch, host=HostId(host), to=None, coordinator=first)
    if scheduler is not None:
        scheduler.env.spawn("move", scheduler.queue_log.insist(command))


def whole(rack: SimRack, job: JobId, workers: int, without: str) -> bool:
    """Whether all the job's ranks run, none of them on host `without`."""
    where = [name for name in ranks(rack, job) if name != without]
    hosts = [place.host for place in known(rack, job).start.places]
    return state(rack, job) == "running" and len(where) == workers == len(hosts) and without not in hosts
