"""A job waits for its quota with an API key in its environment, and the host where it was submitted is lost with its
disk: it runs with that key all the same. No host except those of the job is given the environment, no file has the key
in clear except the records of its ranks, and nothing of it is left anywhere once the job is over."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories.classes import known
from chaos.story import QUIET_S, ended
from covey.core.ids import HostId, JobId
from plugins.scheduler.messages.wire import EnvAnswer, EnvOf

KEY = "API_KEY"
SECRET = "sk-planted-in-a-story"
RECORDS = "jobs/"
"""Folder of records of what runs on a host, readable by its agent alone."""
LOST_S = 1000.0


def play(rack: SimRack) -> None:
    rack.settle()
    before = secret(rack, "before", "30", "red", len(rack.hosts))
    rack.until(lambda: known(rack, before).state == "running", 30.0, "the first job runs")
    nobody_else(rack, before)
    coordinator = rack.rng.choice([name for name in sorted(rack.hosts) if name != rack.leader()])
    job = secret(rack, "waits", "20", "red", 1, on=coordinator)
    rack.run(rack.rng.uniform(1.0, 4.0))
    in_clear(rack)
    nobody_else(rack, job)
    faults.strike(rack.world, faults.Kill("host", coordinator, LOST_S))
    rack.hosts[coordinator].disk.files.clear()
    rack.until(lambda: known(rack, before).state in ("done", "failed"), 200.0, "the quota is free")
    rack.until(lambda: known(rack, job).state in ("running", "done"), 60.0, "it runs without the host that had it")
    in_clear(rack)
    nobody_else(rack, job)
    ended(rack, {before: ("done", "failed"), job: ("done",)})
    rack.until(lambda: not files(rack, "scheduler/env/"), 2 * QUIET_S, "environments of jobs that are over are gone")
    rack.until(lambda: not clear(rack), QUIET_S, f"no file has the key any more, not even {clear(rack)}")


def secret(rack: SimRack, key: str, seconds: str, tenant: str, workers: int, on: str | None = None) -> JobId:
    argv = ["sleeper", seconds, "0", f"{KEY}={SECRET}"]
    spec = {"argv": argv[:3], "tenant": tenant, "workers": workers, "cwd": "/", "env": {KEY: SECRET}}
    return rack.submit(spec, f"env-{key}-{rack.world.seed}", on=on)


def files(rack: SimRack, part: str) -> list[str]:
    return [f"{name}:{file}" for name, host in rack.hosts.items() for file in host.disk.files if part in file]


def clear(rack: SimRack) -> list[str]:
    """Files in which the key can be read."""
    found = [(name, file, of.data) for name, host in rack.hosts.items() for file, of in host.disk.files.items()]
    return [f"{file} of {name}" for name, file, data in found if SECRET.encode() in data]


def in_clear(rack: SimRack) -> None:
    """Assert that no environment is in clear, except in records of ranks that run on that host."""
    wrong = [where for where in clear(rack) if not where.startswith(RECORDS)]
    assert not wrong, f"an API key stands in clear in {wrong[0]}"


def nobody_else(rack: SimRack, job: JobId) -> None:
    """Assert that hosts which do not run the job are refused its environment by the hosts that may have it."""
    now = known(rack, job)
    assert now.env is not None
    theirs = {now.grant.coordinator, *(place.host for place in now.start.places)}
    for outsider in [name for name in rack.alive() if HostId(name) not in theirs]:
        for holder in [name for name in rack.alive() if name != outsider]:
            given = rack.ask_as(outsider, holder, "scheduler", EnvOf(job, now.grant.epoch, now.env.digest))
            stolen = isinstance(given, EnvAnswer) and given.data
            assert not stolen, f"{holder} gave {outsider} the environment of {job}, which does not run there"
