"""The story `mirrored_twice` with parity: two faults at once, and often the death of the volume's process, take two
members of slabs. What was lost fails to be read, and is never older, zeros or another's; it can be written anew."""

from chaos.rackworld import SimRack
from chaos.stories import mirrored_twice


def play(rack: SimRack) -> None:
    mirrored_twice.play_with(rack, parity="2+1")
