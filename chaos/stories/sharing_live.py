"""Jobs of all classes on GPUs that hold one guaranteed job and two others, while agents, hosts and the leader are lost.

What shares the GPUs is a stand-in (`chaos/gpu_guard.py`): it lets ranks start late, says that some do not fit and that
some do not pair. Whatever happens, a GPU has one guaranteed job and two others at most, quotas count the guaranteed
ones, and when all is healed every job comes to its end and holds nothing.
"""

from chaos import faults
from chaos.gpu_guard import GUARD
from chaos.rackworld import SimRack
from chaos.story import ended
from covey.core import JobId
from plugins.registry import PLUGINS as REGISTERED
from plugins.scheduler.machine.jobs import OVER
from plugins.scheduler.policy.shared import is_part

SETTINGS = {"scheduler": {"beside": 2, "demote_after_s": 10.0}}
PLUGINS = (*(plugin for plugin in REGISTERED if plugin.name == "scheduler"), GUARD)
JOBS = (6, 14)
FAULTS = (0, 4)
OVER_S = 900.0
"""Jobs wait for one another, and some are taken back again and again."""


def play(rack: SimRack) -> None:
    rack.settle()
    jobs: dict[JobId, tuple[str, ...]] = {}
    strikes = rack.rng.randint(*FAULTS)
    for number in range(rack.rng.randint(*JOBS)):
        jobs[submit(rack, number)] = OVER
        rack.run(rack.rng.uniform(0.0, 6.0))
        if strikes and rack.rng.random() < 0.4:
            strikes -= 1
            strike(rack)
    ended(rack, jobs, OVER_S)
    queue = rack.plugin(next(iter(rack.hosts)), "scheduler").queue
    shared = [id for id in jobs if any(is_part(gpu) for place in queue.jobs[id].places for gpu in place.gpus)]
    rack.world.counts["shared"] = len(shared)
    rack.world.counts["upgraded"] = sum(queue.jobs[id].upgraded is not None for id in jobs)


def submit(rack: SimRack, number: int) -> JobId:
    rng = rack.rng
    tenant = rng.choice(("red", "red", "blue"))
    most = len(rack.hosts) if tenant == "red" else max(1, len(rack.hosts) // 2)
    spec = {
        "argv": ["sleeper", str(rng.randint(2, 40))],
        "tenant": tenant,
        "workers": rng.randint(1, most),
        "class": rng.choice(("guaranteed", "auto", "auto", "opportunistic", "opportunistic")),
        "pack": rng.choice(("few", "few", "any")),
        "retries_lost": 1000,
        "cwd": "/",
    }
    return rack.submit(spec, f"shared-{rack.world.seed}-{number}")


def strike(rack: SimRack) -> None:
    """An agent dies, the leader's or another one's, or a host does; it is back after a while."""
    leader = rack.leader()
    name = leader if leader is not None and rack.rng.random() < 0.4 else rack.rng.choice(sorted(rack.hosts))
    for_s = rack.rng.uniform(0.5, 30.0)
    kill = faults.Kill("host", name, for_s) if rack.rng.random() < 0.3 else faults.Kill("agent", name, for_s)
    faults.strike(rack.world, kill)
