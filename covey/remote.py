"""Remote memory for a job: a volume that is larger than what this host can spare, kept in the memory of others.

    with RemoteMemory.open("samples", 8 * GIB) as memory:
        memory.write(0, batch)
        batch = memory.read(0, len(batch))

The volume has a process of its own on this host (`vold`). This module connects to it over a unix socket, and to the
agent only to find it. When that process is killed, the agent starts it again and the request under way is repeated,
which is harmless: it reads or writes the same bytes. Every later read returns what was written, also after the loss of
a lender; after `flush` it is on this host's disk as well.

A volume belongs to the user who opened it first and is removed by `remove`, not by `close`. Calls may come from many
threads and take turns. Standard library and msgspec only: it runs inside training processes.

`RemoteArray` is a numpy array in such a volume; a part of it is in local memory:

    with RemoteArray("features", (1_000_000, 256), "float32", local_budget="256 MiB") as features:
        features[:] = 0
        features.array[17] += 1
"""

from covey.arrays.remote_array import RemoteArray
from covey.arrays.remote_memory import RemoteMemory
from covey.arrays.volume_link import RemoteMemoryError

__all__ = ["RemoteArray", "RemoteMemory", "RemoteMemoryError"]
