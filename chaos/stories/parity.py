"""The story `mirrored` with pages on two hosts and their parity on a third: under one fault at a time no acknowledged
page is lost, older or another's, even when the volume's process dies in the middle of whatever it does about the
fault."""

from chaos.actors.pager import Redundancy
from chaos.rackworld import SimRack
from chaos.stories import mirrored


def play(rack: SimRack) -> None:
    wide = len(rack.hosts) > 4 and rack.rng.random() < 0.4
    mirrored.play_with(rack, Redundancy(parity="3+1" if wide else "2+1"))
