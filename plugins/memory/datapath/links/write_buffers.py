"""Memory that writes are received into, used again and again: fresh memory costs more than the copying.

A buffer comes back when its write is answered. Not if a lender of it failed: what a broken connection still holds of it
might be sent yet, and must not change, whoever else acknowledges the write.
"""

from typing import Final

import numpy as np

from plugins.memory.datapath.links.write_memory import WriteMemory

KEPT_MAX: Final = 16
KEPT_SHORT_MAX: Final = 64
"""Most free buffers of a short size: more writes of a page are seldom under way."""
KEPT_BYTES_MAX: Final = 32 << 20
"""Bytes of all free buffers together: room for the longest request, once."""
LONG_BYTES: Final = 32 << 10
"""Bytes from which buffers are used again: shorter ones come from Python's own memory, which is quick, unless the user
of `WriteBuffers` asks for more."""


def room(length: int) -> memoryview:
    """Memory for `length` bytes that will be read. A long read is not filled with zeros first: it is sent only when all
    of it was read."""
    return memoryview(bytearray(length)) if length < LONG_BYTES else np.empty(length, np.uint8).data


class WriteBuffers:
    """Write buffers of one volume, by size. Buffers of at least `shortest` bytes are used again."""

    def __init__(self, shortest: int = LONG_BYTES) -> None:
        self._shortest = shortest
        self._free: dict[int, list[memoryview]] = {}
        self._free_bytes = 0

    def take(self, size: int) -> memoryview:
        """A buffer of `size` bytes with any content."""
        free = self._free.get(size)
        if free:
            self._free_bytes -= size
            return free.pop()
        return memoryview(WriteMemory(size) if size >= self._shortest else bytearray(size))

    def give(self, view: memoryview) -> None:
        """The write for which this was taken is over: keep the buffer. Buffers that were not taken here are left
        alone."""
        memory, size = view.obj, len(view)
        if not isinstance(memory, WriteMemory) or memory.is_spoiled or self._free_bytes + size > KEPT_BYTES_MAX:
            return
        free = self._free.get(size)
        if free is None:
            free = self._free[size] = []
            if len(self._free) > KEPT_MAX:
                self._drop_a_size(size)
        if len(free) < (KEPT_MAX if size >= LONG_BYTES else KEPT_SHORT_MAX):
            free.append(view)
            self._free_bytes += size

    def _drop_a_size(self, needed: int) -> None:
        """Drop the size that came first; pages always come."""
        for size in self._free:
            if size != self._shortest and size != needed:
                self._free_bytes -= size * len(self._free[size])
                del self._free[size]
                return

    def spoil(self, view: memoryview | None) -> None:
        """The buffer may still be read by a sender: it is not used again."""
        if view is not None and isinstance(view.obj, WriteMemory):
            view.obj.is_spoiled = True
