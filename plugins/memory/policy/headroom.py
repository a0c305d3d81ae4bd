"""Headroom that follows what the host really does, instead of a fixed eighth of it.

The paper keeps 8 of 64 GB and says that the right amount depends on the machine and on what runs there (§2.5.1). What
headroom must cover is known: while slabs are on their way back, local programs keep taking memory. So headroom is what
they took in their fastest recent spell, for as long as an eviction lasts, times `SAFETY`. On a quiet host that is a few
percent; the rest can be lent. All figures come from `MemAvailable` of the machine or, where it is smaller, what the
cgroup's limit leaves (`covey.ports.probes.MemoryNow`).
"""

import msgspec

from covey.ports.probes import MemoryNow
from plugins.memory.policy.lending import PRESSURE_MAX, Headroom, lend_auto

HALF_LIFE_S = 600.0
"""Seconds after which a spell of growth counts half."""
SAFETY = 1.5
"""Factor by which a spell may be faster than any seen lately."""
FLOOR, CEILING = 0.03, 0.25
"""Shares of all memory. The floor is above the kernel's own watermarks; the ceiling is twice the paper's eighth."""
SPELL_S = 5.0
"""Seconds over which growth is measured; a shorter burst is an allocation, not a trend, and is covered by headroom's
floor."""


class HeadroomGrowth(msgspec.Struct, frozen=True):
    """How fast this host's own memory use has grown lately, as one second leaves it to the next."""

    peak_bytes_per_s: float = 0.0
    """Fastest spell seen, in bytes per second, decaying."""
    own_bytes: tuple[float, ...] = ()
    """Bytes used by the host itself (slabs lent not counted) in each of the last seconds, oldest first."""


def own_memory(memory: MemoryNow, touched_bytes: int) -> int:
    """Bytes that the host itself uses: everything in use except the touched pages of lent slabs (Infiniswap §2.5.1:
    "everything else running on the machine")."""
    return max(0, memory.total_bytes - memory.available_bytes - touched_bytes)


def grown(
    old: HeadroomGrowth, own_bytes: float, half_life_s: float = HALF_LIFE_S, spell_s: float = SPELL_S
) -> HeadroomGrowth:
    """The growth one second later. A host seen for the first time has not grown."""
    seconds = (*old.own_bytes, own_bytes)[-(round(spell_s) + 1) :]
    rate = (seconds[-1] - seconds[0]) / (len(seconds) - 1) if len(seconds) > 1 else 0.0
    return HeadroomGrowth(max(old.peak_bytes_per_s * 0.5 ** (1.0 / half_life_s), rate, 0.0), seconds)


def headroom_auto(memory: MemoryNow, growth: HeadroomGrowth, react_s: float) -> int:
    """Bytes to keep free: what the fastest recent spell would take in `react_s` seconds (the time from short of memory
    to memory back: a measurement, the answers, the grace), times 1.5; between 3 % and 25 % of all. While tasks wait for
    memory it is twice that. The paper's is fixed (Infiniswap §2.5.1)."""
    wanted = SAFETY * growth.peak_bytes_per_s * react_s
    if memory.pressure_some_avg10 > PRESSURE_MAX:
        wanted = 2 * max(wanted, FLOOR * memory.total_bytes)
    return round(min(CEILING * memory.total_bytes, max(FLOOR * memory.total_bytes, wanted)))


def lent_at_most(memory: MemoryNow, kept: Headroom | None, react_s: float) -> int:
    """Bytes that `lend = "auto"` allows for as long as the agent runs, from the host's memory at its start. `kept`
    None: headroom is measured, on a host that has not grown yet."""
    kept_bytes = headroom_auto(memory, HeadroomGrowth(), react_s) if kept is None else kept.of(memory.total_bytes)
    return lend_auto(memory.available_bytes, kept_bytes)
