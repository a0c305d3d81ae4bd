"""As `mischief`, with strangers at every port: noise, half frames, clients that talk nonsense, programs that take a
port of one that died, and a member of a version to come whose letters, answers and commands nobody understands. What
is not understood does no more harm than what is lost: no page, no job, no sum is wrong, and the rack is whole again."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import swarm
from chaos.strangers import Strangers, newer_answers, usurp
from covey.headers import MAGIC

NAMES = ("h1:7946", "h2:7946")
SETTINGS = {"gossip": {"seeds": list(NAMES)}}
"""Names, which have to be looked up."""


def play(rack: SimRack) -> None:
    rack.settle()
    rack.world.mischief.on = True
    until_s = rack.world.now + swarm.FAULTS_S
    Strangers(rack, until_s)
    at_s = rack.world.now
    while (at_s := at_s + rack.rng.uniform(2.0, 15.0)) < until_s:
        rack.world.at(at_s, lambda: _upgrade(rack))
        rack.world.at(at_s + rack.rng.uniform(0.0, 2.0), lambda: _usurped(rack))
    swarm.play(rack, mischief=True)


def _upgrade(rack: SimRack) -> None:
    """An agent that runs now is of a version to come, until it starts again."""
    names = [name for name in rack.alive() if rack.began(name)]
    if names and rack.world.mischief.on:
        newer_answers(rack, rack.rng.choice(names))


def _usurped(rack: SimRack) -> None:
    """A slab's process dies, and its port is somebody else's at once."""
    name = rack.rng.choice(sorted(rack.hosts))
    memory = rack.room(name, "memory")
    address = "" if memory is None else memory.lending.machine.address
    if ":" not in address or not rack.world.mischief.on:
        return
    words = MAGIC + b"\xee" * 64 if rack.rng.random() < 0.5 else rack.rng.randbytes(200)
    faults.strike(rack.world, faults.Kill("program", name, 0.0, "slabd"))
    usurp(rack.hosts[name], address, words, rack)
