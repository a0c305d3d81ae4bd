"""Pages that were flushed before a crash are read while their lender is silent; what may be newer there is not."""

import asyncio
import errno
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from covey.ports.env import Env
from plugins.memory.datapath.volumes import flushed_regions
from plugins.memory.datapath.volumes.flushed_regions import SINGLE_MAX, FlushedRegions
from tests.plugins.memory.ports import a_bench, read, write
from tests.plugins.memory.test_volume import crashed_with_a_silent_lender

PAGES, SLAB = 64, 16


class Disk:
    """A disk that is slow by one turn of the loop, and refuses what it is told to refuse."""

    def __init__(self) -> None:
        self.file: bytes | None = None
        self.refuses: set[str] = set()
        self.done: list[str] = []

    async def _do(self, what: str) -> None:
        for _ in range(2):
            await asyncio.sleep(0)
        self.done.append(what)
        if what in self.refuses:
            raise OSError(errno.ENOSPC, "full")

    async def read(self, _: str) -> bytes | None:
        return self.file

    async def replace(self, _: str, data: bytes) -> None:
        await self._do("replace")
        self.file = data
        await asyncio.sleep(0)

    async def append(self, _: str, data: bytes) -> None:
        self.file = (self.file or b"") + data[:5]  # a crash may leave that much of it
        try:
            await self._do("append")
        except OSError:
            raise
        self.file = self.file[:-5] + data

    async def delete(self, _: str) -> None:
        await self._do("delete")
        self.file = None


class Volume:
    """A volume's acknowledged writes, and what the disk has of them: page -> number of the write."""

    def __init__(self, disk: Disk) -> None:
        self.disk, self.now_s = disk, 0.0
        self.tasks: list[asyncio.Task[Any]] = []
        clock = SimpleNamespace(now_s=lambda: self.now_s)
        env = SimpleNamespace(
            disk=disk, clock=clock, spawn=lambda _, work: self.tasks.append(asyncio.ensure_future(work))
        )
        self.env = cast(Env, env)
        self.regions = FlushedRegions(self.env, "memory/volumes/data", SLAB)
        self.number = 0
        self.begun: dict[int, int] = {}
        self.acknowledged: dict[int, int] = {}
        self.on_disk: dict[int, int] = {}

    async def write(self, first: int, count: int) -> None:
        while not self.regions.covers(first, count):
            await self.regions.add(first, count)
        self.regions.begun(first, count)
        self.number += 1
        number = self.number
        for page in range(first, first + count):
            self.begun[page] = number
        await asyncio.sleep(0)
        for page in range(first, first + count):
            self.acknowledged[page] = max(number, self.acknowledged.get(page, 0))

    async def flush(self) -> None:
        async with self.regions.flushing():
            before = dict(self.begun)
            for _ in range(3):
                await asyncio.sleep(0)
            for page, number in before.items():
                self.on_disk[page] = max(number, self.on_disk.get(page, 0))

    async def after_a_crash(self) -> FlushedRegions:
        found = FlushedRegions(self.env, "memory/volumes/data", SLAB)
        await found.load()
        return found


@pytest.fixture
def regions_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flushed_regions, "REGION_PAGES", 2)


@pytest.mark.usefixtures("regions_of_two")
@pytest.mark.parametrize("mark_s", [0.0, 3.0])
async def test_no_page_that_is_not_on_disk_is_called_flushed_after_a_crash(
    mark_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flushed_regions, "MARK_S", mark_s)
    served = 0
    for seed in range(150):
        rng = random.Random(seed)
        disk = Disk()
        volume = Volume(disk)
        if rng.random() < 0.5:
            disk.file = flushed_regions._HEAD
            await volume.regions.load()
        await volume.regions.take_over()
        tasks = []
        for _ in range(rng.randrange(2, 40)):
            volume.now_s += rng.choice((0.0, 0.0, 1.0))
            disk.refuses = {"append"} if rng.random() < 0.1 else {"replace"} if rng.random() < 0.1 else set()
            first = rng.randrange(PAGES)
            work = volume.flush() if rng.random() < 0.3 else volume.write(first, rng.randint(1, min(5, PAGES - first)))
            tasks.append(asyncio.ensure_future(work))
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
        for _ in range(rng.choice((0, 20))):
            await asyncio.sleep(0)
        again = await volume.after_a_crash()
        for page, number in volume.acknowledged.items():
            if again.were_flushed(page, 1):
                assert volume.on_disk.get(page, 0) >= number, f"seed {seed}, page {page}"
                served += 1
        for task in (*tasks, *volume.tasks):
            task.cancel()
        await asyncio.gather(*tasks, *volume.tasks, return_exceptions=True)
    assert served > 100, "it says something"


@pytest.mark.usefixtures("regions_of_two")
async def test_a_slab_that_is_written_in_many_regions_is_named_whole_and_alone() -> None:
    disk = Disk()
    volume = Volume(disk)
    await volume.flush()
    for page in range(0, SLAB, 2):
        await volume.write(page, 1)
    assert disk.done.count("append") == SINGLE_MAX + 1
    again = await volume.after_a_crash()
    assert not again.were_flushed(0, SLAB)
    assert again.were_flushed(SLAB, SLAB)


async def test_a_volume_that_never_flushes_asks_nothing_of_the_disk() -> None:
    disk = Disk()
    volume = Volume(disk)
    await volume.regions.load()
    for page in range(PAGES):
        await volume.write(page, 1)
    assert disk.done == []
    assert not (await volume.after_a_crash()).were_flushed(0, 1)


async def test_a_full_disk_names_all_by_a_file_that_is_not_there() -> None:
    disk = Disk()
    volume = Volume(disk)
    await volume.flush()
    disk.refuses = {"append"}
    await volume.write(0, 1)
    assert disk.file is None
    assert not (await volume.after_a_crash()).were_flushed(PAGES - 1, 1)


async def test_a_disk_that_takes_neither_a_word_nor_the_file_away_lets_nothing_be_written() -> None:
    disk = Disk()
    volume = Volume(disk)
    await volume.flush()
    disk.refuses = {"append", "delete"}
    with pytest.raises(OSError, match="full"):
        await volume.write(0, 1)


@pytest.mark.parametrize("data", [b"", b"coveyuf", b"nonsense" * 4, flushed_regions._HEAD + b"\1" * 12])
async def test_a_file_that_is_damaged_names_all(data: bytes) -> None:
    disk = Disk()
    disk.file = data
    assert not (await Volume(disk).after_a_crash()).were_flushed(0, 1)


async def test_flushed_pages_are_served_and_the_others_say_how_to_end_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Page 1 alone was written after the flush, and is newest at the lender."""
    monkeypatch.setattr(flushed_regions, "REGION_PAGES", 1)
    monkeypatch.setattr("plugins.memory.datapath.volumes.lenders.UNSURE_S", 0.3)
    async with a_bench() as bench:
        again = await crashed_with_a_silent_lender(bench)
        assert await read(again, 0, 1) == [1]
        assert await read(again, 2, 1) == [1]
        with pytest.raises(OSError, match=r"h2 may hold newer.*; next: .*agentctl volume give-up \S+"):
            await read(again, 0, 3)
        await write(again, 0, 7)
        assert await read(again, 0, 1) == [7]
        await bench.wake_lender()
        await again.slabs[0].sure.wait()
        assert await read(again, 0, 3) == [7, 2, 1]
