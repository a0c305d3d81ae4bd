"""Memory that `aggd` shares with its lanes: each piece exists for as long as some array of it does."""

import weakref
from bisect import bisect_right, insort
from typing import Any

import numpy as np
import numpy.typing as npt

from covey.ports.pages import Pages, SharedRing
from covey.wire.splicing import LEAST_BYTES
from plugins.aggregator.datapath.lanes.wire import LaneMemoryAt, Place


class LaneMemory:
    """All shared pieces of this process, and where an array is in one."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._there: dict[int, LaneMemoryAt] = {}
        """Address of its first byte -> piece."""
        self._addresses: list[int] = []
        self._pieces = 0
        self.by_number: dict[int, LaneMemoryAt] = {}

    def mapped(self, size: int) -> npt.NDArray[np.uint8]:
        """New memory of `size` bytes that lanes can see, as `memory.mapped` returns it. MemoryError."""
        if size < LEAST_BYTES:
            return np.empty(size, np.uint8)
        try:
            ring = self._pages.make_ring(size, sparse=True)
        except OSError as error:
            raise MemoryError(f"{size} bytes that lanes share: {error}") from error
        found = np.frombuffer(ring.view, np.uint8)
        self._pieces += 1
        address = _address(found)
        at = self._there[address] = self.by_number[self._pieces] = LaneMemoryAt(self._pieces, ring.name, size)
        insort(self._addresses, address)
        # arrays that are cut from this one hold it
        weakref.finalize(found, self._gone, address, at.number, ring).atexit = False
        return found

    def place(self, data: Any) -> Place | None:
        """Where an array or a buffer is, for lanes; None: no lane can see it."""
        array = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
        address = _address(array)
        index = bisect_right(self._addresses, address)
        if not index:
            return None
        first = self._addresses[index - 1]
        at, begin = self._there[first], address - first
        return None if begin + array.nbytes > at.size else (at.number, begin, begin + array.nbytes)

    def _gone(self, address: int, number: int, ring: SharedRing) -> None:
        del self._there[address], self.by_number[number]
        self._addresses.remove(address)
        ring.close()


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])
