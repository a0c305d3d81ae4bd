"""The backing file of a volume: every page at rest, each with its version.

Two files: `pages` has two places for each page, `index` has an entry for each place.

    pages   [first places of all pages][second places]      sparse: a place that was never written takes no room
    index   [entries of the first places][of the second][mark]

An entry has the version of the page, the number of the batch that wrote it, a checksum of the page and one of itself.
The mark says up to which batch everything is durable.

A page is written to the place that does *not* hold its newest content, then the entry; so a process killed between the
two leaves the older content complete. And the place that is overwritten never holds the last content that was synced:
if the newest one is not synced yet, everything is synced first. So what a FLUSH covered survives a loss of power too,
whatever was being written at that moment.

When a volume is loaded, every page written after the mark is read and checked. What is torn was never promised: its
entry is taken back and the other place counts. After that a page that does not match its checksum is a failing disk,
and an error.

A kernel that failed to sync may have dropped what was written, and says so only once: a later sync that succeeds
proves nothing. So what is not synced yet is kept in memory too, and after a failure all of it is written again, to the
same places, before the next sync counts. A disk that works again is used again.
"""

import asyncio
import errno
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from covey.checksum import crc32
from covey.ports import Disk
from plugins.memory.datapath.slabwire import Versions

_ENTRY = struct.Struct("<QQII")
_SIGNED = struct.Struct("<QQIQ")
_MARK = struct.Struct("<QQ")
ENTRY_BYTES = _ENTRY.size
_LOAD_ENTRIES = 1 << 16
READ_TRIES = 8
UNSYNCED_MAX = 4096
"""Pages written without a sync; about so many are kept in memory (16 MiB of 4 KiB), and checked when the volume is
loaded."""


class Page(NamedTuple):
    """Content of one page under one version."""

    version: int
    data: bytes


class _Entry(NamedTuple):
    version: int
    batch: int
    checksum: int
    """Of the page."""


class Backing:
    """Files `PREFIX/pages` and `PREFIX/index` on `disk`. One writer and any number of readers at a time."""

    def __init__(self, disk: Disk, prefix: str, pages: int, page_bytes: int) -> None:
        self.pages, self.page_bytes = pages, page_bytes
        self.version = array("Q", bytes(8 * pages))
        """Newest version on disk of each page; 0: never written."""
        self.torn = 0
        """Pages whose newest place was torn and whose other place was taken."""
        self._disk, self._data_name, self._index_name = disk, f"{prefix}/pages", f"{prefix}/index"
        self._checksum = array("I", bytes(4 * pages))
        self._place = bytearray(b"\1" * pages)
        """Which place holds the newest version; the first write goes to place 0."""
        self._unsynced: dict[int, Page] = {}
        """Pages whose newest content may not be durable yet; at most `UNSYNCED_MAX` and one batch."""
        self._batch = self._mark = 0
        self._torn: dict[int, int] = {}
        """Pages whose place for the next content may hold half of a write that failed -> the batch of that write. Until
        it is written again, no mark covers that batch."""
        self._doubted = False
        """A sync failed: what is unsynced is written again before the next one."""
        self._unsettled = False
        """Pages were found that no mark covers."""
        self._torn_at: list[int] = []
        """Where in the index the entries of torn pages stand."""
        self._lock = asyncio.Lock()

    async def load(self) -> None:
        """Read the index, and write nothing: `settle` comes before the first write. Entries that are no entries (torn,
        never written) count as never written."""
        mark, signature = _MARK.unpack(await self._disk.read_at(self._index_name, self._mark_at, _MARK.size))
        self._mark = self._batch = mark if signature == _signature(_Entry(mark, 0, 0), 0, 0) else 0
        unmarked: set[int] = set()
        twice: list[int] = []
        for place in (0, 1):
            for first in range(0, self.pages, _LOAD_ENTRIES):
                count = min(_LOAD_ENTRIES, self.pages - first)
                data = await self._disk.read_at(self._index_name, self._entry_at(place, first), count * ENTRY_BYTES)
                if data.count(0) != len(data):
                    self._load(place, first, data, unmarked, twice)
        for page in twice:
            await self._take_later(page, unmarked)
        await self._check(unmarked)

    def _load(self, place: int, first: int, data: bytes, unmarked: set[int], twice: list[int]) -> None:
        """`unmarked`: pages whose newest entry is of a batch after the mark. `twice`: those of which both places have
        the newest version, since a batch that failed in part was written again."""
        for page in range(first, first + len(data) // ENTRY_BYTES):
            entry = _parsed(data[(page - first) * ENTRY_BYTES : (page - first + 1) * ENTRY_BYTES], page, place)
            if entry is None:
                continue
            self._batch = max(self._batch, entry.batch)
            if entry.version > self.version[page]:
                self.version[page], self._checksum[page], self._place[page] = entry.version, entry.checksum, place
                (unmarked.add if entry.batch > self._mark else unmarked.discard)(page)
            elif entry.version == self.version[page]:
                twice.append(page)

    async def _take_later(self, page: int, unmarked: set[int]) -> None:
        """Of two places with one version that of the later batch counts: the other is where the next content goes, and
        may hold half of it."""
        at = {place: await self._entry(place, page) for place in (0, 1)}
        place = max(at, key=lambda place: at[place].batch)
        self._checksum[page], self._place[page] = at[place].checksum, place
        (unmarked.add if at[place].batch > self._mark else unmarked.discard)(page)

    async def _entry(self, place: int, page: int) -> _Entry:
        """Version 0 when there is none."""
        data = await self._disk.read_at(self._index_name, self._entry_at(place, page), ENTRY_BYTES)
        return _parsed(data, page, place) or _Entry(0, 0, 0)

    async def _check(self, unmarked: set[int]) -> None:
        """Pages whose newest content is torn read as the older one from now on."""
        self._unsettled = bool(unmarked)
        for page in sorted(unmarked):
            data = await self._disk.read_at(self._data_name, self._page_at(self._place[page], page), self.page_bytes)
            if _checksum(self.version[page], page, memoryview(data)) != self._checksum[page]:
                await self._take_other(page)

    async def _take_other(self, page: int) -> None:
        """The newest content is torn; the older one takes its place, or none if there was none."""
        place = self._place[page]
        self._torn_at.append(self._entry_at(place, page))
        older = await self._entry(1 - place, page)
        self.torn += 1
        self.version[page], self._checksum[page] = older.version, older.checksum
        self._place[page] = 1 - place if older.version else 1

    async def settle(self) -> None:
        """Take back what is torn; then all that is left is durable, and marked so. Idempotent. OSError: try again."""
        async with self._lock:
            await self._settle()

    async def _settle(self) -> None:
        if not self._unsettled:
            return
        for entry_at in self._torn_at:
            await self._disk.write_at(self._index_name, entry_at, bytes(ENTRY_BYTES))
        await self._sync()
        self._torn_at.clear()
        self._unsettled = False

    # ---- reading ----

    async def read(self, first: int, into: memoryview) -> Versions:
        """Fill `into` with a run of pages; their versions. A page never written is zeros. OSError when a page is not
        what was written."""
        count = len(into) // self.page_bytes
        versions = array("Q")
        page = first
        while page < first + count:
            run = self._same_place(page, first + count)
            view = into[(page - first) * self.page_bytes : (page - first + run) * self.page_bytes]
            versions.extend(await self._read_run(page, view))
            page += run
        return versions

    def _same_place(self, page: int, end: int) -> int:
        """How many pages from `page` on have their newest content in the same place."""
        run = 1
        while page + run < end and self._place[page + run] == self._place[page]:
            run += 1
        return run

    async def _read_run(self, first: int, into: memoryview) -> Versions:
        size = self.page_bytes
        count = len(into) // size
        expected = self.version[first : first + count]
        if not any(expected):
            into[:] = bytes(len(into))
            return expected
        sums = self._checksum[first : first + count]
        offset = self._page_at(self._place[first], first)
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
        for _ in range(READ_TRIES):
            version, checksum = self.version[page], self._checksum[page]
            offset = self._page_at(self._place[page], page)
            data = await self._disk.read_at(self._data_name, offset, self.page_bytes)
            if _checksum(version, page, memoryview(data)) == checksum:
                return Page(version, data)
            if version == failed == self.version[page]:
                raise OSError(errno.EIO, f"page {page} is damaged on disk")
            failed = version
        raise OSError(errno.EIO, f"page {page} changes faster than it can be read")

    # ---- writing ----

    async def write(self, batch: Mapping[int, Page]) -> None:
        """On return a later read, also of another process, finds these pages; durable after `sync`. OSError: some may
        be written and some not; write them again."""
        async with self._lock:
            await self._settle()
            if len(self._unsynced) >= UNSYNCED_MAX or not self._unsynced.keys().isdisjoint(batch):
                await self._sync()
            self._batch += 1
            try:
                for run in _runs(sorted(batch), self._place):
                    await self._write_run(run, batch)
            except OSError:
                self._torn = dict.fromkeys(batch, self._batch) | self._torn
                raise

    async def _write_run(self, run: Sequence[int], batch: Mapping[int, Page]) -> None:
        place = 1 - self._place[run[0]]
        sums = [_checksum(batch[page].version, page, memoryview(batch[page].data)) for page in run]
        await self._put(run, place, batch, sums)
        for page, checksum in zip(run, sums, strict=True):
            self.version[page], self._checksum[page], self._place[page] = batch[page].version, checksum, place
            self._unsynced[page] = batch[page]
            self._torn.pop(page, None)

    async def _put(self, run: Sequence[int], place: int, batch: Mapping[int, Page], sums: Sequence[int]) -> None:
        """Content first, then the entries: a process killed between the two has written nothing."""
        entries = b"".join(
            _packed(_Entry(batch[page].version, self._batch, checksum), page, place)
            for page, checksum in zip(run, sums, strict=True)
        )
        content = b"".join(batch[page].data for page in run)
        await self._disk.write_at(self._data_name, self._page_at(place, run[0]), content)
        await self._disk.write_at(self._index_name, self._entry_at(place, run[0]), entries)

    async def sync(self) -> None:
        """Everything written before is durable. OSError when it may not be; everything is written anew by the next."""
        async with self._lock:
            await self._settle()  # otherwise the mark would cover entries that are torn
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
        mark = _MARK.pack(self._mark, _signature(_Entry(self._mark, 0, 0), 0, 0))
        # if this is lost, the next process checks more pages than it must
        await self._disk.write_at(self._index_name, self._mark_at, mark)

    async def _write_again(self) -> None:
        """Where it is already: that place does not hold the last content that was synced, so nothing durable can be
        torn."""
        self._batch += 1
        for run in _runs(sorted(self._unsynced), self._place):
            await self._put(run, self._place[run[0]], self._unsynced, [self._checksum[page] for page in run])

    async def delete(self) -> None:
        await self._disk.delete(self._data_name)
        await self._disk.delete(self._index_name)

    @property
    def _mark_at(self) -> int:
        """In a block of its own."""
        return -(-2 * self.pages * ENTRY_BYTES // 4096) * 4096

    def _page_at(self, place: int, page: int) -> int:
        return (place * self.pages + page) * self.page_bytes

    def _entry_at(self, place: int, page: int) -> int:
        return (place * self.pages + page) * ENTRY_BYTES


def _runs(pages: Sequence[int], place: bytearray) -> list[list[int]]:
    """Consecutive pages whose newest content is in the same place, together."""
    runs: list[list[int]] = []
    for page in pages:
        if runs and page == runs[-1][-1] + 1 and place[page] == place[runs[-1][0]]:
            runs[-1].append(page)
        else:
            runs.append([page])
    return runs


def _checksum(version: int, page: int, data: memoryview) -> int:
    """Of content, version and page number: content in the wrong place is wrong."""
    return crc32(data, (version ^ version >> 32 ^ page * 2654435761) & 0xFFFFFFFF)


def _packed(entry: _Entry, page: int, place: int) -> bytes:
    return _ENTRY.pack(*entry, _signature(entry, page, place))


def _parsed(data: bytes, page: int, place: int) -> _Entry | None:
    """None when it is no entry of this page and place, or of a page never written."""
    version, batch, checksum, signature = _ENTRY.unpack(data)
    entry = _Entry(version, batch, checksum)
    return entry if version and signature == _signature(entry, page, place) else None


def _signature(entry: _Entry, page: int, place: int) -> int:
    return crc32(_SIGNED.pack(*entry, 2 * page + place))
