"""A gang with a rank on each host runs as opportunistic since its tenant's quota is used up; the quota becomes free,
and while the gang is upgraded an agent dies, the leader's or another one's, or its host is cut off.

All ranks are upgraded or none: by one entry of the log, and by the pages of every rank that lives once its agent is
back, in whatever order agents hear of it (`chaos/classes_held.py` watches the pages all the time).
"""

import contextlib

from chaos import faults
from chaos.classes_held import PagesFollowTheLog
from chaos.rackworld import SimRack
from chaos.stories.classes import known, state
from chaos.stories.gpus_shared import PLUGINS, SETTINGS, watched
from chaos.story import ended
from covey.core.errors import NoLeader, OutcomeUnknown, Refused
from covey.core.ids import JobId
from plugins.scheduler.machine.log.jobs import OVER

__all__ = ["PLUGINS", "SETTINGS"]
FREE_S = 60.0
"""Seconds within which jobs start, are demoted, and are upgraded, once nothing fails."""
TOLD_S = 15.0
"""Seconds within which all ranks have heard of the upgrade, once all agents are back."""


def play(rack: SimRack) -> None:
    classes, hosts, rng = watched(rack), len(rack.hosts), rack.rng
    rack.settle()
    first = submit(rack, "red", hosts, "guaranteed", seconds=300)
    rack.until(lambda: state(rack, first) == "running", FREE_S, "red's first job runs")
    others = [submit(rack, "blue", 1, "guaranteed", 40 + number) for number in range(rng.randint(0, hosts // 2))]
    gang = submit(rack, "red", hosts, "auto", seconds=rng.randint(30, 90))
    rack.until(lambda: runs(rack, gang), FREE_S, "the second one runs beside others, a rank on each host")
    epoch = known(rack, gang).grant.epoch
    rack.run(rng.uniform(0.0, 3.0))
    if rng.random() < 0.5:
        strike(rack)
    cancel(rack, first)
    for _ in range(rng.randint(1, 2)):
        rack.run(rng.uniform(0.0, 3.0))
        strike(rack)
    rack.run(rng.uniform(0.0, 30.0))
    rack.heal()
    rack.until(
        lambda: known(rack, gang).priority.upgraded is not None or state(rack, gang) in OVER, FREE_S, "it is upgraded"
    )
    rack.until(lambda: len(told(classes, gang, epoch)) == hosts or gone(rack, gang, epoch), TOLD_S, "all have heard")
    rack.world.counts["upgraded"] = int(
        known(rack, gang).grant.epoch == epoch and known(rack, gang).priority.upgraded is not None
    )
    ended(rack, dict.fromkeys((first, gang, *others), OVER), 600.0)


def submit(rack: SimRack, tenant: str, workers: int, kind: str, seconds: int) -> JobId:
    """Submit a job. Blue's jobs take the GPUs that red's do not, so that some ranks are beside guaranteed ones."""
    spec = {
        "argv": ["sharer", str(seconds), "20", "20", "1024"],
        "tenant": tenant,
        "workers": workers,
        "class": kind,
        "pack": "apart" if workers > 1 else "few",
        "retries_lost": 1000,
        "cwd": "/",
    }
    return rack.submit(spec, f"{tenant}-{kind}-{rack.world.seed}-{seconds}")


def cancel(rack: SimRack, job: JobId) -> None:
    """Cancel a job, trying until an agent accepts it."""
    while True:
        for name in [name for name in rack.alive() if rack.began(name)]:
            with contextlib.suppress(TimeoutError, NoLeader, OutcomeUnknown, Refused):
                rack.ask(name, "scheduler.cancel", {"id": job}, 5.0)
                return
        rack.run(0.5)


def strike(rack: SimRack) -> None:
    rng, leader = rack.rng, rack.leader()
    name = leader if leader is not None and rng.random() < 0.3 else rng.choice(sorted(rack.hosts))
    others, for_s = tuple(other for other in rack.hosts if other != name), rng.uniform(0.5, 40.0)
    away = rng.random() < 0.25
    faults.strike(
        rack.world, faults.Partition((name,), others, False, for_s) if away else faults.Kill("agent", name, for_s)
    )


def runs(rack: SimRack, gang: JobId) -> bool:
    return known(rack, gang).state == "running" and not known(rack, gang).counts


def told(classes: PagesFollowTheLog, gang: JobId, epoch: int) -> list[str]:
    """Ranks of the gang that are guaranteed by their pages."""
    return [name for name in classes.guaranteed() if name.startswith(f"{gang}.{epoch} ")]


def gone(rack: SimRack, gang: JobId, epoch: int) -> bool:
    """Whether the gang has ended, or runs anew."""
    job = known(rack, gang)
    return job.state in OVER or job.grant.epoch != epoch
