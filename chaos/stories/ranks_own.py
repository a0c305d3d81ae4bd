"""Ranks of a gang on several hosts own the tables of its tensors, and every rank may be lost (`ranks_healed`). What
owns is struck, mostly when it is about to push: its process is killed, or stopped for longer than an order may take,
alone or with the agent that gives it orders; or that agent starts again. Between, anything of `ranks_healed` strikes.
All end with what a run has learnt in which nothing was lost, and no aggregator sums while nothing was struck."""

from chaos import faults
from chaos.faults import Kill, Pause
from chaos.rackworld import SimRack
from chaos.stories.places_joined import heals, whole
from chaos.stories.ranks_healed import ALONE, FLOATS, STEPS, WHOLE_S, check_end, kill, over, pushes, strike
from covey.core.ids import HostId, JobId
from plugins.aggregator.service import AggregatorService

SETTINGS = {"scheduler": {"heal_pause_s": 8.0}}
KINDS = ("killed", "killed", "killed", "with agent", "agent", "silent", "any", "any")
SILENT_S = 7.0
"""Seconds that an owner is stopped: longer than it may take to answer an order."""
OWNED_S = 60.0


def play(rack: SimRack) -> None:
    rack.settle()
    workers, own = rack.rng.randint(2, len(rack.hosts) - 1), rack.rng.choice(("gather", "mirror"))
    spec = {"argv": ["learner", str(STEPS), str(FLOATS), own], "tenant": "red", "workers": workers, "cwd": "/"}
    job = rack.submit({**spec, "pack": "apart", "spares": rack.rng.choice((0, 1))}, f"learner-{rack.world.seed}")
    rack.until(lambda: bool(owners(rack, job)) and heals(rack, job), OWNED_S, "ranks own the tables")
    rack.run(rack.rng.uniform(0.0, 3.0))
    assert not any(host.find("aggd") for host in rack.hosts.values()), "an aggregator runs although ranks can own"
    for _ in range(rack.rng.randint(1, 4)):
        rack.until(lambda: over(rack, job) or heals(rack, job), WHOLE_S, "all its hosts may be lost")
        if over(rack, job):
            break
        strike_owner(rack, job, workers)
        rack.run(rack.rng.uniform(0.0, 6.0))
        rack.until(lambda: over(rack, job) or whole(rack, job, workers), WHOLE_S, f"all ranks of {job} run once")
    check_end(rack, job, workers, own)


def owners(rack: SimRack, job: JobId) -> list[HostId]:
    """Hosts whose ranks own tables of the job."""
    found = []
    for name in rack.alive():
        plugin = rack.plugin(name, "aggregator")
        if isinstance(plugin, AggregatorService) and any(plugin.direct.serves(*each) for each in tables(plugin)):
            found.append(HostId(name))
    return found


def tables(plugin: AggregatorService) -> list[tuple[JobId, int]]:
    return [(table.job, table.epoch) for table in plugin.direct.tables.values()]


def strike_owner(rack: SimRack, job: JobId, workers: int) -> None:
    """Strike a rank that owns tables, or its agent."""
    kind, each = rack.rng.choice(KINDS), owners(rack, job)
    if kind == "any" or not each:
        strike(rack, job, workers, set(), ALONE)
        return
    host = rack.rng.choice(each)
    if rack.rng.random() < 0.7:
        pushes(rack, job, {host})
        rack.run(rack.rng.choice((0.0, rack.rng.uniform(0.0, 0.05))))
    if kind in ("with agent", "agent"):
        faults.strike(rack.world, Kill("agent", host, rack.rng.uniform(0.1, 4.0)))
    if kind in ("with agent", "killed"):
        kill(rack, job, workers, set(), {host}, "rank")
    if kind == "silent":
        faults.strike(rack.world, Pause(host, SILENT_S, "learner"))
        rack.run(SILENT_S)
