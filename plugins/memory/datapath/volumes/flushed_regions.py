"""Regions of a volume written since its last flush: file `unflushed`. After a crash, other pages are on this host's
disk as they were acknowledged, so they are read without waiting for a lender that may hold newer ones.

    flush:  [begins]  everything written before goes to the log   [done]  the file names what was begun meanwhile
    write:  its region is in the file, durably, before the page goes anywhere

It is a bitmap of intent, as software RAID keeps one, of regions of `REGION_PAGES`. A region costs one durable append
after a flush, and a slab that is written in several of them is named whole. Flushes that follow one another within
`MARK_S` leave the file as it is, which names too much and never too little; a volume that never flushes (swap) has
none, and pays nothing.
"""

import asyncio
import contextlib
import struct
import zlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from covey.ports.env import Env

REGION_PAGES = 256
"""Pages of a region, 1 MiB with pages of 4 KiB: the file of a terabyte has 8 MiB at most."""
MARK_S = 5.0
"""Seconds between two flushes after which the file is rewritten."""
SINGLE_MAX = 2
"""Regions of a slab that are named one by one; the next one names all of them."""
_HEAD = b"coveyuf1"
_ENTRY = struct.Struct("<III")
"""Entry of the file: first region, number of regions, checksum."""


class FlushedRegions:
    """The regions of one volume of slabs of `slab_pages` pages. Only one process uses it."""

    def __init__(self, env: Env, prefix: str, slab_pages: int) -> None:
        self._disk, self._clock, self._spawn = env.disk, env.clock, env.spawn
        self._name = f"{prefix}/unflushed"
        self._slab_pages = slab_pages
        self._before: frozenset[int] | None = None
        """Regions that the earlier process may have written after its last flush; None: any."""
        self._dirty: set[int] | None = None
        """Regions that the file names; None: there is no file, which stands for all."""
        self._flushes: list[set[int]] = []
        """Regions written since each flush under way began."""
        self._named: dict[int, int] = {}
        """Slab -> regions of it that were named one by one."""
        self._lock = asyncio.Lock()
        self._marked_s = float("-inf")
        self._begun = 0
        """Count of writes begun."""

    # ---- a process begins ----

    async def load(self) -> None:
        """Read the file that the earlier process left. A damaged file names all regions."""
        data = await self._disk.read(self._name)
        self._before = None if data is None else _regions(data)

    async def take_over(self) -> None:
        """Take over the earlier process's file before this process writes. OSError."""
        if self._before is None:
            await self._disk.delete(self._name)
        else:
            await self._replace(set(self._before))

    def were_flushed(self, first: int, count: int) -> bool:
        """Does this host's disk have these pages as the earlier process acknowledged them?"""
        return self._before is not None and self._before.isdisjoint(_of(first, count))

    async def delete(self) -> None:
        await self._disk.delete(self._name)

    # ---- writes ----

    def covers(self, first: int, count: int) -> bool:
        """May these pages be written without writing to the file first?"""
        return self._dirty is None or self._dirty.issuperset(_of(first, count))

    async def add(self, first: int, count: int) -> None:
        """Name the regions of these pages in the file, after which they may be written. OSError: the disk can neither
        add them nor delete the file."""
        async with self._lock:
            while not self.covers(first, count):
                begin, end = self._to_name(first, count)
                try:
                    await self._disk.append(self._name, _entry(begin, end - begin))
                except OSError:  # full: then the file names all, by not being there
                    await self._disk.delete(self._name)
                    self._dirty = None
                    return
                assert self._dirty is not None
                self._dirty.update(range(begin, end))

    def _to_name(self, first: int, count: int) -> tuple[int, int]:
        """The first region to name, and the one after the last."""
        slab = first // self._slab_pages
        self._named[slab] = self._named.get(slab, 0) + 1
        if self._named[slab] > SINGLE_MAX:
            first, count = slab * self._slab_pages, max(self._slab_pages, first + count - slab * self._slab_pages)
        return first // REGION_PAGES, (first + count - 1) // REGION_PAGES + 1

    def begun(self, first: int, count: int) -> None:
        """These pages are written now. Nothing awaits between `covers` and this."""
        self._begun += 1
        for since in self._flushes:
            since.update(_of(first, count))

    # ---- flushes ----

    @asynccontextmanager
    async def flushing(self) -> AsyncIterator[None]:
        """Context of a flush: within it, everything written before goes to the disk. At its end the file is rewritten
        if it is time for that; not when an error is raised within. If the disk refuses, the file names too many
        regions, which is safe."""
        since: set[int] = set()
        begun = self._begun
        self._flushes.append(since)
        try:
            yield
            if self._clock.now_s() >= self._marked_s + MARK_S:
                await self._mark(since)
            else:
                self._spawn("name what is not flushed", self._later(begun))
        finally:
            self._flushes = [other for other in self._flushes if other is not since]

    async def _later(self, begun: int) -> None:
        """Rewrite the file after `MARK_S`, unless something was written since, or another flush has done it."""
        marked_s = self._marked_s
        await asyncio.sleep(MARK_S)
        if self._marked_s == marked_s and self._begun == begun:
            since: set[int] = set()
            self._flushes.append(since)
            try:
                await self._mark(since)
            finally:
                self._flushes = [other for other in self._flushes if other is not since]

    async def _mark(self, since: set[int]) -> None:
        """Rewrite the file: only these regions were written since a flush began that is done."""
        async with self._lock:
            self._marked_s = self._clock.now_s()
            self._named.clear()
            with contextlib.suppress(OSError):  # the file is the old one, or the new one, which names less
                await self._replace(set(since))

    # ---- the file ----

    async def _replace(self, dirty: set[int]) -> None:
        self._dirty = dirty  # at once: what is not in it waits for the lock, and is appended
        runs = b"".join(_entry(begin, end - begin) for begin, end in _runs(dirty))
        await self._disk.replace(self._name, _HEAD + runs)


def _of(first: int, count: int) -> range:
    return range(first // REGION_PAGES, (first + count - 1) // REGION_PAGES + 1)


def _entry(begin: int, count: int) -> bytes:
    return _ENTRY.pack(begin, count, zlib.crc32(struct.pack("<II", begin, count)))


def _regions(data: bytes) -> frozenset[int] | None:
    """Regions that a file names; None: all, since it is damaged. An entry that is cut off at the end was never relied
    on."""
    if data[: len(_HEAD)] != _HEAD:
        return None
    body = data[len(_HEAD) :]
    found: set[int] = set()
    for at in range(0, len(body) - _ENTRY.size + 1, _ENTRY.size):
        begin, count, check = _ENTRY.unpack_from(body, at)
        if check != zlib.crc32(struct.pack("<II", begin, count)):
            return None
        found.update(range(begin, begin + count))
    return frozenset(found)


def _runs(regions: Iterable[int]) -> list[tuple[int, int]]:
    """Runs of regions: the first of each, and the one after its last."""
    runs: list[tuple[int, int]] = []
    for region in sorted(regions):
        if runs and runs[-1][1] == region:
            runs[-1] = runs[-1][0], region + 1
        else:
            runs.append((region, region + 1))
    return runs
