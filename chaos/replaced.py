"""How long a gang that heals is without a rank when it loses a host: from the loss until another host runs that rank.

    quiet   five hosts, a rank on each of four; the power of one fails
    cut     the same, and it is cut off instead
    again   right after another one was lost and is back
    busy    every agent is stopped for up to 0.6 s, again and again, as on a machine with more work than cores

Measured in virtual time, with the defaults of all settings. The time that a rank's process takes to start, and to get
its state from the others, must be added.
"""

from typing import Literal, NamedTuple, get_args

from chaos import faults
from chaos.faults import Kill, Partition, Pause
from chaos.rackworld import SimRack
from chaos.stories.classes import known
from chaos.stories.cut_off import ranks
from chaos.stories.hosts_replaced import whole
from covey.core.ids import JobId

Kind = Literal["quiet", "cut", "again", "busy"]
KINDS: tuple[Kind, ...] = get_args(Kind)
HOSTS = 5
MOST_S = 90.0
STEP_S = 0.05
"""Resolution of the measurement in seconds."""
BUSY_S = 80.0
PAUSES_PER_S, PAUSE_S = 5.0, (0.05, 0.6)


class Replaced(NamedTuple):
    took_s: float
    led: bool
    """Whether the lost host led."""


def lose_host(seed: int, kind: Kind) -> Replaced:
    """Lose one host; raises AssertionError when no other host takes its rank over."""
    with SimRack(seed, HOSTS, gpus=1, quotas={"red": HOSTS}, watched=False) as rack:
        rack.world.replay += " --story hosts_replaced"
        rack.start()
        rack.settle()
        job = _gang(rack)
        lost = rack.rng.choice(ranks(rack, job))
        if kind == "again":
            lost = _lose_another_first(rack, job, lost)
        elif kind == "busy":
            _make_busy(rack)
        led = rack.leader() == lost
        others = tuple(name for name in rack.hosts if name != lost)
        cut = Partition((lost,), others, False, 2 * MOST_S)
        faults.strike(rack.world, cut if kind == "cut" else Kill("host", lost, 2 * MOST_S))
        return Replaced(_until_whole(rack, job, lost), led)


def _gang(rack: SimRack) -> JobId:
    end_s = rack.world.now + 10 * MOST_S
    spec = {"argv": ["healer", str(int(end_s))], "tenant": "red", "workers": HOSTS - 1, "cwd": "/", "pack": "apart"}
    job = rack.submit(spec, f"healer-{rack.world.seed}")
    rack.until(lambda: len(known(rack, job).healing.may_be_lost) == HOSTS - 1, 30.0, "all its hosts may be lost")
    rack.run(rack.rng.uniform(0.0, 15.0))
    return job


def _lose_another_first(rack: SimRack, job: JobId, lost: str) -> str:
    """Lose another host first, which comes back; returns the host that is to be lost next."""
    rack.hosts[lost].power_off()
    _until_whole(rack, job, lost)
    rack.hosts[lost].power_on()
    rack.until(lambda: lost in rack.alive() and rack.began(lost), 10.0, f"{lost} is back")
    rack.run(rack.rng.uniform(0.5, 2.0))
    return rack.rng.choice(ranks(rack, job))


def _make_busy(rack: SimRack) -> None:
    at_s = rack.world.now
    end_s = at_s + BUSY_S
    while at_s < end_s:
        at_s += rack.rng.expovariate(PAUSES_PER_S)
        pause = Pause(rack.rng.choice(sorted(rack.hosts)), rack.rng.uniform(*PAUSE_S))
        rack.world.at(at_s, lambda pause=pause: faults.strike(rack.world, pause))  # type: ignore[misc]
    rack.run(10.0)


def _until_whole(rack: SimRack, job: JobId, lost: str) -> float:
    began_s = rack.world.now
    while not (rack.alive() and whole(rack, job, HOSTS - 1, lost)):
        assert rack.world.now - began_s < MOST_S, f"seed {rack.world.seed}: nobody takes over from {lost}"
        rack.run(STEP_S)
    return rack.world.now - began_s
