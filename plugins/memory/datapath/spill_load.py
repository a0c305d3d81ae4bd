"""A spill log as a new process finds it on disk: arrays filled from tables, one for each segment.

Nothing is written. A segment that was sealed is loaded from the table of all its rows. One that was not, since its
process died, is read whole: pages that no mark says are durable are checked, and what is torn was never promised.
"""

import errno

import msgspec
import numpy as np

from covey import checked
from covey.checked import Damaged
from covey.ports import Disk
from plugins.memory.datapath.page_table import PageTable
from plugins.memory.datapath.spill_writer import ALIGNED, list_name, mark_name, segment_name
from plugins.memory.machine.spill_log import LogSegment
from plugins.memory.policy import log_records
from plugins.memory.policy.log_records import BATCH_BITS, MARK_BYTES, ROW, RecordTable, Rows


class SegmentRecord(msgspec.Struct, frozen=True, array_like=True):
    """One segment in the list on disk."""

    id: int
    first: int
    """Number of its first batch."""
    last: int
    """Of its last one, `first` - 1 when there is none; 0: it was being written when the list was."""
    used: int
    """Blocks, when it is sealed."""
    table_at: int
    """Block of the table of all its rows; 0: it is not sealed."""
    table_bytes: int
    doubted_from: int = 0
    """A sync of it failed: batches from this one on may be gone. 0: none."""


class SegmentList(msgspec.Struct, frozen=True):
    """File `segments`: what the log consists of. A segment is listed before anything is in it."""

    salt: int
    page_bytes: int
    segment_blocks: int
    segments: tuple[SegmentRecord, ...] = ()


segment_list: msgspec.msgpack.Decoder[SegmentList] = msgspec.msgpack.Decoder(SegmentList)


class Unsealed:
    """A segment of a process that died, with the rows in it that count."""

    def __init__(self, segment: LogSegment, rows: Rows) -> None:
        self.segment, self.rows = segment, rows


class FoundLog:
    """What `load` found."""

    def __init__(self, listed: SegmentList, table: PageTable) -> None:
        self.salt, self.table = listed.salt, table
        self.segments: list[LogSegment] = []
        self.unsealed: list[Unsealed] = []
        self.torn = 0
        """Records that were being written at the end, and count for nothing."""


async def load_list(disk: Disk, prefix: str) -> SegmentList | None:
    """None when there is none. Damaged names the file."""
    return await checked.load(disk, list_name(prefix), segment_list)


async def load(disk: Disk, prefix: str, listed: SegmentList, table: PageTable) -> FoundLog:
    """Damaged says which file does not hold what was promised, and what to do. OSError: the disk cannot be read."""
    found = FoundLog(listed, table)
    marks = await disk.read_at(mark_name(prefix), 0, 2 * ALIGNED)
    mark = max(log_records.mark(marks[at : at + MARK_BYTES], listed.salt) for at in (0, ALIGNED))
    for slot, record in enumerate(listed.segments):
        table.live.append(0)
        segment = LogSegment(record.id, slot, record.first, record.last, record.used)
        segment.doubted_from = record.doubted_from
        found.segments.append(segment)
        rows = None
        if record.table_at:
            data = memoryview(
                await disk.read_at(
                    segment_name(prefix, record.id), record.table_at * listed.page_bytes, record.table_bytes
                )
            )
            whole = log_records.table(data, listed.salt, record.id)
            rows = None if whole is None else whole.rows
            segment.sealed, segment.table_at = True, record.table_at
        if rows is None:
            rows = await _scan(disk, prefix, listed, segment, mark, found)
            if not segment.sealed:
                found.unsealed.append(Unsealed(segment, rows))
        table.take_newer(rows, slot)
    return found


async def _scan(disk: Disk, prefix: str, listed: SegmentList, segment: LogSegment, mark: int, found: FoundLog) -> Rows:
    """The rows of a segment without a table of all of them, batch by batch."""
    name, block = segment_name(prefix, segment.id), listed.page_bytes
    data = memoryview(await disk.read(name) or b"")
    tables = log_records.tables_in(data, listed.salt, segment.id, block)
    life = segment.first >> BATCH_BITS
    if segment.last:
        tables = [each for each in tables if each.batch <= segment.last]  # beyond lies what was refused there
    life = segment.first >> BATCH_BITS
    if segment.sealed:
        durable = segment.last
    else:
        said = [mark, *(each.synced for each in tables)]
        durable = max([each for each in said if each >> BATCH_BITS == life], default=0)
    if segment.doubted_from:
        durable = min(durable, segment.doubted_from - 1)
    last = min(segment.last, durable) if segment.last else durable
    missing = log_records.first_missing([each.batch for each in tables], segment.first, last)
    if missing is not None:
        raise Damaged(
            f"{disk.path(name)} is damaged: batch {missing - (life << BATCH_BITS)} of its log is not there, and "
            "nobody knows any more which pages were in it; next: restore the file, or detach the volume for good "
            "(agentctl detach)"
        )
    segment.last = max([segment.last, *(each.batch for each in tables)])
    segment.used = max(segment.used, -(-len(data) // block))
    kept = [each.rows if each.batch <= durable else _whole(each, data, block, found) for each in tables]
    return np.concatenate(kept) if kept else np.zeros(0, ROW)


def _whole(table: RecordTable, data: memoryview, block: int, found: FoundLog) -> Rows:
    """Those rows of a batch whose content is there."""
    good: list[bool] = []
    for version, page, zeros, crc, at in table.rows.tolist():
        content = data[at * block : (at + 1) * block]
        good.append(bool(zeros) or log_records.checksum(version, page, content) == crc)
    found.torn += good.count(False)
    rows: Rows = table.rows[np.array(good, bool)]
    return rows


async def read_rows(disk: Disk, prefix: str, segment: LogSegment, salt: int, block: int) -> Rows:
    """All rows of a sealed segment. OSError when its table is damaged."""
    name, size = segment_name(prefix, segment.id), (segment.used - segment.table_at) * block
    data = memoryview(await disk.read_at(name, segment.table_at * block, size))
    table = log_records.table(data, salt, segment.id)
    if table is not None:
        return table.rows
    tables = log_records.tables_in(memoryview(await disk.read(name) or b""), salt, segment.id, block)
    if log_records.first_missing([each.batch for each in tables], segment.first, segment.last) is not None:
        raise OSError(errno.EIO, f"{disk.path(name)} is damaged")
    return np.concatenate([each.rows for each in tables]) if tables else np.zeros(0, ROW)
