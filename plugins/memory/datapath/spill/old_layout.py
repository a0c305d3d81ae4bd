"""A volume in the files that it had before its spill log, read once and converted.

Two files: `pages` had two places for each page, `index` an entry for each place.

    pages   [first places of all pages][second places]      sparse: a place that was never written takes no room
    index   [entries of the first places][of the second][mark][lives][lives, the one before][leaves in use]

An entry has the version of the page, the number of the batch that wrote it, a checksum of the page and one of itself
(`old_index`). The mark says up to which batch of the newest process everything is durable, and `lives` the same of
those before it. A page whose batch no mark covers is read and checked: what is torn was never promised, and the other
place counts. A page that a mark covers and that does not match its checksum is a failing disk, and an error.
"""

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Protocol, cast

from covey.ports import Disk, Env
from covey.wire.checksum import crc32
from plugins.memory.datapath.spill import old_index
from plugins.memory.datapath.spill.old_index import BATCH_BITS, BLOCK_BYTES, ENTRY_BYTES, LEAF_PAGES, Leaf, Marks
from plugins.memory.datapath.spill.spill import Spill
from plugins.memory.policy.settings import REQUEST_PAGES_MAX

STEP_BYTES = 64 << 20
"""Converted between two syncs."""
AGAIN_S = 1.0
"""Pause before what the disk refused is tried again."""


class OldLayout:
    """Files `PREFIX/pages` and `PREFIX/index` on `disk`. Nothing is written."""

    def __init__(self, disk: Disk, prefix: str, pages: int, page_bytes: int) -> None:
        self.pages, self.page_bytes = pages, page_bytes
        self.torn = 0
        """Pages whose newest place was torn and whose other place was taken."""
        self._disk, self._data_name, self._index_name = disk, f"{prefix}/pages", f"{prefix}/index"
        self._in_use: list[int] = []
        """Leaves in which pages were written, as far as is known without looking."""
        self._marks = Marks()

    # ---- loading ----

    async def load(self) -> None:
        """Read what is durable and which leaves are in use. Writes nothing: `settle` comes before the first write."""
        blocks = await self._disk.read_at(self._index_name, self._mark_at, 3 * BLOCK_BYTES)
        for at in (1, 2):
            self._marks.take(blocks[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES])
        mark = old_index.mark(blocks[: old_index.MARK_BYTES])
        if mark:
            life = mark >> BATCH_BITS
            self._marks.of[life] = max(mark, self._marks.of.get(life, 0))
        leaves = await self._disk.read_at(self._index_name, self._leaf_map_at, -(-self.pages // LEAF_PAGES))
        used = not self._marks.life and mark  # written by the first version, which kept no such map
        self._in_use = [number for number, byte in enumerate(leaves) if byte or used]

    async def leaves(self) -> AsyncIterator[tuple[int, Leaf]]:
        """First page of each leaf in which pages were written, and what is known of its pages."""
        for number in self._in_use:
            leaf = await self._load(number)
            if leaf is not None:
                yield number * LEAF_PAGES, leaf

    async def _load(self, number: int) -> Leaf | None:
        first = number * LEAF_PAGES
        count = min(LEAF_PAGES, self.pages - first)
        one = await self._disk.read_at(self._index_name, self._entry_at(0, first), count * ENTRY_BYTES)
        two = await self._disk.read_at(self._index_name, self._entry_at(1, first), count * ENTRY_BYTES)
        found = old_index.load(first, (one, two), self._marks)
        if found is not None:
            await self._check(first, found)
        return None if found is None else found.leaf

    async def _check(self, first: int, found: old_index.Loaded) -> None:
        """Pages whose newest content is torn read as the older one from now on."""
        leaf = found.leaf
        for at in found.unmarked:
            page = first + at
            data = await self._disk.read_at(self._data_name, self._page_at(leaf.place[at], page), self.page_bytes)
            if _checksum(leaf.version[at], page, memoryview(data)) != leaf.checksum[at]:
                await self._take_other(leaf, at, page)

    async def _take_other(self, leaf: Leaf, at: int, page: int) -> None:
        """The newest content is torn; the older one takes its place, or none if there was none."""
        other = 1 - leaf.place[at]
        data = await self._disk.read_at(self._index_name, self._entry_at(other, page), ENTRY_BYTES)
        older = old_index.parsed(data, page, other)
        self.torn += 1
        leaf.version[at], leaf.checksum[at] = older.version, older.checksum
        leaf.place[at] = other if older.version else 1

    # ---- reading ----

    async def read(self, leaf: Leaf, first: int, at: int, into: memoryview) -> int:
        """Fill `into` with pages of a leaf that begins at `first`, from number `at` in it on, as far as they have one
        version and lie next to one another; how many. OSError when one is not what was written."""
        size, most = self.page_bytes, min(len(into) // self.page_bytes, len(leaf.version) - at)
        run = 1
        while run < most and (leaf.version[at + run], leaf.place[at + run]) == (leaf.version[at], leaf.place[at]):
            run += 1
        offset = self._page_at(leaf.place[at], first + at)
        data = memoryview(await self._disk.read_at(self._data_name, offset, run * size))
        for each in range(run):
            page = data[each * size : (each + 1) * size]
            if _checksum(leaf.version[at + each], first + at + each, page) != leaf.checksum[at + each]:
                name = self._disk.path(self._data_name)
                raise OSError(errno.EIO, f"page {first + at + each} is damaged in {name}; next: look at the disk")
        into[: run * size] = data
        return run

    async def delete(self) -> None:
        """The index goes last: without it, the rest is nothing."""
        await self._disk.delete(self._data_name)
        await self._disk.delete(self._index_name)

    @property
    def where(self) -> str:
        """For people."""
        return self._disk.path(self._index_name)

    @property
    def _mark_at(self) -> int:
        """In a block of its own."""
        return -(-2 * self.pages * ENTRY_BYTES // BLOCK_BYTES) * BLOCK_BYTES

    @property
    def _leaf_map_at(self) -> int:
        """A byte for each leaf: not 0 when a page of it was written. It saves reading those of which none was."""
        return self._mark_at + 3 * BLOCK_BYTES

    def _page_at(self, place: int, page: int) -> int:
        return (place * self.pages + page) * self.page_bytes

    def _entry_at(self, place: int, page: int) -> int:
        return (place * self.pages + page) * ENTRY_BYTES


def _checksum(version: int, page: int, data: memoryview) -> int:
    """Of content, version and page number: content in the wrong place is wrong."""
    return crc32(data, (version ^ version >> 32 ^ page * 2654435761) & 0xFFFFFFFF)


class PunchDisk(Disk, Protocol):
    """What conversion wants of a disk beyond `covey.ports.Disk`; every one has it."""

    async def punch(self, name: str, offset: int, size: int) -> None:
        """Give the room of this part of a file back; it reads as zeros, or as it did where that cannot be."""


class Conversion:
    """Brings a volume of before into its log. It may end at any moment and begin again: what is in the log, durable, is
    given back in the old files, so it needs `STEP_BYTES` of room and no more, and is not converted twice."""

    def __init__(self, env: Env, prefix: str, spill: Spill, say: Callable[[str], None]) -> None:
        """`say`: what to tell people about it, whenever that changes; empty: nothing."""
        self._env, self._spill, self._say = env, spill, say
        self._index_name, self._data_name = f"{prefix}/index", f"{prefix}/pages"
        self._old = OldLayout(env.disk, prefix, spill.pages, spill.page_bytes)
        self._buffer = memoryview(bytearray(REQUEST_PAGES_MAX * spill.page_bytes))
        self._ready: list[tuple[int, int]] = []
        """First page and pages that are in the log, and may not be durable there."""
        self.pages = 0

    async def run(self) -> None:
        """Nothing happens when there are no old files. OSError, for what is in them; while the disk has no room, or
        refuses, it waits."""
        if not await self._env.disk.names(self._index_name):
            return
        await self._old.load()
        self._env.log.info("converts a volume of an earlier version into a log", files=self._old.where)
        async for first, leaf in self._old.leaves():
            self._say(f"it converts its files of an earlier version: {first * 10 // self._old.pages * 10} % done")
            await self._convert(first, leaf)
        await self._settle()
        await self._old.delete()
        self._say("")
        torn = self._old.torn
        self._env.log.info("converted a volume of an earlier version", pages=self.pages, torn=torn)

    async def _convert(self, first: int, leaf: Leaf) -> None:
        spill, size, at = self._spill, self._spill.page_bytes, 0
        while at < len(leaf.version):
            version, page = leaf.version[at], first + at
            if version <= spill.version(page):
                at += 1
                continue
            spill.table.use(page)
            run = await self._old.read(leaf, first, at, self._buffer)
            await self._until_taken(partial(spill.room, run))
            for each in range(run):
                if version > spill.version(page + each):
                    spill.put(page + each, 1, version, self._buffer[each * size : (each + 1) * size])
            self._ready.append((page, run))
            at += run
            self.pages += run
            if sum(count for _, count in self._ready) * size >= STEP_BYTES:
                await self._settle()

    async def _settle(self) -> None:
        """What is converted is durable, and its old places are given back."""
        await self._until_taken(self._spill.flush)
        size = self._spill.page_bytes
        for page, count in self._ready:
            for place in (0, 1):
                await cast(PunchDisk, self._env.disk).punch(
                    self._data_name, (place * self._old.pages + page) * size, count * size
                )
        self._ready.clear()

    async def _until_taken(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                return await work()
            except OSError as error:
                self._say(f"it cannot convert its files of an earlier version now: {error.strerror or error}")
                await asyncio.sleep(AGAIN_S)
