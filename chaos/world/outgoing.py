"""Bytes that a process has handed over and its kernel has not taken yet.

They are views of the sender's memory, read at the moment when there is room for them: transports keep them like this,
and hand them to the kernel as its buffer empties, even after `close`. A process that writes to that memory earlier has
sent what it holds then.
"""

from collections import deque
from collections.abc import Iterable

from covey.wire.driven import Part


class Outgoing:
    """One write. `size`: bytes that the kernel has not taken."""

    __slots__ = ("_views", "size", "whole")

    def __init__(self, parts: Iterable[Part]) -> None:
        self._views = deque(memoryview(part).cast("B") for part in parts if len(part))
        self.size = self.whole = sum(map(len, self._views))

    def take(self, most: int) -> bytes:
        """The next bytes, at most `most`, as the memory is now."""
        taken: list[memoryview] = []
        left = min(most, self.size)
        self.size -= left
        while left:
            view = self._views.popleft()
            if len(view) > left:
                self._views.appendleft(view[left:])
                view = view[:left]
            taken.append(view)
            left -= len(view)
        return b"".join(taken)
