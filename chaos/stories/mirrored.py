"""A volume without a disk under one fault after another, each over and its members whole again before the next: a
lender or the volume's process dies, a host loses power, is cut off, stops or needs its memory, links are reset, the
disk that says who is whole refuses; and often the volume's process dies in the middle of that. No acknowledged page is
lost, older or another's, no two members of a slab lie on one host, and afterwards nothing unused is lent."""

from collections.abc import Callable

from chaos import faults
from chaos.actors.pager import Redundancy
from chaos.rackworld import SimRack
from chaos.stories import leaked, lenders
from chaos.story import READ_S, ended
from chaos.world.world import World
from covey.core.units import GIB
from plugins.memory.datapath.vold import control_name, prefix

BORROWER, VOLUME = "h1", "vol1"
WHOLE_S = 90.0
"""Seconds after a fault within which every slab has two members again: a host is called gone, others are asked, pages
are copied."""


class MembersApart:
    """No two members of a slab lie on one host, and no page of the volume on the borrower's disk."""

    name, every_s = "members of a slab lie apart", 0.5

    def __init__(self, rack: SimRack) -> None:
        self.rack = rack

    def check(self, world: World) -> None:
        held: dict[tuple[str, int], set[str]] = {}
        memory = self.rack.plugin(BORROWER, "memory")
        for slab in [] if memory is None else memory.borrowing.machine._all():
            for place in slab.places:
                mine = held.setdefault((slab.volume, slab.index // slab.members), set())
                others = {str(p.lender) for p in slab.places if p is not place}
                assert place.lender not in mine - others, f"{slab.subject} has two members on {place.lender}"
                mine.add(str(place.lender))
        files = self.rack.hosts[BORROWER].disk.files
        assert not [name for name in files if name.startswith(f"{prefix(VOLUME)}/log")], (
            "a volume without a disk has one"
        )


def play(rack: SimRack) -> None:
    play_with(rack, Redundancy(mirror=2))


def play_with(rack: SimRack, kind: Redundancy) -> None:
    rack.settle()
    rack.world.watch(MembersApart(rack))
    pager = rack.pager(BORROWER, VOLUME, 512 << 10, 80.0, kind=kind)
    rack.until(lambda: whole(rack), 60.0, "every slab has its members")
    for _ in range(rack.rng.randint(2, 4)):
        rack.run(rack.rng.uniform(0.5, 8.0))
        strike_one(rack)
        if rack.rng.random() < 0.5:  # and what its process knows is gone, in the middle of whatever it does about that
            rack.run(rack.rng.uniform(0.0, 6.0))
            killed = faults.Kill("program", BORROWER, 0.0, "vol"), faults.Kill("agent", BORROWER, 1.0)
            faults.strike(rack.world, killed[rack.rng.random() < 0.3])
        rack.run(rack.rng.uniform(6.0, 12.0))
        rack.until(lambda: whole(rack), WHOLE_S, "every slab has its members again")
    rack.until(lambda: not pager.alive, 200.0, "the pager reads everything back")
    if (
        rack.hosts[BORROWER].booted > 1.0
    ):  # it lost power, and the pager with it: another one reads what was acknowledged
        readers = rack.readers()
        rack.until(lambda: not any(reader.alive for reader in readers), READ_S, "everything is read back")
    else:
        assert pager.code == 0
    ended(rack, {})
    rack.until(lambda: not leaked(rack), 180.0, "no lender holds an unused slab")


def strike_one(rack: SimRack) -> None:
    """Strike one fault, which is over within some seconds."""
    rng, world = rack.rng, rack.world
    victim = rng.choice(lenders(rack, BORROWER) or ["h2"])
    for_s = rng.uniform(0.5, 15.0)
    others = tuple(name for name in rack.hosts if name != victim)
    away = tuple(name for name in rack.hosts if name != BORROWER)

    def lose_memory() -> None:
        for name in ("slab-keeper", "slabd"):
            faults.strike(world, faults.Kill("program", victim, 0.0, name))

    kinds: list[Callable[[], None]] = [
        lambda: faults.strike(world, faults.Kill("program", victim, 0.0, "slabd")),
        lose_memory,
        lambda: faults.strike(world, faults.Kill("host", victim, for_s)),
        lambda: faults.strike(world, faults.Kill("program", BORROWER, 0.0, "vol")),
        lambda: faults.strike(world, faults.Kill("agent", rng.choice([BORROWER, victim]), rng.uniform(0.2, 4.0))),
        lambda: faults.strike(world, faults.Pause(victim, for_s, "slabd")),
        lambda: faults.strike(world, faults.Pause(BORROWER, for_s, control_name(VOLUME))),
        lambda: faults.strike(world, faults.Partition((victim,), others, False, for_s)),
        lambda: faults.strike(world, faults.Partition((BORROWER,), away, False, for_s)),
        lambda: faults.strike(world, faults.Partition((BORROWER,), (victim,), rng.random() < 0.5, for_s)),
        lambda: faults.strike(world, faults.CutLinks(rng.choice([BORROWER, victim]))),
        lambda: faults.strike(world, faults.FillMemory(victim, rng.choice([24, 48]) * GIB, for_s)),
        lambda: faults.strike(world, faults.FillDisk(BORROWER, rng.choice([0.0, 0.5]), rng.uniform(0.5, 6.0))),
        lambda: faults.strike(world, faults.Slow(victim, 50.0, 0.0, for_s)),
        lambda: faults.strike(world, faults.Kill("host", BORROWER, rng.uniform(1.0, 8.0))),
    ]
    rng.choice(kinds)()


def whole(rack: SimRack) -> bool:
    """Whether all slabs are whole, as the agent knows from the volume's process."""
    memory = rack.plugin(BORROWER, "memory")
    volume = None if memory is None else memory.borrowing.volumes.get(VOLUME)
    if volume is None or not volume.process.ready.is_set():
        return False
    slabs = memory.borrowing.machine.volumes.get(VOLUME)
    return slabs is not None and volume.formed() == volume.slabs and all(s.state == "mapped" for s in slabs.slabs)
