"""Decisions and memory of the spill log's process, without a disk; and its decoders on bytes that are anything."""

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.wire import frames
from plugins.memory.datapath.spill import spill_wire
from plugins.memory.datapath.spill.page_table import LOG, RING, ZERO, PageTable
from plugins.memory.machine.spill_log import (
    AppendNext,
    CompactNext,
    DropNext,
    LogSegment,
    RestUntil,
    SealNext,
    SpillLog,
    StartSegment,
    SyncSegments,
)
from plugins.memory.policy import log_records, spilling
from plugins.memory.policy.log_records import ROW, RecordTable, Rows, TableKind
from plugins.memory.policy.spilling import Fill

LIFE = 3
BLOCKS = 64


def a_log(places: int = 128) -> SpillLog:
    log = SpillLog(places, 4096, BLOCKS, LIFE, log_records.BATCH_BITS)
    start(log, 0)
    return log


def start(log: SpillLog, slot: int) -> None:
    if not log.reserved:
        log.reserve([(log.last_id + 1, slot)])
    log.started()


def filled(log: SpillLog, records: int = 10) -> LogSegment:
    """A segment with these records in it and no room for more."""
    segment = log.active
    assert segment is not None
    log.has_put(records, 0.0)
    log.appended(log.put, BLOCKS, b"", 0.0)
    assert log.active is None
    return segment


# ---- when what is done -----------------------------------------------------------------------------------------------


def test_records_are_gathered_for_a_moment_unless_somebody_waits() -> None:
    log = a_log()
    log.has_put(1, 10.0)
    assert log.next(10.0, [0], 1) == RestUntil(10.0 + spilling.GATHER_S)
    assert log.next(10.0 + spilling.GATHER_S, [0], 1) == AppendNext(0, 1, False)
    log.wait_written(1)
    assert log.next(10.0, [0], 1) == AppendNext(0, 1, False)
    log.wait_synced(1)
    assert log.next(10.0, [0], 1) == AppendNext(0, 1, True)


def test_what_is_written_is_synced_when_somebody_waits_and_before_long() -> None:
    log = a_log()
    log.has_put(1, 10.0)
    log.appended(1, 3, b"", 10.0)
    assert isinstance(log.next(10.0 + spilling.SYNC_S, [1], 1), SyncSegments)
    assert log.next(10.5, [1], 1) == RestUntil(11.0)
    log.wait_synced(1)
    assert isinstance(log.next(10.5, [1], 1), SyncSegments)
    log.did_sync()
    assert log.synced == 1 and log.mark == log.batch


def test_a_segment_goes_only_when_what_made_its_records_dead_is_durable() -> None:
    """A loss of power would leave neither the older content nor the newer."""
    log = a_log()
    segment = filled(log)
    log.did_sync()
    log.sealed(segment, 1)
    log.did_sync()
    start(log, 1)
    log.has_put(10, 1.0)  # in the ring alone, and all that lived in the segment is dead
    log.emptied(segment)
    assert not isinstance(log.next(1.0, [0, 0], 1), DropNext)
    log.appended(20, 12, b"", 1.1)
    due = log.next(1.1, [0, 10], 1)
    assert isinstance(due, SyncSegments), "at once, since a segment waits for it"
    log.did_sync()
    assert log.next(1.1, [0, 10], 1) == DropNext((segment,))


def test_a_segment_goes_only_when_the_copies_are_durable() -> None:
    log = a_log()
    segment = filled(log)
    log.sealed(segment, 1)
    log.did_sync()
    start(log, 1)
    log.copied(12, b"", 1.0)
    log.emptied(segment)
    assert isinstance(log.next(1.0, [0, 10], 1), SyncSegments)
    log.did_sync()
    assert log.next(1.0, [0, 10], 1) == DropNext((segment,))


def test_a_sync_covers_a_segment_that_is_about_to_go() -> None:
    """A page in it was flushed; the record written over it since stands in the ring alone, and no flush is about
    that."""
    log = a_log()
    segment = filled(log)
    log.has_put(10, 1.0)
    log.emptied(segment)
    assert log.unsynced == BLOCKS and segment in log.on_disk()
    assert log.sync_refused() == (0, 10)
    start(log, 1)
    assert log.next(1.0, [0, 0], 1) == CompactNext(segment), "there may have been copies, and those are gone"
    log.emptied(segment)
    log.appended(10, 12, b"", 1.1)
    log.did_sync()
    assert log.synced == 0, "what was in it may be gone, and what is newer is not written"
    log.appended(20, 12, b"", 1.2)
    log.did_sync()
    assert log.synced == 20


def test_after_a_failed_sync_nothing_counts_as_synced_before_the_segment_is_gone() -> None:
    log = a_log()
    segment = log.active
    assert segment is not None
    log.has_put(10, 0.0)
    log.appended(10, 12, b"", 0.0)
    assert log.sync_refused() == (0, 10), "the ring has all of it"
    assert (log.written, log.synced, log.active) == (0, 0, None)
    log.check()
    log.wait_synced(10)
    assert isinstance(log.next(0.0, [0], 1), StartSegment)
    start(log, 1)
    assert log.next(0.0, [0, 0], 1) == CompactNext(segment)
    log.appended(10, 12, b"", 0.1)
    log.did_sync()
    assert log.synced == 0, "the segment in doubt is still there"
    log.emptied(segment)
    log.did_sync()
    assert log.synced == 10
    assert log.next(0.2, [0, 10], 1) == DropNext((segment,))


def test_of_what_a_failed_sync_may_have_dropped_the_ring_has_the_last_records() -> None:
    log = a_log(places=4)
    for _ in range(3):
        log.has_put(4, 0.0)
        log.appended(log.put, 6, b"", 0.0)
    assert log.sync_refused() == (8, 12), "older ones are not in the ring any more"


@pytest.mark.parametrize(
    ("live", "expected"), [(40, None), (31, 5), (0, 5)], ids=["half and more lives", "less than half", "nothing"]
)
def test_a_segment_is_compacted_when_more_than_half_of_it_is_dead(live: int, expected: int | None) -> None:
    fills = [Fill(4, 64, 60), Fill(5, 64, live)]
    assert spilling.to_compact(fills, 1000, 1000, 64) == expected


def test_a_log_that_takes_too_much_is_compacted_where_most_is_dead() -> None:
    fills = [Fill(1, 64, 50), Fill(2, 64, 40), Fill(3, 64, 64)]
    assert spilling.takes_too_much(1700, 1000, 64) and not spilling.takes_too_much(1490, 1000, 64)
    assert spilling.to_compact(fills, 1700, 1000, 64) == 2
    assert spilling.to_compact(fills, 1490, 1000, 64) is None
    assert spilling.to_compact([], 1700, 1000, 64) is None


@given(steps=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 40)), max_size=60))
def test_whatever_happens_no_place_of_the_ring_is_used_twice(steps: list[tuple[int, int]]) -> None:
    log = a_log()
    now_s = 0.0
    for what, count in steps:
        now_s += 0.001 * count
        if what < 4 and log.free() >= count:
            log.has_put(count, now_s)
        live = [8] * 80
        due = log.next(now_s, live, count)
        log.check()
        match due:
            case StartSegment():
                slots = {each.slot for each in [*log.segments, *(left.segment for left in log.dropping)]}
                start(log, next(slot for slot in range(80) if slot not in slots))
            case AppendNext():
                assert log.written == due.start < due.stop <= log.put
                log.appended(due.stop, due.stop - due.start + 2, b"", now_s)
            case SyncSegments() if what == 6:
                log.sync_refused()
            case SyncSegments():
                log.did_sync()
            case SealNext():
                log.sealed(due.segment, 1)
            case CompactNext() if count % 2 and log.active is not None:
                log.copied(5, b"", now_s)
            case CompactNext():
                log.emptied(due.segment)
            case DropNext():
                log.dropped(due.segments)
            case RestUntil():
                assert due.at_s >= now_s or log.put > log.written
        log.check()


# ---- the table of pages ----------------------------------------------------------------------------------------------


def rows_of(*records: tuple[int, int, int, int]) -> Rows:
    """Rows of (version, page, zeros, block)."""
    return np.array([(version, page, zeros, version * 7, block) for version, page, zeros, block in records], ROW)


def test_an_older_record_that_stands_later_in_the_log_does_not_win() -> None:
    """Compaction copies old records behind newer ones."""
    table = PageTable(100, 128)
    table.live = [0, 0]
    table.take_newer(rows_of((5, 3, 0, 1), (6, 4, 0, 2)), 0)
    table.take_newer(rows_of((4, 3, 0, 1), (7, 5, 0, 2), (3, 4, 0, 3)), 1)
    assert list(table.run(3, 3)) == [5, 6, 7]
    assert [table.segment_of(table.places[page]) for page in (3, 4, 5)] == [(0, 1), (0, 2), (1, 2)]
    assert table.live == [2, 1]


def test_of_zeros_and_content_the_newer_counts_page_by_page() -> None:
    table = PageTable(100, 128)
    table.live = [0, 0]
    table.take_newer(rows_of((1, 3, 0, 1), (9, 4, 0, 2)), 0)
    table.take_newer(rows_of((5, 0, 10, 0), (6, 8, 0, 1)), 1)
    assert list(table.run(3, 2)) == [5, 9]
    assert (table.places[3], table.versions[8]) == (ZERO, 6)
    assert table.live == [1, 1]


def test_a_page_written_again_while_it_was_on_its_way_stays_in_the_ring() -> None:
    table = PageTable(10, 128)
    table.live = [0]
    table.put(3, 1, RING | 0)
    table.put(3, 2, RING | 1)
    rows = rows_of((1, 3, 0, 1))
    table.landed(rows, np.array([RING | 0], np.uint32), 0)
    assert (table.places[3], table.live) == (RING | 1, [0])
    table.landed(rows_of((2, 3, 0, 2)), np.array([RING | 1], np.uint32), 0)
    assert (table.segment_of(table.places[3]), table.live) == ((0, 2), [1])
    table.lift(rows_of((1, 3, 0, 1), (2, 3, 0, 2)), np.array([RING | 0, RING | 1], np.uint32))
    assert (table.places[3], table.live) == (RING | 1, [0])


# ---- decoders --------------------------------------------------------------------------------------------------------


def a_table(salt: int = 7) -> bytearray:
    rows = rows_of((5, 3, 0, 1), (6, 4, 2, 0))
    data = bytearray(4096)
    log_records.pack_table(RecordTable(TableKind.HEAD, 9, 11, 10, 0, 3, rows), salt, memoryview(data))
    return data


def test_a_table_comes_back_as_it_was_packed() -> None:
    found = log_records.table(memoryview(a_table()), 7, 9)
    assert found is not None and found[:6] == (TableKind.HEAD, 9, 11, 10, 0, 3)
    assert found.rows.tolist() == [(5, 3, 0, 35, 1), (6, 4, 2, 42, 0)]
    assert log_records.table(memoryview(a_table()), 8, 9) is None, "of another log"
    assert log_records.table(memoryview(a_table()), 7, 8) is None, "of another segment"


@given(at=st.integers(0, 111), bit=st.integers(0, 7))
def test_a_table_in_which_a_bit_is_wrong_is_none(at: int, bit: int) -> None:
    data = a_table()
    data[at] ^= 1 << bit
    assert log_records.table(memoryview(data), 7, 9) is None


@given(data=st.binary(max_size=20_000), seed=st.integers(0, 1 << 30))
def test_any_bytes_are_a_segment_with_or_without_tables(data: bytes, seed: int) -> None:
    rng = random.Random(seed)
    mixed = bytearray(data.ljust(5 * 4096, b"\0"))
    for block in rng.sample(range(5), 2):
        table = a_table()
        for _ in range(rng.randrange(3)):
            table[rng.randrange(4096)] ^= 1 << rng.randrange(8)
        mixed[block * 4096 : (block + 1) * 4096] = table
    for found in log_records.tables_in(memoryview(bytes(mixed)), 7, 9, 4096):
        assert found.batch == 11 and len(found.rows) == 2
    log_records.table(memoryview(data), 7, 9)
    assert log_records.mark(data, 7) == 0


@given(batch=st.integers(0, (1 << 63) - 1), at=st.integers(0, log_records.MARK_BYTES - 1))
def test_a_mark_says_what_was_packed_or_nothing(batch: int, at: int) -> None:
    packed = bytearray(log_records.pack_mark(batch, 7))
    assert log_records.mark(bytes(packed), 7) == batch and log_records.mark(bytes(packed), 6) == 0
    packed[at] ^= 16
    assert log_records.mark(bytes(packed), 7) == 0


END = spill_wire.LogEnd(1, 0, 2, 3, 4)
SAID: list[spill_wire.SpillFrame] = [
    spill_wire.SpillHello("1:2:3", 512, 4096, 7, END, 3),
    spill_wire.AppendRecords(END, 9, 2, True, spill_wire.LogSync((1,), 3)),
    spill_wire.CopyRecords(1, b"r" * 24, END, 2),
    spill_wire.SealSegment(1, 0, 5, 3, b"r" * 24),
    spill_wire.SyncLog(spill_wire.LogSync((1, 2), 3)),
    spill_wire.SaveSegments(b"record", END),
    spill_wire.DropSegment(1),
]
ANSWERED: list[spill_wire.SpillFrame] = [
    spill_wire.SpillReady(),
    spill_wire.SpillDone(),
    spill_wire.SpillDone(True, 5, "broken", (3, 4)),
]


@pytest.mark.parametrize("frame", SAID + ANSWERED, ids=lambda frame: type(frame).__name__)
def test_what_the_two_processes_say_comes_back_as_it_was(frame: spill_wire.SpillFrame) -> None:
    decoder: Any = spill_wire.done_decoder if frame in ANSWERED else spill_wire.order_decoder
    assert frames.unpack(frames.pack(frame)[4:], decoder) == frame


@given(
    data=st.one_of(
        st.binary(max_size=300),
        st.tuples(st.sampled_from(SAID + ANSWERED), st.integers(0, 200), st.integers(0, 255)).map(
            lambda drawn: _mutated(*drawn)
        ),
    )
)
def test_any_bytes_are_an_order_or_a_frame_error(data: bytes) -> None:
    decoders: list[Any] = [spill_wire.order_decoder, spill_wire.done_decoder]
    for decoder in decoders:
        try:
            found = frames.unpack(data, decoder)
        except frames.FrameError:
            continue
        assert isinstance(found, spill_wire.SpillFrame)


def _mutated(frame: spill_wire.SpillFrame, at: int, value: int) -> bytes:
    data = bytearray(msgspec.msgpack.encode(frame))
    data[at % len(data)] = value
    return bytes(data)


STRIDE, SLOTS, PAGES = 6, 3, 24
_A_PLACE = st.one_of(st.sampled_from([0, ZERO, RING, RING + 5]), st.integers(LOG, LOG + SLOTS * STRIDE - 1))


@given(
    st.lists(_A_PLACE, min_size=PAGES, max_size=PAGES),
    st.lists(st.tuples(st.integers(0, PAGES - 1), st.integers(1, PAGES)), min_size=1, max_size=6),
)
def test_blocks_that_live_are_counted_right_whatever_a_run_overwrites(
    places: list[int], runs: list[tuple[int, int]]
) -> None:
    """The count says which segments are compacted, and when one may be deleted."""

    def lives() -> list[int]:
        return [sum(slot * STRIDE <= at - LOG < (slot + 1) * STRIDE for at in found) for slot in range(SLOTS)]

    table, found = PageTable(PAGES, STRIDE), list(places)
    table.all_places[:] = found
    table.live = lives()
    zeros_died = 0
    for first, length in runs:
        count = min(length, PAGES - first)
        over = found[first : first + count]
        zeros_died += over.count(ZERO)
        assert table.put_run(first, count, 7, RING + 9) == sum(at != 0 for at in over)
        found[first : first + count] = [RING + 9] * count
        assert table.live == lives() and table.zeros_died == zeros_died
        assert table.all_places.tolist() == found
