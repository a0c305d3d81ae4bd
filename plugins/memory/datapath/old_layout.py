"""A volume in the files that it had before its spill log, read once and converted.

Two files: `pages` had two places for each page, `index` an entry for each place.

    pages   [first places of all pages][second places]      sparse: a place that was never written takes no room
    index   [entries of the first places][of the second][mark][lives][lives, the one before][leaves in use]

An entry has the version of the page, the number of the batch that wrote it, a checksum of the page and one of itself
(`old_index`). The mark says up to which batch of the newest process everything is durable, and `lives` the same of
those before it. A page whose batch no mark covers is read and checked: what is torn was never promised, and the other
place counts. A page that a mark covers and that does not match its checksum is a failing disk, and an error.
"""

import errno
from collections.abc import AsyncIterator

from covey.checksum import crc32
from covey.ports import Disk, Env
from plugins.memory.datapath import old_index
from plugins.memory.datapath.old_index import BATCH_BITS, BLOCK_BYTES, ENTRY_BYTES, LEAF_PAGES, Leaf, Marks
from plugins.memory.datapath.spill import Spill
from plugins.memory.policy.settings import REQUEST_PAGES_MAX


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


async def convert(env: Env, prefix: str, spill: Spill) -> None:
    """Bring a volume of before into its log, then delete its old files; nothing happens when there are none. It may
    end at any moment and begin again. `spill` runs. OSError says what stands in the way."""
    if not await env.disk.names(f"{prefix}/index"):
        return
    old = OldLayout(env.disk, prefix, spill.pages, spill.page_bytes)
    await old.load()
    env.log.info("converts a volume of an earlier version into a log", files=env.disk.path(f"{prefix}/index"))
    buffer = memoryview(bytearray(REQUEST_PAGES_MAX * spill.page_bytes))
    converted = 0
    async for first, leaf in old.leaves():
        at = 0
        while at < len(leaf.version):
            version = leaf.version[at]
            if version <= spill.version(first + at):
                at += 1
                continue
            spill.table.use(first + at)
            run = await old.read(leaf, first, at, buffer)
            await spill.room(run)
            for each in range(run):
                if version > spill.version(first + at + each):
                    spill.put(
                        first + at + each, 1, version, buffer[each * spill.page_bytes : (each + 1) * spill.page_bytes]
                    )
            at += run
            converted += run
    await spill.flush()
    await old.delete()
    env.log.info("converted a volume of an earlier version", pages=converted, torn=old.torn)
