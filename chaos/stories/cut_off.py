"""A host that runs jobs is cut off for longer than every lease, in one of many ways: with its agent stopped or killed
besides, with clocks that drift against one another, in one direction only, or its agent alone is stopped; now and then
it is the leader. Its ranks end there before any host starts them elsewhere (`RanksOnce`, `QuotaHeld`), its jobs
continue on other hosts while it is still away, and what is to be kept waits for it."""

from chaos import faults
from chaos.faults import Kill, Partition, Pause, SkewClock
from chaos.rackworld import SimRack
from chaos.stories import train
from chaos.stories.classes import known, state
from chaos.story import ended
from covey.core.ids import JobId
from plugins.scheduler.policy.leases import DRIFT

AWAY_S = 100.0
KEPT_S = 90.0
"""Seconds after which a host that is cut off is taken for lost, and its jobs run elsewhere."""
TROUBLES = (
    *("cut", "agent stopped", "agent killed", "slow clock", "fast clock", "deaf", "dumb", "only stopped"),
    "with a voter",
)


def play(rack: SimRack) -> None:
    rack.settle()
    first = train(rack, rounds=130, tenant="blue", workers=2)
    jobs = [first, *(sleep(rack, n, on_lost) for n, on_lost in enumerate(("heal", rack.rng.choice(("heal", "keep")))))]
    rack.until(lambda: all(len(ranks(rack, job)) == 2 for job in jobs), 30.0, "all ranks run")
    rack.run(rack.rng.uniform(0.0, 8.0))
    leader, at_work = rack.leader(), sorted({host for job in jobs for host in ranks(rack, job)})
    host = leader if leader in at_work and rack.rng.random() < 0.4 else rack.rng.choice(at_work)
    keeping = [name for job in jobs if known(rack, job).spec.on_lost == "keep" for name in ranks(rack, job)]
    host = keeping[0] if keeping and rack.rng.random() < 0.5 else host
    theirs = [job for job in jobs if host in ranks(rack, job)]
    began_s = rack.world.now
    failing = fails_soon(rack)
    for fault in troubles(rack, host, rack.rng.choice(TROUBLES)):
        faults.strike(rack.world, fault)
    kept = [job for job in theirs if known(rack, job).spec.on_lost == "keep"]
    moved = [job for job in theirs if job not in kept]
    rack.until(lambda: all(again(rack, job, host) for job in moved), AWAY_S, f"{moved} go on without {host}")
    if kept:
        rack.run(max(0.0, began_s + KEPT_S - rack.world.now))
    assert rack.world.now < began_s + AWAY_S, f"{host} is back, and nothing was shown"
    for job in kept:
        assert host in ranks(rack, job), "it was to be kept"
    lost = host in ranks(rack, failing) or known(rack, failing).tally.attempt > 1
    ended(rack, dict.fromkeys(jobs, ("done",)) | {failing: ("failed",)})
    assert lost or known(rack, failing).tally.attempt == 1, f"{failing} failed by itself and was started again"
    for job in theirs:
        assert known(rack, job).tally.attempt == 1 + (job in moved), (
            f"{job} was started {known(rack, job).tally.attempt} times"
        )


def fails_soon(rack: SimRack) -> JobId:
    """Submit a job with an error of its own, while a host is away that has none of its ranks or has them."""
    spec = {"argv": ["sleeper", "20", "1"], "tenant": "red", "workers": 1, "gpus_per_worker": 0, "cwd": "/"}
    return rack.submit(spec, f"fails-by-itself-{rack.world.seed}")


def troubles(rack: SimRack, host: str, kind: str) -> list[faults.AnyFault]:
    others = tuple(name for name in rack.hosts if name != host)
    cut = Partition((host,), others, False, AWAY_S)
    match kind:
        case "with a voter":
            voters = [name for name in others if name in rack.agents[host].voters and name != rack.leader()]
            both = (host,) if host in rack.agents[host].voters else (host, *voters[:1])  # most voters are elsewhere
            return [Partition(both, tuple(name for name in others if name not in both), False, AWAY_S)]
        case "agent stopped":
            return [cut, Pause(host, AWAY_S)]
        case "agent killed":
            return [cut, Kill("agent", host, AWAY_S)]
        case "slow clock" | "fast clock":
            sign = -1 if kind == "slow clock" else 1
            theirs = [SkewClock(name, 0.0, 1 - sign * DRIFT, AWAY_S) for name in others]
            return [SkewClock(host, 0.0, 1 + sign * DRIFT, AWAY_S), *theirs, cut]
        case "deaf":
            return [Partition(others, (host,), True, AWAY_S)]
        case "dumb":
            return [Partition((host,), others, True, AWAY_S)]
        case "only stopped":
            return [Pause(host, AWAY_S)]
        case _:
            return [cut]


def sleep(rack: SimRack, number: int, on_lost: str) -> JobId:
    spec = {"argv": ["sleeper", "110"], "tenant": "red", "workers": 2, "cwd": "/", "on_lost": on_lost}
    return rack.submit(spec, f"sleeper-{rack.world.seed}-{number}")


def ranks(rack: SimRack, job: JobId) -> list[str]:
    """The host of each rank of this job that lives."""
    return [
        name
        for name, host in rack.hosts.items()
        for pid in host.processes
        if pid in host.commands and host.commands[pid].env.get("COVEY_JOB_ID") == job
        if "COVEY_RANK" in host.commands[pid].env  # not a spare
    ]


def again(rack: SimRack, job: JobId, without: str) -> bool:
    """Whether the job was started again, and is whole, on other hosts."""
    where = ranks(rack, job)
    return (
        known(rack, job).tally.attempt == 2
        and state(rack, job) == "running"
        and len(where) == 2
        and without not in where
    )
