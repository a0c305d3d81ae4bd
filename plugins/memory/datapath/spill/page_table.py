"""Table of a volume's pages: the newest version on this host, and where its content is.

    place   0                    never written
            1                    zeros
            2 and more           a block of the spill log: 2 + slot of the segment * blocks of a segment + block
            RING and more        a place of the ring: on its way to the log

The table is arrays over all pages, in memory that the kernel gives when it is touched: 16 bytes for each page in use,
and nothing for the rest.
"""

import mmap
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from plugins.memory.datapath.wire.slabwire import Versions
from plugins.memory.policy import spilling
from plugins.memory.policy.log_records import ROW, Rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

PART_PAGES: Final = 4096
NOWHERE: Final = 0
ZERO: Final = 1
LOG: Final = 2
RING: Final = 1 << 31
assert RING - LOG == spilling.PLACES_MAX
_LAZY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
"""Flags of a mapping; the last is MAP_NORESERVE, which has no name in Python 3.11."""
_MADV_NOHUGEPAGE = 15


def lazy_zeros(size: int) -> memoryview:
    """Zeros that take no memory until they are written. No huge pages: a volume may be used here and there."""
    memory = mmap.mmap(-1, max(mmap.PAGESIZE, size), flags=_LAZY)
    try:
        memory.madvise(_MADV_NOHUGEPAGE)
    except OSError:  # a kernel without them
        pass
    return memoryview(memory)[:size]


def runs_of(
    zeros: "NDArray[np.bool_]", first: int, most: int, but: Sequence[tuple[int, int]]
) -> list[tuple[int, int, bool]]:
    """Runs as `PageTable.zero_runs` returns them. `zeros`, shape (pages,): which pages from `first` on are zeros; it is
    written to."""
    for start, end in but:
        zeros[max(0, start - first) : max(0, end - first)] = False
    cuts = [0, *(np.flatnonzero(zeros[1:] != zeros[:-1])[:most] + 1).tolist(), len(zeros)]
    return [(first + start, end - start, bool(zeros[start])) for start, end in pairwise(cuts[: most + 1])]


class PageTable:
    """Table of a volume of `pages` pages whose log has segments of `stride` blocks. `live[slot]`: blocks of that
    segment whose record is the newest of its page."""

    def __init__(self, pages: int, stride: int) -> None:
        self.pages, self.stride = pages, stride
        versions, places, sums = lazy_zeros(8 * pages), lazy_zeros(4 * pages), lazy_zeros(4 * pages)
        self._version_bytes = versions
        self.versions, self.places, self.sums = versions.cast("Q"), places.cast("I"), sums.cast("I")
        self.all_versions: NDArray[np.uint64] = np.frombuffer(versions, np.uint64)
        self.all_places: NDArray[np.uint32] = np.frombuffer(places, np.uint32)
        self.all_sums: NDArray[np.uint32] = np.frombuffer(sums, np.uint32)
        self.live: list[int] = []
        self.zeros_died = 0
        """Number of pages that were zeros and are something newer; it only grows."""
        self._used = np.zeros(pages // PART_PAGES + 1, np.uint8)
        """Parts of which something was found on disk, or is written."""

    @property
    def slots_max(self) -> int:
        return (RING - LOG) // self.stride

    def run(self, first: int, count: int) -> Versions:
        """Versions of a run of pages."""
        found = array("Q")
        found.frombytes(self._version_bytes[8 * first : 8 * (first + count)])
        return found

    def slabs_in_use(self, slab_pages: int) -> list[int]:
        """Numbers of the slabs, of `slab_pages` pages each, in which a page was ever written."""
        places = self.all_places
        parts = np.flatnonzero(self._used) * PART_PAGES
        wide = np.arange(0, PART_PAGES, min(slab_pages, PART_PAGES))
        slabs = sorted(set(((parts[:, None] + wide) // slab_pages).ravel().tolist()))  # np.unique imports much more
        return [slab for slab in slabs if places[slab * slab_pages : (slab + 1) * slab_pages].any()]

    def are_zeros(self, first: int, count: int) -> bool:
        if count == 1:
            return self.places[first] < LOG
        return bool(self.all_places[first : first + count].max() < LOG)

    def zero_runs(
        self, first: int, count: int, most: int, but: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int, bool]]:
        """Runs of `count` (at least one) pages, cut where zeros begin or end: first page, pages, zeros or not; at most
        `most` of them. Pages in one of `but`, first page and end of each, are not called zeros."""
        return runs_of(self.all_places[first : first + count] < LOG, first, most, but)

    def use(self, page: int) -> None:
        """Note that a page is about to be written."""
        self._used[page // PART_PAGES] = 1

    def log_place(self, slot: int, block: int) -> int:
        return LOG + slot * self.stride + block

    def segment_of(self, place: int) -> tuple[int, int]:
        """Slot and block of a place in the log."""
        return divmod(place - LOG, self.stride)

    # ---- a write begins ----

    def put(self, page: int, version: int, place: int) -> bool:
        """Make this version the newest. True: the page was written before."""
        old, places = self.places[page], self.places
        places[page], self.versions[page] = place, version
        if LOG <= old < RING:
            self.live[(old - LOG) // self.stride] -= 1
        elif old == ZERO:
            self.zeros_died += 1
        return old != NOWHERE

    def put_run(self, first: int, count: int, version: int, places: "NDArray[Any] | int") -> int:
        """`put` for a run of pages; returns how many were written before."""
        old, before = self.all_places[first : first + count], count
        if int(old.min()) < LOG:
            before = int(np.count_nonzero(old))
            self.zeros_died += int(np.count_nonzero(old == ZERO))
        self._let_go(old)
        self.all_places[first : first + count] = places
        self.all_versions[first : first + count] = version
        return before

    def _let_go(self, places: "NDArray[Any]") -> None:
        """The content at these places is not the newest of its page any more."""
        if not len(places):
            return
        low, high = int(places.min()), int(places.max())
        slot = (low - LOG) // self.stride
        if low >= LOG and high < RING and slot == (high - LOG) // self.stride:  # a run that was written as one
            self.live[slot] -= len(places)
            return
        if low >= RING or high < LOG:
            return
        in_log = places[(places >= LOG) & (places < RING)]
        if len(in_log):
            slots, counts = np.unique((in_log - LOG) // self.stride, return_counts=True)
            for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
                self.live[slot] -= count

    # ---- records arrive in the log ----

    def landed(self, rows: Rows, were: "NDArray[Any]", slot: int) -> None:
        """Records are in their blocks of this segment now. `were`: place of each before, shape (rows,); a record whose
        page was written again meanwhile is dead."""
        content = rows["zeros"] == 0
        rows, were = rows[content], were[content]
        newest = self.all_places[rows["page"]] == were
        self._let_go(were[newest])
        self._take(rows[newest], slot)

    def _take(self, rows: Rows, slot: int) -> None:
        pages = rows["page"]
        self.all_places[pages] = LOG + slot * self.stride + rows["block"]
        self.all_sums[pages] = rows["crc"]
        self.live[slot] += len(rows)

    def lift(self, rows: Rows, places: "NDArray[Any]") -> None:
        """The log may not have these records: read their pages from the ring again."""
        content = rows["zeros"] == 0
        rows, places = rows[content], places[content]
        pages = rows["page"]
        old = self.all_places[pages]
        newest = (self.all_versions[pages] == rows["version"]) & (old >= LOG)
        self._let_go(old[newest])
        self.all_places[pages[newest]] = places[newest]

    def take_back(self, rows: Rows, slot: int, doubted: Sequence[int]) -> None:
        """Read pages from these records of one segment again, if their copies are in one of the doubted segments."""
        rows = rows[rows["zeros"] == 0]
        pages = rows["page"]
        places = self.all_places[pages]
        there = (self.all_versions[pages] == rows["version"]) & (places >= LOG) & (places < RING)
        there &= np.isin((places - LOG) // self.stride, doubted)
        self._let_go(places[there])
        self._take(rows[there], slot)

    # ---- loading and compaction ----

    def take_newer(self, rows: Rows, slot: int) -> None:
        """Enter rows of a segment found on disk that are newer than what is known."""
        rows = rows[rows["page"] < self.pages]
        self._used[rows["page"] // PART_PAGES] = 1
        for start, end in _rising(rows["version"]):
            part = rows[start:end]
            content = part["zeros"] == 0
            if not content.all():
                for row in part[~content]:
                    self._take_zeros(int(row["page"]), int(row["zeros"]), int(row["version"]))
                part = part[content]
            part = part[part["version"] > self.all_versions[part["page"]]]
            self._take_last(part, slot)

    def _take_zeros(self, first: int, count: int, version: int) -> None:
        count = min(count, self.pages - first)
        self._used[first // PART_PAGES : (first + count - 1) // PART_PAGES + 1] = 1
        run = slice(first, first + count)
        older = self.all_versions[run] < version
        self._let_go(self.all_places[run][older])
        self.all_versions[run][older] = version
        self.all_places[run][older] = ZERO

    def _take_last(self, rows: Rows, slot: int) -> None:
        """Enter these rows; they are sorted, so of several rows of one page the last is the newest."""
        pages = rows["page"]
        old = self.all_places[pages]
        if old.any():
            self._let_go(self.all_places[np.unique(pages)])
        self.all_versions[pages] = rows["version"]
        self.all_places[pages] = LOG + slot * self.stride + rows["block"]
        self.all_sums[pages] = rows["crc"]
        kept = self.all_places[pages] == LOG + slot * self.stride + rows["block"]
        self.live[slot] += int(np.count_nonzero(kept))

    def rows_in(self, slot: int) -> Rows:
        """Rows for a segment whose tables cannot be read: its living records, and all zeros of the volume, since it is
        not known where their records are. This looks at every page."""
        first = LOG + slot * self.stride
        pages = np.flatnonzero((self.all_places >= first) & (self.all_places < first + self.stride))
        content = np.zeros(len(pages), ROW)
        content["page"], content["version"], content["crc"] = pages, self.all_versions[pages], self.all_sums[pages]
        content["block"] = self.all_places[pages] - first
        nothing = np.flatnonzero(self.all_places == ZERO)
        new = (np.diff(nothing) != 1) | (np.diff(self.all_versions[nothing].astype(np.int64)) != 0)
        runs = np.split(nothing, np.flatnonzero(new) + 1) if len(nothing) else []
        zeros = np.zeros(len(runs), ROW)
        for at, run in enumerate(runs):
            zeros[at] = (self.all_versions[run[0]], run[0], len(run), 0, 0)
        return np.concatenate([content, zeros])

    def living(self, rows: Rows, slot: int) -> "NDArray[np.intp]":
        """Positions of the rows of a segment that a copy of it must keep: content that is the newest of its page, and
        runs of zeros that some page still is."""
        content = rows["zeros"] == 0
        kept = content & (self.all_places[rows["page"]] == LOG + slot * self.stride + rows["block"])
        runs = np.flatnonzero(~content)
        if len(runs):
            first = rows["page"][runs].astype(np.int64)
            counts = np.minimum(rows["zeros"][runs], self.pages - first)
            starts = np.cumsum(counts) - counts
            pages = np.repeat(first - starts, counts) + np.arange(counts.sum())
            is_it = (self.all_places[pages] == ZERO) & (
                self.all_versions[pages] == np.repeat(rows["version"][runs], counts)
            )
            kept[runs] = np.logical_or.reduceat(is_it, starts)
        return np.flatnonzero(kept)


def _rising(versions: "NDArray[np.uint64]") -> list[tuple[int, int]]:
    """Start and end of runs in which versions do not fall: copies that compaction made are older than the records near
    them."""
    if not len(versions):
        return []
    cuts = [0, *(np.flatnonzero(versions[1:] < versions[:-1]) + 1).tolist(), len(versions)]
    return list(pairwise(cuts))
