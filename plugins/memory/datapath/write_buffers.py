"""Memory that long writes are received into, used again and again: fresh memory costs more than the copying.

A buffer comes back when its write is answered. Not if its lender failed: what a broken connection still holds of it
might be sent yet, and must not change.
"""

from typing import Final

KEPT_MAX: Final = 16
LONG_BYTES: Final = 32 << 10
"""Shorter ones come from Python's own memory, which is quick."""


class WriteBuffers:
    """Of one volume, by size."""

    def __init__(self) -> None:
        self._free: dict[int, list[bytearray]] = {}
        self._spoiled: set[int] = set()

    def take(self, size: int) -> memoryview:
        """Its content is anything."""
        free = self._free.get(size)
        return memoryview(free.pop() if free else bytearray(size))

    def give(self, view: memoryview) -> None:
        """The write that this was taken for is over."""
        buffer, size = view.obj, len(view)
        if id(buffer) in self._spoiled:
            self._spoiled.discard(id(buffer))
        elif size >= LONG_BYTES and isinstance(buffer, bytearray):
            free = self._free.setdefault(size, [])
            if len(free) < KEPT_MAX:
                free.append(buffer)
            if len(self._free) > KEPT_MAX:
                del self._free[next(iter(self._free))]

    def spoil(self, view: memoryview | None) -> None:
        """Somebody may still read it: it does not come back."""
        if view is not None and isinstance(view.obj, bytearray) and len(view.obj) >= LONG_BYTES:
            self._spoiled.add(id(view.obj))
