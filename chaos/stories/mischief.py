"""As `swarm`; and besides, single calls of the outside fail, break off, or take long, at a quarter of the places of the
code that make one (`chaos.world.mischief`)."""

from chaos.rackworld import SimRack
from chaos.stories import swarm


def play(rack: SimRack) -> None:
    rack.world.at(swarm.FAULTS_S + 10.0, rack.world.mischief.end)
    swarm.play(rack, mischief=True)
