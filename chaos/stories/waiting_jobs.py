"""Jobs wait for something else than GPUs while leaders are killed and hosts are cut off: an array has two tasks at
once, one job waits for the end of another that fails, one for its time, one until it is released, and one that runs is
queued again. Nothing starts too early, nothing waits for ever, and every task of the array runs once."""

from collections.abc import Mapping
from typing import Any

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories.classes import known, lose_the_leader
from chaos.story import ended
from covey.core.errors import NoLeader, OutcomeUnknown, Refused
from covey.core.ids import JobId

TASKS, AT_ONCE = 8, 2
LATER_S = 25.0
"""Seconds after its submission at which a job may start at the earliest."""
ASKED_S = 60.0
"""Seconds within which some agent does what a person asks for."""


def play(rack: SimRack) -> None:
    rack.settle()
    watch = Watch(rack)
    array = job(rack, "array", ("sleeper", "4"), array=f"0-{TASKS - 1}%{AT_ONCE}")
    watch.array = array
    fails = job(rack, "fails", ("sleeper", "3", "7"))
    waits = job(rack, "ok", ("sleeper", "1"), after=[f"ok:{fails}"])
    follows = job(rack, "any", ("sleeper", "1"), after=[f"any:{fails}", f"ok:{array}"])
    held = job(rack, "held", ("sleeper", "1"), hold=True)
    later = job(rack, "later", ("sleeper", "1"), begin_wall_s=wall(rack) + LATER_S)
    again = job(rack, "again", ("sleeper", "40"))
    rack.until(lambda: known(rack, again).state == "running", 60.0, "the job that is queued again runs")
    lose_the_leader(rack)
    others = sorted(rack.hosts)[1:]
    cut = faults.Partition((others[-1],), tuple(sorted(rack.hosts.keys() - {others[-1]})), for_s=rack.rng.uniform(2, 9))
    faults.strike(rack.world, cut)
    insist(rack, "scheduler.requeue", {"id": again})
    rack.until(lambda: known(rack, waits).holds.held != "", 120.0, "the job whose dependency failed is held")
    assert "done first, failed (exit 7)" in known(rack, waits).holds.held, known(rack, waits).holds.held
    rack.settle(60.0)  # with a second voter away the same host might lead again
    lose_the_leader(rack)
    rack.run(rack.rng.uniform(0.0, 5.0))
    for id in (waits, held):
        assert known(rack, id).tally.attempt == 0, f"{id} is held, and started"
        insist(rack, "scheduler.release", {"id": id})
    insist(rack, "scheduler.priority", {"id": held, "up": True}, may_be_refused=True)
    ended(rack, {**dict.fromkeys((waits, follows, held, later, again, array), ("done",)), fails: ("failed",)})
    record = known(rack, array).array
    assert record is not None and (record.done, record.begun) == (TASKS, TASKS), f"{record}"
    assert watch.seen == set(range(TASKS)), f"tasks {sorted(watch.seen)} of the array were seen to run"
    assert known(rack, again).tally.attempt >= 2, "it was queued again, and ran again"


class Watch:
    """Looks twice a second at what really runs: no more tasks than may, and nothing before its time."""

    def __init__(self, rack: SimRack) -> None:
        self.rack = rack
        self.array: JobId | None = None
        self.seen: set[int] = set()
        self._look()

    def _look(self) -> None:
        found: list[int] = []
        for host in self.rack.hosts.values():
            for pid, command in host.commands.items():
                process = host.processes.get(pid)
                if process is None or not process.alive or command.env.get("COVEY_ARRAY") != self.array:
                    continue
                found.append(int(command.env["COVEY_TASK"]))
        self.seen.update(found)
        if self.array is not None and len(set(found)) > AT_ONCE:
            self.rack.saw_wrong(f"tasks {sorted(found)} of {self.array} run at once, and {AT_ONCE} may")
        self.rack.world.at(self.rack.world.now + 0.5, self._look)


def wall(rack: SimRack) -> float:
    """What clocks of people show now."""
    host = rack.hosts[sorted(rack.alive())[0]]
    assert host.agent is not None
    return float(rack.agents[host.name].env.clock.wall_s())


def job(rack: SimRack, name: str, argv: tuple[str, ...], **more: Any) -> JobId:
    spec = {"argv": list(argv), "name": name, "tenant": "red", "cwd": "/", "gpus_per_worker": 0, **more}
    return rack.submit(spec, f"waits-{rack.world.seed}-{name}")


def insist(rack: SimRack, command: str, given: Mapping[str, Any], may_be_refused: bool = False) -> None:
    """Ask until some agent has done it, as a person at a keyboard would."""
    start = rack.world.now
    while rack.world.now - start < ASKED_S:
        for name in sorted(rack.alive()):
            if not rack.began(name):
                continue
            try:
                rack.ask(name, command, given, 15.0)
                return
            except (NoLeader, OutcomeUnknown, TimeoutError):
                continue
            except Refused as no:
                if may_be_refused and no.code == 4:
                    return
                if no.code not in (6, 75, 3):
                    raise
        rack.run(1.0)
    raise rack.world.broken(f"not within {ASKED_S:g} s: {command} of {given['id']}")
