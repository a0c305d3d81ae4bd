"""A volume's pages on this host: in the ring on their way to the log, or in the log on disk (Infiniswap §2.4.3, the
disk dispatch queue and the backing disk).

Whatever is put is read back from here at once. A process of its own (`spill_writer`) brings it to the disk: this one
tells it what to do, one order at a time, as `machine.spill_log` decides, and never waits for a disk on its loop. When
the writer dies another is started and told to do the same again: everything that is not on disk is in the ring.
"""

import asyncio
import contextlib
import errno
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from covey.ports.env import Env
from plugins.memory.datapath.spill.log_keeper import LogKeeper
from plugins.memory.datapath.spill.page_table import LOG, RING, ZERO
from plugins.memory.datapath.spill.writer_process import WriterGone
from plugins.memory.datapath.wire.slabwire import Versions
from plugins.memory.machine.spill_log import Next, RestUntil
from plugins.memory.policy import log_records

_LOG = np.uint32(LOG)
RETRY_S = 1.0
"""Seconds to pause after the disk refused something, which stays in the ring."""
READ_TRIES = 8
AMONG_WAITS_S = 3600.0
"""Seconds of the longest rest without a look."""


PAGES_NAMED = 8


def named(pages: Sequence[int]) -> str:
    """Page numbers, for people."""
    more = f" and {len(pages) - PAGES_NAMED} more" if len(pages) > PAGES_NAMED else ""
    return f"{'page' if len(pages) == 1 else 'pages'} {', '.join(map(str, pages[:PAGES_NAMED]))}{more}"


SpillWaits = list[tuple[int, int, "asyncio.Future[None]"]]


class Spill:
    """The spilled pages of one volume; files under `PREFIX/log`. Call `open`, then `settle`, then run `run` as a
    task."""

    def __init__(self, env: Env, volume: str, prefix: str, pages: int, page_bytes: int, places: int) -> None:
        self.pages, self.page_bytes = pages, page_bytes
        self.refused = ""
        """Why the disk did not take the last order; empty: it took it."""
        self._env, self._now_s = env, env.clock.now_s
        self.keeper = LogKeeper(env, volume, prefix, pages, page_bytes, places)
        self.writer, self.ring = self.keeper.writer, self.keeper.ring
        self.table, self.log = self.keeper.table, self.keeper.log
        self._settled = asyncio.Event()
        """This process may write."""
        self._ordering = asyncio.Lock()
        """Held by the task that gives the writer an order."""
        self._wake = asyncio.Event()
        self._written_waits: SpillWaits = []
        self._synced_waits: SpillWaits = []
        self._room_waits: deque[tuple[int, asyncio.Future[None]]] = deque()
        """Records that have no room yet, in order of arrival: of two writes to one page, the first of a process that
        died meanwhile, the second must not come first."""
        self._granted = 0
        """Number of records that were let in and are not put yet."""
        self._waits = self._turn = 0
        self._stopped = False

    # ---- life ----

    async def open(self, life: int) -> None:
        """Own the files, and find out what they hold; what the earlier process left is in the ring afterwards. Damaged
        says what is wrong with them. OSError: the disk cannot be read, or no writer be started."""
        await self.keeper.open(life)
        self.table, self.log, self.ring = self.keeper.table, self.keeper.log, self.keeper.ring
        for run in self.keeper.left:
            self.put(*run)
        self.keeper.left = []

    async def settle(self) -> None:
        """Before the first write, list what earlier processes left as what it is. Idempotent. OSError: try again."""
        async with self._ordering:
            await self.keeper.settle()
        self._settled.set()

    async def stop(self) -> None:
        """Stop in good order, once everything is flushed."""
        self._stopped = True
        self._wake.set()
        async with self._ordering:
            with contextlib.suppress(OSError):
                await self.keeper.seal_all()

    async def close(self) -> None:
        """End the writer."""
        self._stopped = True
        await self.writer.close()

    async def delete(self) -> None:
        """Delete everything durable; nothing is written any more."""
        await self.close()
        await self.keeper.delete()

    # ---- what is known ----

    @property
    def torn(self) -> int:
        """Number of records that were being written when the earlier process ended, and count for nothing."""
        return self.keeper.torn

    def __len__(self) -> int:
        """Number of records on their way to the disk."""
        return self.log.put - self.log.written

    def version(self, page: int) -> int:
        """Version of the newest content on this host; 0: never written."""
        return self.table.versions[page]

    def versions(self, first: int, count: int) -> Versions:
        return self.table.run(first, count)

    def marks(self) -> tuple[int, int]:
        """Number of the next record, and of the first that is not durable; -1: a sync failed, so that is not known."""
        return self.log.put, -1 if self.log.owed else self.log.synced

    def is_on_disk(self, page: int) -> bool:
        """Is the page's newest content in the log, durable or not?"""
        place = self.table.places[page]
        return LOG <= place < RING or (place == ZERO and self.log.put == self.log.written)

    def is_here(self, first: int, count: int) -> bool:
        """Is the newest content of all of these pages at hand, so that neither disk nor lender need be asked?"""
        places = self.table.places
        if count == 1:
            return places[first] < LOG or places[first] >= RING
        run = self.table.all_places[first : first + count]
        return bool(((run < LOG) | (run >= RING)).all())

    def has_any(self, first: int, count: int) -> bool:
        """Is the newest content of one of these pages at hand, so that a lender need not be asked for it?"""
        places = self.table.places
        if count == 1:
            return places[first] < LOG or places[first] >= RING
        above = self.table.all_places[first : first + count] - _LOG  # what is below LOG becomes larger than all others
        return bool(above.max() >= RING - LOG)

    def ever_written(self, first: int, count: int) -> bool:
        return bool(self.table.all_places[first : first + count].any())

    def count_written(self, first: int, count: int) -> int:
        """How many of a run of pages were ever written."""
        return int(np.count_nonzero(self.table.all_places[first : first + count]))

    # ---- putting ----

    def fits(self, records: int) -> bool:
        """There is room for these records, and no earlier request waits for room."""
        return not self._room_waits and self._has_room(records)

    def _has_room(self, records: int) -> bool:
        return self.log.free() - self._granted >= records

    async def room(self, records: int) -> None:
        """Wait until `records` more fit, in turn. OSError when they do not and the disk refuses to take any."""
        if self.fits(records):
            return
        self._work()
        future = self._future()
        self._room_waits.append((records, future))
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():  # it was let in, and puts nothing
                self._granted -= records
            self._let_in()
            raise
        self._granted -= records

    def _let_in(self) -> None:
        """Let in those that wait for room and have it now, in turn."""
        waits = self._room_waits
        while waits and (waits[0][1].done() or self._has_room(waits[0][0])):
            records, future = waits.popleft()
            if not future.done():
                self._granted += records
                future.set_result(None)
        if waits:
            self._work()

    def put(self, first: int, count: int, version: int, content: memoryview | None) -> int:
        """Put a run of pages, None: zeros, for which there is room. Called only after `room`, with no await between.
        Returns how many of them were written before."""
        log, ring, table = self.log, self.ring, self.table
        number = log.put
        if content is None:
            before = table.put_run(first, count, version, ZERO)
            ring.put_zeros(number, version, first, count)
            records = 1
        elif count == 1:
            ring.put_page(number, version, first, content)
            before = int(table.put(first, version, RING | number % ring.places))
            records = 1
        else:
            ring.put_run(number, version, first, count, content)
            places = (number + np.arange(count)) % ring.places + RING
            before = table.put_run(first, count, version, places.astype(np.uint32))
            records = count
        if log.put == log.written or len(self) + records >= log.rows_max:
            self._wake.set()
        log.has_put(records, self._now_s() if log.put == log.written else 0.0)
        return before

    def _work(self) -> None:
        self.log.wait_written(self.log.put)
        self._wake.set()

    def _future(self) -> "asyncio.Future[None]":
        return asyncio.get_running_loop().create_future()

    async def written(self, number: int) -> None:
        """Wait until the records before this number are on disk. OSError when the disk refused them."""
        while self.log.written < number:
            self.log.wait_written(number)
            self._wake.set()
            await self._wait(self._written_waits, number)

    async def flush(self) -> None:
        """Bring everything put before to the disk, synced. OSError when it is not."""
        await self._synced(self.log.put)
        dropped = self.keeper.lost(dropped=True)
        if dropped:
            raise OSError(
                errno.EIO, f"the disk dropped {named(dropped)} that it had accepted; next: write or discard the lost "
                "pages, and flush again"
            )  # fmt: skip

    async def _synced(self, number: int) -> None:
        while self.log.synced < number or self.log.owed:
            if self.log.is_stuck(self._now_s()):
                raise OSError(errno.EIO, "a sync failed, and the pages it was for cannot be read; next: check the disk")
            self.log.wait_synced(number)
            self._wake.set()
            await self._wait(self._synced_waits, number)

    async def _wait(self, waits: SpillWaits, number: int) -> None:
        future = self._future()
        self._waits += 1
        heappush(waits, (number, self._waits, future))
        await future

    async def kept(self, number: int) -> None:
        """Wait until the records before this number, and all of earlier processes, survive a loss of power, however
        often the disk refuses: a lender that has them is about to forget them."""
        while True:
            try:
                return await self._synced(number)
            except OSError:
                await asyncio.sleep(RETRY_S)

    # ---- reading ----

    async def read(self, first: int, into: memoryview) -> Versions:
        """Fill `into` with a run of pages, as this host has them, and return their versions. OSError when a page on
        disk is not what was written."""
        count, size = len(into) // self.page_bytes, self.page_bytes
        versions = self.versions(first, count)
        at = 0
        while at < count:
            run = self._read_here(first + at, into[at * size :])
            if not run:
                run = self._next_to_one_another(first + at, count - at)
                await self._read_log(first + at, into[at * size : (at + run) * size], versions, at)
            at += run
        return versions

    def read_here(self, first: int, into: memoryview) -> None:
        """Read pages that are all at hand (`is_here`)."""
        at, size = 0, self.page_bytes
        while at < len(into):
            at += self._read_here(first + at // size, into[at:]) * size

    def _read_here(self, page: int, into: memoryview) -> int:
        """Read pages from the ring or known to be zeros; returns how many, 0: the next one is neither."""
        place, size = self.table.places[page], self.page_bytes
        if place >= RING:
            into[:size] = self.ring.content(place - RING)
            return 1
        if place < LOG:
            into[:size] = bytes(size)
            return 1
        return 0

    def _next_to_one_another(self, page: int, most: int) -> int:
        places = self.table.places
        run, place = 1, places[page]
        while run < most and places[page + run] == place + run:
            run += 1
        return run

    async def _read_log(self, first: int, into: memoryview, versions: Versions, at: int) -> None:
        """Read pages that were next to one another in the log when this was called."""
        table, size = self.table, self.page_bytes
        count = len(into) // size
        known = [(table.versions[page], table.sums[page]) for page in range(first, first + count)]
        data = memoryview(await self._read_place(table.places[first], count))
        for each, (version, crc) in enumerate(known):
            content = data[each * size : (each + 1) * size]
            if log_records.checksum(version, first + each, content) == crc:
                into[each * size : (each + 1) * size] = content
                versions[at + each] = version
            else:
                versions[at + each] = await self._read_again(first + each, into[each * size : (each + 1) * size])

    async def _read_place(self, place: int, count: int) -> bytes:
        slot, block = self.table.segment_of(place)
        name = self.keeper.segment_file(slot)
        if name is None:
            return bytes(count * self.page_bytes)  # it is gone by now: read again
        return await self._env.disk.read_at(name, block * self.page_bytes, count * self.page_bytes)

    async def _read_again(self, page: int, into: memoryview) -> int:
        """Read the newest content of a page that was rewritten or moved while it was read, unless the disk fails."""
        table = self.table
        for _ in range(READ_TRIES):
            place, version, crc = table.places[page], table.versions[page], table.sums[page]
            if self._read_here(page, into):
                return version
            data = memoryview(await self._read_place(place, 1))
            if log_records.checksum(version, page, data) == crc:
                into[:] = data
                return version
            if (place, version) == (table.places[page], table.versions[page]):
                raise OSError(
                    errno.EIO, f"page {page} is damaged on disk; next: check the disk, then write the page again"
                )
        raise OSError(errno.EIO, f"page {page} is written faster than it can be read")

    # ---- what goes on ----

    async def run(self) -> None:
        """Give the writer orders for as long as the volume is open."""
        await self._settled.wait()
        while not self._stopped:
            try:
                due = self._due()
                if isinstance(due, RestUntil):
                    await self._rest_until(due.at_s - self._now_s())
                    continue
                await self._do(due)
            except WriterGone as gone:
                self._env.log.warning("the writer of the volume's log ended; another one is started", why=str(gone))
                if self.writer.pause_s >= RETRY_S:
                    self._refuse(gone)
                await asyncio.sleep(self.writer.pause_s)
            except OSError as error:
                self._refuse(error)
                await asyncio.sleep(RETRY_S)

    def _refuse(self, error: OSError) -> None:
        """Tell all waiting requests that the disk refuses."""
        self.refused = error.strerror or str(error)
        self._env.log.warning("the disk did not take pages", pages=len(self), why=self.refused)
        waits = [*self._written_waits, *self._synced_waits]
        self._written_waits.clear()
        self._synced_waits.clear()
        rooms, self._room_waits = self._room_waits, deque()
        for future in [*(each for _, _, each in waits), *(each for _, each in rooms)]:
            if not future.done():
                future.set_exception(OSError(error.errno or errno.EIO, self.refused))

    def _tell(self) -> None:
        """Let requests continue whose records are written, or durable."""
        synced = -1 if self.log.owed else self.log.synced
        for waits, number in ((self._written_waits, self.log.written), (self._synced_waits, synced)):
            while waits and waits[0][0] <= number:
                future = heappop(waits)[2]
                if not future.done():
                    future.set_result(None)
        self._let_in()

    def _due(self) -> Next:
        self._wake.clear()
        self._turn += 1
        return self.log.next(self._now_s(), self.table.live, self._turn, self.table.zeros_died)

    async def _do(self, due: Next) -> None:
        async with self._ordering:
            if self._stopped:
                return
            await self.keeper.connect()
            try:
                await self.keeper.do(due)
            finally:
                self._tell()
        self.refused = ""

    async def _rest_until(self, for_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(max(0.0, for_s), AMONG_WAITS_S)):
                await self._wake.wait()
