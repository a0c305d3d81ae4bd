"""The seeds of a rack are one name with several addresses, the first of them dead, and its name server answers only
some seconds after the hosts began: they find one another all the same, and work."""

from chaos.rackworld import SimRack
from chaos.stories import train
from chaos.story import ended

NAME = "rack.example"
SETTINGS = {"gossip": {"seeds": [f"{NAME}:7946"]}}
DEAD = "10.9.9.9"
FOUND_S = 75.0
"""Seconds within which hosts find one another: names are looked up again every 30 s, and at once while alone."""


def play(rack: SimRack) -> None:
    rack.run(rack.rng.uniform(0.5, 20.0))
    first, second = rack.rng.sample([host.ip for host in rack.hosts.values()], 2)
    rack.world.network.names[NAME] = (DEAD, first, second)
    rack.settle(FOUND_S)
    ended(rack, {train(rack, rounds=5): ("done",)})
