"""The faults of `swarm`, and besides, single calls of the outside fail, break off, or take long, at a quarter of the
places of the code that make one (`chaos.world.mischief`).

Seeds that once broke: 24 (a flipped bit in the file of known hosts made a live host a replayer), 30 (a volume that
could not be opened after a loss of power marked torn pages durable), 40074 (`promote_knob = 0` let two jobs stop one
another for ever), 71006 (an identity that was put back was older than its clock), 83043 (a copy that the disk refused
once was never tried again), 300145 (two settings under which jobs stop one another; they are not drawn together).
"""

from chaos.rackworld import SimRack
from chaos.stories import swarm


def play(rack: SimRack) -> None:
    rack.world.at(swarm.FAULTS_S + 10.0, rack.world.mischief.end)
    swarm.play(rack, mischief=True)
