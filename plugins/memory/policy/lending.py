"""How much memory a host may lend (Infiniswap §2.5.1). What it takes back: `eviction`."""

import msgspec

from covey.core.units import format_size

BETA = 0.2
"""Weight of the newest second in the memory in use (Infiniswap §2.5.1)."""
PRESSURE_MAX = 10.0
"""Percent of the last 10 s in which some task waited for memory; above it nothing more is lent. Ours: the paper looks
at free memory only, which on Linux says little about need."""


class Headroom(msgspec.Struct, frozen=True):
    """Memory that a host keeps for itself: `fixed_bytes`, or `fraction` of all it has (Infiniswap §2.5.1: 8 GB of 64
    GB)."""

    fixed_bytes: int = 0
    fraction: float = 0.0

    def of(self, total_bytes: int) -> int:
        return max(self.fixed_bytes, round(self.fraction * total_bytes))


class Budget(msgspec.Struct, frozen=True):
    """The memory of a lending host in one second, bytes."""

    total_bytes: int
    used_bytes: float
    """Bytes in use by everything on the machine, touched pages of slabs included; smoothed."""
    used_now_bytes: int
    """Bytes in use as just measured, not smoothed."""
    pressure: float
    """Memory pressure: PSI `some avg10`, in percent."""
    headroom_bytes: int
    lend_bytes: int
    """Most bytes that are ever lent."""
    lent_bytes: int
    """Bytes of all slabs lent, at full size."""
    touched_bytes: int
    """Bytes of lent slabs that have been written, and so are part of `used_bytes` already."""
    promised_bytes: int = 0
    """Bytes that jobs of this host may take (`submit --mem`); those in use are part of `used_bytes` already."""

    @property
    def free_for_sure_bytes(self) -> float:
        """Bytes that may be lent: free by both figures, so that a dip of a second is not given away."""
        return self.total_bytes - max(self.used_bytes, self.used_now_bytes)

    @property
    def free_at_best_bytes(self) -> float:
        """Free bytes by the better figure: a host is short only if it is short by both, so a spike of a second does not
        count, and slabs that were just freed do."""
        return self.total_bytes - min(self.used_bytes, self.used_now_bytes)


def memory_used(old_bytes: float | None, measured_bytes: float, beta: float = BETA) -> float:
    """Memory in use, smoothed: EWMA with one second period (Infiniswap §2.5.1). The paper starts at 0 and so believes
    for its first seconds that the host is empty; we start at the first measurement."""
    return measured_bytes if old_bytes is None else beta * measured_bytes + (1 - beta) * old_bytes


def lend_auto(available_bytes: int, headroom_bytes: int) -> int:
    """Bytes that `lend = "auto"` means at start: half of what is free above headroom."""
    return max(0, available_bytes - headroom_bytes) // 2


def spare_bytes(budget: Budget) -> int:
    """Bytes that could be lent in addition: free memory above headroom (Infiniswap §2.5.1), less what borrowers have
    been promised but not yet touched, within the cap; 0 under pressure. Ours: nothing of what jobs may take is lent.
    How much of it they use already is not known, so it is compared with all memory, as for the next job."""
    if budget.pressure > PRESSURE_MAX:
        return 0
    untouched = max(0, budget.lent_bytes - budget.touched_bytes)
    free = int(budget.free_for_sure_bytes) - untouched
    unpromised = budget.total_bytes - budget.promised_bytes - budget.lent_bytes
    return max(0, min(min(free, unpromised) - budget.headroom_bytes, budget.lend_bytes - budget.lent_bytes))


def shortage_told(budget: Budget | None) -> str:
    """Why slabs must be taken back, for people."""
    assert budget is not None, "free memory has not been measured yet"
    free, kept = format_size(budget.free_at_best_bytes), format_size(budget.headroom_bytes)
    waits = f", tasks waited for memory {budget.pressure:.0f} % of 10 s" if budget.pressure > PRESSURE_MAX else ""
    return f"memory is low: {free} free, headroom {kept}{waits}"
