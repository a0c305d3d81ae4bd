"""The swarm with slabs of the default size, and a volume that is idle for most of the time: links are cut, agents and
hosts begin anew, lenders stop or need their memory between its requests, and nothing else tells its slabs of it."""

from chaos.rackworld import OWN_SLABS, SPREAD, SimRack
from chaos.stories import swarm

SETTINGS = {"memory": OWN_SLABS}
IDLES = 0.02
"""Chance, before each request, that the pager becomes idle: it is busy for some 4 s, and then idle for 3 to 25."""


def play(rack: SimRack) -> None:
    rack.spread, rack.idles = SPREAD, IDLES
    swarm.play(rack)
