"""A gang that heals continues on fewer hosts: a person moves its ranks to a host that has others of them, once or
until all lie on one, and at any moment of that the host that they leave, the one that they join, or the leader is cut
off or stopped, its agent or its power fails, or the supervisor that takes them in is killed. Spares wait, or do not.
No rank runs twice at any moment, none is missing in the end, and no rank begins anew unless all lay on a host that was
lost.

Seeds that once broke: 1, 3, 6, 8 (a supervisor ended with the ranks that it had begun with, and killed those that had
joined them).
"""

from typing import Any

from chaos import faults
from chaos.faults import Kill
from chaos.rackworld import SimRack
from chaos.stories.classes import known, state
from chaos.stories.cut_off import TROUBLES, ranks, troubles
from chaos.story import ended
from covey.core.ids import HostId, JobId
from plugins.scheduler.messages.commands import CancelAsked, MoveAsked

SETTINGS = {"scheduler": {"heal_pause_s": 12.0}}
JOINED_S = 130.0
"""Seconds after which ranks are where they were moved to, or elsewhere if that host was lost; where all of them were
lost with it, its leases have run out, and the job begins again."""
LASTS_S = 225.0


def play(rack: SimRack) -> None:
    rack.settle()
    workers = rack.rng.randint(2, 4)
    spares = rack.rng.choice((0, 0, 1))
    job = spread(rack, workers, {"spares": spares})
    for _ in range(rack.rng.randint(1, workers - 1)):
        rack.until(lambda: over(rack, job) or heals(rack, job), JOINED_S, "all its hosts may be lost")
        hosts = [str(place.host) for place in known(rack, job).start.places]
        if len(hosts) < 2 or over(rack, job):
            break
        leaves, to = rack.rng.sample(hosts, 2)
        move(rack, job, leaves, to)
        rack.run(rack.rng.choice((0.0, rack.rng.uniform(0.0, 0.3), rack.rng.uniform(0.0, 3.0))))
        disturbed = rack.rng.random() < 0.7
        if disturbed:
            disturb(rack, rack.rng.choice((leaves, to, to, str(rack.leader() or to))))
        rack.until(lambda: over(rack, job) or whole(rack, job, workers), JOINED_S, f"all ranks of {job} run once")
        rack.run(rack.rng.uniform(0.0, 5.0))
        assert len(hosts) == 2 or known(rack, job).tally.attempt == 1, f"{job} began anew"
        if disturbed:
            break
    ended(rack, {job: ("done",)})


def spread(rack: SimRack, workers: int, more: dict[str, Any], hosts: int = 0) -> JobId:
    """Submit a gang with a worker on each of its hosts, each of which has room for one more. `hosts`: how many have
    any room; 0: all."""
    hosts = hosts or len(rack.hosts)
    blocks = {"argv": ["sleeper", "400"], "tenant": "blue", "workers": hosts, "cwd": "/", "pack": "apart"}
    blocks |= {"job_class": "opportunistic"}
    block = rack.submit(blocks, f"blocking-{rack.world.seed}")
    rack.until(lambda: len(ranks(rack, block)) == hosts, 30.0, "a GPU of each host is taken")
    until_s = int(rack.world.now + LASTS_S)
    spec = {"argv": ["healer", str(until_s)], "tenant": "red", "workers": workers, "cwd": "/", **more}
    job = rack.submit(spec, f"healer-{rack.world.seed}")
    rack.until(lambda: len(ranks(rack, job)) == workers, 30.0, "it runs")
    scheduler = rack.plugin(rack.rng.choice(rack.alive()), "scheduler")
    assert scheduler is not None and len(known(rack, job).start.places) == workers
    scheduler.env.spawn("cancel", scheduler.queue_log.insist(CancelAsked(wall_s=0.0, job=block)))
    rack.until(lambda: not ranks(rack, block), 60.0, "there is room")
    return job


def disturb(rack: SimRack, host: str) -> None:
    kind = rack.rng.choice((*TROUBLES[:-1], "power", "agent", "supervisor", "supervisor"))
    found: list[faults.AnyFault]
    match kind:
        case "power":
            found = [Kill("host", host, 100.0)]
        case "agent":
            found = [Kill("agent", host, rack.rng.uniform(0.1, 4.0))]
        case "supervisor":
            found = [Kill("program", host, 0.0, "supervisor")]
        case _:
            found = troubles(rack, host, kind)
    for fault in found:
        faults.strike(rack.world, fault)


def move(rack: SimRack, job: JobId, host: str, to: str) -> None:
    """Do what `agentctl move` does, at any agent."""
    scheduler = rack.plugin(rack.rng.choice(rack.alive()), "scheduler")
    epoch = known(rack, job).grant.epoch
    command = MoveAsked(wall_s=0.0, job=job, epoch=epoch, host=HostId(host), to=HostId(to), coordinator=HostId(to))
    if scheduler is not None:
        scheduler.env.spawn("move", scheduler.queue_log.insist(command))


def over(rack: SimRack, job: JobId) -> bool:
    return state(rack, job) == "done"


def heals(rack: SimRack, job: JobId) -> bool:
    now = known(rack, job)
    return now.state == "running" and {place.host for place in now.start.places} == set(now.healing.may_be_lost)


def whole(rack: SimRack, job: JobId, workers: int) -> bool:
    """Whether all the job's ranks run, where the log says."""
    now, where = known(rack, job), ranks(rack, job)
    placed = sorted(str(place.host) for place in now.start.places for _ in place.ranks)
    return state(rack, job) == "running" and not now.seeks and not now.healing.leaving and sorted(where) == placed
