"""A process that uses remote memory in a simulated rack, with a write-ahead oracle of every page.

Before a write is sent its version is noted as *possible*, when it is answered it is *acknowledged* and everything
older stops being possible. A read must return the acknowledged version or a later possible one. Each page says which
volume, page and version it is and carries a checksum, so another volume's page, a mixture of two or a torn one is
noticed.

Two verdicts: `wrong` must never be, whatever failed (bytes never written there); `stale` is an older version of the
right page, which one failure must not cause, but two at once (the volume's process and a lender) may:
`chaos.checks.custody` says for which pages.
"""

import asyncio
import struct
import zlib
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple

from covey.ports.env import Env
from covey.ports.processes import Command
from covey.ports.streams import ByteStream
from covey.wire import headers
from covey.wire import volume_wire as volumewire
from covey.wire.frames import pack, read_frame
from covey.wire.headers import Op, Request, Status
from covey.wire.job import Join, Refusal, VolumeAt, VolumeWanted, decoder

_HEAD = struct.Struct("<IIII")
ANSWER_S = 60.0
PAUSE_S = 0.1
REFUSED_S = 1.0
"""Seconds before a page that the volume could not read is read again."""
BLOCK = 16
"""Pages used of one slab where slabs are large: all of a slab of 64 KiB."""
ASKED_MOST = 256
"""Most pages of one request."""
USER = 1000
"""Uid of the user who owns processes and volumes."""
Say = Callable[[str], None]


def page_of(volume: str, page: int, version: int, size: int) -> bytes:
    """Content of version `version` of a page."""
    body = bytes([(page * 7 + version * 13 + 1) & 255]) * (size - _HEAD.size)
    here = zlib.crc32(volume.encode())
    return _HEAD.pack(here, page, version, zlib.crc32(body, here ^ page ^ version)) + body


def version_of(volume: str, page: int, data: bytes) -> int | None:
    """The version of this page that `data` is: 0 when it was never written, None when it is no version of it."""
    if not any(data):
        return 0
    here, number, version, crc = _HEAD.unpack_from(data)
    right = here == zlib.crc32(volume.encode()) and number == page
    return version if right and crc == zlib.crc32(data[_HEAD.size :], here ^ page ^ version) else None


class Redundancy(NamedTuple):
    """How a volume is asked to keep its pages safe. With neither field it has a disk."""

    mirror: int = 0
    """Members of each slab, which are copies; 0: it is no mirror."""
    parity: str = ""
    """Members of each slab as `K+1`, one of them with parity; empty: there is none."""


DISK = Redundancy()


class Oracle:
    """What each page of one volume may hold."""

    def __init__(
        self,
        volume: str,
        size_bytes: int,
        wrong: Say,
        stale: Say,
        used_bytes: int | None = None,
        kind: Redundancy = DISK,
        spread: int = 1,
        uid: int = USER,
    ) -> None:
        self.volume, self.size_bytes, self._wrong, self._stale = volume, size_bytes, wrong, stale
        self.kind, self.uid = kind, uid
        """How the volume is made, and the user who owns it."""
        self.spread = spread
        """Factor of slab size over `BLOCK`: above 1 the pages that are used lie in pairs of blocks, the last pages of
        one slab and the first of the next."""
        self._used_bytes = size_bytes if used_bytes is None else used_bytes
        self.page_bytes = 0
        """Bytes of a page, known once the volume is attached."""
        self.forgives: Callable[[int], bool] = lambda page: False
        """Whether this page may be older than it was acknowledged."""
        self.on_acknowledged: Callable[[int, int], None] = lambda page, version: None
        """Called with every page and version that is acknowledged, or read: a version that was read may not go back
        either."""
        self.acknowledged: dict[int, int] = {}
        self.possible: dict[int, int] = {}
        """Page -> the newest version ever sent."""
        self.refused: set[tuple[int, int]] = set()
        """Page and version of writes that were answered with an error: reads may find them, and later not, until the
        page is written again."""
        self.reads = self.writes = 0

    @property
    def pages(self) -> int:
        """How many pages, from the first one on, are used; 0 before the volume was ever attached."""
        return self._used_bytes // self.page_bytes if self.page_bytes else 0

    def place(self, number: int) -> int:
        """The page of the volume that is the used page `number`."""
        if self.spread == 1:
            return number
        block, at = divmod(number, BLOCK)
        slab = BLOCK * self.spread
        return block * slab + at + (0 if block % 2 else slab - BLOCK)

    def together(self, number: int, count: int) -> int:
        """How many of `count` used pages from this one on are pages of the volume in a row."""
        return count if self.spread == 1 else min(count, 2 * BLOCK - number % (2 * BLOCK))

    def unused(self) -> Iterator[tuple[int, int]]:
        """Yield runs of unused pages: the first page, and how many in a row, at most `ASKED_MOST`."""
        begin = 0
        for page in [*map(self.place, range(self.pages)), self.size_bytes // self.page_bytes]:
            for first in range(begin, page, ASKED_MOST):
                yield first, min(ASKED_MOST, page - first)
            begin = page + 1

    def sending(self, page: int) -> int:
        version = self.possible.get(page, 0) + 1
        self.possible[page] = version
        return version

    def acknowledge(self, page: int, version: int) -> None:
        self.acknowledged[page] = max(version, self.acknowledged.get(page, 0))
        self.on_acknowledged(page, version)
        self.writes += 1

    def check(self, page: int, data: bytes) -> None:
        self.reads += 1
        found = version_of(self.volume, page, data)
        least, most = self.acknowledged.get(page, 0), self.possible.get(page, 0)
        where = f"page {page} of {self.volume}"
        if found is None or found > most:
            self._wrong(f"{where} holds bytes never written there: {data[:24].hex()}, at most version {most} was sent")
        elif found < least and not self.forgives(page):
            self._stale(f"{where} is at version {found}, but {least} was acknowledged")
        elif (page, found) not in self.refused:
            self.acknowledged[page] = found  # once seen it may not go back
            self.on_acknowledged(page, found)


class VolumeClient:
    """One connection to a volume's process, made again when it breaks. Requests may be repeated at will."""

    def __init__(self, env: Env, volume: str, size_bytes: int, kind: Redundancy = DISK) -> None:
        self.env, self.volume, self.size_bytes, self.kind = env, volume, size_bytes, kind
        self.at: VolumeAt | None = None
        self._stream: ByteStream | None = None
        self._tag = 0

    async def attach(self) -> VolumeAt:
        """Attach the volume. Raises ConnectionError while the agent is away, PermissionError when it refuses."""
        stream = await self.env.bytes.connect(f"unix:{self.env.run_dir}/jobs.sock")
        try:
            await stream.write(pack(Join(1)))
            await stream.write(pack(VolumeWanted(self.volume, self.size_bytes, *self.kind)))
            async with asyncio.timeout(ANSWER_S):
                while True:
                    frame = await read_frame(stream, decoder)
                    if isinstance(frame, VolumeAt):
                        return frame
                    if isinstance(frame, Refusal):
                        raise PermissionError(f"{frame.what}: {frame.why}")
        finally:
            stream.close()

    async def ask(self, op: Op, page: int, count: int, data: bytes = b"") -> bytes | None:
        """The pages read (empty for a write); None when the volume failed. Repeated until there is an answer."""
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    return await self._try(op, page, count, data)
            except (ConnectionError, TimeoutError, PermissionError):
                self.hang_up()
                await asyncio.sleep(PAUSE_S)

    async def _try(self, op: Op, page: int, count: int, data: bytes) -> bytes | None:
        stream = await self._connected()
        self._tag += 1
        await stream.write(headers.pack_request(Request(op, page, count, self._tag)), data)
        header = bytearray(headers.REPLY_BYTES)
        await stream.read_into(memoryview(header))
        reply = headers.reply(header)
        if reply.status is not Status.OK:
            self.hang_up()
            return None
        if reply.tag != self._tag:
            raise headers.WireError("an answer to something else")
        assert self.at is not None
        pages = bytearray(count * self.at.page_bytes if op is Op.READ else 0)
        await stream.read_into(memoryview(pages))
        return bytes(pages)

    async def _connected(self) -> ByteStream:
        if self._stream is None:
            self.at = at = await self.attach()
            stream = await self.env.bytes.connect(f"unix:{at.path.removeprefix('unix:')}")
            await stream.write(volumewire.pack_hello(at.token))
            data = bytearray(headers.WELCOME_BYTES)
            await stream.read_into(memoryview(data))
            if headers.welcome(data).status is not Status.OK:
                stream.close()
                raise headers.WireError("not admitted")
            self._stream = stream
        return self._stream

    def hang_up(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class Pace(NamedTuple):
    pause_s: float
    """Mean seconds between an answer and the next request."""
    runs: tuple[int, ...]
    """Numbers of pages of one request, drawn at random; a fourth of the volume must have more."""
    idles: float = 0.0
    """Chance that the pager uses nothing for a while before a request."""


BUSY_S, IDLE_S = 8.0, (3.0, 25.0)
"""Seconds at the beginning in which a pager is never idle, since its slabs turn hot; and least and most seconds that
it is idle later."""
QUICK = Pace(0.02, (1, 1, 1, 2, 4))
LONG_RUNS = Pace(0.06, (1, 2, 4, 8, 12))
"""A pace with about as many pages in a third of the requests: for long stories about more than pages."""


def pager(oracle: Oracle, seconds: float, pace: Pace = QUICK) -> Callable[[Env, Command], Awaitable[int]]:
    """A program that writes and reads pages for `seconds`, most of them in one hot part of the volume, then reads all
    of it back."""

    async def run(env: Env, command: Command) -> int:
        client = VolumeClient(env, oracle.volume, oracle.size_bytes, oracle.kind)
        while client.at is None:
            try:
                await client._connected()
            except (ConnectionError, TimeoutError, PermissionError):
                await asyncio.sleep(PAUSE_S)
        page_bytes = oracle.page_bytes = client.at.page_bytes
        pages = oracle.pages
        end_s, idles_from_s = env.clock.now_s() + seconds, env.clock.now_s() + BUSY_S
        while env.clock.now_s() < end_s:
            await asyncio.sleep(env.rng.uniform(0.5, 1.5) * pace.pause_s)
            count = env.rng.choice(pace.runs)
            first = env.rng.randrange(0, (pages // 4 if env.rng.random() < 0.8 else pages) - count)
            first, count = oracle.place(first), oracle.together(first, count)
            if pace.idles and env.clock.now_s() > idles_from_s and env.rng.random() < pace.idles:
                await asyncio.sleep(env.rng.uniform(*IDLE_S))
            if env.rng.random() < 0.6:
                await _write(client, oracle, first, count, page_bytes)
            else:
                await _read(client, oracle, first, count, page_bytes)
        for first in range(0, pages, 16):
            await _read_in_the_end(client, oracle, oracle.place(first), min(16, pages - first), page_bytes)
        client.hang_up()
        return 0

    return run


def reader(oracle: Oracle) -> Callable[[Env, Command], Awaitable[int]]:
    """A program that reads every page back, again and again until each came once: what a volume cannot read for ever
    is lost."""

    async def run(env: Env, command: Command) -> int:
        client = VolumeClient(env, oracle.volume, oracle.size_bytes, oracle.kind)
        missing = [oracle.place(number) for number in range(oracle.pages)]
        while missing:
            missing = [page for page in missing if not await _read(client, oracle, page, 1, oracle.page_bytes)]
            await asyncio.sleep(PAUSE_S)
        client.hang_up()
        return 0

    return run


def mender(oracle: Oracle) -> Callable[[Env, Command], Awaitable[int]]:
    """A program that reads every page once, of which some may be lost and fail; then it writes all of them anew,
    discards all others, and reads them back."""

    async def run(env: Env, command: Command) -> int:
        client = VolumeClient(env, oracle.volume, oracle.size_bytes)
        pages = [oracle.place(number) for number in range(oracle.pages)]
        for page in pages:
            await _read(client, oracle, page, 1, oracle.page_bytes)
        for page in pages:
            least = oracle.acknowledged.get(page, 0)
            while oracle.acknowledged.get(page, 0) == least:
                await _write(client, oracle, page, 1, oracle.page_bytes)
        for first, count in oracle.unused():  # of which nobody knows any more that they were never written
            while await client.ask(Op.DISCARD, first, count) is None:  # noqa: ASYNC110
                await asyncio.sleep(REFUSED_S)
        for page in pages:
            await _read_in_the_end(client, oracle, page, 1, oracle.page_bytes)
        while await client.ask(Op.FLUSH, 0, 0) is None:  # noqa: ASYNC110
            await asyncio.sleep(REFUSED_S)
        client.hang_up()
        return 0

    return run


async def _write(client: VolumeClient, oracle: Oracle, first: int, count: int, page_bytes: int) -> None:
    versions = [oracle.sending(page) for page in range(first, first + count)]
    data = [page_of(oracle.volume, first + at, version, page_bytes) for at, version in enumerate(versions)]
    if await client.ask(Op.WRITE, first, count, b"".join(data)) is not None:
        for at, version in enumerate(versions):
            oracle.acknowledge(first + at, version)
    else:
        oracle.refused |= {(first + at, version) for at, version in enumerate(versions)}


async def _read(client: VolumeClient, oracle: Oracle, first: int, count: int, page_bytes: int) -> bool:
    """Read and check pages; returns whether the volume answered."""
    found = await client.ask(Op.READ, first, count)
    if found is not None:
        for at in range(count):
            oracle.check(first + at, found[at * page_bytes : (at + 1) * page_bytes])
    return found is not None


async def _read_in_the_end(client: VolumeClient, oracle: Oracle, first: int, count: int, page_bytes: int) -> None:
    """Read and check pages however often the volume refuses: a lender that may hold something newer has not answered
    yet."""
    while True:
        if await _read(client, oracle, first, count, page_bytes):
            return
        await asyncio.sleep(REFUSED_S)
