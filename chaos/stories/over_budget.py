"""Volumes on every host want three times the budget that they share, in whole agents with real gossip: agents begin
anew, lenders' processes die, the rack is split. The rack lends little more than the budget, each half of a split one
the same, what is over comes back, and no page is lost."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.story import ended

SLAB = 64 << 10
BUDGET = 8
"""Budget in slabs."""
SETTINGS = {"memory": {"budgets": {"": f"{BUDGET * 64} KiB"}, "lease": "20 s", "grace": "5 s"}}
OVER = 2
"""Most slabs above the budget, for a moment, while the rack is one."""
SEEN_S = 20.0
"""Seconds after a split within which the halves see one another again."""
BACK_S = 60.0
"""Seconds after that within which what is over is taken back: `SETTLED_S`, the grace, and once more."""


def lent_slabs(rack: SimRack) -> int:
    """Slabs that all lenders hold at this instant, whatever any host told."""
    found = 0
    for name in rack.hosts:
        memory = rack.plugin(name, "memory")
        found += 0 if memory is None else sum(lent.counted_bytes for lent in memory.lending.machine.lent.values())
    return found // SLAB


def at_most(rack: SimRack, slabs: int, seconds: float) -> int:
    """Run for `seconds`, and look every half a second; returns the most slabs that were lent."""
    most = 0
    for _ in range(round(2 * seconds)):
        rack.run(0.5)
        most = max(most, lent_slabs(rack))
        assert most <= slabs, f"{most} slabs are lent of a budget of {BUDGET}, at most {slabs} expected"
    return most


def play(rack: SimRack) -> None:
    rack.settle()
    names = sorted(rack.hosts)
    pagers = [rack.pager(host, f"vol-{host}", 6 * SLAB, 150.0) for host in names]
    most = at_most(rack, BUDGET + OVER, 35.0)
    assert most >= BUDGET - 1, f"only {most} slabs were lent of a budget of {BUDGET}"
    for _ in range(2):
        name = rack.rng.choice(names)
        faults.strike(
            rack.world, rack.rng.choice((faults.Kill("agent", name, 2.0), faults.Kill("program", name, 0.0, "slabd")))
        )
        at_most(rack, BUDGET + OVER, 12.0)
    rack.rng.shuffle(names)
    half = len(names) // 2
    faults.strike(rack.world, faults.Partition(tuple(names[:half]), tuple(names[half:]), False, 45.0))
    at_most(rack, 2 * (BUDGET + OVER), 46.0 + SEEN_S)
    rack.until(lambda: lent_slabs(rack) <= BUDGET + OVER, BACK_S, "what is over the budget is taken back")
    at_most(rack, BUDGET + OVER, 10.0)
    rack.until(lambda: not any(pager.alive for pager in pagers), 200.0, "every page is read back")
    assert all(pager.code == 0 for pager in pagers)
    ended(rack, {})
