"""A process that uses a volume as a block device: some connections, each with requests under way, as a kernel has
them.

No two writes that are under way touch the same bytes (a page cache ensures that); reads meet whatever is written.
Connections end at any moment, in good order or not, and begin anew.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from chaos.nbd.cells import Cells
from chaos.nbd.connection import Connection, Failed, Flag, Nbd
from covey.ports.env import Env
from covey.ports.processes import Command

PAUSE_S = 0.2
"""Seconds before a connection is tried again, or a request that failed at the end."""
ZERO = 2
"""State of an extent that reads as zeros."""


class Habits(NamedTuple):
    """How a user uses the device."""

    path: str
    seconds: float
    connections: int = 2
    depth: int = 4
    """Requests under way on each connection."""
    structured: bool = True
    length_max: int = 1 << 20
    """Most bytes of one request."""
    pause_s: float = 0.1
    """Mean seconds between an answer and the next request."""
    ends_s: float = 4.0
    """Mean seconds that a connection lasts."""
    sizes: tuple[int, ...] = ()
    """Bytes of requests, which begin at multiples of them; empty: any."""


class User:
    """A user of a device: the state that all its tasks share."""

    def __init__(self, env: Env, cells: Cells, habits: Habits) -> None:
        self.env, self.cells, self.habits, self.page_bytes = env, cells, habits, cells.page_bytes
        self._written: set[int] = set()
        """Cells of writes that are under way."""
        self._end_s = env.clock.now_s() + habits.seconds

    async def connect(self) -> Connection:
        while True:
            try:
                stream = await self.env.bytes.connect(f"unix:{self.habits.path}")
                found = Connection(self.env, stream, self.habits.structured)
                try:
                    await found.greet()
                except (ConnectionError, TimeoutError):
                    found.close()
                    raise
                return found
            except (ConnectionError, TimeoutError):
                await asyncio.sleep(PAUSE_S)

    async def use(self) -> None:
        """Use one connection after another until the time is over."""
        rng = self.env.rng
        while self.env.clock.now_s() < self._end_s:
            connection = await self.connect()
            until_s = self.env.clock.now_s() + rng.expovariate(1 / self.habits.ends_s)
            workers = [self._work(connection) for _ in range(self.habits.depth)]
            working = asyncio.gather(*workers)
            await asyncio.wait([working], timeout=min(until_s, self._end_s) - self.env.clock.now_s())
            if rng.random() < 0.5:
                await connection.disconnect()
            connection.close()
            await working

    async def _work(self, connection: Connection) -> None:
        rng = self.env.rng
        while not connection.over and self.env.clock.now_s() < self._end_s:
            await asyncio.sleep(rng.uniform(0.2, 1.8) * self.habits.pause_s)
            first, count = self._place()
            doing = rng.choices((self._write, self._read, self._zeroes, self._trim, self._status, self._flush),
                                (10, 8, 1, 1, 2, 1))[0]  # fmt: skip
            try:
                await doing(connection, first, count)
            except (Failed, ConnectionError):
                pass

    def _place(self) -> tuple[int, int]:
        """First cell and number of cells of a request: mostly of whole pages and of a size that comes again, as from a
        page cache; most of them in one part of the device, so that the rest keeps its content for long."""
        rng, cells, most = self.env.rng, self.cells, self.habits.length_max.bit_length() - 1
        if self.habits.sizes:
            count = rng.choice(self.habits.sizes) // cells.cell_bytes
            return rng.randrange(cells.count // count) * count, count
        whole = self.page_bytes % cells.cell_bytes == 0 and rng.random() < 0.7
        step = self.page_bytes // cells.cell_bytes if whole else 1
        length = 1 << rng.randint(most - 5, most) if rng.random() < 0.6 else int(self.habits.length_max ** rng.random())
        count = min(max(1, length // (step * cells.cell_bytes)), cells.count // step)
        reach = cells.count // step - count
        first = rng.randrange((reach // 3 if rng.random() < 0.7 else reach) + 1)
        return first * step, count * step

    # ---- requests ----

    async def _write(self, connection: Connection, first: int, count: int) -> None:
        fua = Flag.FUA if self.env.rng.random() < 0.2 else 0

        async def ask(versions: list[int]) -> None:
            data = b"".join(self.cells.content(cell, version) for cell, version in enumerate(versions, first))
            await connection.ask(Nbd.WRITE, first * self.cells.cell_bytes, len(data), data, fua)

        await self._change(first, count, False, ask)

    async def _zeroes(self, connection: Connection, first: int, count: int) -> None:
        size, flags = self.cells.cell_bytes, self.env.rng.choice((0, Flag.NO_HOLE, Flag.FUA, Flag.FAST_ZERO))
        if flags is Flag.FAST_ZERO and (first * size % self.page_bytes or count * size % self.page_bytes):
            flags = 0

        async def ask(versions: list[int]) -> None:
            await connection.ask(Nbd.ZEROES, first * size, count * size, flags=flags)

        await self._change(first, count, True, ask)

    async def _trim(self, connection: Connection, first: int, count: int) -> None:
        """Trim cells. What that leaves of pages that it covers in part is known only where cells divide pages."""
        size, page = self.cells.cell_bytes, self.page_bytes
        if page % size:
            return
        start, end = -(-first * size // page) * page // size, (first + count) * size // page * page // size

        async def ask(versions: list[int]) -> None:
            await connection.ask(Nbd.TRIM, first * size, count * size)

        if start < end:
            await self._change(start, end - start, True, ask)
        else:
            await self._change(first, 0, True, ask)

    async def _change(self, first: int, count: int, zeros: bool, ask: Callable[[list[int]], Awaitable[None]]) -> None:
        cells = set(range(first, first + count))
        if cells & self._written:
            return
        self._written |= cells
        versions = self.cells.sending(first, count, zeros)
        try:
            await ask(versions)
        except (Failed, ConnectionError):
            self.cells.let_loose(first, versions)
            raise
        finally:
            self._written -= cells
        self.cells.acknowledge(first, versions)

    async def _read(self, connection: Connection, first: int, count: int) -> None:
        since, size = self.cells.since(first, count), self.cells.cell_bytes
        found = await connection.ask(Nbd.READ, first * size, count * size)
        self.cells.check(first, since, bytes(found.data))

    async def _status(self, connection: Connection, first: int, count: int) -> None:
        if not connection.structured:
            return
        since, size = self.cells.since(first, count), self.cells.cell_bytes
        found = await connection.ask(Nbd.STATUS, first * size, count * size)
        at = 0
        for length, state in found.extents:
            start, at = -(-at // size), at + length
            if state & ZERO and start < (end := min(count, at // size)):
                self.cells.check_zeros(first + start, since[start:end])

    async def _flush(self, connection: Connection, first: int, count: int) -> None:
        await connection.ask(Nbd.FLUSH, 0, 0)

    # ---- the end ----

    async def read_back(self) -> None:
        """Read every cell back, however often the volume refuses."""
        count = max(1, (64 << 10) // self.cells.cell_bytes)
        first, connection = 0, await self.connect()
        while first < self.cells.count:
            try:
                await self._read(connection, first, min(count, self.cells.count - first))
                first += count
            except (Failed, ConnectionError):
                connection.close()
                await asyncio.sleep(PAUSE_S)
                connection = await self.connect()
        await connection.disconnect()


def user(cells: Cells, habits: Habits) -> Callable[[Env, Command], Awaitable[int]]:
    """A program that uses the device for its time, then reads all of it back."""

    async def run(env: Env, command: Command) -> int:
        using = User(env, cells, habits)
        await asyncio.gather(*(using.use() for _ in range(habits.connections)))
        await using.read_back()
        return 0

    return run
