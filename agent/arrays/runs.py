"""Runs of neighbouring chunks, each handled by one system call and one request: what a call costs, a run of chunks pays
once."""

import mmap
from collections.abc import Sequence

from plugins.memory.machine.arrays.events import FetchChunk, PagingAction, PunchHole, PutInPlace, SendChunk

RUN_BYTES_MAX = 1 << 20
"""The most bytes of one run, and the longest request to a volume with pages of 4 KiB."""


def together(actions: Sequence[PagingAction], most: int) -> list[list[PagingAction]]:
    """The actions in their order, with those of one kind about neighbouring chunks in one list of at most `most`."""
    runs: list[list[PagingAction]] = []
    for action in actions:
        if runs and len(runs[-1]) < most and _goes_on(runs[-1][-1], action):
            runs[-1].append(action)
        else:
            runs.append([action])
    return runs


def _goes_on(before: PagingAction, action: PagingAction) -> bool:
    if type(before) is not type(action):
        return False
    if isinstance(before, PutInPlace) and isinstance(action, PutInPlace):
        return action.chunk == before.chunk + 1 and action.writable == before.writable
    if isinstance(before, FetchChunk | SendChunk | PunchHole) and isinstance(
        action, FetchChunk | SendChunk | PunchHole
    ):
        return action.chunk == before.chunk + 1
    return False


class StagingPlaces:
    """Memory for chunks on their way, in places of one chunk."""

    def __init__(self, places: int, chunk: int) -> None:
        self._chunk = chunk
        self._taken = bytearray(places)
        self.memory = mmap.mmap(-1, places * chunk)
        self._view = memoryview(self.memory)

    def take(self, most: int) -> range:
        """Take places side by side, at most `most` of them and as many as there are; at least one, since the machine
        counts them."""
        for count in range(most, 0, -1):
            at = self._taken.find(bytes(count))
            if at >= 0:
                self._taken[at : at + count] = b"\1" * count
                return range(at, at + count)
        raise AssertionError("every place is taken")

    def free(self, place: int) -> None:
        assert self._taken[place]
        self._taken[place] = 0

    def at(self, place: int, start: int, size: int) -> memoryview:
        """The memory of `size` bytes, `start` after the beginning of this place; it may reach into the next places
        too."""
        start += place * self._chunk
        return self._view[start : start + size]
