"""Decides how a request about one slab travels: one-sided (over a queue pair, or in memory that both processes map),
or to the lender's process over TCP.

A write that comes over TCP is performed by the lender's process, whole or not at all, and only if it is newer. A
one-sided one is neither, so this end keeps the rules:

    a write over a page whose last write is not durable    TCP: half done, and this process killed, that page would be
                                                           nowhere
    zeros                                                  TCP, there is nothing to send
    a copy of what is not the newest any more              TCP: the lender's process drops it
    whatever is about pages that a write is under way to   waits for that one, since the two ways have no order
    a read of a page that is written to meanwhile          is not answered with what came, maybe half of each

Everything else goes one-sided.
"""

from array import array
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np

from covey.wire.driven import Part
from plugins.memory.datapath.links.asked_in_order import NO_VERSIONS, Answered
from plugins.memory.datapath.wire.slabwire import COPY, DISCARD, READ, VERSION_BYTES, SlabOp, Versions

MASK: Final = (1 << 32) - 1
"""Mask of record numbers, which are kept in 32 bits: fewer are ever under way."""


class OwnDisk(Protocol):
    """A volume's knowledge of its pages on this host."""

    def marks(self) -> tuple[int, int]:
        """Number of the next record, and of the first record that is not durable; -1: none is sure to be."""

    def versions(self, first: int, count: int) -> Versions:
        """Newest versions of a run of pages of the volume."""


class PagesThere(Protocol):
    """Pages of one slab, reached in the lender's memory without its process. `answered` may be called before a method
    returns."""

    def write(self, first: int, versions: Versions, pages: memoryview, answered: Answered) -> None:
        """Write pages. `pages` must stay as it is until the write is answered."""

    def read(self, first: int, into: memoryview, answered: Answered) -> None: ...

    def close(self) -> None:
        """Stop reaching the pages."""


class SlabAsk:
    """A request about a run of pages, and `by_lane`, which sends it over TCP."""

    __slots__ = ("answered", "by_lane", "count", "first", "into", "op", "parts", "version")

    def __init__(
        self,
        op: SlabOp,
        first: int,
        count: int,
        version: int,
        parts: tuple[Part, ...],
        into: memoryview | None,
        answered: Answered,
        by_lane: Callable[[Answered], None],
    ) -> None:
        self.op, self.first, self.count, self.version = op, first, count, version
        self.parts, self.into, self.answered, self.by_lane = parts, into, answered, by_lane

    def overlaps(self, first: int, count: int) -> bool:
        return self.first < first + count and first < self.first + self.count


class ReadUnderWay:
    """A read under way. `spoiled`: a write was sent to one of its pages meanwhile."""

    __slots__ = ("_answered", "_reads", "count", "first", "spoiled")

    def __init__(self, first: int, count: int, answered: Answered, reads: "list[ReadUnderWay]") -> None:
        """The read is in `reads` until it is over."""
        self.first, self.count, self.spoiled = first, count, False
        self._answered, self._reads = answered, reads
        reads.append(self)

    def over(self, did: bool, versions: Versions) -> None:
        self._reads.remove(self)
        if self.spoiled:
            self._answered(False, NO_VERSIONS)
        else:
            self._answered(did, versions)


class WriteUnderWay:
    """A write under way; its pages are busy."""

    __slots__ = ("_answered", "_count", "_first", "_slab")

    def __init__(self, slab: "OneSided", first: int, count: int, answered: Answered) -> None:
        self._slab, self._first, self._count, self._answered = slab, first, count, answered

    def over(self, did: bool, versions: Versions) -> None:
        self._slab.wrote(self._first, self._count)
        self._answered(did, versions)
        self._slab.go_on()


class OneSided:
    """Sends requests about one slab, whose first page is page `first` of the volume."""

    def __init__(self, there: PagesThere, first: int, pages: int, disk: OwnDisk) -> None:
        self._there, self._disk, self._first = there, disk, first
        self._busy = bytearray(pages)
        """One byte for each page: 1 while a write to it is under way."""
        self._records = np.zeros(pages, np.uint32)
        """Number of the record of the last write to each page, lower 32 bits."""
        self._reads: list[ReadUnderWay] = []
        self._behind: list[SlabAsk] = []
        """Waiting requests in order; each waits for what came before it."""
        self._ended = False

    def starts(self, held: bytes | bytearray) -> None:
        """Begin. `held`: 1 for each page whose newest content the lender has by now: that may be nowhere else."""
        self._records[np.frombuffer(bytes(held), np.uint8) == 1] = self._disk.marks()[0] & MASK

    def is_free(self, first: int, count: int) -> bool:
        """No earlier request about these pages is under way or waits."""
        if self._behind:
            return False
        return not self._busy[first] if count == 1 else self._busy.find(1, first, first + count) < 0

    def may_write(self, page: int) -> bool:
        """May this page be written at once (where writing takes no time)? If so, its record is the last one that was
        put."""
        if not self.is_free(page, 1) or not self._is_durable(page, 1):
            return False
        self._records[page] = self._disk.marks()[0] & MASK
        return True

    def ask(self, asked: SlabAsk) -> None:
        if self._blocked(asked):
            self._behind.append(asked)
        else:
            self._go(asked)

    def end(self) -> None:
        """End. Idempotent. Waiting requests are answered with no; requests under way are answered by the pair and the
        lanes."""
        self._ended = True
        behind, self._behind = self._behind, []
        for asked in behind:
            asked.answered(False, NO_VERSIONS)
        self._there.close()

    def _blocked(self, asked: SlabAsk) -> bool:
        if self._busy.find(1, asked.first, asked.first + asked.count) >= 0:
            return True
        return any(each.overlaps(asked.first, asked.count) for each in self._behind)

    def _go(self, asked: SlabAsk) -> None:
        if asked.op is READ:
            assert asked.into is not None
            read = ReadUnderWay(asked.first, asked.count, asked.answered, self._reads)
            self._there.read(asked.first, asked.into, read.over)
        else:
            self._write(asked)

    def _write(self, asked: SlabAsk) -> None:
        first, count = asked.first, asked.count
        for read in self._reads:
            read.spoiled = read.spoiled or asked.overlaps(read.first, read.count)
        by_lane = asked.op is DISCARD or not self._is_durable(first, count)
        versions, pages = self._content(asked)
        if asked.op is COPY and versions != self._disk.versions(self._first + first, count):
            by_lane = True
        self._busy[first : first + count] = b"\1" * count
        self._records[first : first + count] = self._disk.marks()[0] & MASK
        over = WriteUnderWay(self, first, count, asked.answered).over
        if by_lane:
            asked.by_lane(over)
        else:
            self._there.write(first, versions, pages, over)

    def wrote(self, first: int, count: int) -> None:
        """A write is over (called by `WriteUnderWay`)."""
        self._busy[first : first + count] = bytes(count)

    def _content(self, asked: SlabAsk) -> tuple[Versions, memoryview]:
        if asked.op is COPY:
            versions = array("Q")
            versions.frombytes(asked.parts[0])
            assert len(versions) * VERSION_BYTES == len(asked.parts[0])
            return versions, memoryview(asked.parts[1])
        return array("Q", (asked.version,)) * asked.count, memoryview(asked.parts[0] if asked.parts else b"")

    def _is_durable(self, first: int, count: int) -> bool:
        """Is what these pages held at the lender, or something newer, on this host's disk, come what may?"""
        put, synced = self._disk.marks()
        if synced < 0:
            return False
        if count == 1:
            ahead = (int(self._records[first]) - synced) & MASK
            return not 0 < ahead <= put - synced
        ahead_of_all = self._records[first : first + count] - np.uint32(synced & MASK)
        return not bool(((ahead_of_all > 0) & (ahead_of_all <= put - synced)).any())

    def go_on(self) -> None:
        """Send waiting requests, as far as nothing is in their way any more."""
        if not self._behind:
            return
        behind, self._behind = self._behind, []
        for at, asked in enumerate(behind):
            if self._ended:
                for rest in behind[at:]:
                    rest.answered(False, NO_VERSIONS)
                return
            self.ask(asked)
