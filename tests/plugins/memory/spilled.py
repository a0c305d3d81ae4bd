"""A spill log in a simulated world: a process that puts pages, the writer beside it, and what must be true after any
death of either, or of the power."""

import asyncio
import random
from dataclasses import dataclass, field

from chaos.world.host import SimHost, SimProcess
from chaos.world.world import World
from covey.ports.env import Env
from covey.ports.processes import Command
from plugins.base import Program
from plugins.memory.datapath.spill.spill import Spill
from plugins.memory.datapath.spill.spill_writer import SpillConfig, run_spill

PAGE = 4096
PAGES = 48
PLACES = 256


def content(page: int, word: int) -> bytes:
    return (word.to_bytes(8, "little") + page.to_bytes(8, "little")) * (PAGE // 16)


def word(data: bytes | memoryview, page: int) -> int:
    """The word of a page; -1 if it is not a page that was ever put there."""
    data = bytes(data)
    found = int.from_bytes(data[:8], "little")
    if not any(data):
        return 0
    return found if data == content(page, found) else -1


async def look(spill: Spill, pages: int = PAGES) -> list[int]:
    found = []
    for page in range(pages):
        data = memoryview(bytearray(PAGE))
        await spill.read(page, data)
        found.append(word(data, page))
    return found


@dataclass
class Told:
    """Promises to the process that puts pages: each field has a word for each page."""

    put: list[int] = field(default_factory=lambda: [0] * PAGES)
    """The writes that were begun, so that a read may find them."""
    written: list[int] = field(default_factory=lambda: [0] * PAGES)
    synced: list[int] = field(default_factory=lambda: [0] * PAGES)
    found: list[int] | None = None
    most: list[int] = field(default_factory=lambda: [0] * PAGES)
    """The words that had been put before the process began anew."""
    life: int = 0
    spill: Spill | None = None
    refused: int = 0
    wrong: str = ""
    """A read that found what it must not find, in words."""


class SpillWorld:
    """One host with one volume's process. `busy` is what the process does once it is open."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.rng, self.told = world, random.Random(seed), Told()
        program = Program("spill", SpillConfig, run_spill)
        world.programs = lambda: {"spill": program}
        self.host: SimHost = world.add_host("h1")
        self.process: SimProcess = self.begin()

    def begin(self) -> SimProcess:
        self.told.found = None
        self.process = self.host.run("volume", self._main)
        return self.process

    def writers(self) -> list[SimProcess]:
        return self.host.find("spill-data")

    def opened(self) -> None:
        """Run until the process has read every page."""
        assert self.world.run(self.world.now + 60, stop=lambda: self.told.found is not None), "it does not open"

    async def _main(self, env: Env, command: Command) -> int:
        told, rng = self.told, self.rng
        told.life += 1
        while True:
            told.spill = spill = Spill(env, "data", "v", PAGES, PAGE, PLACES)
            try:
                await spill.open(told.life)
                break
            except OSError:
                await spill.close()
                await asyncio.sleep(0.5)
        while True:
            try:
                await spill.settle()
                break
            except OSError:
                await asyncio.sleep(0.5)
        env.spawn("spill", spill.run())
        while told.found is None:
            try:
                found = await self._look(spill)
                told.most, told.put, told.written = told.put, list(found), list(found)
                told.synced = [min(pair) for pair in zip(told.synced, found, strict=True)]
                told.found = found
            except OSError:
                await asyncio.sleep(0.1)
        number = max([*told.found, *told.most])
        while True:
            number += 1
            first = rng.randrange(PAGES)
            count = rng.randint(1, min(6, PAGES - first))
            try:
                await spill.room(count)
                self._put(spill, first, count, number, env)
                if rng.random() < 0.5:
                    at = spill.log.put
                    known = list(told.put)
                    await spill.written(at)
                    told.written = [max(pair) for pair in zip(told.written, known, strict=True)]
                if rng.random() < 0.1:
                    known = list(told.put)
                    await spill.flush()
                    told.synced = [max(pair) for pair in zip(told.synced, known, strict=True)]
            except OSError:
                told.refused += 1
                await asyncio.sleep(0.01)
            spill.log.check()
            if not told.wrong and rng.random() < 0.2:
                await self._read_one(spill, rng.randrange(PAGES))

    async def _look(self, spill: Spill) -> list[int]:
        """A page that the disk dropped before it was durable is an error, and counts as what was put last."""
        found = []
        for page in range(PAGES):
            data = memoryview(bytearray(PAGE))
            try:
                await spill.read(page, data)
                found.append(word(data, page))
            except OSError as error:
                if "is damaged" not in str(error) or self.told.put[page] <= self.told.synced[page]:
                    raise
                found.append(self.told.put[page])
        return found

    async def _read_one(self, spill: Spill, page: int) -> None:
        """Check that a living process finds what was put last, or an error."""
        put, data = self.told.put[page], memoryview(bytearray(PAGE))
        try:
            await spill.read(page, data)
        except OSError:
            return
        if word(data, page) != put:
            self.told.wrong = f"page {page} read as {word(data, page)}, and {put} was put"

    def _put(self, spill: Spill, first: int, count: int, number: int, env: Env) -> None:
        version = self.told.life << 40 | number
        data = memoryview(b"".join(content(page, number) for page in range(first, first + count)))
        spill.put(first, count, version, data)
        for page in range(first, first + count):
            self.told.put[page] = number

    def check_found(self, least: list[int]) -> None:
        found, most = self.told.found, self.told.most
        assert found is not None
        wrong = [
            (page, at, low, high)
            for page, (at, low, high) in enumerate(zip(found, least, most, strict=True))
            if not low <= at <= high
        ]
        assert not wrong, f"(page, found, promised, put): {wrong}"
