"""The link of a volume's process to the writer of its spill log: started, connected, started again when it dies."""

import asyncio

from covey.ports.env import Env
from covey.ports.processes import Process
from covey.ports.streams import ByteStream
from covey.wire.frames import read_frame, write_frame
from plugins.memory.datapath.spill.spill_ring import SpillRing
from plugins.memory.datapath.spill.spill_wire import (
    TOKEN_BYTES,
    LogEnd,
    Order,
    SpillDone,
    SpillHello,
    SpillReady,
    done_decoder,
)
from plugins.memory.datapath.spill.spill_writer import SpillConfig, writer_name
from plugins.starting import why_ended

LOOK_S = 0.02
PAUSE_S, PAUSE_MAX_S = 0.05, 2.0
"""First and longest pause in seconds before another writer is started."""
END_S = 2.0
"""Seconds that a writer may take to end once its connection is closed; then it is killed."""


class WriterGone(OSError):
    """The writer ended, or could not be started; nothing is known about what it was told to do."""


async def _answer(stream: ByteStream) -> SpillReady | SpillDone:
    return await read_frame(stream, done_decoder)


class WriterProcess:
    """The writer's process, which is `spill` in the registry of programs."""

    def __init__(self, env: Env, volume: str, prefix: str) -> None:
        self.starts = 0
        self.pause_s = PAUSE_S
        self._env, self._volume, self._prefix = env, volume, prefix
        self._process: Process | None = None
        self._stream: ByteStream | None = None
        self._owner: ByteStream | None = None
        """Connection to a writer that has not been told yet what it writes from."""
        self._token = b""

    @property
    def is_up(self) -> bool:
        return self._stream is not None

    async def start(self) -> None:
        """Start a writer and wait until it owns the files. OSError when it cannot be started."""
        self._token = self._env.entropy(TOKEN_BYTES)
        config = SpillConfig(volume=self._volume, prefix=self._prefix, token=self._token)
        self.starts += 1
        self._process = await self._env.processes.start_program("spill", writer_name(self._volume), config)
        self._stream = None
        self._owner = await self._reached()

    async def _reached(self) -> ByteStream:
        """Connect to the writer that was started, and to none before it: those listen too while they end."""
        process = self._process
        assert process is not None
        while True:
            try:
                stream = await self._env.bytes.connect(f"unix:{self._env.run_dir}/{writer_name(self._volume)}.sock")
                await stream.write(self._token)
                answer = bytearray(1)
                await stream.read_into(memoryview(answer))
                return stream
            except ConnectionError:
                if self._env.processes.find(process.id) is None:
                    name = writer_name(self._volume)
                    why = await why_ended(self._env.processes, name, process) or f"it ended; see logs/{name}.log"
                    raise ConnectionRefusedError(f"the writer of the volume's log is gone: {why}") from None
            await asyncio.sleep(LOOK_S)

    async def connect(self, ring: SpillRing, salt: int, end: LogEnd, synced: int) -> None:
        """Tell the writer that was started, or another, what it writes from. WriterGone."""
        try:
            if self._owner is None:
                await self.start()
            stream, self._owner = self._owner, None
            assert stream is not None
            hello = SpillHello(ring.shared.name, ring.places, ring.page_bytes, salt, end, synced)
            await write_frame(stream, hello)
            if not isinstance(await _answer(stream), SpillReady):
                raise ConnectionAbortedError("it gave an unexpected answer")
        except OSError as error:
            await self._over()
            self.pause_s = min(PAUSE_MAX_S, 2 * self.pause_s)
            raise WriterGone(str(error)) from error
        self._stream, self.pause_s = stream, PAUSE_S

    async def ask(self, order: Order) -> SpillDone:
        """Give an order and wait for its answer. WriterGone: it may be done or not, or half."""
        await self.send(order)
        return await self.answer()

    async def send(self, order: Order) -> None:
        """Send an order without waiting for the answer; answers come in the order of the orders."""
        try:
            if self._stream is None:
                raise ConnectionResetError("it is not there")
            await write_frame(self._stream, order)
        except OSError as error:
            await self._over()
            raise WriterGone(str(error)) from error

    async def answer(self) -> SpillDone:
        """The answer to the oldest order that was sent."""
        try:
            if self._stream is None:
                raise ConnectionResetError("it is not there")
            done = await _answer(self._stream)
            if not isinstance(done, SpillDone):
                raise ConnectionAbortedError("it gave an unexpected answer")
            return done
        except OSError as error:
            await self._over()
            raise WriterGone(str(error)) from error

    async def _over(self) -> None:
        """End the writer. When this returns nothing of it is left: two writers must never share the files."""
        for stream in (self._stream, self._owner):
            if stream is not None:
                stream.close()
        self._stream = self._owner = None
        process, self._process = self._process, None
        if process is not None:
            process.signal(9)
            await process.wait()

    async def close(self) -> None:
        for stream in (self._stream, self._owner):
            if stream is not None:
                stream.close()
        self._stream = self._owner = None
        process, self._process = self._process, None
        if process is None:
            return
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            process.signal(9)
            await process.wait()
