"""The writer of a volume's spill log: a process of its own, which does what the volume's process says and decides
nothing. Its disk may be slow, or hang; only the writer waits.

When the volume's process ends without a word, what it put into the ring and is not in the log goes to a file of its
own; then the writer ends, and the next one may have the files.
"""

import asyncio
import contextlib
import errno
import re
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, cast

import msgspec
import numpy as np

from covey.ports.disk import Disk
from covey.ports.env import Env
from covey.ports.streams import ByteStream
from covey.wire import checked
from covey.wire.frames import FrameError, read_frame, write_frame
from covey.wire.handshake import is_secret
from plugins.base import Program
from plugins.memory.datapath.spill.spill_ring import SpillRing, ring_bytes
from plugins.memory.datapath.spill.spill_wire import (
    TOKEN_BYTES,
    AppendRecords,
    CopyRecords,
    DropSegment,
    LogEnd,
    LogSync,
    Order,
    OrderPart,
    SaveSegments,
    SealSegment,
    SpillDone,
    SpillHello,
    SpillReady,
    SyncLog,
    order_decoder,
)
from plugins.memory.policy import log_records
from plugins.memory.policy.log_records import ROW, RecordTable, Rows, TableKind, batch_blocks, table_blocks
from plugins.memory.policy.spilling import BATCH_ROWS, COPY_ROWS

BIND_S, LOOK_S = 60.0, 0.02
"""Seconds that a writer waits for the earlier one to end, and between two looks."""
HELLO_S = 5.0
"""Seconds that it waits for the process that started it."""
ALIGNED = 4096
GAP_MAX = 16
"""Most unneeded blocks between two that are read at once, since one read costs a disk less than two."""
NOWHERE = LogEnd(0, 0, 0, 0, 0)
SEGMENT = re.compile("[0-9a-f]{8}")
"""Name of a segment's file. A folder may have other files, as network file systems leave there."""


class GatherDisk(Disk, Protocol):
    """The operations of a disk that this plugin needs beyond `covey.ports.disk.Disk`; every disk has them."""

    async def write_parts_at(self, name: str, offset: int, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """`write_at` for parts that follow one another. OSError: any of it may be written."""

    async def read_into_at(self, name: str, offset: int, into: memoryview) -> None:
        """`read_at` into existing memory."""


class SpillConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that a volume's process gives the writer at its start."""

    volume: str
    prefix: str
    """Path prefix of the volume's files on `Disk`."""
    token: bytes


def writer_name(volume: str) -> str:
    return f"spill-{volume}"


def segment_name(prefix: str, slot: int) -> str:
    """File of the segment in this slot: files are used again, since that costs a disk least."""
    return f"{prefix}/log/{slot:08x}"


def list_name(prefix: str) -> str:
    return f"{prefix}/log/segments"


def mark_name(prefix: str) -> str:
    return f"{prefix}/log/synced"


def left_name(prefix: str) -> str:
    return f"{prefix}/log/left"


class LeftRecords(msgspec.Struct, frozen=True):
    """File `left`: records that a volume's process had put when it ended without a word, and that the log has not. It
    is durable, and goes once the log has them, durably."""

    salt: int
    page_bytes: int
    rows: bytes
    """Their rows (`log_records.ROW`), in the order in which they were put."""
    pages: bytes
    """The content of those that have some, in their order."""


left_records: msgspec.msgpack.Decoder[LeftRecords] = msgspec.msgpack.Decoder(LeftRecords)


class SpillWriter:
    """The writer for one volume's process. OSError from `do`: the disk refused it."""

    def __init__(self, env: Env, prefix: str, hello: SpillHello, ring: SpillRing) -> None:
        self._prefix, self._ring, self._salt = prefix, ring, hello.salt
        self._block = hello.page_bytes
        self._disk = cast(GatherDisk, env.disk)
        self._end = hello.end
        self._durable = self._written = hello.synced
        """Numbers of records that are in the log, durably, and at least written."""
        self._marks = 0
        self._parts: list[bytes] = []
        """Data of the next order that came in parts."""
        tables = 2 * table_blocks(BATCH_ROWS, self._block) * self._block
        copied = COPY_ROWS * self._block
        self._aligned = env.pages.make_ring(max(ALIGNED, 2 * tables + 2 * copied))
        """Memory that begins at a page of the machine, as writes past the page cache need."""
        self._tables: list[memoryview] = [self._aligned.view[:tables], self._aligned.view[tables : 2 * tables]]
        """Two buffers for tables: one for the batch that is being written, one for the next, prepared meanwhile."""
        self._copied: memoryview = self._aligned.view[2 * tables : 2 * tables + copied]
        self._span: memoryview = self._aligned.view[2 * tables + copied : 2 * tables + 2 * copied]
        """Buffer for blocks of a segment that are read at once."""

    async def do(self, order: Order) -> SpillDone:
        match order:
            case AppendRecords():
                return await self.append(order, self.prepare(order))
            case CopyRecords():
                return await self._copy(order)
            case OrderPart():
                self._parts.append(order.data)
            case SealSegment():
                rows = np.frombuffer(self._whole(order.rows), ROW)
                blocks = table_blocks(len(rows), self._block)
                table = RecordTable(TableKind.ALL, order.segment, order.batch, order.batch, order.at, blocks, rows)
                into = memoryview(bytearray(blocks * self._block))
                log_records.pack_table(table, self._salt, into)
                await self._write(order.slot, order.at, [into])
                if order.segment == self._end.segment:
                    self._end = NOWHERE
            case SyncLog():
                await self._sync(order.sync)
            case SaveSegments():
                await self._disk.replace(list_name(self._prefix), self._whole(order.record))
                self._end = order.end
            case DropSegment():
                await self._disk.delete(segment_name(self._prefix, order.slot))
        return SpillDone()

    def _whole(self, last: bytes) -> bytes:
        """Data of an order that came in parts, joined."""
        parts, self._parts = [*self._parts, last], []
        return b"".join(parts)

    def prepare(self, order: AppendRecords) -> list[memoryview]:
        """Parts of a batch to be written, with checksums: prepared while the disk works on the batch before."""
        ring, end = self._ring, order.end
        rows = ring.rows(end.start, order.stop)
        blocks = batch_blocks(len(rows), log_records.place_rows(rows, end.at, self._block), self._block)
        sums = rows["crc"]
        for at, (version, page, zeros) in enumerate(
            zip(rows["version"].tolist(), rows["page"].tolist(), rows["zeros"].tolist(), strict=True)
        ):
            if not zeros:
                content = ring.content((end.start + at) % ring.places)
                sums[at] = log_records.checksum(version, page, content)
        ring.fill_in(end.start, rows)
        return self._batch(end, order.synced, blocks, rows, ring.pages(end.start, rows))

    async def append(self, order: AppendRecords, parts: list[memoryview]) -> SpillDone:
        """Write a prepared batch. OSError: the disk refused it, or the batch before is not there."""
        end = order.end
        if order.follows and (self._end.start, self._end.batch) != (end.start, end.batch):
            raise OSError(errno.ECANCELED, "the batch before it is not written")
        self._end = end
        await self._write(end.slot, end.at, parts)
        blocks = sum([len(part) for part in parts]) // self._block
        self._end = LogEnd(end.segment, end.slot, end.at + blocks, end.batch + 1, order.stop)
        self._written = order.stop
        return SpillDone() if order.sync is None else await self._synced(order.sync)

    def _batch(self, end: LogEnd, synced: int, blocks: int, rows: Rows, pages: list[memoryview]) -> list[memoryview]:
        """Parts of one batch, to be written at once."""
        size = table_blocks(len(rows), self._block) * self._block
        self._tables.reverse()
        room = self._tables[0][: 2 * size]
        tables = (room[:size], room[size:])
        for kind, into in zip((TableKind.HEAD, TableKind.TRAILER), tables, strict=True):
            table = RecordTable(kind, end.segment, end.batch, synced, end.at, blocks, rows)
            log_records.pack_table(table, self._salt, into)
        return [tables[0], *pages, tables[1]]

    async def _write(self, slot: int, at: int, parts: list[memoryview]) -> None:
        await self._disk.write_parts_at(segment_name(self._prefix, slot), at * self._block, parts)

    async def _copy(self, order: CopyRecords) -> SpillDone:
        rows = np.frombuffer(order.rows, ROW).copy()
        old = rows["block"][rows["zeros"] == 0].tolist()
        content = self._copied[: len(old) * self._block]
        unreadable = await self._read(order.source, old, content)
        lost = set(order.lost)
        wrong: list[int] = []
        silent: list[int] = []
        done = 0
        for at, (version, page, zeros, crc, _) in enumerate(rows.tolist()):
            if not zeros:
                there = content[done * self._block : (done + 1) * self._block]
                if done in unreadable:
                    silent.append(at)
                elif at not in lost and log_records.checksum(version, page, there) != crc:
                    wrong.append(at)
                done += 1
        if wrong or silent:
            return SpillDone(False, errno.EIO, "damaged on disk, or not to be read", tuple(wrong), tuple(silent))
        end = order.end
        count = log_records.place_rows(rows, end.at, self._block)
        blocks = batch_blocks(len(rows), count, self._block)
        await self._write(end.slot, end.at, self._batch(end, order.synced, blocks, rows, [content] if count else []))
        self._end = LogEnd(end.segment, end.slot, end.at + blocks, end.batch + 1, self._end.start)
        return SpillDone()

    async def _read(self, slot: int, blocks: list[int], into: memoryview) -> set[int]:
        """Read blocks; those near to one another are read at once, with what is between. Returns the positions of
        blocks that the disk cannot read."""
        at, size = 0, self._block
        unreadable: set[int] = set()
        while at < len(blocks):
            end, first = at + 1, blocks[at]
            while (
                end < len(blocks) and 0 < blocks[end] - blocks[end - 1] <= GAP_MAX and blocks[end] - first < COPY_ROWS
            ):
                end += 1
            span = blocks[end - 1] + 1 - first
            if span == end - at and await self._read_span(slot, first * size, into[at * size : end * size]):
                at = end
                continue
            data = self._span[: span * size]
            whole = await self._read_span(slot, first * size, data)
            for each in range(at, end):
                offset = (blocks[each] - first) * size
                page = into[each * size : (each + 1) * size]
                if whole:
                    page[:] = data[offset : offset + size]
                elif not await self._read_span(slot, blocks[each] * size, page):
                    unreadable.add(each)
                    page[:] = bytes(size)
            at = end
        return unreadable

    async def _read_span(self, slot: int, offset: int, into: memoryview) -> bool:
        """Read a span. False: a sector of it cannot be read, which concerns those pages and is no reason to stop."""
        try:
            await self._disk.read_into_at(segment_name(self._prefix, slot), offset, into)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return False
        return True

    async def _synced(self, sync: LogSync) -> SpillDone:
        """Sync after a batch, which is written whether or not the sync is refused."""
        try:
            await self._sync(sync)
        except OSError as error:
            return refused(error, written=True)
        return SpillDone()

    async def _sync(self, sync: LogSync) -> None:
        for slot in sync.slots:
            await self._disk.sync(segment_name(self._prefix, slot))
        self._durable = self._written
        self._marks += 1
        mark = log_records.pack_mark(sync.batch, self._salt)
        with contextlib.suppress(OSError):  # if it is lost, the next process reads and checks more than it must
            await self._disk.write_at(mark_name(self._prefix), self._marks % 2 * ALIGNED, mark)

    async def bring_home(self) -> int:
        """When the volume's process is gone, save the records that were put and are not durable in a file of their own:
        what was written and not synced may be dropped by the disk, a segment may have no room for the others, and a
        lender may have taken its copies back already. Returns how many."""
        start, count = max(self._durable, self._ring.first), self._ring.count
        if start >= count:
            return 0
        rows = self._ring.rows(start, count)
        content = b"".join(self._ring.pages(start, rows))
        left = LeftRecords(self._salt, self._block, rows.tobytes(), content)
        await checked.save(self._disk, left_name(self._prefix), left)
        return count - start

    def close(self) -> None:
        self._ring.close()
        self._aligned.close()


def refused(error: OSError, written: bool = False) -> SpillDone:
    return SpillDone(written, error.errno or errno.EIO, (error.strerror or str(error))[:400] or "refused")


async def run_spill(env: Env, config: SpillConfig) -> None:
    """The program. OSError when the earlier writer does not end. It ends when the volume's process has. It stays in
    memory like that one: when the ring is full, writes of the volume wait for it."""
    env.probes.stay_in_memory(flushes=True)
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    claimed = asyncio.Event()

    async def serve(stream: ByteStream) -> None:
        token = bytearray(TOKEN_BYTES)
        await stream.read_into(memoryview(token))
        if claimed.is_set() or not is_secret(bytes(token), config.token):
            env.log.info("refused a connection of another volume to the writer of a volume's log", peer=stream.peer)
            return
        claimed.set()
        try:
            await stream.write(b"\1")
            hello = await read_frame(stream, order_decoder)
            if not isinstance(hello, SpillHello):
                raise FrameError("out of turn")
            await _serve(env, config.prefix, hello, stream)
        finally:
            if not over.done():
                over.set_result(None)

    listener = None
    until_s = env.clock.now_s() + BIND_S
    while listener is None:
        try:
            listener = await env.bytes.listen(f"unix:{env.run_dir}/{writer_name(config.volume)}.sock", serve)
        except OSError:
            if env.clock.now_s() >= until_s:
                raise
            await asyncio.sleep(LOOK_S)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HELLO_S):
                await claimed.wait()
        if claimed.is_set():  # also when both were true at once: the machine stood still
            await over
        else:
            env.log.warning("no process connected to the writer of a volume's log", volume=config.volume)
    finally:
        await listener.close()


PROGRAM = Program("spill", SpillConfig, run_spill)


async def _serve(env: Env, prefix: str, hello: SpillHello, stream: ByteStream) -> None:
    try:
        ring = env.pages.open_ring(hello.ring, ring_bytes(hello.places, hello.page_bytes))
    except OSError as error:
        env.log.error("the ring of a volume's log cannot be opened", why=str(error))
        return
    writer = SpillWriter(env, prefix, hello, SpillRing(ring, hello.places, hello.page_bytes))
    env.log.info("writes the log of a volume", places=hello.places, locked=ring.locked)
    under_way: asyncio.Task[None] | None = None
    try:
        await write_frame(stream, SpillReady())
        while True:
            order = await read_frame(stream, order_decoder)
            if isinstance(order, SpillHello):
                raise FrameError("out of turn")
            work = writer.append(order, writer.prepare(order)) if isinstance(order, AppendRecords) else writer.do(order)
            if under_way is not None:
                await under_way
            under_way = asyncio.get_running_loop().create_task(_answered(stream, work))
            if not isinstance(order, AppendRecords):
                await under_way
    except ConnectionError:
        if under_way is not None:
            await asyncio.wait([under_way])
        await _finish(env, writer)
    finally:
        writer.close()


async def _answered(stream: ByteStream, work: Coroutine[Any, Any, SpillDone]) -> None:
    """Run an order and answer it: an append while the next one is prepared, any other order alone."""
    try:
        done = await work
    except OSError as error:
        done = refused(error)
    with contextlib.suppress(ConnectionError):  # whoever reads orders finds that out too
        await write_frame(stream, done)


async def _finish(env: Env, writer: SpillWriter) -> None:
    try:
        records = await writer.bring_home()
    except OSError as error:
        env.log.error("the content of the ring is not on disk", why=str(error))
    else:
        env.log.info("the volume's process ended", records_brought_home=records)
