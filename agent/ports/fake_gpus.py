"""Simulated GPUs, for racks on a laptop: the scheduler counts and places them like real ones."""

from collections.abc import Sequence

from covey.core import HostId
from covey.ports import Gpu
from covey.units import GIB

MODEL = "simulated GPU"


def simulated_gpus(host: HostId, count: int, memory_bytes: int = 16 * GIB) -> Sequence[Gpu]:
    """`count` idle GPUs of `memory_bytes` each, with UUIDs that mark them as simulated."""
    return tuple(
        Gpu(
            index=index,
            uuid=f"GPU-sim-{host}-{index}",
            model=MODEL,
            memory_total_bytes=memory_bytes,
            memory_used_bytes=0,
            utilization=0.0,
            simulated=True,
        )
        for index in range(count)
    )
