"""Jobs of all classes share devices under the real scheduler and the real sharing, on every host: they ask for memory,
follow the limits in their pages or do not, some do not pair, and agents, hosts, devices and the network fail
meanwhile.

What all ranks may hold of a device never exceeds it, whatever has died or begun anew (`chaos/actors/sharer.py` keeps
account of the limits that ranks really follow); no rank is stopped without a lease; and when all is healed every job
ends.
"""

from chaos import faults
from chaos.actors.sharer import DeviceAccounts, sharer
from chaos.classes_held import PagesFollowTheLog, alive
from chaos.rackworld import SimRack
from chaos.story import ended
from covey.core.ids import JobId
from covey.core.units import GIB
from plugins.registry import PLUGINS as REGISTERED
from plugins.scheduler.machine.log.jobs import OVER
from plugins.scheduler.policy.shared import is_part

RESERVE = "1 GiB"
SETTINGS = {"scheduler": {"beside": 2, "demote_after_s": 10.0}, "sharing": {"reserve": RESERVE}}
PLUGINS = tuple(plugin for plugin in REGISTERED if plugin.name in ("scheduler", "sharing"))
JOBS = (5, 12)
FAULTS = (0, 5)
OVER_S = 900.0
"""Seconds within which all jobs are over: they wait for one another, and some are taken back again and again."""
MANNERS = ("", "", "", "", "deaf", "garbage", "plain", "heavy", "heavy")
DEVICE_FAULTS = (("xid", 95), ("ecc", 3), ("lost", 0), ("lost", 1), ("stuck", 0))


def play(rack: SimRack) -> None:
    watched(rack)
    rack.settle()
    jobs: dict[JobId, tuple[str, ...]] = {}
    strikes = rack.rng.randint(*FAULTS)
    for number in range(rack.rng.randint(*JOBS)):
        jobs[submit(rack, number)] = OVER
        rack.run(rack.rng.uniform(0.0, 8.0))
        if strikes and rack.rng.random() < 0.5:
            strikes -= 1
            strike(rack)
    ended(rack, jobs, OVER_S)
    queue = rack.plugin(next(iter(rack.hosts)), "scheduler").queue
    shared = [id for id in jobs if any(is_part(gpu) for place in queue.jobs[id].start.places for gpu in place.gpus)]
    rack.world.counts["shared"] = len(shared)
    rack.world.counts["upgraded"] = sum(queue.jobs[id].priority.upgraded is not None for id in jobs)


def watched(rack: SimRack) -> PagesFollowTheLog:
    """Let `sharer` be submitted from now on, and watch what its ranks hold and are told."""
    accounts = DeviceAccounts(rack.saw_wrong, lambda: alive(rack))
    rack.world.user_programs["sharer"] = sharer(accounts)
    for host in rack.hosts.values():
        accounts.room |= {device.uuid: device.memory_bytes - GIB for device in host.probes.devices.devices()}
    classes = PagesFollowTheLog(rack, accounts)
    rack.world.watch(classes)
    return classes


def submit(rack: SimRack, number: int) -> JobId:
    rng = rack.rng
    tenant = rng.choice(("red", "red", "blue"))
    peak_gib = rng.choice((1, 2, 6, 12))
    busy_ms, idle_ms = rng.choice(((20, 20), (40, 10), (10, 90), (50, 0)))
    spec = {
        "argv": [
            "sharer",
            str(rng.randint(2, 30)),
            str(busy_ms),
            str(idle_ms),
            str(peak_gib * 1024),
            rng.choice(MANNERS),
        ],
        "tenant": tenant,
        "workers": rng.randint(1, max(1, len(rack.hosts) // (1 if tenant == "red" else 2))),
        "class": rng.choice(("guaranteed", "auto", "auto", "opportunistic", "opportunistic")),
        "gpu_memory": rng.choice((0, peak_gib * GIB, peak_gib * GIB)),
        "pack": rng.choice(("few", "few", "any")),
        "retries_lost": 1000,
        "cwd": "/",
    }
    return rack.submit(spec, f"gpus-shared-{rack.world.seed}-{number}")


def strike(rack: SimRack) -> None:
    """Strike: an agent dies, the leader's or another one's, or a host does, the rack splits in two, or a device falls
    sick; all come back."""
    leader, rng = rack.leader(), rack.rng
    name = leader if leader is not None and rng.random() < 0.4 else rng.choice(sorted(rack.hosts))
    for_s, kind = rng.uniform(0.5, 30.0), rng.random()
    if kind < 0.3:
        sick, number = rng.choice(DEVICE_FAULTS)
        faults.strike(rack.world, faults.SickDevice(name, sick, number, for_s))  # type: ignore[arg-type]
    elif kind < 0.5:
        faults.strike(rack.world, faults.draw(rng, rng.choice(("partition", "one way", "isolate")), sorted(rack.hosts)))
    else:
        faults.strike(rack.world, faults.Kill("host" if kind < 0.65 else "agent", name, for_s))
