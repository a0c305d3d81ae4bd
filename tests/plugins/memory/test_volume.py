"""The rules for pages, on real sockets and files: five holes of Infiniswap's released code, and what a crash leaves."""

import asyncio
import itertools
from typing import Any

import msgspec
import pytest

from covey.wire.checked import Damaged, load, save, seal
from plugins.memory.datapath.links.remote_slab import RemoteSlab
from plugins.memory.datapath.spill.places import PlacesRecord
from plugins.memory.datapath.volumes.volume import Volume
from plugins.memory.datapath.wire.control import OpenPlace, SlabLost
from plugins.memory.datapath.wire.shape import VolumeRecord
from plugins.memory.datapath.wire.slabwire import Versions
from tests.plugins.memory.ports import (
    PAGE,
    SHAPE,
    SLOW,
    Bench,
    a_bench,
    a_volume,
    asks_the_lender,
    copied,
    page,
    placed,
    read,
    soon,
    write,
)
from tests.quiet import quiet


async def test_an_unmapped_write_is_acknowledged_by_the_disk_only() -> None:
    """Reference: §2.4.3"""
    async with a_volume() as (bench, volume):
        bench.disk.gate.clear()
        writing = asyncio.ensure_future(write(volume, 3, 7))
        await quiet()
        assert not writing.done()
        bench.disk.gate.set()
        await writing
        assert await read(volume, 3, 1) == [7]


async def test_a_mapped_write_is_acknowledged_by_the_lender_while_the_disk_follows() -> None:
    """Writes go to remote memory at once, and to disk later. Reference: §2.4.3"""
    async with a_volume() as (bench, volume):
        await placed(volume, bench.register(0))
        bench.disk.gate.clear()
        await write(volume, 3, 7)
        assert not volume.spill.is_on_disk(3)
        assert bench.store.slabs["h1", "data", 0].has(3, 1) == page(7)
        bench.disk.gate.set()
        await soon(lambda: volume.spill.is_on_disk(3))


# ---- the five holes --------------------------------------------------------------------------------------------------


async def test_hole_1_a_failed_overwrite_does_not_leave_the_lenders_older_copy_valid() -> None:
    async with a_volume() as (bench, volume):
        place = bench.register(0)
        await placed(volume, place)
        await write(volume, 5, 1)
        await volume.flush()
        await bench.cut_lender()  # the overwrite below never arrives; the lender's memory keeps content 1
        await write(volume, 5, 2)
        await bench.lend()
        assert bench.store.slabs["h1", "data", 0].has(5, 1) == page(1)
        await bench.die(volume)
        again = await bench.volume()  # which remembers the place, and finds an older copy there
        assert await read(again, 5, 1) == [2]


async def test_a_page_being_overwritten_counts_as_held_by_nobody() -> None:
    async with a_volume() as (bench, volume):
        await placed(volume, bench.register(0))
        await write(volume, 5, 1, 2)
        assert volume.counts(1).slabs[0].remote == 2
        writing = asyncio.ensure_future(write(volume, 5, 3))
        await asyncio.sleep(0)
        link = volume.slabs[0].link
        assert link is not None and volume.slabs[0].holder(5) is None and volume.slabs[0].holder(6) is link
        await writing
        assert volume.slabs[0].holder(5) is link


async def test_hole_1_a_lender_that_answers_older_than_it_acknowledged_is_given_up() -> None:
    async with a_volume() as (bench, volume):
        await placed(volume, bench.register(0))
        await write(volume, 5, 1)
        await write(volume, 5, 2)
        await volume.flush()
        bench.store.slabs["h1", "data", 0].versions[5] -= 1  # it lost the newer one
        assert await read(volume, 5, 1) == [2]
        assert isinstance(bench.told[-1], SlabLost)
        assert "older content" in bench.told[-1].why


@pytest.mark.parametrize("count", [1, 2])
async def test_hole_1_a_lender_that_answers_older_is_given_up_by_who_does_not_wait(count: int) -> None:
    async with a_volume() as (bench, volume):
        await placed(volume, bench.register(0))
        for word in (1, 2):
            await write(volume, 5, *[word] * count)
        await volume.flush()
        bench.store.slabs["h1", "data", 0].versions[4 + count] -= 1
        into, answered = bytearray(count * PAGE), list[OSError | None]()
        volume.submit_read(5, memoryview(into), answered.append)
        await soon(lambda: answered == [None])
        assert into == page(2) * count
        assert isinstance(bench.told[-1], SlabLost) and "older content" in bench.told[-1].why


async def test_hole_2_after_an_eviction_a_read_does_not_overtake_its_pages_disk_write() -> None:
    async with a_volume() as (bench, volume):
        await placed(volume, bench.register(0))
        bench.disk.gate.clear()
        await write(volume, 5, 9)
        closing = asyncio.ensure_future(volume.close_place(0, 1))
        await quiet()
        assert await read(volume, 5, 1) == [9]
        assert not closing.done(), "DONE before the disk has every page that only the lender has"
        bench.disk.gate.set()
        await closing
        assert await read(volume, 5, 1) == [9]


async def test_hole_3_a_broken_connection_forgets_the_lenders_pages_but_not_the_queue() -> None:
    """A read after a write goes through the same queue. Reference: §2.4.5"""
    async with a_volume() as (bench, volume):
        await placed(volume, bench.register(0))
        bench.disk.gate.clear()
        await write(volume, 0, 1, 2, 3)
        await bench.cut_lender()
        await soon(lambda: volume.slabs[0].link is None or bool(volume.slabs[0].link.why))
        assert await read(volume, 0, 3) == [1, 2, 3]
        bench.disk.gate.set()
        await volume.flush()
        assert await read(volume, 0, 3) == [1, 2, 3]


async def test_hole_4_flush_returns_when_every_acknowledged_write_is_on_disk_and_synced() -> None:
    async with a_volume() as (bench, volume):
        await placed(volume, bench.register(0))
        bench.disk.gate.clear()
        await write(volume, 0, *range(1, 9))
        syncs = bench.disk.syncs
        flushing = asyncio.ensure_future(volume.flush())
        await quiet()
        assert not flushing.done()
        bench.disk.gate.set()
        await flushing
        assert bench.disk.syncs > syncs
        assert all(volume.spill.is_on_disk(page) for page in range(8))


# ---- moving ----------------------------------------------------------------------------------------------------------


async def test_while_a_slab_moves_the_old_place_still_serves_what_it_holds() -> None:
    async with a_volume() as (bench, volume):
        await placed(volume, bench.register(0))
        await write(volume, 0, *range(1, 17))
        await volume.flush()
        before = volume.counts(1).disk_read_bytes
        other = Bench(bench.env.run_dir)
        await other.lend()
        await placed(volume, other.register(0, epoch=2))
        await copied(bench, epoch=2)
        await volume.close_place(0, 1)
        assert await read(volume, 0, 16) == list(range(1, 17))
        assert volume.counts(1).disk_read_bytes == before, "copied from the old place, read from the new one"
        await soon(lambda: [place.epoch for place in volume.places.all()] == [2])
        await other.close()


async def test_while_a_slab_moves_its_old_place_does_not_hold_what_is_overwritten() -> None:
    """The old place is not given up for pages it was never sent, once it is the only place again."""
    async with a_volume() as (bench, volume):
        await placed(volume, bench.register(0))
        await write(volume, 5, 1, 2)
        await volume.flush()
        other = Bench(bench.env.run_dir)
        await other.lend()
        await placed(volume, other.register(0, epoch=2))
        await copied(bench, epoch=2)
        source = volume.slabs[0].source
        assert source is not None and list(source.held.flags[5:7]) == [1, 1]
        await write(volume, 5, 3)
        assert list(source.held.flags[5:7]) == [0, 1]
        await volume.flush()
        await other.close()
        await soon(lambda: volume.slabs[0].link is source)
        assert await read(volume, 5, 2) == [3, 2]
        assert [told.epoch for told in bench.told if isinstance(told, SlabLost)] == [2]


async def test_a_copy_that_the_disk_could_not_read_is_tried_again() -> None:
    """Otherwise a slab that moves would keep its old place for ever, and its lender wait for it."""
    async with a_volume() as (bench, volume):
        await write(volume, 0, *range(1, 17))
        await volume.flush()
        bench.disk.reads_failing = 2
        await placed(volume, bench.register(0))
        await copied(bench)
        assert bench.disk.reads_failing == 0
        assert volume.counts(1).slabs[0].remote == 16


async def test_a_place_of_an_older_epoch_than_the_one_in_use_is_refused() -> None:
    async with a_volume() as (bench, volume):
        await placed(volume, bench.register(0, epoch=5))
        with pytest.raises(ValueError, match="newer epoch: 5"):
            await placed(volume, OpenPlace(0, 4, "h2", bench.address, b"s" * 16))


async def test_a_place_that_cannot_be_opened_changes_nothing() -> None:
    async with a_volume() as (bench, volume):
        await write(volume, 0, 1)
        with pytest.raises(ValueError, match="does not lend"):
            await placed(volume, OpenPlace(0, 4, "h2", bench.address, b"s" * 16))
        with pytest.raises(ValueError, match="cannot connect"):
            await placed(volume, OpenPlace(0, 4, "h2", "127.0.0.1:1", b"s" * 16))
        with pytest.raises(ValueError, match="none with index 9"):
            await placed(volume, OpenPlace(9, 4, "h2", bench.address, b"s" * 16))
        assert volume.places.all() == ()
        assert await read(volume, 0, 1) == [1]


# ---- links that end --------------------------------------------------------------------------------------------------


async def test_a_link_that_breaks_while_nobody_asks_is_opened_again_under_its_epoch() -> None:
    async with a_volume() as (bench, volume):
        await placed(volume, bench.register(0))
        await write(volume, 0, *range(1, 17))
        await volume.flush()
        await copied(bench)
        bench.break_links()
        await soon(lambda: volume.lenders.reopened == 1)
        assert [place.state for place in volume.counts(1).places] == ["open"]
        assert volume.counts(1).slabs[0].remote == 16, "and what it holds is known"
        assert await read(volume, 0, 16) == list(range(1, 17))
        assert volume.counts(1).disk_read_bytes == 0
        assert not any(isinstance(told, SlabLost) for told in bench.told)


async def test_a_link_to_a_silent_lender_is_tried_for_a_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plugins.memory.datapath.volumes.lenders.REOPEN_S", 0.3)
    async with a_volume() as (bench, volume):
        await placed(volume, bench.register(0))
        await bench.mute_lender()
        await soon(lambda: [place.state for place in volume.counts(1).places] == ["reopening"])
        await write(volume, 0, 5)
        await soon(lambda: any(isinstance(told, SlabLost) for told in bench.told))
        assert await read(volume, 0, 1) == [5]


async def test_a_place_of_a_newer_epoch_ends_the_search_for_the_older_one() -> None:
    async with a_volume() as (bench, volume):
        await placed(volume, bench.register(0))
        await bench.mute_lender()
        await soon(lambda: volume.slabs[0].reopening is not None)
        other = Bench(bench.env.run_dir)
        await other.lend()
        await placed(volume, other.register(0, epoch=2))
        assert volume.slabs[0].reopening is None
        await soon(lambda: [place.epoch for place in volume.places.all()] == [2])
        await other.close()


async def lenders_on_record(bench: Bench) -> list[int]:
    """The epochs of the places that a process would ask after a crash now."""
    record = await load(bench.directory, "memory/volumes/data/places", msgspec.msgpack.Decoder(PlacesRecord))
    return [] if record is None else [place.epoch for place in record.places]


async def test_a_place_being_closed_stays_on_record_until_its_pages_are_on_disk() -> None:
    """Otherwise the process that comes after a crash between the two would not ask the lender that still has them."""
    async with a_volume() as (bench, volume):
        await placed(volume, bench.register(0))
        bench.disk.gate.clear()
        await write(volume, 0, 7)
        closing = asyncio.ensure_future(volume.close_place(0, 1))
        await quiet()
        assert await lenders_on_record(bench) == [1]
        bench.disk.gate.set()
        await closing
        await soon(lambda: volume.places.all() == ())
        await volume.places.write()
        assert await lenders_on_record(bench) == []


async def test_pages_of_a_place_that_is_closed_survive_a_loss_of_power() -> None:
    """The lender forgets the pages, so those in only the cache of a kernel would be gone with one failure."""
    async with a_volume() as (bench, volume):
        await placed(volume, bench.register(0))
        await write(volume, 0, 7)
        bench.disk.sync_fail = True
        closing = asyncio.ensure_future(volume.close_place(0, 1))
        await quiet()
        assert await lenders_on_record(bench) == [1] and not closing.done()
        bench.disk.sync_fail = False
        await asyncio.wait_for(closing, 5.0)
        await soon(lambda: volume.places.all() == ())
        await volume.places.write()
        assert await lenders_on_record(bench) == []


async def test_a_lost_lender_stays_on_record_until_its_pages_are_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plugins.memory.datapath.volumes.lenders.REOPEN_S", 0.1)
    async with a_volume() as (bench, volume):
        await placed(volume, bench.register(0))
        bench.disk.gate.clear()
        await write(volume, 0, 7)
        await bench.cut_lender()
        await soon(lambda: any(isinstance(told, SlabLost) for told in bench.told))
        await quiet()
        assert await lenders_on_record(bench) == [1]
        bench.disk.gate.set()
        await soon(lambda: volume.places.all() == ())


async def test_no_page_goes_to_a_lender_before_it_is_on_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """The place is open at once; a process that starts after a crash would not find it yet."""
    async with a_volume() as (bench, volume):
        write_record, may = volume.places.write, asyncio.Event()

        async def slow(clean: bool = False) -> None:
            await may.wait()
            await write_record(clean)

        monkeypatch.setattr(volume.places, "write", slow)
        await volume.open_place(bench.register(0))
        assert volume.slab(0).state(1) == "open"
        await write(volume, 3, 7)
        lent = bench.store.slabs["h1", "data", 0]
        assert not any(lent.versions) and await lenders_on_record(bench) == []
        may.set()
        await soon(lambda: lent.has(3, 1) == page(7))
        assert await lenders_on_record(bench) == [1]


async def test_a_place_closed_before_it_is_on_record_is_never_used() -> None:
    async with a_volume() as (bench, volume):
        await volume.open_place(bench.register(0))
        await volume.close_place(0, 1)
        await write(volume, 3, 7)
        await soon(lambda: volume.places.all() == () and not volume.slab(0).opening)
        assert volume.slab(0).links() == [] and await lenders_on_record(bench) == []


async def test_a_place_that_cannot_be_taken_out_of_the_record_is_taken_out_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("plugins.memory.datapath.spill.places.CATCH_UP_S", 0.01)
    async with a_volume() as (bench, volume):
        await placed(volume, bench.register(0))
        await write(volume, 0, 7)
        await volume.flush()
        bench.disk.replace_fail = True
        await volume.close_place(0, 1)
        await soon(lambda: volume.places.late)
        assert volume.places.all() == () and await lenders_on_record(bench) == [1]
        await placed(volume, bench.register(1, epoch=2))
        assert volume.places.all() == () and volume.slabs[1].link is None, "nobody would ask it after a crash"
        assert [told.why for told in bench.told if isinstance(told, SlabLost)] == [
            "its record cannot be written: [Errno 30] read-only in this test"
        ]
        bench.disk.replace_fail = False
        await soon(lambda: not volume.places.late)
        assert await lenders_on_record(bench) == []


# ---- crashes and full queues -----------------------------------------------------------------------------------------


async def crashed_with_a_silent_lender(bench: Bench) -> Volume:
    """Crash when page 1 is newest at the lender alone, page 2 everywhere: a killed process and a stopped lender."""
    volume = await bench.volume()
    await placed(volume, bench.register(0))
    await write(volume, 0, 1, 1, 1)
    await volume.flush()
    bench.disk.gate.clear()
    await write(volume, 1, 2)
    await bench.die(volume)
    bench.disk.gate.set()
    await bench.mute_lender()
    return await bench.volume(deadline_s=0.2 * SLOW)


async def test_a_read_waits_however_long_for_a_lender_that_may_hold_a_newer_page() -> None:
    async with a_bench() as bench:
        again = await crashed_with_a_silent_lender(bench)
        reading = asyncio.ensure_future(read(again, 0, 3))
        await soon(lambda: "did not accept the connection" in again.counts(1).places[0].why)
        await quiet()
        assert not reading.done()
        assert again.counts(1).places[0].state == "recovering"
        await bench.wake_lender()
        assert await reading == [1, 2, 1]
        assert again.lenders.unrecovered == 0


async def test_what_is_written_anew_need_not_wait_for_a_silent_lender() -> None:
    async with a_bench() as bench:
        again = await crashed_with_a_silent_lender(bench)
        await write(again, 1, 3)
        assert await read(again, 1, 1) == [3]
        assert await read(again, 16, 1) == [0], "nor slabs that no lender held"
        await bench.wake_lender()
        assert await read(again, 0, 3) == [1, 3, 1], "and is not overwritten by what comes home"
        await again.flush()
        assert await read(again, 0, 3) == [1, 3, 1]


async def test_a_write_during_recovery_is_not_overwritten_by_what_was_under_way_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_bench() as bench:
        again = await crashed_with_a_silent_lender(bench)
        read_there, on_its_way = RemoteSlab.read_what_is_ours, asyncio.Event()

        async def read_slowly(link: RemoteSlab, first: int, into: memoryview) -> tuple[Versions, list[int]]:
            found = await read_there(link, first, into)
            on_its_way.set()
            await asyncio.sleep(0.05)
            return found

        monkeypatch.setattr(RemoteSlab, "read_what_is_ours", read_slowly)
        await bench.wake_lender()
        await on_its_way.wait()
        await write(again, 1, 3)
        await again.slabs[0].sure.wait()
        assert await read(again, 1, 1) == [3]


async def test_a_read_that_waited_long_enough_fails_and_says_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plugins.memory.datapath.volumes.lenders.UNSURE_S", 0.3)
    async with a_bench() as bench:
        again = await crashed_with_a_silent_lender(bench)
        with pytest.raises(OSError, match=r"slab 0 waits for its lender.*h2 may hold newer pages"):
            await read(again, 0, 1)
        with pytest.raises(OSError, match="h2 may hold newer pages"):
            await again.flush()
        with pytest.raises(ValueError, match="h2 may hold newer pages"):
            await again.open_place(bench.register(0, epoch=2))


@pytest.mark.parametrize("how", ["it says no", "it refuses"])
async def test_after_a_crash_no_word_over_tcp_is_proof_and_the_lenders_agents_word_is(how: str) -> None:
    """A stranger may listen at that port by now, and a firewall refuses too."""
    async with a_bench() as bench:
        again = await crashed_with_a_silent_lender(bench)
        if how == "it says no":
            bench.store.free("h1", "data", 0, 1)
            await bench.wake_lender()
            await soon(lambda: "does not lend" in again.counts(1).places[0].why)
        else:
            await bench.cut_lender()
        reading = asyncio.ensure_future(read(again, 1, 1))
        await quiet()
        assert not reading.done()
        await again.lenders.give_up(again.slabs[0], 1, "h2 no longer holds it")
        assert await reading == [1], "the disk's word: the newer one is lost with two processes"
        lost = [told for told in bench.told if isinstance(told, SlabLost)]
        assert "may read older" in lost[-1].why
        await soon(lambda: again.places.all() == ())
        assert again.lenders.unrecovered == 1


async def test_a_person_may_give_a_silent_lender_up() -> None:
    async with a_bench() as bench:
        again = await crashed_with_a_silent_lender(bench)
        reading = asyncio.ensure_future(read(again, 1, 1))
        await asyncio.sleep(0.05)
        given_up = await again.lenders.give_up_all("given up by request")
        assert [(place.index, place.lender) for place in given_up] == [(0, "h2")]
        assert await reading == [1]
        assert again.lenders.unrecovered == 1
        await soon(lambda: again.places.all() == ())
        assert await again.lenders.give_up_all("again") == ()


async def test_after_an_end_in_good_order_no_lender_is_waited_for() -> None:
    async with a_volume() as (bench, volume):
        await placed(volume, bench.register(0))
        await write(volume, 0, 1, 2)
        await volume.end()
        await bench.die(volume)
        await bench.mute_lender()
        again = await bench.volume(deadline_s=0.2 * SLOW)
        assert await read(again, 0, 2) == [1, 2]
        await bench.wake_lender()
        await soon(lambda: again.slabs[0].link is not None)
        bench.disk.gate.clear()
        await write(again, 0, 9)
        await bench.die(again)
        bench.disk.gate.set()
        assert await read(await bench.volume(), 0, 2) == [9, 2], "good order holds until the next start only"


async def test_versions_of_a_later_process_are_higher_than_any_before() -> None:
    async with a_volume() as (bench, volume):
        await write(volume, 0, 1)
        first = volume.spill.version(0)
        await bench.die(volume)
        again = await bench.volume()
        await write(again, 0, 2)
        assert again.spill.version(0) > first + (1 << 40)


async def test_a_volume_that_could_not_be_opened_leaves_its_files_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends in good order: once that marked torn pages as durable, and forgot where pages lie."""

    async def sick(name: str, offset: int, size: int) -> bytes:
        raise OSError(5, "sick in this test")

    async with a_volume() as (bench, volume):
        await placed(volume, bench.register(0))
        await write(volume, 3, 7)
        await bench.die(volume)
        names = [f"memory/volumes/data/{name}" for name in ("places", "log/segments", "log/00000000", "volume")]
        before = [await bench.disk.read(name) for name in names]
        monkeypatch.setattr(bench.directory, "read_at", sick)
        again = Volume(bench.env, SHAPE, "memory/volumes/data", 512, 5.0, bench.told.append)
        with pytest.raises(OSError, match="sick"):
            await again.open()
        await again.end()
        await again.close()
        assert [await bench.disk.read(name) for name in names] == before


async def test_a_volume_of_another_size_on_disk_is_refused() -> None:
    async with a_bench() as bench:
        await bench.volume()
        await save(bench.disk, "memory/volumes/data/volume", VolumeRecord(1, 1, 1, 1))
        with pytest.raises(ValueError, match="other sizes"):
            await bench.volume()


@pytest.mark.parametrize("name", ["volume", "places"])
async def test_a_volume_whose_records_are_damaged_is_refused_and_they_stay(name: str) -> None:
    """If they were taken for empty, they would leave pages behind that only lenders hold."""
    async with a_bench() as bench:
        await bench.die(await bench.volume())
        path = f"memory/volumes/data/{name}"
        await bench.disk.replace(path, seal(VolumeRecord(1, 1, 1, 1))[:-1])
        with pytest.raises(Damaged, match=rf"{path} is damaged: it has \d+ bytes after its header"):
            await bench.volume()
        assert await bench.disk.read(path) is not None


async def test_a_full_queue_holds_up_writers_and_reads_go_on() -> None:
    """Reference: §2.4.3."""
    async with a_bench() as bench:
        volume = await bench.volume(queue_pages=16)
        await placed(volume, bench.register(0))
        await placed(volume, bench.register(1))
        bench.disk.gate.clear()
        await write(volume, 0, *range(1, 17))
        waiting = asyncio.ensure_future(write(volume, 16, 99))
        await quiet()
        assert not waiting.done()
        assert await read(volume, 0, 16) == list(range(1, 17))
        bench.disk.gate.set()
        await waiting


async def test_a_disk_that_refuses_fails_unmapped_writes_and_loses_nothing_of_mapped_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("plugins.memory.datapath.spill.spill.RETRY_S", 0.01)
    async with a_volume() as (bench, volume):
        await placed(volume, bench.register(0))
        bench.disk.fail = True
        await write(volume, 0, 1)
        with pytest.raises(OSError, match="no space"):
            await write(volume, 20, 2)
        with pytest.raises(OSError, match="no space"):
            await volume.flush()
        assert await read(volume, 0, 1) == [1]
        bench.disk.fail = False
        await asyncio.sleep(0.05)
        await volume.flush()
        assert await read(volume, 0, 1) == [1]


async def test_a_slab_whose_opening_failed_unforeseen_is_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No link of the try that failed stays behind: the lender would call the place open."""
    monkeypatch.setattr("plugins.memory.datapath.volumes.lender_tasks.PAUSE_MAX_S", 0.02)
    async with a_volume() as (bench, volume):
        await placed(volume, bench.register(0))
        holds, tries = volume.lenders._holds, list[int]()

        def once(*what: Any) -> None:
            tries.append(1)
            if len(tries) == 1:
                raise KeyError("a fault of this program")
            holds(*what)

        monkeypatch.setattr(volume.lenders, "_holds", once)
        bench.break_links()
        await soon(lambda: volume.lenders.reopened == 1)
        await write(volume, 0, 4)
        assert len(tries) == 2 and not any(isinstance(told, SlabLost) for told in bench.told)


async def test_a_copy_in_the_background_makes_way_while_requests_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """All slabs that are copied share the time that requests leave, and what nobody asks for goes at full speed."""
    asked: list[tuple[int, int, bool]] = []

    def pause_s(took_s: float, copied_bytes: int, waiting_bytes: int, busy: bool) -> float:
        asked.append((copied_bytes // PAGE, waiting_bytes // PAGE, busy))
        return 0.02 if busy else 0.0

    monkeypatch.setattr("plugins.memory.policy.copying.pause_s", pause_s)
    async with a_volume() as (bench, volume):
        assert volume.lenders._requested == volume._requested
        requests = itertools.count(1)
        monkeypatch.setattr(volume.lenders, "_requested", lambda: next(requests))
        for at in (0, 2, 4, 16, 18, 20):
            await write(volume, at, 1)
        began_s = bench.env.clock.now_s()
        for index in (0, 1):
            await placed(volume, bench.register(index))
        await soon(lambda: len(asked) == 6)
        assert bench.env.clock.now_s() - began_s > 0.07, "not each slab at full speed"
        assert [(size, busy) for size, _, busy in asked] == [(1, True)] * 6
        assert max(waiting for _, waiting, _ in asked) > 2 and asked[-1][1] == 0, "of both slabs"
        await copied(bench)
        asked.clear()
        monkeypatch.setattr(volume.lenders, "_requested", lambda: 77)
        bench.store.free("h1", "data", 0, 1)
        await placed(volume, bench.register(0, epoch=2))
        await copied(bench, epoch=2)
        assert [busy for _, _, busy in asked][1:] == [False, False]
        assert volume._requested() == 6 * PAGE, "copies are no requests"


async def test_a_silent_lender_is_left_at_the_deadline_and_the_disk_acknowledges() -> None:
    asks_the_lender()
    async with a_bench() as bench:
        volume = await bench.volume(deadline_s=0.2 * SLOW)
        await placed(volume, bench.register(0))
        link = volume.slabs[0].link
        assert link is not None
        bench.ignore_requests()
        await write(volume, 0, 4)
        assert await read(volume, 0, 1) == [4]
        assert volume.spill.is_on_disk(0)
        assert "did not answer within" in link.why
        await soon(lambda: volume.slabs[0].link is not None)
        assert volume.lenders.reopened == 1


async def test_discarded_pages_are_zeros_here_at_the_lender_and_after_a_crash() -> None:
    async with a_volume() as (bench, volume):
        await placed(volume, bench.register(0))
        await write(volume, 0, 1, 2, 3)
        await volume.write(1, 1, None)
        assert bench.store.slabs["h1", "data", 0].has(1, 1) == bytes(PAGE)
        await volume.flush()
        assert await read(volume, 0, 3) == [1, 0, 3]
        await bench.die(volume)
        assert await read(await bench.volume(), 0, 3) == [1, 0, 3]
