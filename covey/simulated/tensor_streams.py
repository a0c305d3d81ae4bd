"""Push and pull for a worker on asyncio and `covey.ports`: the rounds of `covey.job.tensors`, without threads.

It is for programs that run on the ports, such as a job's ranks in the simulator. Arrays are float32 bytes here.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from covey.core.errors import RankLeft
from covey.core.ids import JobId
from covey.ports.streams import Bytes, ByteStream
from covey.tensors.aggregator.present_owner import PresentOwner
from covey.tensors.aggregator.rounds import Rounds, Superseded, Tell, TensorRounds, ToldByRank
from covey.tensors.numbers.sum_order import Node
from covey.tensors.numbers.tensor_wire import (
    HEADER_BYTES,
    PART_BYTES,
    Declared,
    Frame,
    Payload,
    TensorOp,
    TensorWireError,
    parse,
    verify,
)
from covey.wire.handshake import NONCE_BYTES
from covey.wire.job import AggregatorAt

SILENT_S, DEAD_S = 2.0, 6.0
"""Seconds of quiet until the aggregator is sent a PING, and until it is given up; equal to those of
`covey.tensors.aggregator.link`."""
RETRY_S = 0.5
"""Seconds between attempts to reach the same address."""


class TensorStream:
    """One rank's tensors. `spawn` runs a coroutine as a kept task; `lost(epoch, why)` is called when the aggregator of
    that epoch cannot be used; `entropy(n)` gives n unpredictable bytes; `moved` is called with every `AggregatorAt` of
    the agent."""

    def __init__(
        self,
        port: Bytes,
        spawn: Callable[[str, Coroutine[Any, Any, Any]], object],
        job: JobId,
        rank: int,
        world_size: int,
        lost: Callable[[int, str], None],
        entropy: Callable[[int], bytes],
        part_bytes: int = PART_BYTES,
    ) -> None:
        self.rounds = Rounds(job, rank, world_size, part_bytes)
        self._port, self._lost, self._entropy = port, lost, entropy
        self._owner = PresentOwner()
        self._goes_beside = False
        """Whether it is on its way to the owner at which another rank of this process is."""
        self._stream: ByteStream | None = None
        self._outbox: asyncio.Queue[Frame] | None = None
        """Frames to send on the newest connection with a WELCOME."""
        self._changed = asyncio.Event()
        self._fatal: Exception | None = None
        self._closed = False
        self.told: Callable[[ToldByRank], None] = lambda told: None
        """Called with the messages of other ranks."""
        self.changed: Callable[[], None] = lambda: None
        """Called whenever a wait may be over."""
        spawn(f"tensors of rank {rank}", self._run())

    def declare_as(self, declared: Declared, initial: Payload | None = None, ranks: Node | None = None) -> None:
        """Declare a tensor or a Block, as in `Rounds.declare_as`."""
        self._send(self.rounds.declare_as(declared, initial, ranks))

    async def model(self, name: str, initial: bytes, shape: tuple[int, ...]) -> bytes:
        """Rank 0's initial parameters, on every rank."""
        self._send(self.rounds.declare(name, "model", shape, initial))
        return await self.agreed(name)

    async def agreed(self, label: str) -> bytes:
        """The initial value of a Block that was declared."""
        tensor = self.rounds.tensors[label]
        return await self._until(tensor, lambda: tensor.agreed)

    async def push_pull(self, label: str, *sums: Payload, rate: float = 0.0) -> bytes:
        """The result of the next round of a Block: parameters plus sum for a model, else the sum. `sums`, `rate`: as in
        `Rounds.push`."""
        if label not in self.rounds.tensors:
            self._send(self.rounds.declare(label, "grad", (len(sums[0]) // 4,)))
        self.push(label, *sums, rate=rate)
        return await self.result(label)

    def push(self, label: str, *sums: Payload, rate: float = 0.0) -> None:
        """Begin the next round of a Block that was declared."""
        self._send(self.rounds.push(label, *sums, rate=rate))

    async def result(self, label: str) -> bytes:
        """The result of the round that was begun last."""
        tensor = self.rounds.tensors[label]
        return await self._until(tensor, lambda: tensor.unacknowledged is None)

    def adopt(self, declared: Declared, version: int) -> None:
        """Take over a Block from the lost rank, as in `Rounds.adopt`."""
        self._send(self.rounds.adopt(declared, version))

    @property
    def at(self) -> AggregatorAt | None:
        """The owner that is connected."""
        return None if self._outbox is None else self._owner.at

    def tell(self, said: Tell) -> None:
        """Send a message to another rank, if both are connected."""
        if self._outbox is not None:
            self._send((self.rounds.tell(said),))

    def leave(self, words: bytes) -> None:
        """Tell the aggregator that this rank leaves, as in `Rounds.leave`."""
        self._send(self.rounds.leave(words))

    def moved(self, at: AggregatorAt) -> None:
        if self._owner.told(at, self._goes_beside or self._outbox is not None, self._now_s()):
            self._go_to(at)

    def begin_as(self, other: "TensorStream") -> None:
        """Begin at the owner at which another rank of this process is, as in
        `covey.tensors.aggregator.aggregator_rounds`."""
        self._owner.begin_as(other._owner)
        if self._owner.at is not None:
            self._goes_beside = True
            self._go_to(self._owner.at)

    def close(self) -> None:
        self._closed = True
        self._drop()
        self._notify()

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _go_to(self, at: AggregatorAt) -> None:
        try:
            self.rounds.moved(at.epoch)
        except Superseded as error:
            self._fatal = error
        self._drop()
        self._notify()

    def _handed_over(self, at: AggregatorAt) -> bool:
        """Whether the owner whose connection ended has handed over; then the next owner becomes the present one."""
        after = self._owner.ended(at)
        if after is not None:
            self._go_to(after)
        return after is not None

    async def _until(self, tensor: TensorRounds, done: Callable[[], bool]) -> bytes:
        while not done():
            self._raise_if_over(tensor)
            await self._changed.wait()
        return bytes(tensor.state)

    def is_here(self, label: str) -> bool:
        """Whether the result of the round that was begun last is here. Raises what `result` raises."""
        tensor = self.rounds.tensors[label]
        if tensor.unacknowledged is not None:
            self._raise_if_over(tensor)
        return tensor.unacknowledged is None

    @property
    def is_superseded(self) -> bool:
        """Whether another process runs as this rank by now."""
        return isinstance(self._fatal, Superseded)

    def _raise_if_over(self, tensor: TensorRounds) -> None:
        if self._fatal is not None:
            raise self._fatal
        if tensor.in_vain:
            raise RankLeft(tensor.fault)
        if self._closed or tensor.fault:
            raise RuntimeError(tensor.fault or "closed")

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self.changed()

    def _send(self, frames: Any) -> None:
        """Send frames. They are made at once, since a caller may change their data before they are sent."""
        made = [(head, bytes(payload)) for head, payload in frames]
        if self._outbox is not None:
            for one in made:
                self._outbox.put_nowait(one)

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = self._outbox = None

    async def _run(self) -> None:
        while not self._closed and self._fatal is None:
            at = self._owner.at
            if at is None:
                await self._changed.wait()
                continue
            try:
                await self._serve(at)
            except Superseded as error:
                self._fatal = error
                self._notify()
            except (OSError, TimeoutError) as error:
                self._drop()
                if not self._handed_over(at) and self._owner.at is at and not self._closed:
                    self._lost(at.epoch, str(error) or type(error).__name__)
                    await self._pause(at)

    async def _pause(self, at: AggregatorAt) -> None:
        """Wait `RETRY_S`, or until the agent names another aggregator."""
        try:
            async with asyncio.timeout(RETRY_S):
                while self._owner.at is at and not self._closed:
                    await self._changed.wait()
        except TimeoutError:
            pass

    async def _serve(self, at: AggregatorAt) -> None:
        """Serve one connection until it ends, by an exception."""
        stream = await self._port.connect(at.address)
        if self._owner.at is not at or self._closed:
            stream.close()
            return
        self._stream = stream
        outbox: asyncio.Queue[Frame] = asyncio.Queue()
        outbox.put_nowait(self.rounds.hello(at.secret, self._entropy(NONCE_BYTES)))
        writer = asyncio.get_running_loop().create_task(self._write(stream, outbox))
        try:
            for expected in (TensorOp.CHALLENGE, TensorOp.WELCOME):
                op = await self._read(stream, outbox, at)
                if op is not expected:
                    raise TensorWireError(f"answered {op.name} to our hello")
            self._outbox, self._goes_beside = outbox, False
            self._send(self.rounds.connected())
            while True:
                await self._read(stream, outbox, at)
        finally:
            writer.cancel()
            stream.close()
            if self._stream is stream:
                self._stream = self._outbox = None

    async def _write(self, stream: ByteStream, outbox: asyncio.Queue[Frame]) -> None:
        try:
            while True:
                await stream.write(*await outbox.get())
        except ConnectionError:
            stream.close()

    async def _read(self, stream: ByteStream, outbox: asyncio.Queue[Frame], at: AggregatorAt) -> TensorOp:
        head = bytearray(HEADER_BYTES)
        quiet = asyncio.get_running_loop().call_later(SILENT_S, outbox.put_nowait, self.rounds.ping())
        try:
            async with asyncio.timeout(DEAD_S):
                await stream.read_into(memoryview(head))
                header = parse(head)
                self._still(at)
                into = self.rounds.destination(header)
                await stream.read_into(into)
        finally:
            quiet.cancel()
        verify(head, into)
        self._still(at)
        for one in [(made, bytes(payload)) for made, payload in self.rounds.heard(header, into)]:
            outbox.put_nowait(one)
        self._notify()
        if header.op is TensorOp.TOLD:
            self.told(ToldByRank(header.rank, header.key, header.round, into))
        return header.op

    def _still(self, at: AggregatorAt) -> None:
        if self._owner.at is not at or self._closed or self._owner.overdue(self._now_s()):
            raise ConnectionAbortedError("is no longer the aggregator")
