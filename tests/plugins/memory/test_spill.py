"""The spill log of a volume: what a later process finds after deaths, loss of power, damage, and disks that refuse."""

import asyncio
import random
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.world.world import World
from covey.wire import checked
from covey.wire.checked import Damaged
from plugins.memory.datapath.spill.spill import Spill
from plugins.memory.datapath.spill.spill_writer import LeftRecords
from tests.families import examples
from tests.plugins.memory.ports import Bench, a_bench, soon
from tests.plugins.memory.spilled import PAGE, PAGES, PLACES, SpillWorld, content, look, word
from tests.quiet import quiet

RUNNING: "dict[int, asyncio.Task[None]]" = {}
Death = Literal["volume", "writer", "both", "power"]


async def opened(bench: Bench, life: int, pages: int = PAGES, places: int = PLACES) -> Spill:
    spill = Spill(bench.env, "data", "v", pages, PAGE, places)
    await spill.open(life)
    await spill.settle()
    RUNNING[id(spill)] = bench.tasks.spawn("spill", spill.run())
    return spill


async def die(spill: Spill, writer: bool = True) -> None:
    """End the volume's process as by kill -9; end the writer too, or it brings home what the ring has."""
    RUNNING[id(spill)].cancel()
    await asyncio.sleep(0)
    process = spill.writer._process
    assert process is not None
    if writer:
        process.signal(9)
    elif spill.writer._stream is not None:
        spill.writer._stream.close()
    await process.wait()


def put(spill: Spill, version: int, **words: int) -> None:
    """Put pages: `p3=7` is page 3 with word 7."""
    for name, number in words.items():
        page = int(name[1:])
        spill.put(page, 1, version, memoryview(content(page, number)))


# ---- what is found ---------------------------------------------------------------------------------------------------


async def test_zeros_go_through_the_log_too() -> None:
    async with a_bench() as bench:
        spill = await opened(bench, 1)
        put(spill, 1, p0=10, p1=11, p2=12)
        await spill.flush()
        spill.put(1, 40, 2, None)
        put(spill, 3, p7=17)
        await spill.flush()
        await die(spill)
        again = await opened(bench, 2)
        assert (await look(again))[:8] == [10, 0, 0, 0, 0, 0, 0, 17]
        assert list(again.versions(0, 3)) == [1, 2, 2]
        assert again.count_written(0, PAGES) == 41


async def test_when_the_volumes_process_alone_died_the_writer_brings_the_ring_home() -> None:
    async with a_bench() as bench:
        spill = await opened(bench, 1)
        put(spill, 1, p0=10)
        await spill.written(1)
        bench.disk.gate.clear()
        put(spill, 2, p1=11, p2=12)
        await asyncio.sleep(0.02)
        put(spill, 3, p0=13)
        bench.disk.gate.set()
        await die(spill, writer=False)
        again = await opened(bench, 2)
        assert (await look(again))[:3] == [13, 11, 12]


async def test_a_record_whose_place_is_being_used_again_is_not_brought_home() -> None:
    """It is on disk, and the process died while another record was put in its place."""
    async with a_bench() as bench:
        spill = await opened(bench, 1, places=8)
        put(spill, 1, p0=10, p1=11)
        await spill.written(2)
        assert not spill.log.synced
        ring = spill.ring
        before = ring.count
        put(spill, 2, p2=12, p3=13, p4=14, p5=15, p6=16, p7=17)
        bench.disk.gate.clear()
        ring.put_page(before + 6, 3, 8, content(8, 18))  # in the place of page 0
        ring._count[0] = before + 6  # and it is not whole yet
        bench.disk.gate.set()
        await die(spill, writer=False)
        left = await bench.disk.read("v/log/left")
        assert left is not None and content(8, 18) not in left and content(1, 11) in left
        assert (await look(await opened(bench, 2)))[:9] == [10, 11, 12, 13, 14, 15, 16, 17, 0]


async def left_behind(bench: Bench, writes: int = 201) -> None:
    """A volume's process dies while the disk takes nothing; page n modulo 40 has word n, up to `writes`."""
    spill = await opened(bench, 1)
    put(spill, 1, p0=1)
    await spill.written(1)
    bench.disk.gate.clear()
    for number in range(2, writes + 1):
        put(spill, number, **{f"p{number % 40}": number})
    await asyncio.sleep(0.02)
    bench.disk.gate.set()
    await die(spill, writer=False)


async def test_all_of_a_ring_is_brought_home_that_is_longer_than_a_segment() -> None:
    async with a_bench() as bench:
        await left_behind(bench)
        again = await opened(bench, 2)
        assert sorted((await look(again))[:40]) == list(range(162, 202))
        assert await bench.disk.read("v/log/left") is not None
        await again.flush()
        assert await bench.disk.read("v/log/left") is None
        await die(again)
        assert sorted((await look(await opened(bench, 3)))[:40]) == list(range(162, 202))


async def test_what_was_left_stays_until_the_log_has_it() -> None:
    async with a_bench() as bench:
        await left_behind(bench)
        bench.disk.gate.clear()
        again = await opened(bench, 2)
        await asyncio.sleep(0.02)  # it begins to write
        bench.disk.gate.set()
        await die(again)
        assert sorted((await look(await opened(bench, 3)))[:40]) == list(range(162, 202))


async def test_what_was_left_stays_until_a_process_has_it_in_its_ring() -> None:
    async with a_bench() as bench:
        await left_behind(bench)
        spill = Spill(bench.env, "data", "v", PAGES, PAGE, PLACES)
        await spill.open(2)  # and it dies before it has told a writer what it writes from
        await spill.close()
        bench.disk.gate.clear()
        again = await opened(bench, 3)
        put(again, 1000, p39=1000)
        bench.disk.gate.set()
        await die(again, writer=False)
        assert sorted((await look(await opened(bench, 4)))[:40]) == [*range(162, 199), *range(200, 202), 1000]


async def test_a_ring_has_room_for_what_a_longer_one_left() -> None:
    async with a_bench() as bench:
        await left_behind(bench)
        assert sorted((await look(await opened(bench, 2, places=8)))[:40]) == list(range(162, 202))


async def test_a_file_of_what_was_left_that_cannot_be_deleted_holds_up_nobody() -> None:
    async with a_bench() as bench:
        await left_behind(bench)
        delete, tried = bench.directory.delete, list[str]()

        async def failing(name: str) -> None:
            tried.append(name)
            raise OSError(5, "broken")

        bench.directory.delete = failing  # type: ignore[method-assign]
        spill = await opened(bench, 2)
        await spill.flush()
        put(spill, 300, p3=300)
        await spill.flush()
        assert tried and set(tried) == {"v/log/left"} and not spill.refused
        bench.directory.delete = delete  # type: ignore[method-assign]
        put(spill, 301, p3=301)
        await spill.flush()
        assert await bench.disk.read("v/log/left") is None
        await die(spill)


async def test_what_was_left_does_not_replace_what_is_newer() -> None:
    async with a_bench() as bench:
        await left_behind(bench)
        spill = await opened(bench, 2)
        left = await bench.disk.read("v/log/left")
        assert left is not None
        put(spill, 300, p3=300)
        spill.put(10, 5, 301, None)
        await spill.flush()
        await bench.disk.replace("v/log/left", left)  # as if it could not be deleted
        await die(spill)
        again = await opened(bench, 3)
        found = await look(again)
        assert found[2:16] == [162, 300, *range(164, 170), 0, 0, 0, 0, 0, 175]
        assert list(again.versions(2, 2)) == [162, 300]


async def test_zeros_that_were_left_are_taken_where_nothing_is_newer() -> None:
    async with a_bench() as bench:
        spill = await opened(bench, 1)
        put(spill, 1, p0=1)
        await spill.written(1)
        bench.disk.gate.clear()
        put(spill, 2, p1=2, p2=2, p3=2)
        await asyncio.sleep(0.02)
        spill.put(0, 4, 3, None)
        bench.disk.gate.set()
        await die(spill, writer=False)
        left = await bench.disk.read("v/log/left")
        assert left is not None
        again = await opened(bench, 2)
        put(again, 4, p2=4)
        await again.flush()
        await bench.disk.replace("v/log/left", left)
        await die(again)
        found = await opened(bench, 3)
        assert (await look(found))[:4] == [0, 0, 4, 0] and list(found.versions(0, 4)) == [3, 3, 4, 3]


@pytest.mark.parametrize(("how", "why"), [("changed", "is damaged"), ("of another log", "belongs to another log")])
async def test_what_was_left_and_cannot_be_trusted_is_named(how: str, why: str) -> None:
    async with a_bench() as bench:
        await left_behind(bench, 41)
        left = await bench.disk.read("v/log/left")
        assert left is not None
        if how == "changed":
            await bench.disk.replace("v/log/left", left[:-1] + bytes([left[-1] ^ 1]))
        else:
            other = LeftRecords(7, PAGE, b"", b"")
            await checked.save(bench.disk, "v/log/left", other)
        with pytest.raises(Damaged, match=f"log/left {why}"):
            await opened(bench, 2)


async def test_a_writer_that_died_is_replaced_and_nothing_in_the_ring_is_lost() -> None:
    async with a_bench() as bench:
        spill = await opened(bench, 1)
        put(spill, 1, p0=10)
        await spill.flush()
        bench.disk.gate.clear()
        put(spill, 2, p1=11, p2=12)
        await asyncio.sleep(0.02)
        bench.processes.started[-1].signal(9)
        bench.disk.gate.set()
        put(spill, 3, p3=13)
        await spill.flush()
        assert spill.writer.starts == 2
        await die(spill)
        assert (await look(await opened(bench, 2)))[:4] == [10, 11, 12, 13]


# ---- damage ----------------------------------------------------------------------------------------------------------


async def damaged(bench: Bench, name: str, at: int, how: bytes = b"rot") -> None:
    await bench.disk.write_at(name, at, how)


async def two_versions(bench: Bench, synced: bool) -> None:
    """Write page 3 in two batches of one process: blocks 0 to 2, and 3 to 5. The first is durable, the second if
    `synced`."""
    spill = await opened(bench, 1)
    put(spill, 1, p3=1)
    await spill.flush()
    put(spill, 2, p3=2)
    if synced:
        await spill.flush()
    else:
        await spill.written(2)
    await die(spill)


async def test_a_torn_tail_that_was_never_promised_counts_for_nothing() -> None:
    async with a_bench() as bench:
        await two_versions(bench, synced=False)
        await damaged(bench, "v/log/00000000", 4 * PAGE + 100)
        again = await opened(bench, 2)
        assert (await look(again))[3] == 1
        assert (again.torn, again.version(3)) == (1, 1)
        await die(again)
        assert (await look(await opened(bench, 3)))[3] == 1, "and is not looked at again"


async def test_damage_to_what_was_durable_is_an_error_and_no_older_content() -> None:
    async with a_bench() as bench:
        await two_versions(bench, synced=True)
        await damaged(bench, "v/log/00000000", 4 * PAGE + 100)
        with pytest.raises(OSError, match="page 3 is damaged on disk; next: check the disk"):
            await look(await opened(bench, 2))


@pytest.mark.parametrize("block", [3, 5], ids=["the first", "the second"])
async def test_one_table_of_a_batch_may_be_damaged(block: int) -> None:
    async with a_bench() as bench:
        await two_versions(bench, synced=True)
        await damaged(bench, "v/log/00000000", block * PAGE + 70)
        assert (await look(await opened(bench, 2)))[3] == 2


async def test_a_durable_batch_that_is_gone_is_refused_in_words() -> None:
    """Nobody knows which pages were in the lost batch, so every page might be older than what was promised."""
    async with a_bench() as bench:
        await two_versions(bench, synced=True)
        for block in (0, 2):
            await damaged(bench, "v/log/00000000", block * PAGE + 70)
        with pytest.raises(Damaged, match=r"00000000 is damaged: batch 1 of the volume's log is missing, .*; next: "):
            await opened(bench, 2)


@pytest.mark.parametrize("lost", ["v/log/00000000", "v/log/segments"])
async def test_a_file_of_the_log_that_is_gone_is_refused_in_words(lost: str) -> None:
    async with a_bench() as bench:
        await two_versions(bench, synced=True)
        await bench.disk.delete(lost)
        with pytest.raises(Damaged, match="next: "):
            await opened(bench, 2)


async def test_a_damaged_table_of_all_rows_costs_nothing_but_time() -> None:
    async with a_bench() as bench:
        spill = await opened(bench, 1)
        put(spill, 1, p3=1)
        await spill.flush()
        await spill.stop()
        segment = spill.log.segments[0]
        assert segment.sealed and not segment.unsynced
        await die(spill)
        await damaged(bench, "v/log/00000000", segment.table_at * PAGE + 70)
        assert (await look(await opened(bench, 2)))[3] == 1


async def test_a_page_whose_content_looks_like_a_table_is_none() -> None:
    """A tenant writes what stands in the log of another, or in its own as far as it can know."""
    async with a_bench() as bench:
        spill = await opened(bench, 1)
        put(spill, 1, p3=1)
        await spill.flush()
        table = await bench.disk.read_at("v/log/00000000", 0, PAGE)
        other = table[:8] + bytes(8) + table[16:]
        spill.put(4, 1, 2, memoryview(other))
        await spill.written(2)
        await die(spill)
        again = await opened(bench, 2)
        assert (await look(again))[:4] == [0, 0, 0, 1]


# ---- disks that refuse -----------------------------------------------------------------------------------------------


async def test_what_a_failed_sync_may_have_dropped_is_rewritten_before_one_is_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel drops what it could not write and says so once: the sync after that succeeds and proves nothing."""
    monkeypatch.setattr("plugins.memory.datapath.spill.spill.RETRY_S", 0.01)
    async with a_bench() as bench:
        spill = await opened(bench, 1)
        put(spill, 1, p3=1, p4=7)
        await spill.flush()
        kept = await bench.disk.read_at("v/log/00000000", 0, 64 * PAGE)
        put(spill, 2, p3=2)
        await spill.written(3)
        sync = bench.disk.sync

        async def failing(name: str) -> None:
            await bench.disk.write_at("v/log/00000000", 0, kept)
            raise OSError(5, "broken")

        bench.disk.sync = failing  # type: ignore[method-assign]
        with pytest.raises(OSError, match="broken"):
            await spill.flush()
        bench.disk.sync = sync  # type: ignore[method-assign]
        assert (await look(spill))[3:5] == [2, 7]
        await soon(lambda: not spill.refused)
        await spill.flush()
        await die(spill)
        assert (await look(await opened(bench, 2)))[3:5] == [2, 7]


async def test_a_full_ring_holds_up_whoever_puts_and_loses_nothing() -> None:
    async with a_bench() as bench:
        spill = await opened(bench, 1)
        bench.disk.gate.clear()
        for number in range(1, PLACES + 1):
            await spill.room(1)
            put(spill, number, **{f"p{number % PAGES}": number})
        assert not spill.fits(1)
        waiting = asyncio.ensure_future(spill.room(1))
        await quiet()
        assert not waiting.done()
        before = await look(spill)
        bench.disk.gate.set()
        await waiting
        await spill.flush()
        assert await look(spill) == before
        await die(spill)
        assert await look(await opened(bench, 2)) == before


async def test_what_lives_survives_any_number_of_compactions() -> None:
    """Half of the pages are written once, the others again and again between them."""
    async with a_bench() as bench:
        spill = await opened(bench, 1)
        for number in range(1, 1500):
            await spill.room(1)
            page = number % PAGES if number <= PAGES else 2 * (number % (PAGES // 2)) + 1
            put(spill, number, **{f"p{page}": number})
        await spill.flush()
        before = await look(spill)
        assert min(before) > 0
        await soon(lambda: len(spill.log.segments) < 8)
        assert await look(spill) == before
        await die(spill)
        assert await look(await opened(bench, 2)) == before


# ---- deaths ----------------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 10**6),
    deaths=st.lists(st.sampled_from(["volume", "writer", "both", "power"]), min_size=1, max_size=5),
    slow=st.sampled_from([1.0, 30.0]),
    sick=st.sampled_from([0.0, 0.0, 0.1]),
    drops=st.booleans(),
)
@settings(max_examples=examples(30), deadline=None)
def test_deaths_at_any_moment_lose_nothing_that_was_promised(
    seed: int, deaths: list[Death], slow: float, sick: float, drops: bool
) -> None:
    """After any kill every written page is there. After one of the volume's process alone the records in the ring are
    there too, if there was room. After a loss of power, or of pages that a failed sync took along, everything flushed
    is there."""
    with World(seed) as world:
        spilled = SpillWorld(world, seed)
        told = spilled.told
        spilled.opened()
        for death in deaths:
            spilled.host.disk.slow, spilled.host.disk.sick, spilled.host.disk.drops = slow, sick, drops
            world.run(world.now + spilled.rng.uniform(0.02, 0.8))
            assert spilled.process.alive, "it failed"
            assert not told.wrong
            still_sick = spilled.rng.random() < 0.5
            spilled.host.disk.sick = sick if still_sick else 0.0
            if death == "writer":
                for writer in spilled.writers():
                    writer.signal(9)
                continue
            least = list(told.synced if death == "power" or (sick and drops) else told.written)
            if death == "power":
                spilled.host.power_off()
                spilled.host.power_on()
            else:
                spilled.process.signal(9)
                for writer in spilled.writers() if death == "both" else ():
                    writer.signal(9)
            if spilled.rng.random() < 0.3:
                spilled.begin()  # while the writer before may still be at work
                world.run(world.now + spilled.rng.uniform(0.0, 0.3))
                if told.found is None:
                    spilled.process.signal(9)
            if told.found is None or not spilled.process.alive:
                spilled.begin()
            world.run(world.now + (1.5 if still_sick else 0.0))
            spilled.host.disk.sick = 0.0
            spilled.opened()
            spilled.check_found(least)


def test_words_are_told_apart() -> None:
    rng = random.Random(1)
    assert word(content(3, 7), 3) == 7 and word(content(3, 7), 4) == -1 and word(rng.randbytes(PAGE), 3) == -1
