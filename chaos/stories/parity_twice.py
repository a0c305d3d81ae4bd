"""The story `mirrored_twice` with parity: two faults at once, and often the death of the volume's process, take two
members of slabs; or the process dies in the middle of writes and a lender with it. Reads of what was lost fail, and
never return older pages, zeros or another's; it can be written anew."""

from chaos import faults
from chaos.actors.pager import Redundancy
from chaos.rackworld import SimRack
from chaos.stories import lenders, mirrored_twice
from chaos.stories.mirrored import BORROWER


def play(rack: SimRack) -> None:
    strike = in_the_middle_of_a_write if rack.rng.random() < 0.5 else mirrored_twice.two_losses
    mirrored_twice.play_with(rack, Redundancy(parity="2+1"), strike)


def in_the_middle_of_a_write(rack: SimRack) -> None:
    """Slow a lender down so far that its parities are nearly always on their way, while the pages are at their
    members."""
    slow, lost = rack.rng.sample(lenders(rack, BORROWER), 2)
    faults.strike(rack.world, faults.Slow(slow, 400.0, 0.0, rack.rng.uniform(2.0, 6.0)))
    rack.run(rack.rng.uniform(0.3, 1.5))
    faults.strike(rack.world, faults.Kill("program", BORROWER, 0.0, "vol"))
    mirrored_twice.lose(rack, lost)
