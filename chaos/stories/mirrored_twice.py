"""Two faults at once take both members of slabs of a volume without a disk: one member misses writes, since its lender
is cut off or stopped, and before another one is filled the other lender's slab process dies with its keeper, and often
the volume's own process. Reads of what was lost fail, and never return older pages, zeros or another's; it can be
written anew."""

from collections.abc import Callable

from chaos import faults
from chaos.actors.pager import Redundancy
from chaos.rackworld import SimRack
from chaos.stories import leaked, lenders
from chaos.stories.mirrored import BORROWER, VOLUME, whole
from chaos.story import READ_S, ended


def play(rack: SimRack) -> None:
    play_with(rack, Redundancy(mirror=2))


def two_losses(rack: SimRack) -> None:
    """Let one member miss writes, and lose the other."""
    first, second = rack.rng.sample(lenders(rack, BORROWER), 2)
    for_s = rack.rng.uniform(3.0, 12.0)
    if rack.rng.random() < 0.6:
        faults.strike(rack.world, faults.Partition((BORROWER,), (first,), False, for_s))
    else:
        faults.strike(rack.world, faults.Pause(first, for_s, "slabd"))
    rack.run(rack.rng.uniform(0.5, 6.0))
    if rack.rng.random() < 0.8:
        faults.strike(rack.world, faults.Kill("program", BORROWER, 0.0, "vol"))
    lose(rack, second)


def lose(rack: SimRack, lender: str) -> None:
    """Kill the lender's slab process and its keeper, so that what it lends is lost."""
    for name in ("slab-keeper", "slabd"):
        faults.strike(rack.world, faults.Kill("program", lender, 0.0, name))


def play_with(rack: SimRack, kind: Redundancy, strike: Callable[[SimRack], None] = two_losses) -> None:
    rack.settle()
    pager = rack.pager(BORROWER, VOLUME, 256 << 10, 600.0, kind=kind)
    rack.until(lambda: whole(rack), 60.0, "every slab has its members")
    rack.run(rack.rng.uniform(1.0, 6.0))
    strike(rack)
    rack.run(rack.rng.uniform(0.0, 20.0))
    pager.signal(faults.SIGKILL)
    menders = rack.menders(BORROWER)
    rack.until(lambda: not any(each.alive for each in menders), 40 * READ_S, "what was lost is written anew")
    assert all(each.code == 0 for each in menders)
    ended(rack, {})
    rack.until(lambda: not leaked(rack), 180.0, "no lender holds an unused slab")
