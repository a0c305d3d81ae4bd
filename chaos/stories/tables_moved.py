"""A person moves the tables of jobs that train from host to host, again and again. Nothing strikes the first time: the
next owner has the parameters of the one before, and asks no rank for them. Then one of both dies, is stopped, or is
cut off from the other, mostly while it brings or takes them, sometimes with its agent. Every sum stays exact."""

from collections.abc import Collection

from chaos import faults
from chaos.rackworld import SimRack
from chaos.story import ended
from covey.core.errors import Refused
from covey.core.ids import JobId
from plugins.views import AggregatorJobView

SETTINGS = {"aggregator": {"direct": "never"}}
ROUNDS = 140
MOVED_S = 40.0
"""Seconds after which a table has moved when nothing struck it."""
KINDS = ("old", "old", "new", "new", "still", "deaf", "apart", "agent", "none")
STILL_S = 6.0
"""Seconds that an owner is stopped: longer than either waits for the other."""


def play(rack: SimRack) -> None:
    rack.settle()
    jobs = [trains(rack, key) for key in ("first", "second")]
    rack.until(lambda: len({row.job for row in rows(rack)}) >= 2, 60.0, "the tables of both jobs are summed")
    first = rows(rack)[0]
    rack.run(rack.rng.uniform(2.0, 4.0))
    to = move(rack, first)
    rack.until(lambda: brought(rack, to), MOVED_S, f"{to} has what {first.host} held of {first.job}")
    for _ in range(rack.rng.randint(2, 5)):
        each = [row for row in rows(rack) if row.joined]
        if not each:
            rack.run(2.0)
            continue
        row = rack.rng.choice(each)
        strike(rack, row.host, move(rack, row))
        rack.run(rack.rng.uniform(0.0, 6.0))
    ended(rack, dict.fromkeys(jobs, ("done",)))


def trains(rack: SimRack, key: str) -> JobId:
    """Submit a gang on several hosts: its tensors lie in several tables."""
    what = {"argv": ["trainer", str(ROUNDS), "40"], "tenant": "red", "gpus_per_worker": 1, "cwd": "/", "pack": "apart"}
    return rack.submit({**what, "workers": rack.rng.choice((2, 3))}, f"{key}-job-{rack.world.seed}")


def rows(rack: SimRack) -> list[AggregatorJobView]:
    """Rows that `agentctl tensors` shows."""
    each = [name for name in rack.alive() if rack.plugin(name, "aggregator") is not None]
    return [row for name in each for row in rack.ask(name, "aggregator.tensors", {})]


def move(rack: SimRack, row: AggregatorJobView) -> str:
    """Do what `agentctl tensors --move` does; returns the host to move to. A host that does not sum refuses."""
    to = rack.rng.choice([name for name in rack.hosts if name != row.host])
    try:
        rack.ask(rack.alive()[0], "aggregator.move", {"job": row.job, "epoch": row.epoch, "from": row.host, "to": to})
    except Refused:
        pass
    return to


def brought(rack: SimRack, host: str) -> bool:
    plugin = rack.plugin(host, "aggregator")
    return plugin is not None and plugin.now is not None and plugin.now.copied > 0


def strike(rack: SimRack, old: str, new: str) -> None:
    """Strike one of these faults, mostly between two frames of what the old owner brings to the new one."""
    rack.run_until(lambda: bool(connected(rack, {old, new}, "aggd")), 5.0)
    if rack.rng.random() < 0.8:
        rack.run_until(lambda: not connected(rack, {old}, "trainer"), 5.0)
        rack.run(rack.rng.choice((0.0, rack.rng.uniform(0.0, 0.02))))
    kind, one = rack.rng.choice(KINDS), rack.rng.choice((old, new))
    match kind:
        case "old" | "new":
            faults.strike(rack.world, faults.Kill("program", old if kind == "old" else new, 0.0, "aggd"))
        case "still":
            faults.strike(rack.world, faults.Pause(one, STILL_S, "aggd"))
        case "deaf" | "apart":
            faults.strike(rack.world, faults.Partition((old,), (new,), kind == "deaf", STILL_S))
        case "agent":
            faults.strike(rack.world, faults.Kill("agent", one, rack.rng.uniform(0.5, 3.0)))
            if rack.rng.random() < 0.5:
                faults.strike(rack.world, faults.Kill("program", one, 0.0, "aggd"))
        case _:
            pass


def connected(rack: SimRack, hosts: Collection[str], program: str) -> list[str]:
    """Connections of `aggd` on one of these hosts with a program on another host of them, or on any if it is one."""
    found = []
    for stream in rack.world.wires.streams:
        ends = [(end.process.name.partition("/"), end) for end in (stream, stream.other)]
        if any(end.closed or end.broken or not end.process.alive for _, end in ends):
            continue
        for (host, _, name), (there, _, other) in ((ends[0][0], ends[1][0]), (ends[1][0], ends[0][0])):
            meant = host in hosts and (len(hosts) == 1 or (there in hosts and there != host))
            if meant and name.startswith("aggd") and other.startswith(program):
                found.append(f"{host} {there}")
    return found
