"""A slab process's end of slabs that a volume's process on the same host maps (`mapped_slab`).

Such a slab is in RAM as a whole, and counted so, before its borrower may map it: pages that the borrower touches first
would be charged to it, without a check whether there is room.
"""

import asyncio
import mmap

from plugins.memory.datapath.lending.slab_store import HostedSlab

POPULATE_BYTES = 4 << 20
"""Bytes brought into RAM in one go, so that other work gets its turn."""
_MADV_POPULATE_WRITE = 23


async def lend(slab: HostedSlab) -> str:
    """Lend the slab's memory; returns the name by which it is mapped. ValueError: it was freed meanwhile."""
    if not slab.mapped:
        await populate(slab)
    if not slab.live:
        raise ValueError("freed meanwhile")
    slab.touch_all()
    slab.mapped = True
    return slab.kept.shared.name


async def populate(slab: HostedSlab) -> None:
    """Bring the slab into RAM piece by piece. Without this the kernel does it in one go when memory is registered with
    a device, and holds up everything meanwhile."""
    memory, size = slab.memory.obj, len(slab.memory)
    assert isinstance(memory, mmap.mmap)
    first = len(memory) - size
    for at in range(0, size, POPULATE_BYTES):
        if slab.registered is not None or slab.mapped or not slab.live:
            return
        try:
            memory.madvise(_MADV_POPULATE_WRITE, first + at, min(POPULATE_BYTES, size - at))
        except OSError:  # a kernel before 5.14
            return
        await asyncio.sleep(0)
