"""A volume as a block device of a kernel or qemu: requests of all sizes at any offset, many under way on several
connections that end at any moment, over a volume with a disk, a mirrored one or one with parity. One fault after
another strikes: lenders and the volume's process die, stop or are cut off, connections are reset. Kernels hold little,
so what is sent waits in its sender's memory. No byte that was acknowledged is older afterwards, or another's, no
extent is called zero that is not, and no lender is blamed for pages that it was sent wrong."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from chaos import faults
from chaos.nbd.cells import Cells
from chaos.nbd.user import Habits, user
from chaos.rackworld import SMALL_SLABS, SimRack
from chaos.stories import leaked, lenders, unconnected
from chaos.stories.mirrored import BORROWER, VOLUME, WHOLE_S, whole
from chaos.story import ended
from covey.core.errors import Refused
from covey.core.units import parse_size
from plugins.memory.datapath.vold import control_name

SIZE_BYTES = 1 << 20
SECONDS = 45.0
PATH = "/run/covey/device.sock"
KINDS = ("disk", "mirror", "parity")
"""Kinds of volumes, played in turn by the seed."""


BLAMED = ("older content than it acknowledged", "not sealed for it")
"""What a volume says about a lender that gave back something else than it was sent. No lender does here."""


class Device(NamedTuple):
    """The volume and the kernels of one play."""

    kind: str
    """Kind of the volume, one of `KINDS`."""
    sealed: bool
    window_bytes: int
    """Window of every connection, in bytes."""
    cell_bytes: int
    habits: Habits
    strikes: Sequence[Callable[[SimRack], None]]


def play(rack: SimRack) -> None:
    rng = rack.rng
    habits = Habits(
        PATH,
        SECONDS,
        connections=rng.randint(1, 3),
        depth=rng.choice((1, 2, 4)),
        structured=rng.random() < 0.7,
        length_max=rng.choice((64 << 10, 256 << 10, SIZE_BYTES)),
    )
    play_with(
        rack,
        Device(
            KINDS[rack.world.seed % len(KINDS)],
            sealed=rng.random() < 0.5,
            window_bytes=rng.choice((16 << 10, 64 << 10, 1 << 20)),
            cell_bytes=rng.choice((512, 500, 4096, 4096)),
            habits=habits,
            strikes=(fall_silent, *[strike_one] * rng.randint(1, 2)),
        ),
    )


def play_with(rack: SimRack, device: Device) -> None:
    rng, world = rack.rng, rack.world
    world.wires.window_bytes = device.window_bytes
    for name in rack.hosts:
        rack.configure(name, {"memory": {"seal": device.sealed}})
    rack.settle()
    world.on_log.append(lambda event, fields: _blames(rack, str(fields.get("why", ""))))
    kinds: dict[str, dict[str, Any]] = {"disk": {}, "mirror": {"mirror": 2}, "parity": {"parity": "2+1"}}
    rack.ask(BORROWER, "memory.create", {"volume": VOLUME, "size_bytes": SIZE_BYTES, **kinds[device.kind]})
    rack.until(lambda: device.kind == "disk" or whole(rack), 60.0, "every slab has its members")
    rack.until(lambda: _exported(rack), 10.0, "the volume is exported")
    page_bytes = parse_size(str(SMALL_SLABS["page"]))
    cells = Cells(VOLUME, SIZE_BYTES, device.cell_bytes, page_bytes, rack.saw_wrong, rack.stale.append)
    uses = rack.hosts[BORROWER].run("nbd-user", user(cells, device.habits))
    rack.until(lambda: bool(lenders(rack, BORROWER)), 30.0, "a slab is lent")
    for strike in device.strikes:
        rack.run(rng.uniform(0.5, 5.0))
        strike(rack)
        rack.run(rng.uniform(6.0, 10.0))
        rack.until(lambda: _well(rack, device.kind), WHOLE_S, "the volume has its lenders again")
        assert not rack.stale, rack.stale[0]
    rack.until(lambda: not uses.alive, SECONDS + 200.0, "everything is read back")
    assert uses.code == 0 and cells.written > 100 and cells.checked > cells.count
    ended(rack, {})
    rack.until(lambda: not leaked(rack), 180.0, "no lender holds an unused slab")


def _blames(rack: SimRack, why: str) -> None:
    if any(words in why for words in BLAMED):
        rack.saw_wrong(f"an innocent lender is blamed: {why}")


def fall_silent(rack: SimRack) -> None:
    """Stop a lender for longer than requests are waited for, and continue it before its connections end: it reads then
    what was sent to it before, and after the volume gave it up."""
    victim = rack.rng.choice(lenders(rack, BORROWER))
    faults.strike(rack.world, faults.Pause(victim, rack.rng.uniform(2.5, 4.8), "slabd"))


def strike_one(rack: SimRack) -> None:
    """Strike one fault, which is over within some seconds. None takes what was acknowledged from two places at once."""
    rng, world = rack.rng, rack.world
    victim, for_s = rng.choice(lenders(rack, BORROWER) or ["h2"]), rng.uniform(0.5, 15.0)

    def lose_memory() -> None:
        for name in ("slab-keeper", "slabd"):
            faults.strike(world, faults.Kill("program", victim, 0.0, name))

    kinds: list[Callable[[], None]] = [
        lambda: faults.strike(world, faults.Pause(victim, for_s, "slabd")),
        lambda: faults.strike(world, faults.Kill("program", victim, 0.0, "slabd")),
        lose_memory,
        lambda: faults.strike(world, faults.Kill("program", BORROWER, 0.0, "vol")),
        lambda: faults.strike(world, faults.Pause(BORROWER, for_s, control_name(VOLUME))),
        lambda: faults.strike(world, faults.Kill("agent", rng.choice([BORROWER, victim]), rng.uniform(0.2, 4.0))),
        lambda: faults.strike(world, faults.Partition((BORROWER,), (victim,), rng.random() < 0.5, for_s)),
        lambda: faults.strike(world, faults.CutLinks(rng.choice([BORROWER, victim]))),
        lambda: faults.strike(world, faults.Slow(victim, 50.0, 0.0, for_s)),
    ]
    rng.choice(kinds)()


def _exported(rack: SimRack) -> bool:
    try:
        rack.ask(BORROWER, "memory.export", {"volume": VOLUME, "socket": PATH})
    except (Refused, TimeoutError):
        return False
    return True


def _well(rack: SimRack, kind: str) -> bool:
    memory = rack.plugin(BORROWER, "memory")
    if kind != "disk":
        return whole(rack)
    volume = None if memory is None else memory.borrowing.volumes.get(VOLUME)
    return volume is not None and volume.process.ready.is_set() and not unconnected(rack, BORROWER)
