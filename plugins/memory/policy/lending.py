"""How much memory a host may lend (Infiniswap §2.5.1). What it takes back: `eviction`."""

import msgspec

from covey.core.units import format_size

BETA = 0.2
"""Weight of the newest second in the memory in use (Infiniswap §2.5.1)."""
PRESSURE_MAX = 10.0
"""Percent of the last 10 s in which some task waited for memory; above it nothing more is lent. Ours: the paper looks
at free memory only, which on Linux says little about need."""


class Headroom(msgspec.Struct, frozen=True):
    """Memory a host keeps for itself: `fixed_bytes`, or `fraction` of all it has (Infiniswap §2.5.1: 8 GB of 64 GB)."""

    fixed_bytes: int = 0
    fraction: float = 0.0

    def of(self, total_bytes: int) -> int:
        return max(self.fixed_bytes, round(self.fraction * total_bytes))


class Budget(msgspec.Struct, frozen=True):
    """The memory of a lending host in one second, bytes."""

    total_bytes: int
    used_bytes: float
    """In use by everything on the machine, the slabs' touched pages included; smoothed."""
    used_now_bytes: int
    """The same, as just measured."""
    pressure: float
    """PSI `some avg10`, percent."""
    headroom_bytes: int
    lend_bytes: int
    """Never lend more than this."""
    lent_bytes: int
    """Full size of all slabs lent."""
    touched_bytes: int
    """What of them has been written, and so is already part of `used_bytes`."""

    @property
    def free_for_sure_bytes(self) -> float:
        """What may be lent: free by both figures, so that a dip of a second is not given away."""
        return self.total_bytes - max(self.used_bytes, self.used_now_bytes)

    @property
    def free_at_best_bytes(self) -> float:
        """Short is who is short by both figures: not for a spike of a second, and no more once slabs were freed."""
        return self.total_bytes - min(self.used_bytes, self.used_now_bytes)


def memory_used(old_bytes: float | None, measured_bytes: float, beta: float = BETA) -> float:
    """Memory in use, smoothed: EWMA with one second period (Infiniswap §2.5.1). The paper starts at 0 and so believes
    for its first seconds that the host is empty; we start at the first measurement."""
    return measured_bytes if old_bytes is None else beta * measured_bytes + (1 - beta) * old_bytes


def lend_auto(available_bytes: int, headroom_bytes: int) -> int:
    """What `lend = "auto"` means at start: half of what is free above headroom."""
    return max(0, available_bytes - headroom_bytes) // 2


def spare_bytes(budget: Budget) -> int:
    """What could be lent on top of what is lent: free memory above headroom (Infiniswap §2.5.1), less what the
    borrowers have been promised but not yet touched, within the cap; 0 under pressure."""
    if budget.pressure > PRESSURE_MAX:
        return 0
    promised = max(0, budget.lent_bytes - budget.touched_bytes)
    above = budget.free_for_sure_bytes - budget.headroom_bytes - promised
    return max(0, min(int(above), budget.lend_bytes - budget.lent_bytes))


def shortage_told(budget: Budget | None) -> str:
    """Why slabs must go, for people."""
    assert budget is not None, "free memory has not been measured yet"
    free, kept = format_size(budget.free_at_best_bytes), format_size(budget.headroom_bytes)
    waits = f", tasks waited for memory {budget.pressure:.0f} % of 10 s" if budget.pressure > PRESSURE_MAX else ""
    return f"memory is low: {free} free, headroom {kept}{waits}"
