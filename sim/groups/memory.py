"""What co-located jobs cost each other in memory, and what spilling gives back (Harmony §4.1, §4.3.3, §4.4.8).

A managed runtime collects garbage more often the fuller its heap is: for a heap of which the share x is alive, a
collection goes through x and wins 1 - x, so its cost per allocated byte is in proportion to x / (1 - x). At x = 1
nothing can be allocated. Input data may lie on disk instead, a share of each job; it is reloaded in the background, one
pass over the data in each iteration, and costs processor time to be made into objects again. When the disk does not
keep up, the whole group waits for it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from covey.core.spill_walk import Climb, climbed, spill_first

HOST_GB = 28.0
"""Heap of a host: 32 GB (§4.4.2) less what the system needs."""
OBJECTS = 1.5
"""Bytes in the heap per byte of a data set. On 16 hosts the two larger data sets of NMF and MLR fit, and with Lasso's
they do not (figure 4.3): so between 1.1 and 1.9."""
DISK_GB_S = 0.125
"""Disk bandwidth of an m4.2xlarge in GB/s (1,000 Mbit/s)."""
GC = 0.05
"""Share of computing lost to collections at x = 1/2. Ours: 20 % at 0.8."""
RELOAD_S_PER_GB = 0.4
"""Processor seconds of a host for each GB it reads back. Ours."""
BLOCKS = 40
"""Number of blocks in which a job's input is spilled. Ours."""
FULL_MAX = 0.9
"""Share of the heap above which no operator would start a job on so few hosts."""
TO_FILL = 0.7
"""Share of the heap that the first guess of what to spill fills."""
FULLEST = 0.99
"""Share of the heap at which collections are computed when nothing more can be spilled and the heap is still
over-full: models are spilled too."""


class Load(NamedTuple):
    """What one job needs in the memory of a group."""

    comp_s: float
    """Seconds of a COMP subtask when memory is no concern."""
    comm_s: float
    input_gb: float
    """GB of input on each host of the group."""
    model_gb: float


class MemoryEffect(NamedTuple):
    """How memory changes the times of a group."""

    comp_s: list[float]
    """COMP of each job, collections, reloading and waiting for the disk included."""
    cpu_s: list[float]
    """COMP of each job without waiting for the disk: what processors are busy with, and what a profile is made of."""
    spilled: list[float]
    """Share of each job's input on disk."""
    full: float
    """Share of the heap that is in use, 0..1 and more."""


def collecting(full: float) -> float:
    """Computing lost to collections, as a share of computing, when the share `full` of the heap is alive."""
    full = min(full, FULLEST)
    return GC * full / (1 - full)


def felt(loads: Sequence[Load], spilled: Sequence[float]) -> MemoryEffect:
    """The effect of memory on a group whose jobs have these shares of their input on disk."""
    alive = sum(
        (load.model_gb + (1 - part) * load.input_gb) * OBJECTS for load, part in zip(loads, spilled, strict=True)
    )
    full = alive / HOST_GB
    lost = 1 + collecting(full)
    read = [part * load.input_gb for load, part in zip(loads, spilled, strict=True)]
    comp = [load.comp_s * lost + RELOAD_S_PER_GB * gb for load, gb in zip(loads, read, strict=True)]
    disk_s, took = sum(read) / DISK_GB_S, iteration_s(loads, comp)
    if disk_s > took and sum(comp) > 0:
        least = disk_s if len(loads) > 1 else sum(comp) + disk_s - took
        slower = max(1.0, least / sum(comp))
        return MemoryEffect([each * slower for each in comp], comp, list(spilled), full)
    return MemoryEffect(comp, comp, list(spilled), full)


def resident(loads: Sequence[Load]) -> MemoryEffect:
    """The effect of memory on a group that spills nothing."""
    return felt(loads, [0.0] * len(loads))


def spilling(loads: Sequence[Load]) -> MemoryEffect:
    """The effect of memory on a group whose jobs have walked to the shares that make its iteration shortest, the
    largest input first."""
    size = sum(load.input_gb for load in loads) * OBJECTS
    models = sum(load.model_gb for load in loads) * OBJECTS
    first = spill_first(size, models, HOST_GB * TO_FILL)
    shares = [first if load.input_gb > 0 else 0.0 for load in loads]
    if size + models <= HOST_GB / 2:
        return felt(loads, shares)
    for at in sorted(range(len(loads)), key=lambda n: -loads[n].input_gb):
        if loads[at].input_gb <= 0:
            continue

        def took(blocks: int, at: int = at) -> float:
            found = felt(loads, [*shares[:at], blocks / BLOCKS, *shares[at + 1 :]])
            return iteration_s(loads, found.comp_s) + 0.01 * sum(found.comp_s)

        shares[at] = climbed(Climb(BLOCKS, BLOCKS, round(shares[at] * BLOCKS)), took).at / BLOCKS
    return felt(loads, shares)


def hosts_least(input_gb: float, model_gb: float) -> int:
    """Fewest hosts on which a job fits alone without spilling."""
    room = HOST_GB * FULL_MAX
    return max(1, -int(-(input_gb + model_gb) * OBJECTS // room))


def iteration_s(loads: Sequence[Load], comp: Sequence[float]) -> float:
    """Seconds of a group's iteration when the jobs' COMPs take `comp` (equation 4.1)."""
    longest = max((own + load.comm_s for load, own in zip(loads, comp, strict=True)), default=0.0)
    return max(sum(comp), sum(load.comm_s for load in loads), longest)
