"""A gang calls `job.state` (`chaos.actors.learner`) and lies on all hosts of a rack that have room: a rank that leaves
a host joins others of the gang. A host's power fails, or it is drained; a person moves ranks, once, again, and apart
again; the leader has the gang lie on one host, without being asked; and ranks are killed that came together so. Its
tensors have sizes around everything at which something changes: they lie in one table or in all, in one Block or in
several. No rank begins anew, every sum has each rank's contribution once, and all end with what a run has learnt in
which nothing was lost."""

import numpy as np

from chaos import faults
from chaos.actors.learner import PART_BYTES, SIZES
from chaos.faults import Kill
from chaos.rackworld import SimRack
from chaos.stories.classes import known
from chaos.stories.cut_off import ranks
from chaos.stories.places_joined import heals, spread, whole
from chaos.stories.ranks_healed import WHOLE_S, move, over, with_state
from chaos.story import ended
from covey.core.ids import HostId, JobId
from plugins.scheduler.messages.commands import CancelAsked, HostDrained

SETTINGS = {"scheduler": {"heal_pause_s": 8.0}}
SIGKILL = 9
STEPS = 60
BACK_S = 25.0
"""Seconds after which a host has power again."""
WHOLE_AGAIN_S = 10.0
"""Seconds after that until ranks can be there."""
MERGED_S = 40.0
"""Seconds after which the leader has a gang of two on one host, where there is room for it; 15 s mostly."""
BESIDE_S = (0.0, 6.0)
CUT = [each * count for each in (SIZES.least_bytes, SIZES.most_bytes) for count in (2, 3, 4)]
FLOATS = sorted({edge // 4 + more for edge in (SIZES.elsewhere_bytes, PART_BYTES, *CUT) for more in (-1, 0, 1)})
"""Numbers of floats just below each edge, at it, and just above it, for a tensor on 2 to 4 hosts."""


def play(rack: SimRack) -> None:
    rack.settle()
    workers = rack.rng.randint(2, 4)
    fills = [full(rack, number) for number in range(len(rack.hosts) - workers)]
    own, floats = rack.rng.choice(("gather", "long", "mirror", "mirror")), rack.rng.choice(FLOATS)
    argv = ["learner", str(STEPS), str(floats), own]
    job = spread(rack, workers, {"argv": argv, "pack": "few", "spares": rack.rng.choice((0, 0, 1))}, workers)
    if workers == 2 and rack.rng.random() < 0.5:
        rack.until(lambda: len(known(rack, job).start.places) == 1, MERGED_S, "the leader has it lie on one host")
    calm_s = 0.0
    for _ in range(rack.rng.randint(2, 5)):
        rack.until(lambda: over(rack, job) or at_rest(rack, job, workers), WHOLE_S, "all its hosts may be lost")
        rack.run(rack.rng.uniform(*BESIDE_S))
        if over(rack, job):
            break
        calm_s = strike(rack, job, rack.world.now >= calm_s) or calm_s
        rack.run(rack.rng.choice((0.0, rack.rng.uniform(0.0, 3.0))))
    rack.until(lambda: over(rack, job) or at_rest(rack, job, workers), WHOLE_S, f"all ranks of {job} run once")
    for each in fills:
        cancel(rack, each)
    ended(rack, {job: ("done",)} | dict.fromkeys(fills, ("cancelled",)))
    assert known(rack, job).tally.attempt == 1, f"{job} was started {known(rack, job).tally.attempt} times"
    assert known(rack, job).start.tables == workers
    right = rack.learners.right(job, workers, floats, own, STEPS).w[STEPS]
    for rank in range(workers):
        found = rack.learners.ended.get((job, rank))
        assert found is not None and np.array_equal(found, right), f"rank {rank} of {job} ended with {found}"


def full(rack: SimRack, number: int) -> JobId:
    """Fill a host, so that it has no room for another job."""
    tenant = ("blue", "red")[number]
    spec = {"argv": ["sleeper", "900"], "tenant": tenant, "workers": 1, "gpus_per_worker": 2, "cwd": "/"}
    job = rack.submit(spec, f"full-{tenant}-{rack.world.seed}")
    rack.until(lambda: len(ranks(rack, job)) == 1, 30.0, "a host is full")
    return job


def cancel(rack: SimRack, job: JobId) -> None:
    scheduler = rack.plugin(rack.rng.choice(rack.alive()), "scheduler")
    assert scheduler is not None
    scheduler.env.spawn("cancel", scheduler.queue_log.insist(CancelAsked(wall_s=0.0, job=job)))


def at_rest(rack: SimRack, job: JobId, workers: int) -> bool:
    """Whether all the job's ranks run, have the state, and may be lost."""
    return whole(rack, job, workers) and heals(rack, job) and len(with_state(rack, job)) == workers


def strike(rack: SimRack, job: JobId, calm: bool) -> float:
    """Let ranks leave a host, which join others if no host is empty by now; or strike what they have to live through
    once they are together. Returns the time until which no other host may be lost (without two there is no room for
    all), 0: at once. `calm`: one may be lost now."""
    hosts = [str(place.host) for place in known(rack, job).start.places]
    leaves = rack.rng.choice(hosts)
    others = [host for host in rack.alive() if host != leaves]
    kinds = ["rank", "rank", "aggregator", "agent", "supervisor", "move", "apart"]
    if len(hosts) > 1:
        kinds += ["move", *(["power", "power", "drain", "drain"] if calm else [])]
    match rack.rng.choice(kinds):
        case "power":
            faults.strike(rack.world, Kill("host", leaves, BACK_S))
            return rack.world.now + BACK_S + WHOLE_AGAIN_S
        case "drain":
            for_s = rack.rng.uniform(5.0, BACK_S)
            drain(rack, leaves, for_s)
            return rack.world.now + for_s + WHOLE_AGAIN_S
        case "move":
            move(rack, job, leaves, rack.rng.choice([host for host in hosts if host != leaves] or others))
        case "apart":
            move(rack, job, leaves, rack.rng.choice([host for host in others if host not in hosts] or others))
        case "rank":
            kill_one(rack, job, leaves)
        case "aggregator":
            for host in rack.hosts:
                faults.strike(rack.world, Kill("program", host, 0.0, "aggd"))
        case "agent":
            faults.strike(rack.world, Kill("agent", leaves, rack.rng.uniform(0.1, 4.0)))
        case "supervisor":
            faults.strike(rack.world, Kill("program", leaves, 0.0, "supervisor"))
        case kind:
            raise AssertionError(f"there is no {kind!r}")
    return 0.0


def kill_one(rack: SimRack, job: JobId, host: str) -> None:
    """Kill the process of one of the job's ranks on a host."""
    there, commands = rack.hosts[host].processes, rack.hosts[host].commands
    its = [pid for pid in there if getattr(commands.get(pid), "argv", ("",))[0] == "learner"]
    assert its, f"no rank of {job} runs on {host}"
    there[rack.rng.choice(its)].signal(SIGKILL)


def drain(rack: SimRack, host: str, for_s: float) -> None:
    """Drain a host as a person does, and take that back."""

    def say(drained: bool) -> None:
        scheduler = rack.plugin(next(name for name in rack.alive() if name != host), "scheduler")
        if scheduler is not None:
            command = HostDrained(wall_s=0.0, host=HostId(host), drained=drained, by="a person")
            scheduler.env.spawn("drain", scheduler.queue_log.insist(command))

    say(True)
    rack.world.at(rack.world.now + for_s, lambda: say(False))
