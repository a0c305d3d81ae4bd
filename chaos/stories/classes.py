"""Two tenants share a rack by class while its leader is killed: red's second job finds red's quota used up, is demoted
and runs on idle GPUs of blue; blue's own job takes them back; when red's first one ends, the other is upgraded."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.story import ended
from covey.core.ids import JobId
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job

SETTINGS = {"scheduler": {"demote_after_s": 30.0}}
COPY_S = 60.0
"""Seconds within which an agent runs again where all are away."""


def play(rack: SimRack) -> None:
    rack.settle()
    half = len(rack.hosts)
    first = job(rack, "red", half, "guaranteed", seconds=160)
    rack.until(lambda: state(rack, first) == "running", 30.0, "red's first job runs")
    late = job(rack, "red", half, "auto", seconds=120)
    rack.run(rack.rng.uniform(1.0, 28.0))
    lose_the_leader(rack)
    rack.until(lambda: runs_as(rack, late) == "opportunistic", 45.0, "red's second job is demoted")
    rack.until(lambda: state(rack, late) == "running", 20.0, "it runs on GPUs that blue does not use")
    lose_the_leader(rack)
    own = job(rack, "blue", half // 2, "guaranteed", seconds=10)
    rack.until(lambda: state(rack, own) in ("running", "done"), 40.0, "blue's quota is a promise")
    assert known(rack, late).tally.preemptions == 1 and state(rack, late) != "running", "there is no room for both"
    small = job(rack, "blue", 1, "opportunistic", seconds=5)
    rack.until(lambda: runs_as(rack, late) == "guaranteed", 200.0, "it is upgraded when red's first job has ended")
    assert known(rack, late).state in ("running", "stopping", "done") and known(rack, late).tally.attempt == 2
    assert runs_as(rack, small) == "opportunistic", "who asked to be opportunistic stays so"
    ended(rack, dict.fromkeys((first, late, own, small), ("done",)))


def job(rack: SimRack, tenant: str, workers: int, kind: str, seconds: int) -> JobId:
    spec = {"argv": ["sleeper", str(seconds)], "tenant": tenant, "workers": workers, "class": kind, "cwd": "/"}
    return rack.submit(spec, f"{tenant}-{kind}-{rack.world.seed}-{seconds}")


def lose_the_leader(rack: SimRack) -> None:
    """kill -9 of the leader's agent, which is back some seconds later."""
    leader = rack.leader()
    if leader is not None:
        faults.strike(rack.world, faults.Kill("agent", leader, rack.rng.uniform(0.5, 8.0)))
        rack.until(lambda: rack.leader() not in (None, leader), 10.0, "another host leads")


def state(rack: SimRack, job: JobId) -> str:
    return str(known(rack, job).state)


def runs_as(rack: SimRack, job: JobId) -> str:
    return str(known(rack, job).job_class)


def known(rack: SimRack, job: JobId) -> Job:
    """The job in the newest copy of the log."""
    return newest(rack).jobs[job]


def newest(rack: SimRack) -> JobTable:
    """The newest copy of the log on hosts that are alive: what was accepted a moment ago may not be in it. Runs the
    rack until there is one."""
    rack.until(lambda: bool(_copies(rack)), COPY_S, "some host has a copy of the log")
    return max(_copies(rack), key=lambda queue: queue.index)


def _copies(rack: SimRack) -> list[JobTable]:
    """The copies of the log on hosts that are alive."""
    plugins = [rack.plugin(name, "scheduler") for name in rack.alive() if rack.began(name)]
    return [plugin.queue for plugin in plugins if plugin is not None]
