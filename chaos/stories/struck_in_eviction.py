"""A lender wants the slabs of two volumes back, which have the default size, and at a step of that a participant
fails: the borrower, its volume's process or the writer of its log, the lender, its slab process with or without the
memory, or the host that the slab moves to; or two of them do not reach one another, one is stopped for up to a minute,
or a disk is full, slow, sick, read-only or torn. Which step, whose failure and when within the step are drawn; volumes
are idle meanwhile, or not. No acknowledged page is older, wrong or another volume's, no slab is lent twice, and unused
slabs are freed within a lease."""

from collections.abc import Callable, Mapping
from typing import Any

from chaos import faults
from chaos.rackworld import OWN_SLABS, SPREAD, SimRack
from chaos.stories import leaked, lenders, unconnected
from chaos.story import READ_S, ended, not_stale
from covey.core.units import GIB
from plugins.memory.machine.borrowing.lender_search import Opening, Querying, Requesting
from plugins.memory.machine.borrowing.slab import BorrowedSlab, Closing, Migrating
from plugins.registry import PLUGINS as REGISTERED

SETTINGS = {"memory": OWN_SLABS}
PLUGINS = tuple(plugin for plugin in REGISTERED if plugin.name == "memory")
BORROWERS = {"h1": "vol1", "h2": "vol2"}
ROUNDS = (2, 4)
STEP_S = 14.0
"""Seconds within which a step is reached, or it is not in this round: no host may have room, or nothing is hot."""
CONNECTED_S = 75.0
"""Seconds after a round within which what is called mapped is connected."""
LEASE_S = 60.0
SLOW = (20.0, 100.0, 500.0)
Step = Callable[[SimRack, str, str], bool]
"""A predicate: is this step under way, between this lender and this borrower?"""


def play(rack: SimRack) -> None:
    for name in rack.hosts:  # an unsealed page of somebody else would be read as it is
        rack.configure(name, {"memory": {"seal": rack.world.seed % 3 > 0}})
    rack.spread, rack.idles = SPREAD, 0.004
    rack.settle()
    rack.forgive()
    for number, (host, volume) in enumerate(BORROWERS.items()):
        rack.pager(host, volume, 1 << 18, 1000.0, uid=1000 + number)
    rack.until(lambda: all(lenders(rack, host) for host in BORROWERS), 60.0, "slabs are lent")
    for _ in range(rack.rng.randint(*ROUNDS)):
        rack.run(rack.rng.uniform(0.5, 6.0))
        one_round(rack)
    for host in BORROWERS:
        for process in rack.hosts[host].find("pager"):
            process.signal(faults.SIGKILL)
    reading = rack.readers()
    rack.until(lambda: not any(process.alive for process in reading), READ_S, "every page is read back")
    not_stale(rack)
    ended(rack, {})
    rack.until(lambda: not leaked(rack), LEASE_S + 2.0, "no lender holds an unused slab after a lease")


def one_round(rack: SimRack) -> None:
    """Play one eviction, and one failure in it; all is over and connected afterwards."""
    rng = rack.rng
    found = [(lender, host) for host in BORROWERS for lender in lenders(rack, host)]
    if not found:
        return
    lender, borrower = rng.choice(found)
    slow = rng.random() < 0.4
    if slow:  # what was acknowledged is at the lender, and not on the disk for long
        rack.hosts[borrower].disk.slow = rng.choice(SLOW)
        rack.run(rng.uniform(0.3, 2.0))
    step, strike = rng.choice(sorted(STEPS)), rng.choice(STRIKES)
    filled = 58 if rng.random() < 0.15 else rng.choice((53, 55))  # with 58 tasks wait for memory at once
    for_s = rng.uniform(4.0, 40.0)
    faults.strike(rack.world, faults.FillMemory(lender, filled * GIB, for_s))
    rack.run_until(lambda: STEPS[step](rack, lender, borrower), STEP_S)
    rack.run(rng.choice((0.0, 0.0, rng.uniform(0.0, 0.02), rng.uniform(0.0, 1.0))))
    rack.world.mark("step", lender, f"{step}: {strike.__name__}")
    over_s = strike(rack, lender, borrower)
    rack.run(rng.uniform(0.0, 3.0) if slow else 0.0)
    rack.hosts[borrower].disk.slow = 1.0
    rack.run(max(for_s, over_s))
    faults.heal(rack.world)  # of what was paused, that its time is over
    rack.settle(90.0)
    for host in BORROWERS:
        rack.until(lambda host=host: not unconnected(rack, host), CONNECTED_S, "what is called mapped is connected")  # type: ignore[misc]


# ---- the steps -------------------------------------------------------------------------------------------------------


def _lends(rack: SimRack, lender: str, borrower: str, state: str) -> bool:
    memory = rack.plugin(lender, "memory")
    lent = [] if memory is None else memory.lending.machine.lent.values()
    return any(one.state == state and one.borrower == borrower for one in lent)


def _asks(rack: SimRack, lender: str, borrower: str) -> bool:
    memory = rack.plugin(lender, "memory")
    return memory is not None and memory.lending.machine._batch is not None


def _borrows(rack: SimRack, borrower: str, lender: str, so: Callable[[BorrowedSlab], bool]) -> bool:
    memory = rack.plugin(borrower, "memory")
    slabs = [] if memory is None else memory.borrowing.machine._all()
    return any(slab.place is not None and slab.place.lender == lender and so(slab) for slab in slabs)


def _searches(kind: type[Any]) -> Step:
    return lambda rack, lender, borrower: _borrows(rack, borrower, lender, lambda slab: isinstance(slab.search, kind))


STEPS: Mapping[str, Step] = {
    "the least active are asked for": _asks,
    "it wants it back": lambda rack, lender, borrower: _lends(rack, lender, borrower, "evicting"),
    "hosts are asked for room": _searches(Querying),
    "one is asked for a slab": _searches(Requesting),
    "the next place is opened": _searches(Opening),
    "the next place is filled": lambda rack, lender, borrower: _borrows(
        rack, borrower, lender, lambda slab: isinstance(slab.phase, Migrating) and slab.next is not None
    ),
    "the place is closed": lambda rack, lender, borrower: _borrows(
        rack, borrower, lender, lambda slab: isinstance(slab.phase, Closing)
    ),
    "it is freed": lambda rack, lender, borrower: _lends(rack, lender, borrower, "freeing"),
    "the next lender has it": lambda rack, lender, borrower: not _borrows(rack, borrower, lender, lambda slab: True),
}

# ---- the failures ----------------------------------------------------------------------------------------------------


def _program(rack: SimRack, host: str, *names: str) -> float:
    for name in names:
        faults.strike(rack.world, faults.Kill("program", host, 0.0, name))
    return 6.0


def volume_dies(rack: SimRack, lender: str, borrower: str) -> float:
    return _program(rack, borrower, "vold")


def volume_and_log_die(rack: SimRack, lender: str, borrower: str) -> float:
    return _program(rack, borrower, "vold", "spill")


def log_dies(rack: SimRack, lender: str, borrower: str) -> float:
    return _program(rack, borrower, "spill")


def slab_process_dies(rack: SimRack, lender: str, borrower: str) -> float:
    return _program(rack, lender, "slabd")


def memory_is_lost(rack: SimRack, lender: str, borrower: str) -> float:
    return _program(rack, lender, "slab-keeper", "slabd")


def next_memory_is_lost(rack: SimRack, lender: str, borrower: str) -> float:
    return _program(rack, _next(rack, lender, borrower), "slab-keeper", "slabd")


def agent_dies(rack: SimRack, lender: str, borrower: str) -> float:
    return _struck(rack, faults.Kill("agent", _either(rack, lender, borrower), rack.rng.uniform(0.2, 6.0)))


def agent_begins_anew(rack: SimRack, lender: str, borrower: str) -> float:
    return _struck(rack, faults.Restart(_either(rack, lender, borrower), rack.rng.uniform(0.2, 6.0)))


def power_fails(rack: SimRack, lender: str, borrower: str) -> float:
    return _struck(rack, faults.Kill("host", _either(rack, lender, borrower), rack.rng.uniform(1.0, 30.0)))


def dies_writing(rack: SimRack, lender: str, borrower: str) -> float:
    """Let the borrower, or its host, die in the middle of a write: what is on the disk is torn."""
    name, power = rack.rng.choice(("log", "places", "index", "volume", "agent")), rack.rng.random() < 0.5
    return _struck(rack, faults.DieWriting(borrower, name, power, back_s=rack.rng.uniform(1.0, 5.0), for_s=8.0))


def cut_off(rack: SimRack, lender: str, borrower: str) -> float:
    """Cut two of the three off from one another, or one from all others; both ways or one."""
    one, other = rack.rng.sample([lender, borrower, _next(rack, lender, borrower)], 2)
    others = tuple(name for name in rack.hosts if name != one)
    away = others if rack.rng.random() < 0.4 else (other,)
    return _struck(rack, faults.Partition((one,), away, rack.rng.random() < 0.3, rack.rng.uniform(0.5, 70.0)))


def links_are_cut(rack: SimRack, lender: str, borrower: str) -> float:
    return _struck(rack, faults.CutLinks(_either(rack, lender, borrower), rack.rng.choice((0.5, 1.0)))) + 5.0


def lender_stands_still(rack: SimRack, lender: str, borrower: str) -> float:
    """Stop the lender's slab process, its agent, or both, for 1 to 60 s."""
    for_s = rack.rng.choice((rack.rng.uniform(1.0, 10.0), rack.rng.uniform(1.0, 60.0)))
    names = rack.rng.choice((("slabd",), ("agent",), ("slabd", "slab-keeper", "agent")))
    return max(_struck(rack, faults.Pause(lender, for_s, name)) for name in names)


def next_stands_still(rack: SimRack, lender: str, borrower: str) -> float:
    return lender_stands_still(rack, _next(rack, lender, borrower), borrower)


def disk_is_sick(rack: SimRack, lender: str, borrower: str) -> float:
    """Make a disk full or read-only, or let some of its operations fail; on either host."""
    full = rack.rng.choice((0.0, 0.0, 0.05, 0.5))
    host, for_s = _either(rack, lender, borrower), rack.rng.uniform(0.5, 20.0)
    return _struck(rack, faults.FillDisk(host, full, for_s, read_only=full == 0.0 and rack.rng.random() < 0.5)) + 2.0


def disk_is_slow(rack: SimRack, lender: str, borrower: str) -> float:
    return _struck(rack, faults.SlowDisk(borrower, rack.rng.choice((50.0, 500.0, 3000.0)), rack.rng.uniform(2.0, 12.0)))


def _struck(rack: SimRack, fault: faults.AnyFault) -> float:
    faults.strike(rack.world, fault)
    return fault.for_s


def _either(rack: SimRack, lender: str, borrower: str) -> str:
    return rack.rng.choice((lender, borrower))


def _next(rack: SimRack, lender: str, borrower: str) -> str:
    """The host that the slab moves to, if one was chosen; else another host."""
    memory = rack.plugin(borrower, "memory")
    slabs = [] if memory is None else memory.borrowing.machine._all()
    chosen = [str(slab.next.lender) for slab in slabs if slab.next is not None]
    others = [name for name in rack.hosts if name not in (lender, borrower)]
    return rack.rng.choice(sorted(set(chosen) - {lender}) or others)


STRIKES: tuple[Callable[[SimRack, str, str], float], ...] = (
    volume_dies,
    volume_and_log_die,
    log_dies,
    slab_process_dies,
    memory_is_lost,
    next_memory_is_lost,
    agent_dies,
    agent_begins_anew,
    power_fails,
    power_fails,
    dies_writing,
    cut_off,
    cut_off,
    links_are_cut,
    lender_stands_still,
    lender_stands_still,
    next_stands_still,
    disk_is_sick,
    disk_is_slow,
)
