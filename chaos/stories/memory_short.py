"""Lenders need their memory back, one after the other, under load: slabs move or are written to the disk, no page is
lost."""

from chaos.rackworld import SimRack
from chaos.stories import short_of_memory
from chaos.story import ended


def play(rack: SimRack) -> None:
    rack.settle()
    short_of_memory(rack, 4, 58, (4.0, 20.0), 5.0)
    ended(rack, {})
