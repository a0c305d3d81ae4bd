"""The spill log of a volume as its process knows it: which records are where, and what is to be done next.

Records are numbered as they are put into the ring. Up to `written` they are in the log, up to `synced` they are
durable; a record's place in the ring is free once it is written, and keeps its content until another needs it.

    put -> [ring] -> append -> written -> sync -> synced

A segment fills up, is sealed (a table of all its rows), and is dropped when its living records were copied. It is
dropped only when everything that made its records dead is durable, and every copy.

A kernel that failed to sync may have dropped what was written, and says so only once. So after a failure the segments
in doubt are not trusted: records that the ring still has are appended again to a new one, and living records of the
rest are read, checked and copied there. Nothing counts as synced before they are gone. Segments that an earlier process
left unsealed are not trusted either: it is not known whether a sync of them failed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from plugins.memory.policy import spilling
from plugins.memory.policy.log_records import ROW_BYTES
from plugins.memory.policy.spilling import Fill

LOOK_S = 1.0
"""Seconds after a change within which the log looks for something to compact."""
ASIDE_S = 10.0
"""Pause before a segment of which the disk cannot read something is tried again."""


@dataclass
class LogSegment:
    """One file of the log."""

    id: int
    slot: int
    """Its number among slots of page places; it is used again when the segment is gone."""
    first: int
    """Number of its first batch."""
    last: int = 0
    used: int = 0
    """Blocks in use."""
    sealed: bool = False
    unsynced: int = 0
    """Blocks written since the last sync."""
    doubted: bool = False
    """A sync of it failed."""
    doubted_from: int = 0
    """Number of the first batch that may be lost because of that."""
    found_durable: int = -1
    """Batch up to which everything in it was durable when this process found it; -1: this process began it."""
    aside_s: float = 0.0
    """Time before which it is not tried again, since the disk cannot read something that lives in it."""
    table_at: int = 0
    zeros: int = 0
    """Records of zeros that lived when they were copied here; they have no block of their own."""
    zeros_blocks: int = 0
    """Blocks of tables that these records take."""
    zeros_died: int = 0
    """How many pages of zeros had died by then (`PageTable.zeros_died`)."""
    rows: list[bytes] = field(default_factory=list)
    """Rows of its batches, until it is sealed."""

    def zeros_live(self, died: int) -> int:
        """Blocks of tables whose records of zeros live, as far as is known: those that were copied here, unless half of
        them may have died since. Without this a segment of zeros would be copied again and again."""
        return self.zeros_blocks if 2 * (died - self.zeros_died) < self.zeros else 0


class LeftSegment(NamedTuple):
    """A segment with no living record. It may be dropped once records before `number` and batches up to `batch` are
    durable: those made its records dead, or are the copies."""

    segment: LogSegment
    number: int
    batch: int


class StartSegment(NamedTuple):
    """Begin a segment from the reserve, or list new ones."""


class AppendNext(NamedTuple):
    start: int
    stop: int
    sync: bool


class SyncSegments(NamedTuple):
    pass


class SealNext(NamedTuple):
    segment: LogSegment


class CompactNext(NamedTuple):
    segment: LogSegment


class DropNext(NamedTuple):
    """Drop these segments: nothing in them lives, and all that says so is durable. List the rest first."""

    segments: tuple[LogSegment, ...]


class RestUntil(NamedTuple):
    """There is nothing to do before `at_s`, unless something happens."""

    at_s: float


Next = StartSegment | AppendNext | SyncSegments | SealNext | CompactNext | DropNext | RestUntil


class SpillLog:
    """`places`: places of the ring. `segment_blocks`: length of a segment. `life` is higher than that of every earlier
    process."""

    def __init__(self, places: int, block_bytes: int, segment_blocks: int, life: int, life_bits: int) -> None:
        self.places, self.block_bytes, self.segment_blocks = places, block_bytes, segment_blocks
        self.put = self.written = self.synced = 0
        self.rewound = 0
        """Records appended again after a failed sync; for people."""
        self.batch = life << life_bits
        """Number of the last batch written."""
        self.mark = self.batch
        """Number of the last batch of this life that is durable."""
        self.segments: list[LogSegment] = []
        self.active: LogSegment | None = None
        self.dropping: list[LeftSegment] = []
        """Segments in which nothing lives any more."""
        self.last_id = 0
        self.reserved: list[tuple[int, int]] = []
        """Id and slot of segments that are listed and not begun."""
        self._waited = self._flush_to = 0
        self._oldest_s = self._unsynced_s = self._looked_s = 0.0
        self._since_look = 1
        """Blocks written since the log last looked for something to compact."""
        self._worst: LogSegment | None = None
        self.owed = False
        """There was a segment in doubt, and not all of its content is durable yet: no flush is true until then."""
        self._slots: dict[int, LogSegment] = {}
        """Slot -> segment, for all of `segments`: there are tens of thousands."""
        self._open: list[LogSegment] = []
        """Segments that are not sealed."""
        self._touched: dict[int, LogSegment] = {}
        """Id -> segment on disk that a sync would cover."""
        self._crowded = self._full = self._doubt = False
        """The log is too large; the log is as large as it may ever be; a segment is in doubt."""

    # ---- what happens ----

    def has_put(self, records: int, now_s: float) -> None:
        """Records were put into the ring; if none waited before, the oldest one dates from `now_s`."""
        if self.put == self.written:
            self._oldest_s = now_s
        self.put += records

    def free(self) -> int:
        """Free places of the ring."""
        return self.places - (self.put - self.written)

    def wait_written(self, number: int) -> None:
        """Note that a request waits for the records before this number to be written."""
        self._waited = max(self._waited, number)

    def wait_synced(self, number: int) -> None:
        self._flush_to = max(self._flush_to, number, self.owed)

    def found(self, segments: Iterable[LogSegment]) -> None:
        """Take over the segments on disk when the process begins. Unsealed ones are not trusted."""
        self.segments = list(segments)
        self.last_id = max([self.last_id, *(segment.id for segment in self.segments)])
        self._slots = {segment.slot: segment for segment in self.segments}
        for segment in self.segments:
            if not segment.sealed:
                self._open.append(segment)
                segment.doubted, segment.doubted_from = True, segment.found_durable + 1
                self._doubt = self.owed = True

    def reserve(self, more: Iterable[tuple[int, int]]) -> None:
        """These segments (id and slot) are listed now."""
        self.reserved += more
        self.last_id = max([self.last_id, *(id for id, _ in self.reserved)])

    def started(self) -> None:
        """The next segment in reserve is begun."""
        id, slot = self.reserved.pop(0)
        self.active = LogSegment(id, slot, self.batch + 1)
        self._put_back(self.active)

    def _put_back(self, segment: LogSegment) -> None:
        self.segments.append(segment)
        self._slots[segment.slot] = segment
        if not segment.sealed:
            self._open.append(segment)

    def has_slot(self, slot: int) -> bool:
        """Is there a segment in this slot that may be read?"""
        return slot in self._slots

    def appended(self, stop: int, blocks: int, rows: bytes, now_s: float) -> None:
        """The records before `stop` are in the active segment, as one batch."""
        self._added(blocks, rows, now_s)
        self.written = stop
        self._oldest_s = now_s

    def copied(self, blocks: int, rows: bytes, now_s: float, zeros: int = 0, zeros_died: int = 0) -> None:
        """A batch of copies is in the active segment, `zeros` of them without content."""
        active = self.active
        assert active is not None
        if zeros:
            active.zeros += zeros
            active.zeros_blocks += max(1, blocks * zeros // max(1, len(rows) // ROW_BYTES))
            active.zeros_died = zeros_died
        self._added(blocks, rows, now_s)

    def _added(self, blocks: int, rows: bytes, now_s: float) -> None:
        active = self.active
        assert active is not None
        if not self._touched:
            self._unsynced_s = now_s
        self._touched[active.id] = active
        self.batch += 1
        active.last = self.batch
        active.used += blocks
        active.unsynced += blocks
        active.rows.append(rows)
        self._since_look += blocks
        if active.used >= self.segment_blocks:
            self.active = None

    def did_sync(self) -> None:
        """Everything written before is durable, unless a segment is in doubt."""
        for segment in self.to_sync():
            segment.unsynced = 0
            del self._touched[segment.id]
        self._settle()

    def _settle(self) -> None:
        """The records that made those of a segment in doubt dead must be written before anything counts as synced:
        until then a flush may have been about them."""
        gone = all(self.written >= left.number for left in self.dropping if left.segment.doubted)
        if gone and not any(segment.doubted for segment in self.segments):
            self.synced = max(self.synced, self.written)
            self.mark = self.batch
            self.owed = False

    def sync_refused(self) -> tuple[int, int]:
        """A sync failed: what was written since the last sync is in doubt. Records that the ring still has are appended
        again: their first and last number (exclusive) are returned, and the caller reads them from the ring from now
        on. Segments that were to be dropped once their copies are durable stay: the copies may be gone."""
        for segment in self.to_sync():
            known = self.mark if segment.found_durable < 0 else segment.found_durable
            segment.doubted, segment.doubted_from = True, known + 1
        self._doubt = self.owed = True
        self._worst = None
        back = [left for left in self.dropping if left.batch > self.mark]
        self.dropping = [left for left in self.dropping if left not in back]
        for left in back:
            self._put_back(left.segment)
        self.reserved = []  # the list says which segments are in doubt before another is begun
        self.active = None
        start, stop = max(self.synced, self.put - self.places), self.written
        self.rewound += max(0, stop - start)
        self.written = min(self.written, max(start, 0))
        return self.written, stop

    def sealed(self, segment: LogSegment, blocks: int) -> None:
        """The table of all its rows is written behind its last batch."""
        segment.sealed, segment.table_at = True, segment.used
        segment.used += blocks
        segment.unsynced += blocks
        segment.rows = []
        self._open.remove(segment)
        self._touched[segment.id] = segment
        self._since_look += self.segment_blocks

    def emptied(self, segment: LogSegment) -> None:
        """All living records of the segment are elsewhere."""
        self.segments.remove(segment)
        del self._slots[segment.slot]
        if not segment.sealed:
            self._open.remove(segment)
        self.dropping.append(LeftSegment(segment, self.put, self.batch))
        self._worst, self._since_look = None, self.segment_blocks
        self._doubt = any(each.doubted for each in self.segments)
        if segment.doubted and not self.unsynced:
            self._settle()

    def put_aside(self, segment: LogSegment, now_s: float) -> None:
        """All readable records of the segment are elsewhere. Unreadable ones stay: they may be readable again."""
        segment.aside_s = now_s + ASIDE_S
        self._worst, self._since_look = None, self.segment_blocks

    def is_stuck(self, now_s: float) -> bool:
        """A sync failed of records that the disk cannot even read now: nothing can count as synced."""
        return self._doubt and any(each.doubted and each.aside_s > now_s for each in self.segments)

    def dropped(self, segments: Sequence[LogSegment]) -> None:
        """These segments are not listed any more."""
        self.dropping = [left for left in self.dropping if left.segment not in segments]
        for segment in segments:
            self._touched.pop(segment.id, None)

    # ---- what to do ----

    @property
    def used(self) -> int:
        """Blocks on disk."""
        return sum([segment.used for segment in self.on_disk()])

    def on_disk(self) -> list[LogSegment]:
        """All segments that are on disk, those being dropped included: until they are gone a flush may be about their
        content."""
        return [*self.segments, *(left.segment for left in self.dropping)]

    @property
    def unsynced(self) -> int:
        """Blocks that a sync would make durable."""
        return sum([segment.unsynced for segment in self.to_sync()])

    def to_sync(self) -> list[LogSegment]:
        """Segments that a sync would cover."""
        return [segment for segment in self._touched.values() if segment.unsynced and not segment.doubted]

    @property
    def rows_max(self) -> int:
        """Most records of one batch."""
        return min(spilling.BATCH_ROWS, self.segment_blocks // 2)

    def next(self, now_s: float, live: Sequence[int], turn: int, zeros_died: int = 0) -> Next:
        """The next thing to do. `live[slot]`: blocks of a segment that live. `turn` counts steps: while the log takes
        too much, every second one is a step of compaction, so that the log does not grow for ever. `zeros_died`: as
        `PageTable` counts."""
        drop = self._to_drop()
        if len(drop) >= spilling.DROP_TOGETHER:
            return DropNext(drop)
        unsynced, ready = self.unsynced, len([left for left in self.dropping if self.written >= left.number])
        behind = ready >= len(drop) + spilling.DROP_TOGETHER
        if spilling.sync_due(behind, unsynced * self.block_bytes, now_s - self._unsynced_s):
            return SyncSegments()
        compact = self._to_compact(live, now_s, zeros_died)
        if compact is not None and (self._full or ((self._crowded or compact.doubted) and turn % 2)):
            return self._compaction(compact)
        full = [each for each in self._open if each is not self.active and not each.doubted]
        if len(full) > spilling.UNSEALED_MAX:
            return SealNext(full[0])
        waiting = self.put - self.written
        waited = waiting > 0 and (max(self._waited, self._flush_to) > self.written or waiting * 2 >= self.places)
        if spilling.append_due(waiting, waited, now_s - self._oldest_s):
            if self.active is None:
                return StartSegment()
            stop = min(self.put, self.written + self.rows_max)
            return AppendNext(self.written, stop, self._flush_to > self.synced and stop >= self._flush_to)
        if unsynced and self._flush_to > self.synced:
            return SyncSegments()
        if full:
            return SealNext(full[0])
        if compact is not None:
            return self._compaction(compact)
        if drop:
            return DropNext(drop)
        if ready and unsynced:
            return SyncSegments()
        return RestUntil(self._rest_until(waiting, unsynced, now_s))

    def _compaction(self, segment: LogSegment) -> Next:
        return CompactNext(segment) if self.active is not None else StartSegment()

    def _rest_until(self, waiting: int, unsynced: int, now_s: float) -> float:
        times = [self._oldest_s + spilling.GATHER_S] if waiting else []
        if unsynced:
            times.append(self._unsynced_s + spilling.SYNC_S)
        if self._since_look:
            times.append(self._looked_s + LOOK_S)
        if self._doubt:
            times += [each.aside_s for each in self.segments if each.doubted and each.aside_s > now_s]
        return min(times, default=float("inf"))

    def _to_drop(self) -> tuple[LogSegment, ...]:
        return tuple(left.segment for left in self.dropping if self.synced >= left.number and self.mark >= left.batch)

    def _to_compact(self, live: Sequence[int], now_s: float, zeros_died: int) -> LogSegment | None:
        """The segment to compact, one in doubt first. All are looked at only now and then: there may be a thousand."""
        if self._doubt:
            doubted = next((each for each in self.segments if each.doubted and each.aside_s <= now_s), None)
            if doubted is not None:
                return doubted
        often = self._since_look >= self.segment_blocks // 8
        if often or (self._since_look and now_s >= self._looked_s + LOOK_S):
            self._looked_s, self._since_look = now_s, 0
            full = [each for each in self.segments if each.sealed and each.aside_s <= now_s]
            lives = {each.slot: live[each.slot] + each.zeros_live(zeros_died) for each in self.segments}
            fills = [Fill(each.slot, each.used, lives[each.slot]) for each in full]
            total = sum(lives.values())
            used = sum([each.used for each in self.segments])
            slot = spilling.to_compact(fills, used, total, self.segment_blocks)
            self._worst = next((each for each in full if each.slot == slot), None)
            self._crowded = spilling.takes_too_much(used, total, self.segment_blocks)
            self._full = spilling.takes_too_much(used, total, self.segment_blocks, spilling.TAKES_MOST)
        return self._worst

    def check(self) -> None:
        """Check what must hold after every event. AssertionError."""
        assert self.synced <= self.written <= self.put <= self.written + self.places, "a place is used twice"
        assert len({each.slot for each in self.segments}) == len(self.segments), "two segments in one slot"
        assert self.mark <= self.batch, "the mark is ahead of what was written"
        assert self._slots == {each.slot: each for each in self.segments}
        assert self._open == [each for each in self.segments if not each.sealed]
        assert {each.id for each in self.on_disk() if each.unsynced} <= set(self._touched)
