"""Faults of a spill log beyond deaths: disks that lose what they took, or cannot read it; more records, segments and
writers than fit in one message, one step or one turn."""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest

from agent.ports import disk as disk_port
from agent.ports.disk import DirectoryDisk
from plugins.memory.datapath.spill import spill_wire, spill_writer
from plugins.memory.datapath.spill.page_table import PageTable
from plugins.memory.datapath.spill.spill import Spill
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
from tests.plugins.memory.ports import Bench, a_bench, a_volume, placed, read, soon, write
from tests.plugins.memory.spilled import PAGE, PAGES, PLACES, content, look
from tests.plugins.memory.test_spill import RUNNING, damaged, die, opened, put


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plugins.memory.datapath.spill.spill.RETRY_S", 0.01)


# ---- whoever writes without a pause ----------------------------------------------------------------------------------


class Saturated:
    """A log whose ring is always full, on a disk that takes `append_s` for a batch: pages written at random."""

    def __init__(self, pages: int, segment_blocks: int, seed: int) -> None:
        self.rng, self.pages = random.Random(seed), pages
        self.log = SpillLog(4096, 4096, segment_blocks, 1, log_records.BATCH_BITS)
        self.place: dict[int, tuple[int, int]] = {}
        self.live = [0] * 4096
        self.now_s = 0.0
        self.ring: list[int] = []
        self.unsynced_s = self.unsynced_most = self.used_most = 0.0
        self._dirty_s: float | None = None
        self._next_slot = 0

    def run(self, steps: int) -> None:
        for turn in range(steps):
            while self.log.free():
                self.log.has_put(1, self.now_s)
                self.ring.append(self.rng.randrange(self.pages))
            self._do(self.log.next(self.now_s, self.live, turn))
            self.log.check()
            lives = len(self.place)
            if lives == self.pages:
                self.used_most = max(self.used_most, sum(each.used for each in self.log.segments) / lives)
            self.unsynced_most = max(self.unsynced_most, self.log.unsynced * 4096)

    def _put(self, page: int) -> None:
        active = self.log.active
        assert active is not None
        if page in self.place:
            self.live[self.place[page][0]] -= 1
        self.place[page] = (active.slot, self.log.batch)
        self.live[active.slot] += 1

    def _do(self, due: Next) -> None:
        log = self.log
        match due:
            case StartSegment():
                self._next_slot += 1
                log.reserve([(log.last_id + 1, self._next_slot)])
                log.started()
            case AppendNext():
                for page in self.ring[: due.stop - due.start]:
                    self._put(page)
                del self.ring[: due.stop - due.start]
                log.appended(due.stop, due.stop - due.start + 14, b"", self.now_s)
                self.now_s += 0.02
            case SyncSegments():
                log.did_sync()
            case SealNext():
                log.sealed(due.segment, 7)
            case CompactNext():
                living = [page for page, (slot, _) in self.place.items() if slot == due.segment.slot][:256]
                if living:
                    for page in living:
                        self._put(page)
                    log.copied(len(living) + 4, b"", self.now_s)
                    self.now_s += 0.005
                else:
                    log.emptied(due.segment)
            case DropNext():
                log.dropped(due.segments)
            case RestUntil():
                raise AssertionError("the ring is full")


def test_without_a_pause_between_writes_the_log_is_synced_and_stays_short() -> None:
    """A loss of power takes at most a second of writing, or 64 MiB; the log takes at most 1.5 times what lives, and the
    segments in hand."""
    played = Saturated(8192, 1024, 1)
    played.run(1500)
    batch = 1100 * 4096 * 2
    assert played.unsynced_most <= spilling.SYNC_BYTES + batch, f"{played.unsynced_most / 2**20:.0f} MiB unsynced"
    spare = (spilling.SEGMENTS_SPARE + spilling.UNSEALED_MAX + 2) * 2100 / 8192
    assert played.used_most <= spilling.TAKES_MOST + spare, f"{played.used_most:.1f} times what lives"


async def test_who_waits_for_room_gets_it_in_turn() -> None:
    """A long write of a process that died must not come after a short one of the process that followed it."""
    async with a_bench() as bench:
        spill = await opened(bench, 1)
        bench.disk.gate.clear()
        while spill.fits(1):
            put(spill, 1, p40=1)
        done: list[str] = []

        async def wanted(records: int, name: str) -> None:
            await spill.room(records)
            for _ in range(records):
                put(spill, 2, p41=1)
            done.append(name)

        waiting = [asyncio.ensure_future(wanted(200, "long"))]
        await asyncio.sleep(0)
        waiting += [asyncio.ensure_future(wanted(1, f"short {number}")) for number in range(3)]
        await asyncio.sleep(0.02)
        given_up = asyncio.ensure_future(wanted(3, "given up"))
        await asyncio.sleep(0.02)
        given_up.cancel()
        bench.disk.gate.set()
        await asyncio.gather(*waiting)
        assert done == ["long", "short 0", "short 1", "short 2"]
        spill.log.check()
        await spill.flush()
        assert spill.fits(256)
        await die(spill)


# ---- more than one message holds -------------------------------------------------------------------------------------


async def test_a_segment_with_more_records_than_a_message_holds_is_sealed() -> None:
    """Discards take a row and no block: 50,000 of single pages are one segment of a volume of 512 MiB."""
    async with a_bench() as bench:
        pages = 131_072
        spill = await opened(bench, 1, pages, 4096)
        for number in range(50_000):
            await spill.room(1)
            spill.put(2 * number, 1, number + 1, None)
        put(spill, 60_000, p7=5)
        await spill.flush()
        await spill.stop()
        sealed = [each for each in spill.log.segments if each.sealed]
        assert sum(len(rows) for each in sealed for rows in each.rows) == 0 and len(sealed) == 1
        await die(spill)
        again = await opened(bench, 2, pages, 4096)
        assert again.count_written(0, pages) == 50_001
        assert list(again.versions(99_998, 3)) == [50_000, 0, 0]


async def test_a_writer_that_was_reached_stays_though_the_machine_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_writer, "HELLO_S", 0.05)
    async with a_bench() as bench:
        spill = Spill(bench.env, "data", "v", PAGES, PAGE, PLACES)
        await spill.open(1)
        time.sleep(0.2)  # noqa: ASYNC251
        await spill.settle()
        assert spill.writer.starts == 1
        await spill.close()


async def test_a_list_longer_than_a_message_is_saved() -> None:
    """The list is that of a volume of 1 TiB, written from end to end."""
    async with a_bench() as bench:
        spill = await opened(bench, 1)
        put(spill, 1, p3=1)
        await spill.flush()
        RUNNING[id(spill)].cancel()  # it would look for files of these
        await asyncio.sleep(0)
        log = spill.log
        for number in range(40_000):
            many = LogSegment(1000 + number, 1000 + number, log.batch + 1, log.batch + 99, 8192, True)
            many.table_at = 8000
            log.segments.insert(0, many)
        await spill.keeper._save_list()
        size = await bench.directory.size("v/log/segments")
        assert size > spill_wire.PART_MAX
        await die(spill)
        listed = await spill_list(bench)
        assert len(listed.segments) >= 40_001


async def spill_list(bench: Bench) -> Any:
    from plugins.memory.datapath.spill import spill_load

    found = await spill_load.load_list(bench.env.disk, "v")
    assert found is not None
    return found


# ---- what the disk lost ----------------------------------------------------------------------------------------------


async def filled(bench: Bench) -> Spill:
    """Make a log in which page 50 was durable in a segment that is compacted by now, and its content has rotted."""
    spill = await opened(bench, 1, pages=64)
    put(spill, 1, p50=46)
    await spill.flush()
    slot, block = spill.table.segment_of(spill.table.places[50])
    await damaged(bench, f"v/log/{slot:08x}", block * PAGE + 8)
    place = spill.table.places[50]
    for number in range(2, 2000):
        await spill.room(1)
        put(spill, number, **{f"p{number % 40}": number})
        if spill.table.places[50] != place:
            break
    assert spill.table.places[50] != place, "it was not compacted"
    await spill.flush()
    return spill


async def test_a_page_that_rotted_moves_along_as_lost_and_heals_when_it_is_written() -> None:
    async with a_bench() as bench:
        spill = await filled(bench)
        assert spill.keeper.lost(dropped=False) == [50]
        for life in (2, 3):
            with pytest.raises(OSError, match="page 50 is damaged"):
                await look(spill, 64)
            await die(spill)
            spill = await opened(bench, life, pages=64)
            assert spill.keeper.lost(dropped=False) == [50]
        put(spill, 1 << 41, p50=1)
        assert spill.keeper.lost(dropped=False) == []
        await spill.flush()
        await die(spill)
        assert (await look(await opened(bench, 4, pages=64), 64))[50] == 1


async def test_a_sector_that_cannot_be_read_now_stops_nothing_and_is_not_given_up() -> None:
    async with a_bench() as bench:
        read_at, bad = bench.directory.read_at, -1

        async def failing(name: str, offset: int, size: int) -> bytes:
            if name == "v/log/00000000" and offset <= bad < offset + size:
                raise OSError(5, "unreadable")
            return await read_at(name, offset, size)

        spill = await opened(bench, 1, pages=64)
        put(spill, 1, p50=46, p51=47)
        await spill.flush()
        slot, block = spill.table.segment_of(spill.table.places[50])
        assert slot == 0
        bad = block * PAGE
        bench.disk.read_at = failing  # type: ignore[method-assign]
        place, other = spill.table.places[50], spill.table.places[51]
        for number in range(2, 2000):
            await spill.room(1)
            put(spill, number, **{f"p{number % 40}": number})
            if spill.table.places[51] != other:
                break
        assert spill.table.places[51] != other, "what can be read was not copied"
        await spill.flush()
        await soon(lambda: spill.log.segments[0].aside_s > 0)
        assert spill.table.places[50] == place
        with pytest.raises(OSError, match="unreadable"):
            await look(spill, 64)
        bad = -1
        assert (await look(spill, 64))[50] == 46
        first = spill.log.segments[0]
        first.aside_s = 0.0  # the pause is over
        put(spill, 3000, p0=1)
        await spill.flush()
        await soon(lambda: first not in spill.log.segments)
        assert (await look(spill, 64))[50:52] == [46, 47]
        await die(spill)


async def test_tables_that_cannot_be_read_do_not_stop_compaction() -> None:
    """The pages that live in a segment are known in memory."""
    async with a_bench() as bench:
        spill = await opened(bench, 1, pages=128)
        put(spill, 1, p50=46)
        spill.put(52, 3, 2, None)
        for number in range(3, 70):
            put(spill, number, **{f"p{55 + number}": number})
        await spill.flush()
        first = spill.log.segments[0]
        await soon(lambda: first.sealed and not first.unsynced)
        assert spill.table.segment_of(spill.table.places[50])[0] == first.slot == 0
        for block in range(first.table_at + 1):
            data = await bench.disk.read_at("v/log/00000000", block * PAGE, 8)
            if data == log_records.MAGIC:
                await damaged(bench, "v/log/00000000", block * PAGE + 70)
        for number in range(3, 60):
            put(spill, 100 + number, **{f"p{55 + number}": number})
        await spill.flush()
        await soon(lambda: first not in spill.log.segments)
        before = await look(spill, 128)
        assert before[50] == 46
        await die(spill)
        again = await opened(bench, 2, pages=128)
        assert await look(again, 128) == before
        assert again.version(53) == 2


async def dropped(bench: Bench, spill: Spill, *pages: int) -> None:
    """Let a sync fail, after which these pages are not what was written any more; nor are they in the ring."""
    places = [spill.table.segment_of(spill.table.places[each]) for each in pages]
    sync = bench.disk.sync

    async def failing(name: str) -> None:
        for slot, block in places:
            await bench.disk.write_at(f"v/log/{slot:08x}", block * PAGE, bytes(PAGE))
        raise OSError(5, "broken")

    bench.disk.sync = failing  # type: ignore[method-assign]
    put(spill, 1 << 30, p0=1)
    with pytest.raises(OSError, match="broken"):
        await spill.flush()
    bench.disk.sync = sync  # type: ignore[method-assign]
    await soon(lambda: not spill.refused)


async def written_out(bench: Bench, places: int = 16) -> Spill:
    """Write pages 5 and 6 without a sync, and fill the ring with other records."""
    spill = await opened(bench, 1, places=places)
    put(spill, 1, p5=5, p6=6)
    await spill.written(2)
    for number in range(2, 2 + 2 * places):
        await spill.room(1)
        put(spill, number, **{f"p{10 + number % 30}": number})
    await spill.written(spill.log.put)
    assert not spill.log.synced
    return spill


async def test_what_a_failed_sync_dropped_is_named_until_it_is_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spilling, "SYNC_S", 1000.0)
    async with a_bench() as bench:
        spill = await written_out(bench)
        await dropped(bench, spill, 5, 6)
        for _ in range(2):
            with pytest.raises(
                OSError, match=r"the disk dropped pages 5, 6 that it had accepted; next: write or discard"
            ):
                await spill.flush()
        with pytest.raises(OSError, match="page 5 is damaged"):
            await look(spill)
        await die(spill)
        spill = await opened(bench, 2, places=16)
        with pytest.raises(OSError, match="the disk dropped pages 5, 6"):
            await spill.flush()
        put(spill, 1 << 40, p5=55)
        with pytest.raises(OSError, match="the disk dropped page 6 that"):
            await spill.flush()
        spill.put(6, 1, 1 << 40 | 1, None)  # a discard is as good
        await spill.flush()
        await die(spill)
        assert (await look(await opened(bench, 3, places=16)))[5:7] == [55, 0]


async def test_what_a_failed_sync_dropped_is_saved_from_the_ring_of_a_killed_process() -> None:
    """It is not in the log any more, and the process had no time to write it anew."""
    async with a_bench() as bench:
        spill = await opened(bench, 1)
        put(spill, 1, p0=1)
        await spill.flush()
        put(spill, 2, p1=11, p2=12)
        await spill.written(3)
        slot, block = spill.table.segment_of(spill.table.places[1])
        refused = asyncio.Event()

        async def failing(name: str) -> None:
            await bench.directory.write_at(f"v/log/{slot:08x}", block * PAGE, bytes(PAGE))
            bench.disk.gate.clear()
            refused.set()
            raise OSError(5, "broken")

        sync, bench.disk.sync = bench.disk.sync, failing  # type: ignore[method-assign]
        with pytest.raises(OSError, match="broken"):
            await spill.flush()
        assert refused.is_set()
        bench.disk.sync = sync  # type: ignore[method-assign]
        bench.disk.gate.set()
        await die(spill, writer=False)
        assert (await look(await opened(bench, 2)))[:3] == [1, 11, 12]


async def test_what_a_lender_holds_of_it_is_written_anew_by_the_next_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_volume() as (bench, volume):
        await placed(volume, bench.register(0))
        await write(volume, 5, 50)
        await volume.flush()
        slot, block = volume.spill.table.segment_of(volume.spill.table.places[5])
        name = f"memory/volumes/data/log/{slot:08x}"
        await damaged(bench, name, block * PAGE + 8)
        place = volume.spill.table.places[5]
        for number in range(2000):
            await write(volume, 16 + number % 16, number)
            if volume.spill.table.places[5] != place:
                break
        assert volume.trouble.startswith("the disk lost page 5; next: ")
        assert await read(volume, 5, 1) == [50]
        await volume.flush()
        assert volume.trouble == ""
        await volume.close_place(0, 1)
        assert await read(volume, 5, 1) == [50]


async def test_a_start_whose_syncs_fail_takes_nothing_torn_for_whole() -> None:
    """Power was lost: what the process before had not synced is torn, and the next one's first sync fails."""
    async with a_bench() as bench:
        spill = await opened(bench, 1)
        put(spill, 1, p3=1)
        await spill.flush()
        put(spill, 2, p3=2)
        await spill.written(2)
        put(spill, 3, p4=3)
        await spill.written(3)
        put(spill, 4, p5=4)
        await spill.written(4)
        await die(spill)
        await damaged(bench, "v/log/00000000", 4 * PAGE + 100)  # page 3 as it was written the second time
        for block in (6, 8):  # both tables of the third batch
            await damaged(bench, "v/log/00000000", block * PAGE + 70)
        bench.disk.sync_fail = True
        spill = await opened(bench, 2)
        with pytest.raises(OSError, match="broken"):
            await spill.flush()
        assert (await look(spill))[3:6] == [1, 0, 4]
        await die(spill)
        bench.disk.sync_fail = False
        again = await opened(bench, 3)
        assert (await look(again))[3:6] == [1, 0, 4]
        put(again, 1 << 40, p6=6)
        await again.flush()
        await die(again)
        assert (await look(await opened(bench, 4)))[3:7] == [1, 0, 4, 6]


async def test_copies_that_a_failed_sync_dropped_are_made_again() -> None:
    """The pages that they are copies of were durable, and are still there: a segment goes only once its copies are
    durable."""
    async with a_bench() as bench:
        spill = await opened(bench, 1, pages=64)
        put(spill, 1, p50=46, p51=47)
        await spill.flush()
        place = spill.table.places[50]
        sync, failed = bench.disk.sync, asyncio.Event()

        async def failing(name: str) -> None:
            slot, block = spill.table.segment_of(spill.table.places[50])
            if spill.table.places[50] == place or failed.is_set():
                await sync(name)
                return
            await bench.disk.write_at(f"v/log/{slot:08x}", block * PAGE, bytes(PAGE))
            failed.set()
            raise OSError(5, "broken")

        bench.disk.sync = failing  # type: ignore[method-assign]
        for number in range(2, 2000):
            try:
                await spill.room(1)
            except OSError:
                continue
            put(spill, number, **{f"p{number % 40}": number})
            if failed.is_set():
                break
        assert failed.is_set(), "it was not compacted"
        await soon(lambda: not spill.refused)
        assert (await look(spill, 64))[50:52] == [46, 47]
        await spill.flush()
        assert spill.keeper.lost(dropped=False) == []
        await die(spill)
        assert (await look(await opened(bench, 2, pages=64), 64))[50:52] == [46, 47]


async def test_what_a_process_left_unsynced_is_written_anew_before_a_flush_is_true() -> None:
    """The kernel may have failed to sync those records, and will not say so again: they read well until the power is
    gone."""
    async with a_bench() as bench:
        spill = await opened(bench, 1)
        put(spill, 1, p3=1)
        await spill.written(1)
        await die(spill)
        left = spill.table.segment_of(spill.table.places[3])
        again = await opened(bench, 2)
        await again.flush()
        assert again.table.segment_of(again.table.places[3]) != left
        assert (await look(again))[3] == 1
        await die(again)


async def test_the_writer_is_told_to_sync_a_segment_that_is_about_to_go() -> None:
    """A flush was about the records in it; newer ones stand in the ring alone."""
    async with a_bench() as bench:
        spill = await opened(bench, 1)
        put(spill, 1, p3=1)
        await spill.written(1)
        RUNNING[id(spill)].cancel()
        await asyncio.sleep(0)
        segment = spill.log.segments[0]
        put(spill, 2, p3=2)
        spill.log.emptied(segment)
        assert segment.slot in spill.keeper._to_sync(spill.log.batch).slots
        await die(spill)


# ---- files -----------------------------------------------------------------------------------------------------------


async def test_a_file_that_is_no_segment_is_left_alone() -> None:
    """Network file systems leave `.nfs000...` where a file that somebody still has open was deleted."""
    async with a_bench() as bench:
        await bench.directory.replace("v/log/.nfs0000a1b2", b"theirs")
        spill = await opened(bench, 1)
        put(spill, 1, p3=1)
        await spill.flush()
        await die(spill)
        assert (await look(await opened(bench, 2)))[3] == 1


async def test_a_new_file_whose_entry_could_not_be_made_durable_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next process finds it, and a sync of it would promise what a loss of power takes: the whole
    file."""
    disk, synced = DirectoryDisk(str(tmp_path)), list[str]()
    await disk.replace("v/there", b"1")

    def failing(directory: str) -> None:
        raise OSError(5, "broken")

    with monkeypatch.context() as broken:
        broken.setattr(disk_port, "_sync_directory", failing)
        with pytest.raises(OSError, match="broken"):
            await disk.write_at("v/new", 0, b"2")
    monkeypatch.setattr(disk_port, "_sync_directory", synced.append)
    await disk.write_at("v/new", 0, b"2")
    assert synced == [str(tmp_path / "v")]
    disk.close()


# ---- space -----------------------------------------------------------------------------------------------------------


def on_disk(bench: Bench) -> int:
    return sum(path.stat().st_blocks * 512 for path in Path(bench.env.disk.path("v")).rglob("*") if path.is_file())


async def test_space_comes_back_after_discards_without_another_write() -> None:
    async with a_bench() as bench:
        pages = 8192
        spill = await opened(bench, 1, pages, 1024)
        for number in range(0, pages, 64):
            await spill.room(64)
            data = memoryview(b"".join(content(each, 1) for each in range(number, number + 64)))
            spill.put(number, 64, number + 1, data)
        await spill.flush()
        assert on_disk(bench) >= pages * PAGE
        for number in range(0, pages, 256):
            await spill.room(1)
            spill.put(number, 256, 100_000 + number, None)
        await spill.flush()
        length = spill.log.segment_blocks * PAGE
        await soon(lambda: on_disk(bench) <= 10 * length, within_s=8.0)
        await die(spill)


def rests_for_ever(spill: Spill) -> bool:
    """Whether nothing is left to do in the log, now and later, unless a client writes."""
    log, table, now_s = spill.log, spill.table, spill._now_s()
    dues = [log.next(now_s + s, table.live, turn, table.zeros_died) for s in (0.0, 3.0, 60.0) for turn in (0, 1)]
    return all(isinstance(due, RestUntil) for due in dues)


async def test_zeros_that_live_are_not_copied_for_ever() -> None:
    """Every page of the volume was discarded by itself: nothing else lives in its segments."""
    async with a_bench() as bench:
        pages = 16_384
        spill = await opened(bench, 1, pages, 1024)
        for number in range(pages):
            await spill.room(1)
            spill.put(number, 1, number + 1, None)
        await spill.flush()
        await soon(lambda: rests_for_ever(spill), within_s=20.0)
        await die(spill)


def test_rows_of_a_segment_whose_tables_are_gone_are_known_in_memory() -> None:
    table = PageTable(64, 128)
    table.live = [0, 0]
    table.put(3, 7, table.log_place(1, 5))
    table.put(4, 8, table.log_place(0, 5))
    table.put_run(10, 4, 9, 1)
    table.put_run(14, 2, 10, 1)
    assert [row[:3] for row in table.rows_in(1).tolist()] == [(7, 3, 0), (9, 10, 4), (10, 14, 2)]
    assert table.rows_in(1)["block"][0] == 5
