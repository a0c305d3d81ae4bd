"""What the processes of a job on this host say of their memory, and what each is told of the others. Pure.

Each process says what it has (`MemoryHeld`) and is told what the job may take here and what its other processes need
(`HostMemory`). Processes that a script starts by itself count too, as soon as they say something.
"""

from collections.abc import Iterable, Sequence

from covey.wire.job import HostMemory, MemoryHeld
from plugins.base import RanksSpec
from plugins.facts import MemoryInUse

BYTES_MAX = 1 << 53


def is_possible(used: MemoryHeld) -> bool:
    """Whether a process can have so much memory."""
    said = used.blocks_bytes, used.arrays_bytes, used.beside_bytes, used.peak_bytes
    return all(0 <= each <= BYTES_MAX for each in said)


def on_host(spec: RanksSpec, others: Iterable[MemoryHeld | None]) -> HostMemory:
    """What a process of these ranks is told. `others`: what each other process of them that is connected said last;
    None: nothing."""
    said = [each for each in others if each is not None]
    return HostMemory(spec.host_memory, len(spec.ranks), sum(each.beside_bytes for each in said), len(said))


def together(said: Sequence[MemoryHeld]) -> MemoryInUse:
    """What several processes have together. The peak is the sum of their peaks, which were not at one time."""
    blocks, arrays = sum(each.blocks_bytes for each in said), sum(each.arrays_bytes for each in said)
    found = blocks, arrays, sum(each.peak_bytes for each in said)
    return MemoryInUse(*(min(each, BYTES_MAX) for each in found))
