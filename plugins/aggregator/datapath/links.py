"""The connections of a job's workers at its aggregator.

A connection has a reader (the task the listener gives it) and a writer of its own, so a worker that reads slowly delays
no other: what is given to it is a tensor's state, taken when its turn comes, never a copy in a queue. Anything that is
not a proper frame ends the connection and is counted; the worker connects again and says where it stands.
"""

import asyncio
import contextlib
from typing import NamedTuple

from covey.ports.pages import SharedPage
from covey.ports.streams import ByteStream
from covey.tensors.numbers.tensor_wire import (
    FAULT_BYTES_MAX,
    HEADER_BYTES,
    HOLLOW,
    PLACES,
    WANT,
    Frame,
    Header,
    Payload,
    TensorOp,
    TensorWireError,
    frame,
    is_lasting,
    pack_size,
    parse,
    unpack_opening,
    unpack_rate,
    verify,
)
from covey.tensors.owner.rank_frames import RankFrames
from covey.tensors.owner.results import RankResults
from covey.tensors.owner.sums import TensorSum
from covey.wire.splicing import LEAST_BYTES, PageStream
from plugins.aggregator.datapath.job_sums import READ_BYTES, JobSums

QUEUE_MAX = 1 << 18
"""Most answers waiting for one worker; one that asks for more without reading is cut off."""

TOLD_BYTES_MAX = 16 << 20
"""Most bytes that ranks have told a rank and it has not read yet; more is dropped, and they tell it again."""
BLAME_S = 2.0
"""Seconds that a worker that made a mistake may take to hear of it."""
SMALL_BYTES = 4096
"""Bytes of payloads up to which they are copied, and written together with frames before and after them."""


class _Told(NamedTuple):
    """A frame that passes on what another rank said."""

    head: bytes
    payload: Payload


class _Handed(NamedTuple):
    """A frame with which memory goes to the worker."""

    head: bytes
    payload: Payload
    memory: SharedPage


_Item = Frame | tuple[int, TensorSum] | _Handed
"""What is sent to a worker in its turn: a frame, a result, memory."""


class WorkerLink:
    """One worker's connection after its hello was accepted."""

    def __init__(self, job: JobSums, rank: int, stream: ByteStream) -> None:
        self.job, self.rank = job, rank
        self._stream = stream
        self._near = stream.uid >= 0
        """The worker is on this host, at a unix socket."""
        self._queue: asyncio.Queue[_Item | None] = asyncio.Queue()
        self._told_bytes = 0
        self._small = bytearray()
        """Small frames that are written with what follows."""
        self._closed = False
        self._written = asyncio.Event()
        self._frames = RankFrames(rank, lambda key: job.tensors.get(key))
        self._results = RankResults(rank, job.hash, job.epoch, self._near)
        self._key = 0
        """The tensor of the frame heard last."""
        self._memories: list[SharedPage] = []
        """Memory that it was given for what it pushes."""

    # ---- out ----

    def send(
        self, op: TensorOp, *, key: int = 0, epoch: int | None = None, payload: bytes = b"", round: int = 0
    ) -> None:
        of = self.job.epoch if epoch is None else epoch
        self._put(frame(op, self.job.hash, of, key=key, payload=payload, round=round))

    def give(self, key: int, tensor: TensorSum) -> None:
        if self._results.owe(key) and self._put((key, tensor)):
            self.job.rounds_here.owe()

    def told(self, rank: int, header: Header, payload: Payload) -> None:
        if self._told_bytes + len(payload) > TOLD_BYTES_MAX:
            return
        job, of = self.job, {"key": header.key, "rank": rank, "round": header.round}
        said = frame(TensorOp.TOLD, job.hash, job.epoch, payload=payload, near=self._near, **of)
        if self._put(_Told(*said)):
            self._told_bytes += len(payload)

    def finish(self) -> None:
        """Close once everything that was said so far is sent."""
        self._queue.put_nowait(None)

    def leave(self) -> None:
        self.job.leave(self)

    def close(self) -> None:
        self._closed = True
        self._queue.put_nowait(None)
        self._stream.close()
        memories, self._memories = self._memories, []
        for memory in memories:
            memory.close()
            self.job.give_push_memory(len(memory.view))

    def _put(self, item: _Item) -> bool:
        """Queue an item. True: it will be sent, if the worker listens."""
        if self._queue.qsize() >= QUEUE_MAX:
            self.close()
        if self._closed:
            return False
        self._queue.put_nowait(item)
        return True

    async def write_out(self) -> None:
        """Send the queue until `close` or `finish`; run as a task."""
        try:
            while (item := await self._next()) is not None:
                if isinstance(item, _Handed):
                    await self._hand(item)
                elif isinstance(item[1], TensorSum):
                    await self._pay(item[0], item[1])
                else:
                    await self._write(*item)
                    self._told_bytes -= len(item[1]) if isinstance(item, _Told) else 0
            await self._write_small()
        except ConnectionError:
            pass  # the reader ends the same way, and tidies up
        finally:
            self._closed = True
            while not self._queue.empty():
                if (item := self._queue.get_nowait()) is not None and isinstance(item[1], TensorSum):
                    self.job.rounds_here.paid(item[0])
            self._written.set()
            self._stream.close()

    async def _next(self) -> _Item | None:
        """The next item to write; small frames are written once nothing else is there."""
        if self._small and self._queue.empty():
            await self._write_small()
        return await self._queue.get()

    async def _write(self, head: bytes, payload: Payload) -> None:
        """Write a frame, soon if it is small; it is copied then."""
        if len(payload) <= SMALL_BYTES and len(self._small) < READ_BYTES:
            self._small += head
            self._small += payload
            return
        small, self._small = self._small, bytearray()
        stream = self._stream
        if self._near and len(payload) >= LEAST_BYTES and is_lasting(head) and isinstance(stream, PageStream):
            await stream.lend(bytes(small + head), memoryview(payload))
        else:
            await stream.write(small, head, payload)

    async def _hand(self, item: _Handed) -> None:
        """Hand memory over."""
        await self._write_small()
        await self._stream.write_with(item.head + bytes(item.payload), (item.memory,))
        item.memory.close()

    async def _write_small(self) -> None:
        small, self._small = self._small, bytearray()
        if small:
            await self._stream.write(small)

    async def _pay(self, key: int, tensor: TensorSum) -> None:
        try:
            await self._send_state(key, tensor)
        finally:
            self.job.rounds_here.paid(key)

    async def blame(self, why: str) -> None:
        """Tell the worker what it did wrong, if it listens, and end."""
        self.send(TensorOp.FAULT, key=self._key, payload=why.encode()[:FAULT_BYTES_MAX])
        self.finish()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BLAME_S):
                await self._written.wait()

    async def _send_state(self, key: int, tensor: TensorSum) -> None:
        giving = self._results.begin(key, tensor)
        if giving is None:
            return
        job = self.job
        try:
            for part in giving.parts:
                began_s = job.env.clock.cpu_s()
                head, payload = self._results.frame(giving, part)
                job.worked(began_s)
                await self._write(head, payload)
                job.sent_bytes += len(payload)
                job.carried(len(payload))
        finally:
            self._results.over(giving)

    # ---- in ----

    async def read_in(self) -> None:
        """Read frames until the connection ends, always by an exception. TensorWireError, Violation: it was this
        worker's fault."""
        head = bytearray(HEADER_BYTES)
        while True:
            await self._stream.read_into(memoryview(head))
            header = parse(head)
            if header.job != self.job.hash or header.epoch != self.job.epoch or header.rank != self.rank:
                raise TensorWireError("a frame for another job, epoch or rank than this connection was opened for")
            self._frames.expect(header)
            placed = header.op is TensorOp.PLACED and header.key not in self._frames.refused
            payload = self._placed(header) if placed else self.job.buffers.take(header.length)
            if header.length:
                await self._stream.read_into(memoryview(payload))
            self.job.carried(header.length)
            began_s = self.job.env.clock.cpu_s()
            verify(head, b"" if placed else payload, self._near)
            self.job.worked(began_s)
            if self.job.over or self._closed:
                raise ConnectionAbortedError("no longer served here")
            self._key = header.key
            self._heard(header, payload)

    def _heard(self, header: Header, payload: Payload) -> None:
        match header.op:
            case TensorOp.OPEN:
                self._open(header, payload)
            case TensorOp.PUSH | TensorOp.PLACED | TensorOp.RATE | TensorOp.KEPT if header.key in self._frames.refused:
                pass
            case TensorOp.RATE:
                self._frames.tensor(header).learn(self.rank, header.round, unpack_rate(payload))
            case TensorOp.KEPT:
                tensor = self._frames.tensor(header)
                self.job.do(header.key, tensor, tensor.kept(self.rank, header.round))
                self.job.rounds_here.follow(header.key, tensor.under_way)
            case TensorOp.TELL:
                self.job.tell(self.rank, header, payload)
            case TensorOp.LEAVES if self.job.links.get(self.rank) is self:
                self.job.away.leaving[self.rank] = bytes(payload).decode("utf-8", "replace")
                self.job.look_from_now_on()
            case TensorOp.LEAVES:
                pass
            case TensorOp.PUSH | TensorOp.PLACED:
                self.job.received_bytes += len(payload)
                tensor = self._frames.tensor(header)
                self.job.heard(header.key, tensor, tensor.push(self.rank, header.round, header.part, payload))
            case TensorOp.STATE:
                self.job.received_bytes += header.length
                tensor = self._frames.tensor(header)
                self.job.heard(header.key, tensor, tensor.state_part(self.rank, header.round, header.part, payload))
            case _:
                self.send(TensorOp.PONG)

    def _open(self, header: Header, payload: Payload) -> None:
        declared, ranks = unpack_opening(header.flags, payload)
        tensor = self.job.declare(header.key, declared)
        if isinstance(tensor, str):
            self._frames.refused.add(header.key)
            self.send(TensorOp.FAULT, key=header.key, payload=tensor.encode()[:FAULT_BYTES_MAX])
            return
        want, hollow = bool(header.flags & WANT), bool(header.flags & HOLLOW)
        self.job.heard(header.key, tensor, tensor.open(self.rank, header.round, want, ranks, hollow))
        if header.flags & PLACES and self._near and header.key not in self._frames.memories:
            self._share_memory(header.key, tensor.memory_bytes(self.rank))

    def _share_memory(self, key: int, size: int) -> None:
        """Give the worker memory in which it places what it pushes of this tensor, if that is large and there is
        some."""
        made = self.job.push_memory(size) if size >= LEAST_BYTES else None
        if made is None:
            return
        self._memories.append(made)
        self._frames.memories[key] = memoryview(made.view)  # sums are made there too: each piece comes once
        self._put(
            _Handed(*frame(TensorOp.MEMORY, self.job.hash, self.job.epoch, key=key, payload=pack_size(size)), made)
        )

    def _placed(self, header: Header) -> Payload:
        """The piece that the worker has placed in shared memory."""
        first, end = self._frames.tensor(header).place(self.rank, header.part)
        return memoryview(self._frames.memories[header.key])[first:end]
