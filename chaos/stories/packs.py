"""Gangs that say how they want to lie on hosts (`--pack`, `--nodes`), more of them than there is room for at once, and
a host that fails: each is placed as it asked for, every time, or waits."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories.classes import known
from chaos.story import ended
from covey.core.ids import JobId

JOBS = 9


def play(rack: SimRack) -> None:
    rack.settle()
    first = beside_gaps(rack)
    jobs = [*first, *(pack(rack, number) for number in range(JOBS))]
    victim = rack.rng.choice(sorted(rack.hosts))
    at_s = rack.world.now + rack.rng.uniform(2.0, 30.0)
    faults.schedule(rack.world, [(at_s, faults.Kill("host", victim, rack.rng.uniform(3.0, 80.0)))])
    for _ in range(160):
        rack.run(0.5)
        for job in jobs:
            as_asked(rack, job)
    ended(rack, dict.fromkeys(jobs, ("done", "failed")))


def beside_gaps(rack: SimRack) -> list[JobId]:
    """Every host except one has one free GPU: a gang of two of which nothing is known is placed on the idle host."""
    apart = submit(rack, "apart", len(rack.hosts) - 1, "apart")
    rack.until(lambda: known(rack, apart).placed, 20.0, "a gang lies on all hosts but one")
    gang = submit(rack, "few", 2, "gang")
    rack.until(lambda: known(rack, gang).placed, 20.0, "a gang is placed beside it")
    hosts = [place.host for place in known(rack, gang).start.places]
    assert len(hosts) == 1, f"{gang} was put into gaps on {hosts}, beside an idle host"
    return [apart, gang]


def pack(rack: SimRack, number: int) -> JobId:
    """Submit a gang with a random pack: `apart` on at most all hosts, `host` on at most all GPUs of one."""
    how = rack.rng.choice(("few", "any", "host", "apart"))
    return submit(rack, how, rack.rng.randint(1, 2 if how == "host" else 4), str(number))


def submit(rack: SimRack, how: str, workers: int, key: str) -> JobId:
    argv = ["sleeper", str(rack.rng.randint(5, 40))]
    spec = {"argv": argv, "tenant": "default", "workers": workers, "pack": how, "cwd": "/"}
    return rack.submit(spec, f"packed-{rack.world.seed}-{key}")


def as_asked(rack: SimRack, id: JobId) -> None:
    job = known(rack, id)
    hosts = [place.host for place in job.start.places for _ in place.ranks]
    if job.placed and job.spec.pack == "apart":
        assert len(set(hosts)) == job.spec.workers, f"{id} asked for a host for each worker and lies on {hosts}"
    if job.placed and job.spec.pack == "host":
        assert len(set(hosts)) == 1, f"{id} asked for one host and lies on {hosts}"
