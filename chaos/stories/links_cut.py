"""A volume is filled, and then it is idle. The links to its lenders are reset, or a slab process is killed, or a
lender is cut off for a while. What is still called mapped has a working link within seconds; what is lent is used, or
freed within a lease; every page reads back."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import leaked, lenders
from chaos.story import ended

MAPPED_S = 5.0
"""Seconds after the end of a link within which the slab has a working one or is not called mapped. Kernels notice a
silent end within the same time again."""
LEASE_S = 60.0


def play(rack: SimRack) -> None:
    rack.settle()
    pager = rack.pager("h2", "vol1", 1 << 20, 12.0)
    rack.until(lambda: bool(lenders(rack, "h2")), 20.0, "a slab is lent")
    rack.until(lambda: not pager.alive, 60.0, "the volume is idle")
    assert pager.code == 0
    for _ in range(rack.rng.randint(1, 4)):
        strike(rack, rack.rng.choice(lenders(rack, "h2") or ["h1"]))
        rack.run(2 * MAPPED_S + 1.0)
        assert not unserved(rack, "h2"), unserved(rack, "h2")[0]
    readers = rack.readers()
    rack.until(lambda: not any(reader.alive for reader in readers), 120.0, "every page is read back")
    ended(rack, {})
    rack.run(LEASE_S)
    rack.until(lambda: not leaked(rack), LEASE_S, "no lender holds an unused slab")


def strike(rack: SimRack, lender: str) -> None:
    match rack.rng.randrange(4):
        case 0 | 1:
            faults.strike(rack.world, faults.CutLinks(lender, rack.rng.choice((0.5, 1.0))))
        case 2:
            faults.strike(rack.world, faults.Kill("program", lender, 0.0, "slabd"))
        case _:
            faults.strike(rack.world, faults.Partition(("h2",), (lender,), False, rack.rng.uniform(1.0, 9.0)))


def unserved(rack: SimRack, borrower: str) -> list[str]:
    """Slabs that are called mapped while no connection leads from the volume's process to the lender's slab process."""
    memory = rack.plugin(borrower, "memory")
    linked = {
        stream.other.host.name
        for stream in rack.world.wires.streams
        if stream.process.name.startswith(f"{borrower}/vold") and stream.process.alive
        if stream.other.process.alive and not (stream.closed or stream.broken or stream.other.closed)
    }
    return [
        f"slab {slab.index} is called mapped at {slab.lender}, to which there is no link"
        for slab in ([] if memory is None else memory.borrowing.slab_views())
        if slab.state == "mapped" and str(slab.lender) not in linked
    ]
