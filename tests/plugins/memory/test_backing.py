"""Pages at rest: what a reader finds after rewriting, after damage, after a kill, and after a loss of power."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.world.world import World
from covey.ports import Command, Env
from plugins.memory.datapath.backing import Backing, Page
from plugins.memory.datapath.page_index import ENTRY_BYTES
from tests.plugins.memory.ports import PAGE, Bench, a_bench, page

PAGES = 12


async def loaded(bench: Bench) -> Backing:
    backing = Backing(bench.env.disk, "v", PAGES, PAGE)
    await backing.load()
    return backing


async def content(backing: Backing, first: int = 0, count: int = PAGES) -> list[int]:
    data = bytearray(count * PAGE)
    await backing.read(first, memoryview(data))
    return [int.from_bytes(data[at * PAGE : at * PAGE + 8], "little") for at in range(count)]


def batch(version: int, **pages: int) -> dict[int, Page]:
    return {int(name[1:]): Page(version, page(word)) for name, word in pages.items()}


async def test_a_later_process_finds_what_was_written() -> None:
    async with a_bench() as bench:
        backing = await loaded(bench)
        await backing.write(batch(1, p0=10, p1=11, p5=15))
        await backing.write(batch(2, p1=21))
        again = await loaded(bench)
        assert await content(again) == [10, 21, 0, 0, 0, 15, 0, 0, 0, 0, 0, 0]
        assert list(again.versions(0, 2)) == [1, 2]


async def test_a_page_is_never_overwritten_where_its_newest_content_lies() -> None:
    async with a_bench() as bench:
        backing = await loaded(bench)
        for version in range(1, 6):
            await backing.write(batch(version, p3=version))
            await backing.sync()
        places = [await bench.disk.read_at("v/pages", (place * PAGES + 3) * PAGE, PAGE) for place in (0, 1)]
        assert places == [page(5), page(4)]


async def test_a_page_rewritten_before_a_sync_is_synced_first() -> None:
    async with a_bench() as bench:
        backing = await loaded(bench)
        await backing.settle()
        before = bench.disk.syncs
        await backing.write(batch(1, p3=1))
        assert bench.disk.syncs == before
        await backing.write(batch(2, p4=2))
        assert bench.disk.syncs == before, "another page: nothing is at stake"
        await backing.write(batch(3, p3=3))
        assert bench.disk.syncs == before + 2, "both files"


async def test_damaged_content_is_recognised_and_the_older_copy_taken() -> None:
    async with a_bench() as bench:
        backing = await loaded(bench)
        await backing.write(batch(1, p3=1))
        await backing.sync()
        await backing.write(batch(2, p3=2))
        await bench.disk.write_at("v/pages", (PAGES + 3) * PAGE + 100, b"torn")
        again = await loaded(bench)
        assert await content(again, 3, 1) == [1]
        assert (again.torn, again.version[3]) == (1, 1)


async def test_a_sync_before_the_first_write_does_not_mark_what_is_torn_as_durable() -> None:
    """A volume that is read-only for now is asked to flush, or ends in good order."""
    async with a_bench() as bench:
        backing = await loaded(bench)
        await backing.write(batch(1, p3=1))
        await backing.sync()
        await backing.write(batch(2, p3=2))
        await bench.disk.write_at("v/pages", (PAGES + 3) * PAGE + 100, b"torn")
        await (await loaded(bench)).sync()
        assert await content(await loaded(bench), 3, 1) == [1]


async def test_damage_to_what_was_durable_is_an_error_and_no_older_content() -> None:
    async with a_bench() as bench:
        backing = await loaded(bench)
        for version in (1, 2):
            await backing.write(batch(version, p3=version))
            await backing.sync()
        await bench.disk.write_at("v/pages", (PAGES + 3) * PAGE + 100, b"rot")
        with pytest.raises(OSError, match="page 3 is damaged"):
            await content(await loaded(bench), 3, 1)


async def test_a_damaged_entry_counts_as_never_written() -> None:
    async with a_bench() as bench:
        backing = await loaded(bench)
        await backing.write(batch(1, p3=1))
        await backing.sync()
        await backing.write(batch(2, p3=2))
        await bench.disk.write_at("v/index", (PAGES + 3) * ENTRY_BYTES, b"\xff" * 8)
        assert await content(await loaded(bench), 3, 1) == [1]


async def test_content_in_the_wrong_place_is_wrong() -> None:
    async with a_bench() as bench:
        backing = await loaded(bench)
        await backing.write(batch(1, p3=1, p4=2))
        await backing.sync()
        await bench.disk.write_at("v/pages", 3 * PAGE, page(2))
        with pytest.raises(OSError, match="page 3 is damaged"):
            await content(await loaded(bench), 3, 1)


async def test_what_a_failed_sync_may_have_dropped_is_rewritten_before_one_is_believed() -> None:
    """A kernel drops what it could not write and says so once: the sync after that succeeds and proves nothing."""
    async with a_bench() as bench:
        backing = await loaded(bench)
        await backing.write(batch(1, p3=1, p4=7))
        await backing.sync()
        kept = {name: await bench.disk.read_at(name, 0, 3 * PAGES * PAGE) for name in ("v/pages", "v/index")}
        await backing.write(batch(2, p3=2))

        async def failing(name: str) -> None:
            for file, content in kept.items():
                await bench.disk.write_at(file, 0, content)
            raise OSError(5, "broken")

        sync, bench.disk.sync = bench.disk.sync, failing  # type: ignore[method-assign]
        with pytest.raises(OSError, match="broken"):
            await backing.sync()
        with pytest.raises(OSError, match="broken"):
            await backing.write(batch(3, p3=3))
        bench.disk.sync = sync  # type: ignore[method-assign]
        await backing.sync()
        assert await content(await loaded(bench), 3, 2) == [2, 7]
        await backing.write(batch(3, p3=3))
        assert await content(await loaded(bench), 3, 2) == [3, 7]


async def test_what_refused_writes_left_is_checked_although_a_later_write_was_synced() -> None:
    """A disk may have done what it says it refused: here the entry of a page, and then half of its next content."""
    async with a_bench() as bench:
        backing = await loaded(bench)
        await backing.write(batch(1, p3=10))
        await backing.sync()
        write_at = bench.disk.write_at

        for version, refused in ((2, "v/index"), (3, "v/pages")):

            async def refusing(name: str, offset: int, data: bytes, refused: str = refused) -> None:
                await write_at(name, offset, data[: len(data) // 2] if refused == name == "v/pages" else data)
                if name == refused:
                    raise OSError(5, "refused")

            bench.disk.write_at = refusing  # type: ignore[method-assign, assignment]
            with pytest.raises(OSError, match="refused"):
                await backing.write(batch(version, p3=10 * version))
        bench.disk.write_at = write_at  # type: ignore[method-assign]
        await backing.write(batch(4, p5=50))
        await backing.sync()
        assert await content(await loaded(bench), 3, 3) == [10, 0, 50]
        await backing.write(batch(5, p3=60))
        await backing.sync()
        assert await content(await loaded(bench), 3, 3) == [60, 0, 50]


@pytest.mark.parametrize("first", [0, 1], ids=["the older in the first place", "the older in the second place"])
async def test_of_two_places_with_one_version_the_later_written_counts(first: int) -> None:
    """A batch that was refused in part is written again, and its first page then stands in both places; the next
    content goes over the older of the two, which a death may leave torn."""
    async with a_bench() as bench:
        backing = await loaded(bench)
        for version in range(1, 1 + first):
            await backing.write(batch(version, p3=10))
        second, third = batch(2, p3=20, p5=50), batch(3, p3=30)
        with refusing(bench, page=5), pytest.raises(OSError, match="refused"):
            await backing.write(second)
        await backing.write(second)
        await backing.sync()
        with refusing(bench, page=3), pytest.raises(OSError, match="refused"):
            await backing.write(third)
        assert await content(await loaded(bench), 3, 3) == [20, 0, 50]


@contextmanager
def refusing(bench: Bench, page: int) -> Iterator[None]:
    """The disk writes half of this page, and says that it did not."""
    write_at = bench.disk.write_at

    async def refused(name: str, offset: int, data: bytes) -> None:
        if name != "v/pages" or offset % (PAGES * PAGE) != page * PAGE:
            return await write_at(name, offset, data)
        await write_at(name, offset, data[: len(data) // 2])
        raise OSError(5, "refused")

    bench.disk.write_at = refused  # type: ignore[method-assign, assignment]
    yield
    bench.disk.write_at = write_at  # type: ignore[method-assign]


@given(seed=st.integers(0, 10**6), deaths=st.lists(st.sampled_from(["kill", "power"]), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_deaths_at_any_moment_lose_nothing_that_was_promised(seed: int, deaths: list[str]) -> None:
    """After a kill everything that `write` returned for is there; after a loss of power, everything that was synced."""
    rng = random.Random(seed)
    written, synced, newest, found = [0] * PAGES, [0] * PAGES, [0] * PAGES, [0] * PAGES
    next_version = iter(range(1, 10**6))

    async def writer(env: Env, command: Command) -> int:
        backing = Backing(env.disk, "v", PAGES, PAGE)
        await backing.load()
        found[:] = await content(backing)
        while True:
            version = next(next_version)
            pages = rng.sample(range(PAGES), rng.randint(1, 5))
            for number in pages:
                newest[number] = version
            await backing.write({number: Page(version, page(version)) for number in pages})
            for number in pages:
                written[number] = version
            if rng.random() < 0.1:
                await backing.sync()
                synced[:] = written

    with World(seed) as world:
        host = world.add_host("h1")
        process = host.run("writer", writer)
        for death in [*deaths, "kill"]:
            world.run(world.now + rng.uniform(0.02, 0.2))
            assert process.alive, "the writer failed"
            promised = list(written if death == "kill" else synced)
            if death == "kill":
                process.signal(9)
            else:
                host.power_off()
                host.power_on()
            found[:] = [-1] * PAGES
            limits = list(zip(promised, newest, strict=True))
            process = host.run("writer", writer)
            assert world.run(world.now + 10, stop=lambda: -1 not in found)
            assert all(least <= word <= most for word, (least, most) in zip(found, limits, strict=True)), (
                found,
                limits,
            )
            written[:] = found
            synced[:] = [min(pair) for pair in zip(synced, found, strict=True)]


async def test_readers_and_a_writer_do_not_disturb_one_another() -> None:
    async with a_bench() as bench:
        backing = await loaded(bench)
        done = False

        async def rewrite() -> None:
            nonlocal done
            for version in range(1, 60):
                await backing.write({number: Page(version, page(version)) for number in range(PAGES)})
            done = True

        async def look() -> None:
            last = 0
            while not done:
                words = await content(backing)
                assert min(words) >= last
                last = min(words)
                await asyncio.sleep(0)

        tasks: list[Any] = [rewrite(), look(), look()]
        await asyncio.gather(*tasks)
        assert await content(backing) == [59] * PAGES
