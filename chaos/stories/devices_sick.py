"""Devices fall off the bus, report errors and hang: jobs continue, no rank starts on a device that is lost or to be
emptied, and a gang that finds too few of them waits until they are back."""

from typing import Literal

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import train
from chaos.story import ended
from plugins.scheduler.machine.log.jobs import OVER

KINDS: tuple[tuple[Literal["xid", "ecc", "lost", "stuck"], int], ...] = (
    ("xid", 95),
    ("xid", 31),
    ("ecc", 3),
    ("lost", 0),
    ("lost", 1),
    ("stuck", 0),
)


def play(rack: SimRack) -> None:
    rack.settle()
    jobs = {train(rack, rounds=rack.rng.randint(2, 20), workers=2, key="before"): OVER}
    for _ in range(4):
        host, for_s = rack.rng.choice(sorted(rack.hosts)), rack.rng.uniform(2.0, 15.0)
        kind, number = rack.rng.choice(KINDS)
        faults.strike(rack.world, faults.SickDevice(host, kind, number, for_s))
        rack.run(rack.rng.uniform(0.5, 6.0))
    rack.heal()
    rack.until(lambda: not running(rack), 240.0, "the first job is over")
    for number, host in enumerate(sorted(rack.hosts)[1:]):
        kind, number = rack.rng.choice((("lost", number), ("xid", 48), ("xid", 79)))
        faults.strike(rack.world, faults.SickDevice(host, kind, number, 600.0))
    rack.run(3.0)  # every host has heard which devices are left: 5 of 8
    first = train(rack, rounds=rack.rng.randint(5, 40), workers=4, key="first")
    second = train(rack, rounds=3, tenant="blue", workers=2, key="second")
    for _ in range(20):
        rack.run(1.0)
        sick = {gpu.uuid for host in rack.hosts.values() for gpu in host.probes.gpus() if not gpu.takes_jobs}
        assert len(sick) == 3
        assert not running(rack) & sick, "a rank began on a device that takes no job"
        assert len(running(rack)) <= 5
    ended(rack, {**jobs, first: ("done",), second: ("done",)})


def running(rack: SimRack) -> set[str]:
    """Devices of ranks that run now."""
    return {
        uuid
        for host in rack.hosts.values()
        for process in host.find("trainer")
        for uuid in host.commands[process.id.pid].env["COVEY_GPUS"].split(",")
    }
