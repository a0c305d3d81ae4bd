"""The backing file of a volume: every page at rest, each with its version.

Two files: `pages` has two places for each page, `index` has an entry for each place.

    pages   [first places of all pages][second places]      sparse: a place that was never written takes no room
    index   [entries of the first places][of the second][mark][lives][lives, the one before][leaves in use]

An entry has the version of the page, the number of the batch that wrote it, a checksum of the page and one of itself
(`page_index`). The mark says up to which batch of the newest process everything is durable, and `lives` the same of
those before it.

A page is written to the place that does *not* hold its newest content, then the entry; so a process killed between the
two leaves the older content complete. And the place that is overwritten never holds the last content that was synced:
if the newest one is not synced yet, everything is synced first, and before its first write a process syncs what those
before it left. So what a FLUSH covered survives a loss of power too, whatever was being written at that moment.

Nothing is read when a volume is opened but a few blocks: the entries of a leaf are loaded when its first page is used.
Then every page of it that no mark covers is read and checked. What is torn was never promised: the other place counts.
A page that a mark covers and that does not match its checksum is a failing disk, and an error. Marks are kept for each
process, since one that never used a leaf cannot say that what an earlier one left there is whole.

A kernel that failed to sync may have dropped what was written, and says so only once: a later sync that succeeds
proves nothing. So what is not synced yet is kept in memory too, and after a failure all of it is written again, to the
same places, before the next sync counts. A disk that works again is used again.
"""

import asyncio
import errno
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, cast

from covey.checksum import crc32
from covey.ports import Disk
from plugins.memory.datapath import page_index
from plugins.memory.datapath.page_index import BATCH_BITS, BLOCK_BYTES, ENTRY_BYTES, LEAF_PAGES, Leaf, Marks
from plugins.memory.datapath.slabwire import Versions

READ_TRIES = 8
UNSYNCED_MAX = 4096
"""Pages written without a sync; about so many are kept in memory (16 MiB of 4 KiB), and checked when they are loaded
after a crash."""


class ScatterDisk(Disk, Protocol):
    """What this plugin wants of a disk beyond `covey.ports.Disk`; every one has it."""

    async def write_many_at(self, name: str, parts: Sequence[tuple[int, bytes]]) -> None:
        """`write_at` of several parts, in this order. OSError: some may be written."""


class Page(NamedTuple):
    """Content of one page under one version."""

    version: int
    data: bytes


class PageVersions:
    """Newest version on disk of each page, 0: never written. KeyError for a page that is not `ready`."""

    __slots__ = ("_leaves",)

    def __init__(self, leaves: Mapping[int, Leaf | None]) -> None:
        self._leaves = leaves

    def __getitem__(self, page: int) -> int:
        leaf = self._leaves[page // LEAF_PAGES]
        return 0 if leaf is None else leaf.version[page % LEAF_PAGES]


class Backing:
    """Files `PREFIX/pages` and `PREFIX/index` on `disk`. One writer and any number of readers at a time. `loaded` is
    called with the first page of a leaf and the versions in it, when one is loaded in which pages were written."""

    def __init__(
        self,
        disk: Disk,
        prefix: str,
        pages: int,
        page_bytes: int,
        loaded: Callable[[int, Versions], None] = lambda first, versions: None,
    ) -> None:
        self.pages, self.page_bytes = pages, page_bytes
        self.torn = 0
        """Pages whose newest place was torn and whose other place was taken."""
        self._disk, self._data_name, self._index_name = disk, f"{prefix}/pages", f"{prefix}/index"
        self._loaded = loaded
        self._leaves: dict[int, Leaf | None] = {}
        """Those that are loaded; None: no page of it was ever written."""
        self._loading: dict[int, asyncio.Lock] = {}
        self.version = PageVersions(self._leaves)
        self._in_use: list[int] = []
        """Leaves in which earlier processes wrote, as far as is known without looking."""
        self._unsynced: dict[int, Page] = {}
        """Pages whose newest content may not be durable yet; at most `UNSYNCED_MAX` and one batch."""
        self._marks = Marks()
        self._batch = self._mark = 0
        self._torn: dict[int, int] = {}
        """Pages whose place for the next content may hold half of a write that failed -> the batch of that write. Until
        it is written again, no mark covers that batch."""
        self._doubted = False
        """A sync failed: what is unsynced is written again before the next one."""
        self._settled = False
        """This process may write."""
        self._lock = asyncio.Lock()

    # ---- loading ----

    async def load(self) -> None:
        """Read what is durable and which leaves are in use. Writes nothing: `settle` comes before the first write."""
        blocks = await self._disk.read_at(self._index_name, self._mark_at, 3 * BLOCK_BYTES)
        for at in (1, 2):
            self._marks.take(blocks[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES])
        mark = page_index.mark(blocks[: page_index.MARK_BYTES])
        if mark:
            life = mark >> BATCH_BITS
            self._marks.of[life] = max(mark, self._marks.of.get(life, 0))
        leaves = await self._disk.read_at(self._index_name, self._leaf_map_at, -(-self.pages // LEAF_PAGES))
        used = not self._marks.life and mark  # written by the first version, which kept no such map
        self._in_use = [number for number, byte in enumerate(leaves) if byte or used]

    async def load_all(self) -> None:
        """Every leaf in use, one after another: only then is it known how many pages were ever written."""
        for number in self._in_use:
            await self._ready(number)

    def is_ready(self, first: int, count: int) -> bool:
        """Is it known what the disk holds of these pages?"""
        leaves = self._leaves
        number, last = first // LEAF_PAGES, (first + count - 1) // LEAF_PAGES
        return number in leaves and (number == last or all(each in leaves for each in range(number + 1, last + 1)))

    async def ready(self, first: int, count: int) -> None:
        """Find out what the disk holds of these pages. OSError: it cannot be read."""
        if not self.is_ready(first, count):
            for number in range(first // LEAF_PAGES, -(-(first + count) // LEAF_PAGES)):
                await self._ready(number)

    async def _ready(self, number: int) -> None:
        """Whoever comes while it is loaded waits for it; if that fails, tries it himself."""
        if number not in self._leaves:
            async with self._loading.setdefault(number, asyncio.Lock()):
                if number not in self._leaves:
                    await self._load(number)
            self._loading.pop(number, None)

    async def _load(self, number: int) -> None:
        first = number * LEAF_PAGES
        count = min(LEAF_PAGES, self.pages - first)
        one = await self._disk.read_at(self._index_name, self._entry_at(0, first), count * ENTRY_BYTES)
        two = await self._disk.read_at(self._index_name, self._entry_at(1, first), count * ENTRY_BYTES)
        found = page_index.load(first, (one, two), self._marks)
        if found is not None:
            await self._check(first, found)
            self._loaded(first, found.leaf.version)
        self._leaves[number] = None if found is None else found.leaf

    async def _check(self, first: int, found: page_index.Loaded) -> None:
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
        older = page_index.parsed(data, page, other)
        self.torn += 1
        leaf.version[at], leaf.checksum[at] = older.version, older.checksum
        leaf.place[at] = other if older.version else 1

    def versions(self, first: int, count: int) -> Versions:
        """`version` of a run of pages that is `ready`."""
        found = array("Q")
        while count:
            leaf, at = self._leaves[first // LEAF_PAGES], first % LEAF_PAGES
            run = min(count, LEAF_PAGES - at)
            found.extend(array("Q", bytes(8 * run)) if leaf is None else leaf.version[at : at + run])
            first, count = first + run, count - run
        return found

    async def settle(self) -> None:
        """Before the first write: what earlier processes left is durable, and this one has a life of its own, whose
        marks say nothing of their pages. Idempotent. OSError: try again."""
        async with self._lock:
            await self._settle()

    async def _settle(self) -> None:
        if self._settled:
            return
        if self._marks.life or self._marks.of:
            await self._disk.sync(self._data_name)
            await self._disk.sync(self._index_name)
        self._marks.life += 1
        try:
            at = self._mark_at + (1 + self._marks.life % 2) * BLOCK_BYTES
            await self._disk.write_at(self._index_name, at, self._marks.packed())
            await self._disk.sync(self._index_name)
        except OSError:
            self._marks.life -= 1
            raise
        self._batch = self._mark = self._marks.life << BATCH_BITS
        self._settled = True

    # ---- reading ----

    async def read(self, first: int, into: memoryview) -> Versions:
        """Fill `into` with a run of pages; their versions. A page never written is zeros. OSError when a page is not
        what was written."""
        count = len(into) // self.page_bytes
        await self.ready(first, count)
        versions = array("Q")
        page = first
        while page < first + count:
            run = self._same_place(page, first + count)
            view = into[(page - first) * self.page_bytes : (page - first + run) * self.page_bytes]
            versions.extend(await self._read_run(page, view))
            page += run
        return versions

    def _same_place(self, page: int, end: int) -> int:
        """How many pages from `page` on, of one leaf, have their newest content in the same place."""
        leaf, at = self._leaves[page // LEAF_PAGES], page % LEAF_PAGES
        most = min(end - page, LEAF_PAGES - at)
        if leaf is None:
            return most
        places = leaf.place[at : at + most]
        return len(places) - len(places.lstrip(places[:1]))

    async def _read_run(self, first: int, into: memoryview) -> Versions:
        size = self.page_bytes
        count = len(into) // size
        leaf, from_page = self._leaves[first // LEAF_PAGES], first % LEAF_PAGES
        if leaf is None:
            into[:] = bytes(len(into))
            return array("Q", bytes(8 * count))
        expected = leaf.version[from_page : from_page + count]
        if not any(expected):
            into[:] = bytes(len(into))
            return expected
        sums = leaf.checksum[from_page : from_page + count]
        offset = self._page_at(leaf.place[from_page], first)
        data = memoryview(await self._disk.read_at(self._data_name, offset, count * size))
        for at, (version, checksum) in enumerate(zip(expected, sums, strict=True)):
            page = data[at * size : (at + 1) * size]
            if version == 0:
                into[at * size : (at + 1) * size] = bytes(size)
            elif _checksum(version, first + at, page) == checksum:
                into[at * size : (at + 1) * size] = page
            else:
                found = await self._read_again(first + at, version)
                into[at * size : (at + 1) * size] = found.data
                expected[at] = found.version
        return expected

    async def _read_again(self, page: int, failed: int) -> Page:
        """Either the page was rewritten while we read it, twice: read what is newest now. Or the disk fails."""
        leaf, at = self._leaf(page)
        for _ in range(READ_TRIES):
            version, checksum = leaf.version[at], leaf.checksum[at]
            offset = self._page_at(leaf.place[at], page)
            data = await self._disk.read_at(self._data_name, offset, self.page_bytes)
            if _checksum(version, page, memoryview(data)) == checksum:
                return Page(version, data)
            if version == failed == leaf.version[at]:
                raise OSError(errno.EIO, f"page {page} is damaged on disk")
            failed = version
        raise OSError(errno.EIO, f"page {page} changes faster than it can be read")

    # ---- writing ----

    async def write(self, batch: Mapping[int, Page]) -> None:
        """On return a later read, also of another process, finds these pages; durable after `sync`. OSError: some may
        be written and some not; write them again."""
        async with self._lock:
            await self._settle()
            await self._begin_leaves(batch)
            if len(self._unsynced) >= UNSYNCED_MAX or not self._unsynced.keys().isdisjoint(batch):
                await self._sync()
            self._batch += 1
            pages = sorted(batch)
            runs = list(self._runs(pages))
            sums = [_checksum(batch[page].version, page, memoryview(batch[page].data)) for page in pages]
            places = [1 - place for place in self._places(pages)]
            try:
                await self._put(runs, places, batch, sums)
            except OSError:
                self._torn = dict.fromkeys(batch, self._batch) | self._torn
                raise
            for page, place, checksum in zip(pages, places, sums, strict=True):
                leaf, at = self._leaf(page)
                content = batch[page]
                leaf.version[at], leaf.checksum[at], leaf.place[at] = content.version, checksum, place
                self._unsynced[page] = content
                self._torn.pop(page, None)

    def _places(self, pages: Sequence[int]) -> list[int]:
        """Where the newest content of each lies."""
        found: list[int] = []
        for page in pages:
            leaf, at = self._leaf(page)
            found.append(leaf.place[at])
        return found

    async def _begin_leaves(self, batch: Mapping[int, Page]) -> None:
        """Those of the batch are loaded, and have room for versions."""
        for number in dict.fromkeys(page // LEAF_PAGES for page in batch):
            await self._ready(number)
            if self._leaves[number] is None:
                await self._disk.write_at(self._index_name, self._leaf_map_at + number, b"\1")
                self._leaves[number] = Leaf(min(LEAF_PAGES, self.pages - number * LEAF_PAGES))

    async def _put(
        self, runs: Sequence[Sequence[int]], places: Sequence[int], batch: Mapping[int, Page], sums: Sequence[int]
    ) -> None:
        """All content first, then the entries: a process killed between the two has written nothing. `places` and
        `sums` of each page, in the order of the runs."""
        pages = [page for run in runs for page in run]
        versions = [batch[page].version for page in pages]
        entries = page_index.packed_many(versions, self._batch, sums, pages, places)
        contents: list[tuple[int, bytes]] = []
        parts: list[tuple[int, bytes]] = []
        done = 0
        for run in runs:
            place = places[done]
            contents.append((self._page_at(place, run[0]), b"".join([batch[page].data for page in run])))
            mine = entries[done * ENTRY_BYTES : (done + len(run)) * ENTRY_BYTES]
            parts.append((self._entry_at(place, run[0]), mine))
            done += len(run)
        disk = cast(ScatterDisk, self._disk)
        await disk.write_many_at(self._data_name, contents)
        await disk.write_many_at(self._index_name, parts)

    async def sync(self) -> None:
        """Everything written before is durable. OSError when it may not be; everything is written anew by the next."""
        async with self._lock:
            await self._settle()
            await self._sync()

    async def _sync(self) -> None:
        if self._doubted:
            await self._write_again()
        try:
            await self._disk.sync(self._data_name)
            await self._disk.sync(self._index_name)
        except OSError:
            self._doubted = True
            raise
        self._doubted = False
        self._unsynced.clear()
        self._mark = min([self._batch, *(batch - 1 for batch in self._torn.values())])
        # if this is lost, the next process checks more pages than it must
        await self._disk.write_at(self._index_name, self._mark_at, page_index.pack_mark(self._mark))

    async def _write_again(self) -> None:
        """Where it is already: that place does not hold the last content that was synced, so nothing durable can be
        torn."""
        self._batch += 1
        pages = sorted(self._unsynced)
        sums = [leaf.checksum[at] for leaf, at in map(self._leaf, pages)]
        await self._put(list(self._runs(pages)), self._places(pages), self._unsynced, sums)

    def _leaf(self, page: int) -> tuple[Leaf, int]:
        """Of a page that was written, and where in it."""
        leaf = self._leaves[page // LEAF_PAGES]
        assert leaf is not None
        return leaf, page % LEAF_PAGES

    def _runs(self, pages: Sequence[int]) -> Iterator[list[int]]:
        """Consecutive pages of one leaf whose newest content is in the same place, together."""
        run: list[int] = []
        before = -1
        for page in pages:
            leaf, at = self._leaf(page)
            if run and (page != run[-1] + 1 or at == 0 or leaf.place[at] != before):
                yield run
                run = []
            run.append(page)
            before = leaf.place[at]
        if run:
            yield run

    async def delete(self) -> None:
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
