"""Memory that an aggregator shares with one rank of its host, for what that rank pushes of one tensor.

The rank copies its contribution there, in a thread of its own, and the aggregator adds it in place: nothing of it
passes through a socket, and the aggregator's one thread copies nothing. The aggregator makes the memory once the rank
has opened the tensor, seals its size, and hands the descriptor over with the frame MEMORY; until then, and wherever
that is not possible, the rank pushes over the connection. Memory belongs to a connection: a new one begins without, so
what the old process of a rank has pushed stays as it is.

    rank    copies piece 0 | copies piece 1 | ...
                  PLACED 0 |       PLACED 1 |          40 bytes each, over the unix socket
    aggd                   | adds piece 0   | adds piece 1
"""

import fcntl
import os

from covey.kernel.mapping import map_shared
from covey.kernel.memfd import F_GET_SEALS, GROW, SHRINK


def mapped(descriptor: int, size: int) -> memoryview:
    """The memory behind a descriptor that an aggregator has handed over, which is closed. OSError when it may change
    its size, or cannot be mapped."""
    try:
        seals = fcntl.fcntl(descriptor, F_GET_SEALS)
        if seals & (SHRINK | GROW) != SHRINK | GROW or os.fstat(descriptor).st_size != size:
            raise OSError(f"the memory for pushes is not sealed, or has no {size} bytes")
        return map_shared(descriptor, size, 0)
    finally:
        os.close(descriptor)
