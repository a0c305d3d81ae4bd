"""A spill log as a new process finds it on disk: arrays filled from tables, one for each segment.

Nothing is written. A segment that was sealed is loaded from the table of all its rows. One that was not, since its
process died, is read whole: pages that no mark says are durable are checked, and what is torn was never promised.
"""

import errno
from typing import NamedTuple

import msgspec
import numpy as np

from covey.ports.disk import Disk
from covey.wire import checked
from covey.wire.checked import Damaged
from plugins.memory.datapath.spill.page_table import PageTable
from plugins.memory.datapath.spill.spill_writer import (
    ALIGNED,
    LeftRecords,
    left_name,
    left_records,
    list_name,
    mark_name,
    segment_name,
)
from plugins.memory.machine.spill_log import LogSegment
from plugins.memory.policy import log_records
from plugins.memory.policy.log_records import BATCH_BITS, MARK_BYTES, ROW, RecordTable, Rows


class SegmentRecord(msgspec.Struct, frozen=True, array_like=True):
    """One segment in the list on disk."""

    id: int
    slot: int
    first: int
    """Number of its first batch; 0: it was not begun."""
    last: int
    """Number of its last batch, `first` - 1 when there is none; 0: the segment was being written when the list was, or
    was not begun."""
    used: int
    """Blocks in use, when it is sealed."""
    table_at: int
    """Block of the table of all its rows; 0: it is not sealed."""
    table_bytes: int
    doubted_from: int = 0
    """Batch from which on batches may be lost, since a sync of it failed; 0: none."""


class LostPage(msgspec.Struct, frozen=True, array_like=True):
    """A page whose newest content the disk does not have any more: reading it is an error until it is written anew, and
    never returns something older."""

    page: int
    version: int
    dropped: bool
    """The content was never durable: a sync failed, and the disk did not keep what it had taken."""


class SegmentList(msgspec.Struct, frozen=True):
    """File `segments`: the segments of the log. A segment is listed before anything is in it."""

    salt: int
    page_bytes: int
    segment_blocks: int
    next_batch: int = 0
    """Number of the first batch that may be in a segment whose last one is not known."""
    last_id: int = 0
    """Highest id that a segment ever had: data left in a file by an earlier segment are recognised by it."""
    segments: tuple[SegmentRecord, ...] = ()
    lost: tuple[LostPage, ...] = ()


segment_list: msgspec.msgpack.Decoder[SegmentList] = msgspec.msgpack.Decoder(SegmentList)


class FoundLog:
    """The log as `load` found it."""

    def __init__(self, listed: SegmentList, table: PageTable) -> None:
        self.salt, self.table = listed.salt, table
        self.lost = {(lost.page, lost.version) for lost in listed.lost}
        self.segments: list[LogSegment] = []
        self.torn = 0
        """Number of records that were being written at the end, and count for nothing."""


async def load_list(disk: Disk, prefix: str) -> SegmentList | None:
    """The list of segments; None when there is none. Damaged names the file."""
    return await checked.load(disk, list_name(prefix), segment_list)


class LeftRun(NamedTuple):
    """A run of pages that an earlier process had put and not written."""

    first: int
    pages: int
    version: int
    content: memoryview | None
    """None: they are zeros."""


async def load_left(disk: Disk, prefix: str, listed: SegmentList | None) -> LeftRecords | None:
    """The records that were left in the ring of the earlier process; None: there are none. Damaged names the file."""
    name = left_name(prefix)
    left = await checked.load(disk, name, left_records)
    if left is not None and listed is not None and (left.salt, left.page_bytes) != (listed.salt, listed.page_bytes):
        raise Damaged(
            f"{disk.path(name)} belongs to another log than the one beside it; next: restore the log that it belongs "
            "to, or remove the volume for good (agentctl volume rm)"
        )
    return left


def newer(left: LeftRecords, table: PageTable) -> list[LeftRun]:
    """The runs of these records that are newer than what the log has, in the order in which they were put."""
    size, content, at, found = left.page_bytes, memoryview(left.pages), 0, list[LeftRun]()
    for version, page, zeros, _, _ in np.frombuffer(left.rows, ROW).tolist():
        if not zeros:
            if version > table.versions[page]:
                found.append(LeftRun(page, 1, version, content[at : at + size]))
            at += size
            continue
        older = np.flatnonzero(table.all_versions[page : page + zeros] < version)
        runs = np.split(older, np.flatnonzero(np.diff(older) != 1) + 1) if len(older) else []
        found += [LeftRun(page + int(run[0]), len(run), version, None) for run in runs]
    return found


async def load(disk: Disk, prefix: str, listed: SegmentList, table: PageTable) -> FoundLog:
    """Load the log. Damaged says which file does not hold what was promised, and what to do. OSError: the disk cannot
    be read."""
    found = FoundLog(listed, table)
    marks = await disk.read_at(mark_name(prefix), 0, 2 * ALIGNED)
    mark = max(log_records.mark(marks[at : at + MARK_BYTES], listed.salt) for at in (0, ALIGNED))
    table.live += [0] * (1 + max([-1, *(record.slot for record in listed.segments)]))
    opened: list[_Opened] = []
    for record in listed.segments:
        rows = await _sealed_rows(disk, prefix, listed, record) if record.table_at else None
        if rows is None:
            opened.append(_Opened(record, await disk.read(segment_name(prefix, record.slot)) or b"", listed))
            continue
        segment = LogSegment(record.id, record.slot, record.first, record.last, record.used)
        segment.sealed, segment.table_at = True, record.table_at
        found.segments.append(segment)
        table.take_newer(rows, record.slot)
    _check_whole(disk, prefix, listed, opened, mark)
    for each in opened:
        rows = each.rows(found)
        each.segment.found_durable = each.durable
        if each.tables or each.record.table_at:
            found.segments.append(each.segment)
            if not each.segment.sealed:
                each.segment.rows = [rows.tobytes()]
            table.take_newer(rows, each.record.slot)
    return found


async def _sealed_rows(disk: Disk, prefix: str, listed: SegmentList, record: SegmentRecord) -> Rows | None:
    """Rows of a sealed segment; None when the table of all rows is damaged."""
    at = record.table_at * listed.page_bytes
    data = memoryview(await disk.read_at(segment_name(prefix, record.slot), at, record.table_bytes))
    whole = log_records.table(data, listed.salt, record.id)
    return None if whole is None else whole.rows


class _Opened:
    """A segment without a table of all its rows, batch by batch."""

    def __init__(self, record: SegmentRecord, data: bytes, listed: SegmentList) -> None:
        self.record, self._data, self._block = record, memoryview(data), listed.page_bytes
        tables = log_records.tables_in(self._data, listed.salt, record.id, self._block)
        if not record.last:
            tables = [each for each in tables if each.batch >= listed.next_batch]
        if record.last:
            tables = [each for each in tables if each.batch <= record.last]  # beyond lies what was refused there
        self.tables = tables
        self.durable = 0
        """Batch up to which everything in it is durable, as far as is known."""
        batches = [each.batch for each in tables]
        first = record.first or min(batches, default=0)
        self.segment = LogSegment(record.id, record.slot, first, max([record.last, *batches]))
        self.segment.used = max([record.used, *(each.at + each.blocks for each in tables)])
        self.segment.sealed, self.segment.table_at = record.table_at > 0, record.table_at
        self.segment.doubted_from = record.doubted_from

    def rows(self, found: FoundLog) -> Rows:
        """The rows that count."""
        kept = [
            each.rows if each.batch <= self.durable else _whole(each, self._data, self._block, found)
            for each in self.tables
        ]
        return np.concatenate(kept) if kept else np.zeros(0, ROW)


def _check_whole(disk: Disk, prefix: str, listed: SegmentList, opened: "list[_Opened]", mark: int) -> None:
    """Check that every durable batch is there. Damaged when one is not: it is not known which pages were in it."""
    said = [mark, *(each.synced for one in opened for each in one.tables)]
    life = listed.next_batch >> BATCH_BITS
    durable = max([each for each in said if each >> BATCH_BITS == life], default=0)
    tail: list[int] = []
    for one in opened:
        record, batches = one.record, [each.batch for each in one.tables]
        one.durable = record.last if record.table_at else durable
        if record.doubted_from:
            one.durable = min(durable, record.doubted_from - 1)
        if record.last:
            name = segment_name(prefix, record.slot)
            _check_batches(disk, name, batches, record.first, min(record.last, one.durable))
        else:
            tail += batches
    last = [one for one in opened if not one.record.last]
    if last:
        _check_batches(disk, segment_name(prefix, last[0].record.slot), tail, listed.next_batch, durable)


def _check_batches(disk: Disk, name: str, batches: list[int], first: int, last: int) -> None:
    missing = log_records.first_missing(batches, first, last)
    if missing is not None:
        raise Damaged(
            f"{disk.path(name)} is damaged: batch {missing % (1 << BATCH_BITS)} of the volume's log is missing, and "
            "which pages were in it is not known; next: restore the file, or remove the volume for good "
            "(agentctl volume rm)"
        )


def _whole(table: RecordTable, data: memoryview, block: int, found: FoundLog) -> Rows:
    """The rows of a batch whose content is there."""
    good: list[bool] = []
    for version, page, zeros, crc, at in table.rows.tolist():
        content = data[at * block : (at + 1) * block]
        known = bool(zeros) or (page, version) in found.lost
        good.append(known or log_records.checksum(version, page, content) == crc)
    found.torn += good.count(False)
    rows: Rows = table.rows[np.array(good, bool)]
    return rows


async def read_rows(disk: Disk, prefix: str, segment: LogSegment, salt: int, block: int) -> Rows:
    """All rows of a sealed segment. OSError when its table is damaged."""
    name, size = segment_name(prefix, segment.slot), (segment.used - segment.table_at) * block
    data = memoryview(await disk.read_at(name, segment.table_at * block, size))
    table = log_records.table(data, salt, segment.id)
    if table is not None:
        return table.rows
    tables = log_records.tables_in(memoryview(await disk.read(name) or b""), salt, segment.id, block)
    if log_records.first_missing([each.batch for each in tables], segment.first, segment.last) is not None:
        raise OSError(errno.EIO, f"{disk.path(name)} is damaged")
    return np.concatenate([each.rows for each in tables]) if tables else np.zeros(0, ROW)
