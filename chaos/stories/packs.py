"""Gangs that say how they want to lie on hosts (`--pack`, `--nodes`), more of them than there is room for at once, and
a host that fails: each is placed as it asked for, every time, or waits."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories.classes import known
from chaos.story import ended
from covey.core import JobId

JOBS = 9


def play(rack: SimRack) -> None:
    rack.settle()
    jobs = [pack(rack, number) for number in range(JOBS)]
    victim = rack.rng.choice(sorted(rack.hosts))
    at_s = rack.world.now + rack.rng.uniform(2.0, 30.0)
    faults.schedule(rack.world, [(at_s, faults.Kill("host", victim, rack.rng.uniform(3.0, 80.0)))])
    for _ in range(160):
        rack.run(0.5)
        for job in jobs:
            as_asked(rack, job)
    ended(rack, dict.fromkeys(jobs, ("done", "failed")))


def pack(rack: SimRack, number: int) -> JobId:
    """`apart` on at most all hosts, `host` on at most all GPUs of one."""
    how = rack.rng.choice(("few", "any", "host", "apart"))
    workers = rack.rng.randint(1, 2 if how == "host" else 4)
    argv = ["sleeper", str(rack.rng.randint(5, 40))]
    spec = {"argv": argv, "tenant": "default", "workers": workers, "pack": how, "cwd": "/"}
    return rack.submit(spec, f"packed-{rack.world.seed}-{number}")


def as_asked(rack: SimRack, id: JobId) -> None:
    job = known(rack, id)
    hosts = [place.host for place in job.places for _ in place.ranks]
    if job.placed and job.spec.pack == "apart":
        assert len(set(hosts)) == job.spec.workers, f"{id} asked for a host for each worker and lies on {hosts}"
    if job.placed and job.spec.pack == "host":
        assert len(set(hosts)) == 1, f"{id} asked for one host and lies on {hosts}"
