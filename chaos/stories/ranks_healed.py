"""A gang calls `job.state` (`chaos.actors.learner`: the job side's own code), and is struck at any moment of any step:
a rank is killed or two, a host, an agent, a supervisor, or a process that adds; hosts are cut off and come back; a
person moves ranks to other hosts, of their gang or not. Often the next fault strikes while a successor takes its
state. Some jobs gather what is each rank's own, some have it kept by neighbours. No lost process is heard, none is
missing in the end, every sum has each rank's contribution once, every rank continues with its own random numbers and
samples, and all end with what a run has learnt in which nothing was lost.

Seeds that once broke: 240, 326, 433 (an answer to a process that was lost hid the answers to its successor), 271, 559,
569 (neighbours kept what is a rank's own for two steps, and it was a step ahead), 551 (ranks continued while no host
led, though they had been replaced), 692 (what a lost process pushed for a later step completed a round), 861 (a copy
of the log that was behind ended ranks that ran on there).
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from chaos import faults
from chaos.faults import Kill, Pause
from chaos.rackworld import SimRack
from chaos.stories.classes import known, state
from chaos.stories.cut_off import TROUBLES, ranks, troubles
from chaos.stories.places_joined import heals, whole
from chaos.story import ended
from covey.core.ids import HostId, JobId
from plugins.scheduler.messages.commands import MoveAsked

STEPS, FLOATS = 45, 40
WHOLE_S = 130.0
"""Seconds after which all ranks run once, whatever was lost; 10 s mostly."""
PUSHED_S = 0.05
"""Seconds after which a rank that was about to push has pushed."""
BACK_S = 40.0
"""Seconds after which a host has power again, or its connections."""
LOST = ("rank", "two", "slow", "slow", "between", "after", "after")
ALONE = (*LOST, "aggregator", "agent", "supervisor", "move", "move")
"""Faults that take no host away. `slow`: a rank has pushed and pauses for a moment, and another one is killed;
`between`: one is killed with the process that adds, when some have a result and others do not; `after`: the process
that adds is killed when a rank is about to push, and this rank as soon as it has the result."""
SETTINGS = {"scheduler": {"heal_pause_s": 8.0}, "aggregator": {"direct": "never"}}
"""A pause longer than gossip needs to find a host dead: only this fence keeps others from starting too early. The
tables are with aggregators; `ranks_own` plays the same with those that ranks own."""
HOSTS = ("power", *TROUBLES[:-1])


def play(rack: SimRack) -> None:
    rack.settle()
    pack = rack.rng.choice(("apart", "apart", "any", "few"))
    workers = rack.rng.randint(2, len(rack.hosts) - (pack == "apart"))
    own = rack.rng.choice(("gather", "long", "mirror", "mirror"))
    spec = {"argv": ["learner", str(STEPS), str(FLOATS), own], "tenant": "red", "workers": workers, "cwd": "/"}
    more = {"pack": pack, "spares": rack.rng.choice((0, 0, 1))}
    job = rack.submit({**spec, **more}, f"learner-{rack.world.seed}")
    away = set[str]()
    for _ in range(rack.rng.randint(1, 4)):
        rack.until(lambda: over(rack, job) or heals(rack, job), WHOLE_S, "all its hosts may be lost")
        rack.run(rack.rng.uniform(0.0, 6.0))
        if over(rack, job):
            break
        going = set(away)
        away |= strike(rack, job, workers, going, ALONE if away else (*ALONE, *HOSTS))
        if rack.rng.random() < 0.6:
            again(rack, job, workers, going)
        rack.until(lambda: over(rack, job) or whole(rack, job, workers), WHOLE_S, f"all ranks of {job} run once")
    check_end(rack, job, workers, own)


def check_end(rack: SimRack, job: JobId, workers: int, own: str) -> None:
    """Let the job end; it was started once, and has learnt what a run has in which nothing was lost."""
    ended(rack, {job: ("done",)})
    assert known(rack, job).tally.attempt == 1, f"{job} was started {known(rack, job).tally.attempt} times"
    right = rack.learners.right(job, workers, FLOATS, own, STEPS).w[STEPS]
    for rank in range(workers):
        found = rack.learners.ended.get((job, rank))
        assert found is not None and np.array_equal(found, right), f"rank {rank} of {job} ended with {found}"


def again(rack: SimRack, job: JobId, workers: int, going: set[str]) -> None:
    """Strike again, mostly while a successor takes its state, or while the process that adds is replaced."""
    if going or len(with_state(rack, job)) < workers:
        before = rack.learners.taken_over
        rack.run_until(lambda: begins(rack, job) or rack.learners.taken_over > before, 20.0)
        rack.run(rack.rng.choice((0.0, rack.rng.uniform(0.0, 0.2))))
    else:
        rack.run(rack.rng.uniform(0.0, 2.0))
    strike(rack, job, workers, going, ALONE)


def strike(rack: SimRack, job: JobId, workers: int, going: set[str], kinds: Sequence[str]) -> set[str]:
    """Strike one of these faults, if the job can be healed of it; returns the hosts that are lost by it. `going`:
    hosts that are or were lost, or that ranks are about to leave."""
    kind, each = rack.rng.choice(kinds), ranks(rack, job)
    if not each:
        return set()
    host = rack.rng.choice(each)
    if kind == "move":
        if may_lose(rack, job, workers, going, {host}):
            going.add(host)
            move(rack, job, host, rack.rng.choice([name for name in rack.hosts if name != host]))
    elif kind in LOST:
        several = dict.fromkeys(rack.rng.sample(each, min(len(each), 2)) if kind == "two" else (host,))
        kill(rack, job, workers, going, several, kind)
    elif kind in ALONE:
        program = {"aggregator": "aggd", "agent": "agent", "supervisor": "supervisor"}[kind]
        names = [name for name, at in rack.hosts.items() if at.find("aggd")] if kind == "aggregator" else each
        at = rack.rng.choice(names or each)
        what = Kill("agent", at, rack.rng.uniform(0.1, 4.0)) if kind == "agent" else Kill("program", at, 0.0, program)
        faults.strike(rack.world, what)
    elif may_lose(rack, job, workers, going, {host}):
        going.add(host)
        for fault in [Kill("host", host, BACK_S)] if kind == "power" else troubles(rack, host, kind):
            faults.strike(rack.world, fault)
        return {host}
    return set()


def kill(rack: SimRack, job: JobId, workers: int, going: set[str], hosts: Collection[str], kind: str) -> None:
    """Kill the ranks of this job on these hosts, if it can be healed of it."""
    if kind == "between":
        rack.run_until(lambda: over(rack, job) or rack.learners.differ(job, workers), 5.0)
    if not may_lose(rack, job, workers, going, hosts):
        return
    others = [name for name in ranks(rack, job) if name not in (*hosts, *going)]
    if kind == "slow" and others:
        slow = rack.rng.choice(others)
        pushes(rack, job, {slow})
        rack.run(PUSHED_S)
        faults.strike(rack.world, Pause(slow, rack.rng.uniform(0.5, 4.0), "learner"))
        rack.run(rack.rng.uniform(0.0, 2.0))
    if kind == "after":
        pushes(rack, job, hosts)
    for name in rack.hosts if kind in ("between", "after") else ():
        faults.strike(rack.world, Kill("program", name, 0.0, "aggd"))
    if kind == "after":
        changes(rack, job, hosts, rack.learners.steps)
    for name in hosts:
        faults.strike(rack.world, Kill("program", name, 0.0, "learner"))


def pushes(rack: SimRack, job: JobId, hosts: Collection[str]) -> None:
    """Run until a rank on these hosts is about to push."""
    changes(rack, job, hosts, rack.learners.about_to_push)


def changes(rack: SimRack, job: JobId, hosts: Collection[str], what: Mapping[tuple[JobId, int], int]) -> None:
    """Run until `what` changes for a rank on these hosts, or for some seconds."""
    before, keys = dict(what), [(job, rank) for rank, at in with_state(rack, job).items() if at in hosts]
    rack.run_until(lambda: any(what.get(key) != before.get(key) for key in keys), 5.0)


def may_lose(rack: SimRack, job: JobId, workers: int, going: Collection[str], hosts: Collection[str]) -> bool:
    """Whether others have the state, and each rank's own, without the ranks on these hosts: two neighbours, or ranks
    of one host, may be gone."""
    has = with_state(rack, job)
    left = [at for at in has.values() if at not in hosts and at not in going]
    gone = workers - len(left)
    one_host = len(has) == workers and not going and len(hosts) == 1
    return gone < workers and (gone <= 2 or one_host)


def with_state(rack: SimRack, job: JobId) -> dict[int, str]:
    """Ranks whose newest process runs and has the state -> their host."""
    found: dict[int, str] = {}
    for name, host in rack.hosts.items():
        for pid, process in host.processes.items():
            env = getattr(host.commands.get(pid), "env", {})
            if env.get("COVEY_JOB_ID") == job and "COVEY_RANK" in env and not process.loop.paused:
                key = job, int(env["COVEY_EPOCH"]), int(env["COVEY_RANK"])
                if rack.learners.begun.get(key) == int(env.get("COVEY_INCARNATION", "0")):
                    found[key[2]] = name
    return found


def begins(rack: SimRack, job: JobId) -> bool:
    """Whether some process of the job runs that has no state yet."""
    return len(ranks(rack, job)) > len(with_state(rack, job))


def over(rack: SimRack, job: JobId) -> bool:
    return state(rack, job) in ("done", "failed")


def move(rack: SimRack, job: JobId, host: str, to: str) -> None:
    """Do what `agentctl move` does, at any agent; nothing where it is refused."""
    scheduler = rack.plugin(rack.rng.choice(rack.alive()), "scheduler")
    epoch = known(rack, job).grant.epoch
    command = MoveAsked(wall_s=0.0, job=job, epoch=epoch, host=HostId(host), to=HostId(to), coordinator=HostId(to))
    if scheduler is not None:
        scheduler.env.spawn("move", scheduler.queue_log.insist(command))
