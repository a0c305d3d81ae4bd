"""Volumes whose files are of before the spill log: converted when they are opened first, whatever happens meanwhile."""

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.world.clock import SimLoopStalls
from covey.wire import checked
from plugins.memory.datapath.doors.exports import Exports
from plugins.memory.datapath.doors.swap_door import SwapDoor
from plugins.memory.datapath.spill import old_layout
from plugins.memory.datapath.spill.places import Places
from plugins.memory.datapath.spill.spill import Spill
from plugins.memory.datapath.vold import NOT_OPEN, VolumeControl
from plugins.memory.datapath.wire.control import ListPlaces, No, PlaceList
from plugins.memory.datapath.wire.shape import VolumeRecord
from plugins.memory.service.open_volume import OpenVolume
from tests.plugins.memory.old_volume import LIFE, OldVolume
from tests.plugins.memory.ports import PAGE, SHAPE, Bench, QuietLog, a_bench, page, read, soon, write

PAGES = SHAPE.pages
NAME = "memory/volumes/data"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(old_layout, "AGAIN_S", 0.01)
    monkeypatch.setattr("plugins.memory.datapath.spill.spill.RETRY_S", 0.01)
    yield


async def old_volume(bench: Bench) -> list[int]:
    """Words of its pages. Page 7 was half written in its newer place when the power failed; page 9 never was."""
    folder = Path(bench.env.disk.path(NAME))
    old = OldVolume(folder, PAGES)
    words = [0 if number == 9 else 100 + number for number in range(PAGES)]
    for number, word in enumerate(words):
        if word:
            old.write(number, [page(word)], LIFE << 44 | 1 + number, 1 + number)
    old.write(8, [page(208)], LIFE << 44 | 60, 60, place=1)
    old.write(7, [page(207)[:2000] + bytes(PAGE - 2000)], LIFE << 44 | 61, 61, place=1)
    words[8] = 208
    old.end(60)
    record = VolumeRecord(SHAPE.size_bytes, SHAPE.page_bytes, SHAPE.slab_bytes, LIFE)
    await checked.save(bench.env.disk, f"{NAME}/volume", record)
    await bench.directory.write_at(f"{NAME}/pages", (7 + PAGES) * PAGE + 2000, b"torn")
    return words


async def test_an_old_volume_is_converted_and_its_files_are_gone() -> None:
    async with a_bench() as bench:
        words = await old_volume(bench)
        volume = await bench.volume()
        assert await read(volume, 0, PAGES) == words
        assert not {f"{NAME}/index", f"{NAME}/pages"} & set(await bench.directory.names(NAME))
        await write(volume, 3, 1003)
        await volume.flush()
        await bench.die(volume)
        words[3] = 1003
        assert await read(await bench.volume(), 0, PAGES) == words


@pytest.mark.parametrize("seed", range(12))
async def test_a_conversion_may_end_anywhere_and_begin_again(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed, with the writer of its log, after some step; the old places of what is durable are gone
    by then."""
    monkeypatch.setattr(old_layout, "STEP_BYTES", 3 * PAGE)
    rng = random.Random(seed)
    async with a_bench() as bench:
        words = await old_volume(bench)
        for _ in range(4):
            steps = rng.randrange(1, 40)
            work = asyncio.ensure_future(bench.volume())
            for _ in range(steps):
                await asyncio.sleep(0)
                if work.done():
                    break
                await asyncio.sleep(rng.choice([0, 0, 0.002]))
            if not work.done():
                work.cancel()
                await asyncio.wait([work])
            await bench.die(bench._volumes[-1][0])
        volume = await bench.volume()
        assert await read(volume, 0, PAGES) == words
        assert f"{NAME}/index" not in await bench.directory.names(NAME)


async def test_a_conversion_takes_no_second_time_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(old_layout, "STEP_BYTES", 64 * PAGE)
    async with a_bench() as bench:
        folder, pages = Path(bench.env.disk.path(NAME)), 4096
        old = OldVolume(folder, pages)
        for first in range(0, pages, 256):
            old.write(first, [os.urandom(PAGE) for _ in range(256)], LIFE << 44 | first + 1, first + 1)
        old.end(pages)

        def taken() -> int:
            return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())

        before, most, flush = taken(), 0, bench.disk.sync

        async def watched(name: str) -> None:
            nonlocal most
            most = max(most, taken())
            await flush(name)

        bench.disk.sync = watched  # type: ignore[method-assign]
        spill = Spill(bench.env, "data", NAME, pages, PAGE, 1024)
        await spill.open(LIFE + 1)
        await spill.settle()
        running = bench.tasks.spawn("spill", spill.run())
        said: list[str] = []
        await old_layout.Conversion(bench.env, NAME, spill, said.append).run()
        running.cancel()
        await spill.close()
        assert said[0].endswith("0 % done") and said[-1] == ""
        assert spill.count_written(0, pages) == pages
        assert most < before * 1.25, f"{most / before:.2f} times what the volume took"


async def test_a_disk_without_room_holds_a_conversion_up_and_says_so() -> None:
    async with a_bench() as bench:
        words = await old_volume(bench)
        bench.disk.fail = True
        work = asyncio.ensure_future(bench.volume())
        await soon(lambda: bool(bench._volumes))
        volume = bench._volumes[-1][0]
        await soon(lambda: "no space left" in volume.opening)
        assert volume.opening.startswith("it cannot convert its files of an earlier version now: ")
        assert not work.done()
        bench.disk.fail = False
        assert await read(await work, 0, PAGES) == words


async def test_a_volume_told_to_end_while_it_converts_leaves_its_lenders_to_the_next() -> None:
    """It has not asked them yet what they hold that the disk has not."""
    async with a_bench() as bench:
        await old_volume(bench)
        places = Places(bench.env.disk, QuietLog(), NAME)
        await places.add(bench.register(0))
        bench.disk.fail = True
        work = asyncio.ensure_future(bench.volume())
        await soon(lambda: bool(bench._volumes))
        volume = bench._volumes[-1][0]
        await soon(lambda: "no space left" in volume.opening)
        bench.disk.fail = False
        work.cancel()
        await asyncio.wait([work])
        await volume.end()
        left = Places(bench.env.disk, QuietLog(), NAME)
        await left.load(len(volume.slabs))
        assert not left.clean and len(left.all()) == 1


async def test_who_asks_a_volume_that_opens_is_told_why_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plugins.memory.datapath.vold.OPEN_WAIT_S", 0.05)
    async with a_bench() as bench:
        volume = await bench.volume()
        volume._says("it converts its files of an earlier version: 30 % done")
        asked = VolumeControl(volume, Exports(bench.env, volume), SwapDoor(bench.env, volume, ""), "", SimLoopStalls())
        answer = await asked.answer(ListPlaces(1))
        assert answer == No(1, f"{NOT_OPEN}: it converts its files of an earlier version: 30 % done")
        asked.opened.set()
        assert isinstance(await asked.answer(ListPlaces(2)), PlaceList)


def test_what_a_volume_says_while_it_opens_is_news_once_and_goes_when_it_is_open() -> None:
    volume = OpenVolume(None, None)  # type: ignore[arg-type]
    assert [volume.opens("30 % done"), volume.opens("30 % done"), volume.opens("40 % done")] == [True, False, True]
    assert volume.trouble == "40 % done"
    assert not volume.opens("") and volume.trouble == ""
    volume.trouble = "read-only"
    assert not volume.opens("") and volume.trouble == "read-only"
