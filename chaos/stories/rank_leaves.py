"""A rank makes fewer steps than the others of its gang, which wait for it in vain: it ends with 0, or waits for the
end of all. Meanwhile a process that adds is killed, or an agent. The others are told which rank it is, and end by
that; a gang beside it, whose ranks end a moment apart, is told nothing."""

from chaos import faults
from chaos.actors.workload import RANK_LEFT
from chaos.faults import Kill
from chaos.rackworld import SimRack
from chaos.stories import train
from chaos.stories.classes import known, state
from chaos.story import ended
from covey.core.ids import JobId

SETTINGS = {"aggregator": {"direct": "never"}}
FLOATS = 24
ROUNDS = 12
LEFT_S = 60.0
"""Seconds after which all ranks have heard of it, whatever had to be started again; 20 s mostly."""


def play(rack: SimRack) -> None:
    rack.settle()
    workers, leaves = rack.rng.randint(2, 3), rack.rng.random() < 0.5
    argv = ["trainer", str(ROUNDS), str(FLOATS), str(rack.rng.randint(1, 4)), *(["leave"] if leaves else [])]
    spec = {"argv": argv, "tenant": "red", "workers": workers, "cwd": "/", "pack": "apart"}
    job = rack.submit(spec, f"leaves-{rack.world.seed}")
    beside = train(rack, rack.rng.randint(8, 20), tenant="blue", workers=2)
    rack.until(lambda: state(rack, job) in ("running", "stopping", "failed"), 60.0, "it runs")
    rack.run(rack.rng.uniform(0.0, 8.0))
    host = rack.rng.choice(list(rack.hosts))
    match rack.rng.choice(("none", "none", "aggregator", "agent")):
        case "aggregator":
            for name in rack.hosts:
                faults.strike(rack.world, Kill("program", name, 0.0, "aggd"))
        case "agent":
            faults.strike(rack.world, Kill("agent", host, rack.rng.uniform(0.1, 4.0)))
        case _:
            pass
    rack.until(lambda: known(rack, job).over, LEFT_S, f"those of {job} that wait for rank 0 end")
    ended(rack, {job: ("failed",), beside: ("done",)})
    now = known(rack, job)
    assert now.ending.blame is not None and now.ending.blame.code == RANK_LEFT, f"{job} failed with {now.reason}"
    assert leaves or told_of(rack, job), f"no host has noted which rank of {job} left"


def told_of(rack: SimRack, job: JobId) -> bool:
    """Whether `agentctl why` reports the rank that left, on some host."""
    lines = [line for agent in rack.agents.values() for line in agent.event_log.lines_of(job)]
    return any(line.event == "ranks left" and "rank 0 on " in line.reason for line in lines)
