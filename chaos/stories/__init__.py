"""One failure story per file, each with a `play(rack)`; this module has what they share."""

from chaos import faults
from chaos.rackworld import SimRack
from covey.core.ids import JobId
from covey.core.units import GIB


def train(
    rack: SimRack,
    rounds: int,
    tenant: str = "red",
    workers: int = 4,
    key: str = "first",
    floats: int = 24,
    within_s: float = 60.0,
    on: str | None = None,
) -> JobId:
    """Submit a gang that trains with one GPU per worker."""
    spec = {
        "argv": ["trainer", str(rounds), str(floats)],
        "tenant": tenant,
        "workers": workers,
        "gpus_per_worker": 1,
        "cwd": "/",
    }
    return rack.submit(spec, f"{key}-{rack.world.seed}-{rounds}", on=on, within_s=within_s)


def working(rack: SimRack) -> list[str]:
    """Hosts that run ranks now."""
    return [name for name, host in rack.hosts.items() if host.find("trainer")]


def lenders(rack: SimRack, borrower: str) -> list[str]:
    """Hosts that hold slabs of this host's volumes."""
    memory = rack.plugin(borrower, "memory")
    if memory is None:
        return []
    return sorted({str(slab.place.lender) for slab in memory.borrowing.machine._all() if slab.place is not None})


def short_of_memory(rack: SimRack, times: int, gib: int, for_s: tuple[float, float], pause_s: float) -> None:
    """A volume of h1 is used while its lenders need their memory back, one after the other; every page is read back."""
    pager = rack.pager("h1", "vol1", 1 << 20, 60.0)
    rack.until(lambda: bool(lenders(rack, "h1")), 20.0, "a slab is lent")
    for _ in range(times):
        for host in lenders(rack, "h1"):
            faults.strike(rack.world, faults.FillMemory(host, gib * GIB, rack.rng.uniform(*for_s)))
            rack.run(rack.rng.uniform(0.5, 6.0))
        rack.run(pause_s)
    rack.until(lambda: not pager.alive, 150.0, "the pager reads everything back")
    assert pager.code == 0


def unconnected(rack: SimRack, borrower: str) -> list[str]:
    """Slabs that this host calls mapped, although its volume's process has no connection with their lender; or, where
    `Custody` knows what is in that process, has not opened this slab on it."""
    memory = rack.plugin(borrower, "memory")
    if memory is None:
        return []
    joined = {
        end.other.process.name.partition("/")[0]
        for stream in rack.world.wires.streams
        for end in (stream, stream.other)
        if end.process.name.startswith(f"{borrower}/vold-")
        and not any(one.closed or one.broken or not one.process.alive for one in (end, end.other))
    }
    mapped = [slab for slab in memory.borrowing.machine._all() if slab.state == "mapped" and slab.place is not None]
    return [
        f"slab {slab.index} of {slab.volume} is mapped at {slab.place.lender}"
        for slab in mapped
        if slab.place is not None
        and (slab.place.lender not in joined or not (rack.custody is None or rack.custody.serves(borrower, slab)))
    ]


def leaked(rack: SimRack) -> list[str]:
    """Slabs that a lender holds and no borrower uses."""
    used: set[tuple[str, str, int, int]] = set()
    for name in rack.hosts:
        memory = rack.plugin(name, "memory")
        for slab in [] if memory is None else memory.borrowing.machine._all():
            used.update((name, slab.volume, slab.index, epoch) for epoch in slab.epochs)
    found: list[str] = []
    for name in rack.hosts:
        memory = rack.plugin(name, "memory")
        for lent in [] if memory is None else memory.lending.machine.lent.values():
            key = (str(lent.borrower), lent.slab.volume, lent.slab.index, lent.slab.epoch)
            if key not in used:
                found.append(f"{name} holds {key}")
    return found
