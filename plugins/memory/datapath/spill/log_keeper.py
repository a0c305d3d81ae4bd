"""Keeps the files of a spill log: orders to its writer, and the state after each.

`machine.spill_log` says what is next; this module does it, one order at a time, and the table of pages follows.
"""

import contextlib
import errno
from collections.abc import Sequence
from typing import TYPE_CHECKING, assert_never

import msgspec
import numpy as np

from covey.ports.env import Env
from covey.wire import checked
from covey.wire.checked import Damaged
from plugins.memory.datapath.spill import spill_load
from plugins.memory.datapath.spill.page_table import RING, PageTable
from plugins.memory.datapath.spill.spill_load import LostPage, SegmentList, SegmentRecord
from plugins.memory.datapath.spill.spill_ring import SpillRing, ring_bytes
from plugins.memory.datapath.spill.spill_wire import (
    PART_MAX,
    AppendRecords,
    CopyRecords,
    DropSegment,
    LogEnd,
    LogSync,
    OrderPart,
    SaveSegments,
    SealSegment,
    SpillDone,
    SyncLog,
)
from plugins.memory.datapath.spill.spill_writer import SEGMENT, left_name, list_name, segment_name
from plugins.memory.datapath.spill.writer_process import WriterProcess
from plugins.memory.machine.spill_log import (
    AppendNext,
    CompactNext,
    DropNext,
    LogSegment,
    Next,
    RestUntil,
    SealNext,
    SpillLog,
    StartSegment,
    SyncSegments,
)
from plugins.memory.policy import log_records, spilling
from plugins.memory.policy.log_records import BATCH_BITS, Rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

LOOK_ROWS = 2048
"""Rows of a segment that are looked at in one go for living ones; a run of zeros may be 256 pages long."""
APPENDS = 4
"""Batches one after another before other work has its turn."""


class LogKeeper:
    """The files of one volume's log, under `PREFIX/log`. Call `open`, then `settle`, then `do` what `log.next` says.
    All raise OSError when the disk refused or the writer ended (WriterGone); then the same may be tried again."""

    def __init__(self, env: Env, volume: str, prefix: str, pages: int, page_bytes: int, places: int) -> None:
        self.torn = 0
        """Records that were being written when the earlier process ended, and count for nothing."""
        self.settled = False
        """This process may write."""
        self._env, self._prefix, self._pages = env, prefix, pages
        self._block = page_bytes
        length = spilling.segment_blocks(pages * page_bytes, page_bytes)
        self._listed = SegmentList(0, page_bytes, length)
        self.table = PageTable(pages, spilling.STRIDE * length)
        self.ring = self._made_ring(places)
        self.writer = WriterProcess(env, volume, prefix)
        self.log = SpillLog(places, page_bytes, length, 0, BATCH_BITS)
        self._files: set[int] = set()
        """Slots that have a file."""
        self._lost: dict[int, LostPage] = {}
        self._silent: dict[int, list[Rows]] = {}
        """Segment -> records of it that the disk cannot read now."""
        self._copied: dict[int, list[Rows]] = {}
        """Segment -> records of it that were copied since the last sync: if the next one fails, they are read from
        there again."""
        self._copying: tuple[int, Rows] | None = None
        """Segment being compacted, and the rows of it that were not looked at yet; the rows before them are dead, or
        were copied."""

        self.left: list[spill_load.LeftRun] = []
        """Records that the earlier process put and that the log does not have. `Spill.open` puts them into the ring
        before `settle`, because the writer then takes all that the ring has and the log has not."""
        self._left_until: int | None = None
        """The number of records that must be durable before the file with `left` may go; None: there is no such
        file."""

    def _made_ring(self, places: int) -> SpillRing:
        return SpillRing(self._env.pages.make_ring(ring_bytes(places, self._block)), places, self._block)

    # ---- life ----

    async def open(self, life: int) -> None:
        """Own the files, and find out what they hold. Damaged says what is wrong with them. OSError: the disk cannot be
        read, or no writer be started."""
        await self.writer.start()
        names = await self._env.disk.names(f"{self._prefix}/log/")
        self._files = {int(last, 16) for name in names if SEGMENT.fullmatch(last := name.rpartition("/")[2])}
        listed = await spill_load.load_list(self._env.disk, self._prefix)
        left = await spill_load.load_left(self._env.disk, self._prefix, listed)
        if listed is None:
            if self._files or left is not None:
                raise Damaged(
                    f"{self._env.disk.path(list_name(self._prefix))} is missing, which lists the parts of this "
                    "volume's log; next: restore it, or remove the volume for good (agentctl volume rm)"
                )
            listed = SegmentList(
                int.from_bytes(self._env.entropy(8), "little") >> 1, self._block, self._listed.segment_blocks
            )
        if listed.segment_blocks != self._listed.segment_blocks:
            self.table = PageTable(self._pages, spilling.STRIDE * listed.segment_blocks)
        self._listed = listed
        found = await spill_load.load(self._env.disk, self._prefix, listed, self.table)
        self.torn = found.torn
        self.left = [] if left is None else spill_load.newer(left, self.table)
        self._left_until = None if left is None else len(self.left)
        if len(self.left) > self.ring.places:  # it was longer then, or a run of zeros is several now
            self.ring.close()
            self.ring = self._made_ring(len(self.left))
        self.log = SpillLog(self.ring.places, self._block, listed.segment_blocks, life, BATCH_BITS)
        self.log.found(found.segments)
        self.log.last_id = max([listed.last_id, *(record.id for record in listed.segments)])
        self._lost = {lost.page: lost for lost in listed.lost}

    async def settle(self) -> None:
        """Before the first write, list what earlier processes left as what it is. Idempotent."""
        if not self.settled:
            await self.connect()
            await self._save_list()
            self.settled = True

    async def seal_all(self) -> None:
        """Seal all segments, at an end in good order: the next process need not look for the end of any."""
        if self.settled and self.log.put == self.log.synced and not self.log.owed:
            self.log.active = None
            for segment in [each for each in self.log.segments if not each.sealed]:
                await self._seal(segment)
            await self._sync()
            await self._save_list()

    async def delete(self) -> None:
        """Delete everything durable; the writer has ended."""
        for name in await self._env.disk.names(f"{self._prefix}/log/"):
            await self._env.disk.delete(name)

    def segment_file(self, slot: int) -> str | None:
        """File of the segment in this slot; None when there is no segment any more."""
        return segment_name(self._prefix, slot) if self.log.has_slot(slot) else None

    async def connect(self) -> None:
        if not self.writer.is_up:
            end = self._end(self.log.batch + 1)
            await self.writer.connect(self.ring, self._listed.salt, end, self.log.synced)

    # ---- orders ----

    async def do(self, due: Next) -> None:
        await self._do(due)
        if self._left_until is not None and self.log.synced >= self._left_until and not self.log.owed:
            with contextlib.suppress(OSError):  # the next order tries again; the log has all of it
                await self._env.disk.delete(left_name(self._prefix))
                self._left_until = None

    async def _do(self, due: Next) -> None:
        match due:
            case AppendNext():
                await self._append(due)
            case SyncSegments():
                await self._sync()
            case StartSegment():
                await self._start_segment()
            case SealNext():
                await self._seal(due.segment)
            case CompactNext():
                await self._compact(due.segment)
            case DropNext():
                await self._drop(due.segments)
            case RestUntil():
                return
            case _:
                assert_never(due)

    async def _order(self, order: object) -> SpillDone:
        return await self.writer.ask(order)  # type: ignore[arg-type]

    async def _in_parts(self, data: bytes) -> bytes:
        """Send data in parts; returns the last part, which goes with the order itself."""
        at = 0
        while len(data) - at > PART_MAX:
            self._say(await self._order(OrderPart(data[at : at + PART_MAX])))
            at += PART_MAX
        return data[at:]

    async def _save_list(self, more: Sequence[tuple[int, int]] = (), but: Sequence[LogSegment] = ()) -> None:
        """Write the list of segments. OSError: it is not durable."""
        data = await self._in_parts(self._list(more, but))
        self._say(await self._order(SaveSegments(data, self._end(self.log.batch + 1))))

    def _say(self, done: SpillDone) -> None:
        """Raise OSError when an order was refused."""
        if done.why:
            raise OSError(done.errno, done.why)

    def _end(self, batch: int) -> LogEnd:
        active = self.log.active
        if active is None:
            return LogEnd(0, 0, 0, 0, 0)
        return LogEnd(active.id, active.slot, active.used, batch, self.log.written)

    def _to_sync(self, batch: int) -> LogSync:
        """The sync to order; `batch`: the last one written by then. While a segment is in doubt the mark stays where it
        is."""
        doubt = self.log.owed
        slots = {each.slot for each in self.log.to_sync()}
        if batch > self.log.batch and self.log.active is not None:
            slots.add(self.log.active.slot)
        return LogSync(tuple(sorted(slots)), self.log.mark if doubt else batch)

    async def _append(self, due: AppendNext) -> None:
        """Append a batch. While the writer writes it, it prepares the next, if there is one that is full and has room
        here."""
        order = self._to_append(self._end(self.log.batch + 1), due)
        await self.writer.send(order)
        for _ in range(APPENDS):
            ahead = self._next_to_append(order)
            if ahead is not None:
                await self.writer.send(ahead)
            done = await self.writer.answer()
            if ahead is not None and done.why:
                await self.writer.answer()  # refused too
            self._appended(order, done)
            if ahead is None:
                return
            order = ahead
        self._appended(order, await self.writer.answer())

    def _to_append(self, end: LogEnd, due: AppendNext, follows: bool = False) -> AppendRecords:
        sync = self._to_sync(end.batch) if due.sync else None
        return AppendRecords(end, due.stop, self.log.mark, follows, sync)

    def _next_to_append(self, order: AppendRecords) -> AppendRecords | None:
        """The append that may be sent before this one is answered. None after a sync: its answer decides what comes
        next."""
        log, active, stop = self.log, self.log.active, order.stop + self.log.rows_max
        at = order.end.at + self._blocks_of(order)
        if order.sync is not None or active is None or stop > log.put or at >= log.segment_blocks:
            return None
        end = LogEnd(active.id, active.slot, at, order.end.batch + 1, order.stop)
        return self._to_append(end, AppendNext(order.stop, stop, False), follows=True)

    def _blocks_of(self, order: AppendRecords) -> int:
        rows = self.ring.rows(order.end.start, order.stop)
        return log_records.batch_blocks(len(rows), int(np.count_nonzero(rows["zeros"] == 0)), self._block)

    def _appended(self, order: AppendRecords, done: SpillDone) -> None:
        if done.why and not done.written:
            self._say(done)
        active = self.log.active
        assert active is not None
        start, stop = order.end.start, order.stop
        rows = self.ring.rows(start, stop)
        self.table.landed(rows, self._places_of(start, len(rows)), active.slot)
        self.log.appended(stop, self._blocks_of(order), rows.tobytes(), self._env.clock.now_s())
        if order.sync is not None:
            self._synced_or_doubted(done)

    def _places_of(self, start: int, count: int) -> "NDArray[np.uint32]":
        found: NDArray[np.uint32] = ((start + np.arange(count)) % self.ring.places + RING).astype(np.uint32)
        return found

    async def _sync(self) -> None:
        done = await self._order(SyncLog(self._to_sync(self.log.batch)))
        self._synced_or_doubted(done)

    def _synced_or_doubted(self, done: SpillDone) -> None:
        if not done.why:
            self.log.did_sync()
            if self.log.mark == self.log.batch:
                self._copied.clear()
            return
        start, stop = self.log.sync_refused()
        if start < stop:
            self.table.lift(self.ring.rows(start, stop), self._places_of(start, stop - start))
        self._take_back()
        self._silent.clear()
        self._say(done)

    def _take_back(self) -> None:
        """Copies that compaction made may be gone: read pages from the originals again, which are still there."""
        doubted = [each.slot for each in self.log.on_disk() if each.doubted]
        for segment in self.log.segments:
            for rows in self._copied.get(segment.id, ()):
                if len(rows):
                    self.table.take_back(rows, segment.slot, [slot for slot in doubted if slot != segment.slot])
        self._copying = None

    async def _start_segment(self) -> None:
        if not self.log.reserved:
            more = self._to_reserve()
            await self._save_list(more)
            self.log.reserve(more)
        self.log.started()
        active = self.log.active
        assert active is not None
        self._files.add(active.slot)
        self.table.live += [0] * (active.slot + 1 - len(self.table.live))
        self.table.live[active.slot] = 0

    def _to_reserve(self, but: Sequence[LogSegment] = ()) -> list[tuple[int, int]]:
        """Id and slot of new segments, up to the wanted reserve; slots that have a file come first. `but`: segments
        that go now. OSError when there is no slot for one more."""
        left = (each.segment for each in self.log.dropping if each.segment not in but)
        taken = {each.slot for each in (*self.log.segments, *left)} | {slot for _, slot in self.log.reserved}
        wanted = spilling.RESERVED - len(self.log.reserved)
        free = sorted(self._files - taken)
        free += [
            slot for slot in range(len(taken) + len(free) + wanted) if slot not in taken and slot not in self._files
        ]
        slots = [slot for slot in free[: max(0, wanted)] if slot < self.table.slots_max]
        if not slots and wanted > 0:
            raise OSError(
                errno.ENOSPC, "the volume's log has its maximum of segments; next: discard pages that are not needed"
            )
        return [(self.log.last_id + number, slot) for number, slot in enumerate(slots, 1)]

    def _list(self, more: Sequence[tuple[int, int]] = (), but: Sequence[LogSegment] = ()) -> bytes:
        """The list of segments as it is to be on disk: with `more` in reserve, without those in `but`."""
        log = self.log
        kept = [*log.segments, *(left.segment for left in log.dropping)]
        records = [self._recorded(each) for each in sorted(kept, key=lambda each: each.id) if each not in but]
        records += [SegmentRecord(id, slot, 0, 0, 0, 0, 0) for id, slot in (*log.reserved, *more)]
        first = log.batch + 1 if log.active is None else log.active.first
        last_id = max([log.last_id, *(id for id, _ in more)])
        listed = SegmentList(
            self._listed.salt, self._block, self._listed.segment_blocks, first, last_id, tuple(records),
            tuple(self._still_lost()),
        )  # fmt: skip
        return checked.seal(listed)

    def _recorded(self, segment: LogSegment) -> SegmentRecord:
        """Record of a segment for the list; sealed only once that is durable."""
        id, slot, first = segment.id, segment.slot, segment.first
        last = 0 if segment is self.log.active else segment.last or first - 1
        if segment.sealed and not segment.unsynced:
            size = (segment.used - segment.table_at) * self._block
            return SegmentRecord(id, slot, first, last, segment.used, segment.table_at, size)
        return SegmentRecord(id, slot, first, last, 0, 0, 0, segment.doubted_from)

    async def _seal(self, segment: LogSegment) -> None:
        data = b"".join(segment.rows)
        blocks = log_records.table_blocks(len(data) // log_records.ROW_BYTES, self._block)
        last = segment.last or segment.first - 1
        rest = await self._in_parts(data)
        self._say(await self._order(SealSegment(segment.id, segment.slot, segment.used, last, rest)))
        self.log.sealed(segment, blocks)

    # ---- compaction ----

    async def _compact(self, segment: LogSegment) -> None:
        """Do one step of compaction: copy some of the segment's living records. When nothing in it lives any more, it
        may go."""
        if self._copying is None or self._copying[0] != segment.id:
            self._copying = (segment.id, await self._rows_of(segment))
        rows = self._copying[1]
        living, looked_at = self._first_living(rows, segment)
        if not len(living):
            self._all_copied(segment)
            return
        active = self.log.active
        assert active is not None
        done = await self._copy(segment, living)
        if done.unreadable:
            silent = self._silent.setdefault(segment.id, [])
            silent.append(living[[at for at in done.unreadable if at < len(living)]])
            return
        self._say(done)
        self._copied.setdefault(segment.id, []).append(living.copy())
        were = living["block"] + np.uint32(self.table.log_place(segment.slot, 0))
        content = log_records.place_rows(living, active.used, self._block)
        blocks = log_records.batch_blocks(len(living), content, self._block)
        self.table.landed(living, were, active.slot)
        self._copying = (segment.id, rows[looked_at:])
        zeros = len(living) - content
        self.log.copied(blocks, living.tobytes(), self._env.clock.now_s(), zeros, self.table.zeros_died)

    def _all_copied(self, segment: LogSegment) -> None:
        """Let the segment go, unless something lives in it that the disk cannot read now."""
        self._copying = None
        for rows in self._silent.pop(segment.id, ()):
            living = rows[self.table.living(rows, segment.slot)]
            if len(living):
                self.log.put_aside(segment, self._env.clock.now_s())
                self._env.log.warning(
                    "some pages cannot be read now, and stay where they are", pages=living["page"].tolist()[:16],
                    file=self._env.disk.path(segment_name(self._prefix, segment.slot)),
                )  # fmt: skip
                return
        self.log.emptied(segment)

    async def _copy(self, segment: LogSegment, living: Rows) -> SpillDone:
        """Copy records. Damaged ones are put on record first, and then copied as they are."""
        end = self._end(self.log.batch + 1)
        order = CopyRecords(segment.slot, living.tobytes(), end, self.log.mark, self._known_lost(living))
        done = await self._order(order)
        if done.wrong:
            await self._lose(segment, living[[at for at in done.wrong if at < len(living)]])
            done = await self._order(msgspec.structs.replace(order, lost=self._known_lost(living)))
        return done

    def _first_living(self, rows: Rows, segment: LogSegment) -> tuple[Rows, int]:
        """Up to one step's worth of living, readable rows, and how many rows were looked at to find them."""
        silent = [rows["block"] for rows in self._silent.get(segment.id, ())]
        most, at = min(spilling.COPY_ROWS, self.log.rows_max), 0
        while at < len(rows):
            found = self.table.living(rows[at : at + LOOK_ROWS], segment.slot) + at
            if silent:
                found = found[(rows["zeros"][found] > 0) | ~np.isin(rows["block"][found], np.concatenate(silent))]
            at += LOOK_ROWS
            if len(found):
                return rows[found[:most]].copy(), int(found[:most][-1]) + 1
        return rows[:0], at

    async def _rows_of(self, segment: LogSegment) -> Rows:
        if not segment.sealed:
            return np.frombuffer(b"".join(segment.rows), log_records.ROW)
        try:
            return await spill_load.read_rows(self._env.disk, self._prefix, segment, self._listed.salt, self._block)
        except OSError as error:
            self._env.log.warning(
                "the tables of a segment cannot be read; its pages are known in memory", why=str(error)
            )
            return self.table.rows_in(segment.slot)

    # ---- pages that the disk does not have any more ----

    async def _lose(self, segment: LogSegment, rows: Rows) -> None:
        """Record damaged pages before anything else, so that a later process does not take something older for them."""
        for version, page in zip(rows["version"].tolist(), rows["page"].tolist(), strict=True):
            self._lost[page] = LostPage(page, version, segment.doubted)
        await self._save_list()
        self._env.log.error(
            "pages are damaged on disk: the disk did not return what was written",
            file=self._env.disk.path(segment_name(self._prefix, segment.slot)), pages=rows["page"].tolist()[:16],
            next="check the disk; write these pages again, or restore them",
        )  # fmt: skip

    def _still_lost(self) -> list[LostPage]:
        self._lost = {page: lost for page, lost in self._lost.items() if self.table.versions[page] == lost.version}
        return list(self._lost.values())

    def _known_lost(self, rows: Rows) -> tuple[int, ...]:
        """Positions of rows whose content is known to be lost."""
        if not self._lost:
            return ()
        pairs = zip(rows["page"].tolist(), rows["version"].tolist(), strict=True)
        return tuple(
            at
            for at, (page, version) in enumerate(pairs)
            if (lost := self._lost.get(page)) is not None and lost.version == version
        )

    def lost(self, dropped: bool) -> list[int]:
        """Pages whose newest content is gone; `dropped`: only those that were never durable."""
        return sorted(lost.page for lost in self._still_lost() if lost.dropped or not dropped) if self._lost else []

    async def _drop(self, segments: Sequence[LogSegment]) -> None:
        """Drop segments. Their files are used for the next ones; surplus files are deleted."""
        try:
            more = self._to_reserve(but=segments)
        except OSError:
            more = []
        await self._save_list(more, segments)
        self.log.dropped(segments)
        for segment in segments:
            self._copied.pop(segment.id, None)
        self.log.reserve(more)
        taken = {each.slot for each in self.log.segments} | {slot for _, slot in self.log.reserved}
        taken |= {left.segment.slot for left in self.log.dropping}
        for slot in sorted(self._files - taken)[1:]:
            self._say(await self._order(DropSegment(slot)))
            self._files.discard(slot)
            with contextlib.suppress(OSError):
                await self._env.disk.delete(segment_name(self._prefix, slot))  # and let go of it here
