"""The faults of `mischief`, with strangers at every port: noise, half frames, clients that send malformed frames,
programs that take a port of one that died, and a member of a later version whose messages, answers and commands the
others cannot decode. That has no other effect than a loss: no page, no job, no sum is wrong, and the rack is whole
again.

Seed 3059 once broke for the reason of seed 3046 of `people`.
"""

from chaos import faults
from chaos.actors.strangers import NEWER, Strangers, newer_answers, usurp
from chaos.rackworld import SimRack
from chaos.stories import swarm
from chaos.world.disk import SimFile
from covey.wire.checked import seal
from covey.wire.headers import MAGIC
from plugins.facts import SecondPassed

NAMES = ("h1:7946", "h2:7946")
SETTINGS = {"gossip": {"seeds": list(NAMES)}}
"""Settings whose seeds are names, which have to be looked up."""
SPOILT = ("state", "forgotten")
"""Ends of names of files that a newer agent wrote. The record of a start has one copy: without it the agent does not
let in ranks that run (docs/guides/guarantees.md, Limits)."""


def play(rack: SimRack) -> None:
    rack.settle()
    rack.world.mischief.on = True
    until_s = rack.world.now + swarm.FAULTS_S
    rack.world.at(until_s, rack.world.mischief.end)
    Strangers(rack, until_s)
    older = rack.rng.choice(sorted(rack.hosts))
    at_s = rack.world.now
    while (at_s := at_s + rack.rng.uniform(2.0, 15.0)) < until_s:
        rack.world.at(at_s, lambda: _upgrade(rack))
        rack.world.at(at_s + rack.rng.uniform(0.0, 2.0), lambda: _usurped(rack))
        rack.world.at(at_s + rack.rng.uniform(0.0, 2.0), lambda: _put_back(rack, older))
    swarm.play(rack, mischief=True)


def _upgrade(rack: SimRack) -> None:
    """Let an agent that runs now be of a later version, until it starts again."""
    names = [name for name in rack.alive() if rack.began(name)]
    if names and rack.world.mischief.on:
        newer_answers(rack, rack.rng.choice(names))


def _usurped(rack: SimRack) -> None:
    """Kill a slab's process, and let another program take its port at once."""
    name = rack.rng.choice(sorted(rack.hosts))
    memory = rack.plugin(name, "memory")
    address = "" if memory is None else memory.lending.machine.address
    if ":" not in address or not rack.world.mischief.on:
        return
    words = MAGIC + b"\xee" * 64 if rack.rng.random() < 0.5 else rack.rng.randbytes(200)
    faults.strike(rack.world, faults.Kill("program", name, 0.0, "slabd"))
    usurp(rack.hosts[name], address, words, rack)


def _put_back(rack: SimRack, name: str) -> None:
    """End an agent, and start one of an older version: some file of a job is newer than it."""
    host = rack.hosts[name]
    files = [file for file in sorted(host.disk.files) if file.startswith("jobs/") and file.endswith(SPOILT)]
    if not files or not host.up or not rack.world.mischief.on:
        return
    faults.strike(rack.world, faults.Kill("agent", host.name, rack.rng.uniform(0.2, 2.0)))
    data = bytearray(rack.rng.choice((seal(SecondPassed(1.0)), seal(SecondPassed(1.0), 9), NEWER)))
    host.disk.files[rack.rng.choice(files)] = SimFile(data=data, durable=bytearray(data))
