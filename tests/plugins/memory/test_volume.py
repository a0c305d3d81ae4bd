"""The rules for pages, on real sockets and files: five holes of Infiniswap's released code, and what a crash leaves."""

import asyncio

import pytest

from plugins.memory.datapath.control import OpenPlace, SlabCopied, SlabLost
from tests.plugins.memory.ports import PAGE, Bench, a_bench, page, read, soon, write


async def copied(bench: Bench, epoch: int = 1) -> None:
    await soon(lambda: any(isinstance(told, SlabCopied) and told.epoch == epoch for told in bench.told))


async def test_a_page_never_written_is_zeros() -> None:
    async with a_bench() as bench:
        volume = await bench.volume()
        assert await read(volume, 0, 32) == [0] * 32


async def test_an_unmapped_write_is_acknowledged_by_the_disk_only() -> None:
    async with a_bench() as bench:
        volume = await bench.volume()
        bench.disk.gate.clear()
        writing = asyncio.ensure_future(write(volume, 3, 7))
        await asyncio.sleep(0.02)
        assert not writing.done()
        bench.disk.gate.set()
        await writing
        assert await read(volume, 3, 1) == [7]


async def test_a_mapped_write_is_acknowledged_by_the_lender_while_the_disk_follows() -> None:
    async with a_bench() as bench:
        volume = await bench.volume()
        await volume.open_place(bench.register(0))
        bench.disk.gate.clear()
        await write(volume, 3, 7)
        assert volume.backing.version[3] == 0
        assert bench.store.slabs["h1", "data", 0].has(3, 1) == page(7)
        bench.disk.gate.set()
        await soon(lambda: volume.backing.version[3] > 0)


async def test_reads_come_from_the_lender_once_the_disk_has_caught_up() -> None:
    async with a_bench() as bench:
        volume = await bench.volume()
        await volume.open_place(bench.register(0))
        await write(volume, 0, 1, 2, 3)
        await volume.flush()
        assert await read(volume, 0, 3) == [1, 2, 3]
        counts = volume.counts(1)
        assert (counts.remote_read_bytes, counts.disk_read_bytes) == (3 * PAGE, 0)
        assert counts.slabs[0].remote == counts.slabs[0].written == 3


async def test_what_was_written_before_a_slab_was_mapped_goes_up_in_the_background() -> None:
    async with a_bench() as bench:
        volume = await bench.volume()
        await write(volume, 0, *range(1, 17))
        await volume.open_place(bench.register(0))
        await copied(bench)
        assert await read(volume, 0, 16) == list(range(1, 17))
        assert volume.counts(1).remote_read_bytes == 16 * PAGE


async def test_a_request_may_cross_slabs_of_which_one_is_mapped_and_one_is_not() -> None:
    async with a_bench() as bench:
        volume = await bench.volume()
        await volume.open_place(bench.register(1))
        await write(volume, 10, *range(100, 112))
        await volume.flush()
        assert await read(volume, 10, 12) == list(range(100, 112))
        counts = volume.counts(1)
        assert (counts.disk_read_bytes, counts.remote_read_bytes) == (6 * PAGE, 6 * PAGE)


# ---- the five holes --------------------------------------------------------------------------------------------------


async def test_hole_1_a_failed_overwrite_does_not_leave_the_lenders_older_copy_valid() -> None:
    async with a_bench() as bench:
        volume = await bench.volume()
        place = bench.register(0)
        await volume.open_place(place)
        await write(volume, 5, 1)
        await volume.flush()
        await bench.cut_lender()  # the overwrite below never arrives; the lender's memory keeps content 1
        await write(volume, 5, 2)
        await bench.lend()
        assert bench.store.slabs["h1", "data", 0].has(5, 1) == page(1)
        await bench.die(volume)
        again = await bench.volume()  # which remembers the place, and finds an older copy there
        assert await read(again, 5, 1) == [2]


async def test_hole_1_a_lender_that_answers_with_older_content_than_it_acknowledged_is_given_up() -> None:
    async with a_bench() as bench:
        volume = await bench.volume()
        await volume.open_place(bench.register(0))
        await write(volume, 5, 1)
        await write(volume, 5, 2)
        await volume.flush()
        bench.store.slabs["h1", "data", 0].versions[5] -= 1  # it lost the newer one
        assert await read(volume, 5, 1) == [2]
        assert isinstance(bench.told[-1], SlabLost)
        assert "older content" in bench.told[-1].why


async def test_hole_2_after_an_eviction_a_read_does_not_overtake_the_disk_write_of_its_page() -> None:
    async with a_bench() as bench:
        volume = await bench.volume()
        await volume.open_place(bench.register(0))
        bench.disk.gate.clear()
        await write(volume, 5, 9)
        closing = asyncio.ensure_future(volume.close_place(0, 1))
        await asyncio.sleep(0.02)
        assert await read(volume, 5, 1) == [9]
        assert not closing.done(), "DONE before the disk has every page that only the lender has"
        bench.disk.gate.set()
        await closing
        assert await read(volume, 5, 1) == [9]


async def test_hole_3_a_broken_connection_forgets_the_lenders_pages_but_not_the_queue() -> None:
    async with a_bench() as bench:
        volume = await bench.volume()
        await volume.open_place(bench.register(0))
        bench.disk.gate.clear()
        await write(volume, 0, 1, 2, 3)
        await bench.cut_lender()
        await soon(lambda: volume.slabs[0].link is None or bool(volume.slabs[0].link.why))
        assert await read(volume, 0, 3) == [1, 2, 3]
        bench.disk.gate.set()
        await volume.flush()
        assert await read(volume, 0, 3) == [1, 2, 3]


async def test_hole_4_flush_returns_when_every_acknowledged_write_is_on_disk_and_synced() -> None:
    async with a_bench() as bench:
        volume = await bench.volume()
        await volume.open_place(bench.register(0))
        bench.disk.gate.clear()
        await write(volume, 0, *range(1, 9))
        syncs = bench.disk.syncs
        flushing = asyncio.ensure_future(volume.flush())
        await asyncio.sleep(0.02)
        assert not flushing.done()
        bench.disk.gate.set()
        await flushing
        assert bench.disk.syncs >= syncs + 2
        assert all(volume.backing.version[page] for page in range(8))


async def test_hole_5_the_eviction_of_one_slab_holds_up_no_other() -> None:
    async with a_bench() as bench:
        volume = await bench.volume()
        await volume.open_place(bench.register(0))
        bench.disk.gate.clear()
        await write(volume, 0, 1)
        closing = asyncio.ensure_future(volume.close_place(0, 1))
        await asyncio.sleep(0.01)
        await volume.open_place(bench.register(1))
        await write(volume, 20, 2)
        assert await read(volume, 20, 1) == [2]
        assert not closing.done()
        bench.disk.gate.set()
        await closing


# ---- moving ----------------------------------------------------------------------------------------------------------


async def test_while_a_slab_moves_the_old_place_still_serves_what_it_holds() -> None:
    async with a_bench() as bench:
        volume = await bench.volume()
        await volume.open_place(bench.register(0))
        await write(volume, 0, *range(1, 17))
        await volume.flush()
        before = volume.counts(1).disk_read_bytes
        other = Bench(bench.env.run_dir)
        await other.lend()
        await volume.open_place(other.register(0, epoch=2))
        await copied(bench, epoch=2)
        await volume.close_place(0, 1)
        assert await read(volume, 0, 16) == list(range(1, 17))
        assert volume.counts(1).disk_read_bytes == before, "copied from the old place, read from the new one"
        assert [place.epoch for place in volume.places()] == [2]
        await other.close()


async def test_a_place_of_an_older_epoch_than_the_one_in_use_is_refused() -> None:
    async with a_bench() as bench:
        volume = await bench.volume()
        await volume.open_place(bench.register(0, epoch=5))
        with pytest.raises(ValueError, match="newer epoch 5"):
            await volume.open_place(OpenPlace(0, 4, "h2", bench.address, b"s" * 16))


async def test_a_place_that_cannot_be_opened_changes_nothing() -> None:
    async with a_bench() as bench:
        volume = await bench.volume()
        await write(volume, 0, 1)
        with pytest.raises(ValueError, match="does not lend"):
            await volume.open_place(OpenPlace(0, 4, "h2", bench.address, b"s" * 16))
        with pytest.raises(ValueError, match="cannot connect"):
            await volume.open_place(OpenPlace(0, 4, "h2", "127.0.0.1:1", b"s" * 16))
        with pytest.raises(ValueError, match="none with index 9"):
            await volume.open_place(OpenPlace(9, 4, "h2", bench.address, b"s" * 16))
        assert volume.places() == ()
        assert await read(volume, 0, 1) == [1]


# ---- crashes and full queues -----------------------------------------------------------------------------------------


async def test_after_a_crash_what_only_the_lender_had_comes_home() -> None:
    async with a_bench() as bench:
        volume = await bench.volume()
        await volume.open_place(bench.register(0))
        await write(volume, 0, 1, 1, 1)
        await volume.flush()
        bench.disk.gate.clear()
        await write(volume, 1, 2)
        await bench.die(volume)
        bench.disk.gate.set()
        again = await bench.volume()
        assert await read(again, 0, 3) == [1, 2, 1]
        assert [place.epoch for place in again.places()] == [1]
        await bench.cut_lender()
        assert await read(again, 0, 3) == [1, 2, 1], "and it is on the disk now"


async def test_after_a_crash_a_lender_that_says_no_is_forgotten_at_once() -> None:
    async with a_bench() as bench:
        volume = await bench.volume()
        await volume.open_place(bench.register(0))
        await write(volume, 0, 1)
        await volume.flush()
        await bench.die(volume)
        bench.store.free("h1", "data", 0, 1)
        again = await bench.volume()
        assert await read(again, 0, 1) == [1]
        assert again.places() == ()
        assert any(isinstance(told, SlabLost) for told in bench.told)


async def test_versions_of_a_later_process_are_higher_than_any_before() -> None:
    async with a_bench() as bench:
        volume = await bench.volume()
        await write(volume, 0, 1)
        first = volume.backing.version[0]
        await bench.die(volume)
        again = await bench.volume()
        await write(again, 0, 2)
        assert again.backing.version[0] > first + (1 << 40)


async def test_a_volume_of_another_size_on_disk_is_refused() -> None:
    async with a_bench() as bench:
        await bench.volume()
        await bench.disk.replace(
            "memory/volumes/data/volume",
            b"\x84\xaasize_bytes\x01\xaapage_bytes\x01\xaaslab_bytes\x01\xaageneration\x01",
        )
        with pytest.raises(ValueError, match="other sizes"):
            await bench.volume()


async def test_a_full_queue_holds_up_writers_and_reads_go_on() -> None:
    """Reference: §2.4.3."""
    async with a_bench() as bench:
        volume = await bench.volume(queue_pages=16)
        await volume.open_place(bench.register(0))
        await volume.open_place(bench.register(1))
        bench.disk.gate.clear()
        await write(volume, 0, *range(1, 17))
        waiting = asyncio.ensure_future(write(volume, 16, 99))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        assert await read(volume, 0, 16) == list(range(1, 17))
        bench.disk.gate.set()
        await waiting


async def test_a_disk_whose_failure_is_over_takes_pages_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plugins.memory.datapath.spill.RETRY_S", 0.01)
    async with a_bench() as bench:
        volume = await bench.volume()
        await write(volume, 20, 1)
        bench.disk.sync_fail = True
        with pytest.raises(OSError, match="broken"):
            await volume.flush()
        with pytest.raises(OSError, match="broken"):
            await write(volume, 20, 2)
        bench.disk.sync_fail = False
        await soon(lambda: len(volume.queue) == 0)
        await write(volume, 20, 3)
        await volume.flush()
        assert await read(volume, 20, 1) == [3]


async def test_a_disk_that_refuses_fails_unmapped_writes_and_loses_nothing_of_mapped_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("plugins.memory.datapath.spill.RETRY_S", 0.01)
    async with a_bench() as bench:
        volume = await bench.volume()
        await volume.open_place(bench.register(0))
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


async def test_a_silent_lender_is_given_up_at_the_deadline_and_the_write_is_acknowledged_by_the_disk() -> None:
    async with a_bench() as bench:
        volume = await bench.volume(deadline_s=0.05)
        await volume.open_place(bench.register(0))
        link = volume.slabs[0].link
        assert link is not None
        link._take_reply = _swallow  # type: ignore[method-assign]
        await write(volume, 0, 4)
        assert await read(volume, 0, 1) == [4]
        assert volume.backing.version[0] > 0
        assert isinstance(bench.told[-1], SlabLost)
        assert "did not answer within" in bench.told[-1].why


async def _swallow(reply: object) -> None:
    """A reply that never arrived."""


async def test_discarded_pages_are_zeros_here_at_the_lender_and_after_a_crash() -> None:
    async with a_bench() as bench:
        volume = await bench.volume()
        await volume.open_place(bench.register(0))
        await write(volume, 0, 1, 2, 3)
        await volume.write(1, 1, None)
        assert bench.store.slabs["h1", "data", 0].has(1, 1) == bytes(PAGE)
        await volume.flush()
        assert await read(volume, 0, 3) == [1, 0, 3]
        await bench.die(volume)
        assert await read(await bench.volume(), 0, 3) == [1, 0, 3]
