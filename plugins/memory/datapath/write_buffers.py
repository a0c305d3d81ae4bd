"""Memory that writes are received into, used again and again: fresh memory costs more than the copying.

A buffer comes back when its write is answered. Not if its lender failed: what a broken connection still holds of it
might be sent yet, and must not change.
"""

from typing import Final

KEPT_MAX: Final = 16
KEPT_SHORT_MAX: Final = 64
"""More writes of a page are seldom under way."""
LONG_BYTES: Final = 32 << 10
"""Shorter ones come from Python's own memory, which is quick, unless somebody says that they may come back too."""


class WriteBuffers:
    """Of one volume, by size. Those of at least `shortest` bytes are used again."""

    def __init__(self, shortest: int = LONG_BYTES) -> None:
        self._shortest = shortest
        self._free: dict[int, list[memoryview]] = {}
        self._spoiled: set[int] = set()

    def take(self, size: int) -> memoryview:
        """Its content is anything."""
        free = self._free.get(size)
        return free.pop() if free else memoryview(bytearray(size))

    def give(self, view: memoryview) -> None:
        """The write that this was taken for is over."""
        size = len(view)
        if size < self._shortest:
            return
        if self._spoiled and id(view.obj) in self._spoiled:
            self._spoiled.discard(id(view.obj))
            return
        free = self._free.get(size)
        if free is None:
            free = self._free[size] = []
        if len(free) < (KEPT_MAX if size >= LONG_BYTES else KEPT_SHORT_MAX):
            free.append(view)
        if len(self._free) > KEPT_MAX:
            del self._free[next(iter(self._free))]

    def spoil(self, view: memoryview | None) -> None:
        """Somebody may still read it: it does not come back."""
        if view is not None and isinstance(view.obj, bytearray) and len(view.obj) >= self._shortest:
            self._spoiled.add(id(view.obj))
