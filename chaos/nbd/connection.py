"""One connection of an NBD client in the simulator: many requests under way, each answered by its cookie.

It speaks the protocol as its page describes it, with a parser of its own: what the volume's process says is not read
by the code that said it.
"""

import asyncio
import struct
from enum import IntEnum, IntFlag

from covey.ports.env import Env
from covey.ports.streams import ByteStream

_REQUEST = struct.Struct(">IHHQQI")
_SIMPLE = struct.Struct(">IQ")
_CHUNK = struct.Struct(">HHQI")
_REQUEST_MAGIC, _SIMPLE_MAGIC, _CHUNK_MAGIC = 0x25609513, 0x67446698, 0x668E33EF
_DATA, _HOLE, _STATUS, _ERROR = 1, 2, 5, 1 << 15
_CONTEXT = b"base:allocation"
SILENT_S = 90.0
"""Seconds after which a connection that answers nothing is given up: a volume may wait long for a lender."""


class Nbd(IntEnum):
    """Commands of the protocol."""

    READ = 0
    WRITE = 1
    DISCONNECT = 2
    FLUSH = 3
    TRIM = 4
    ZEROES = 6
    STATUS = 7


class Flag(IntFlag):
    FUA = 1
    NO_HOLE = 2
    FAST_ZERO = 16


class Failed(Exception):
    """The volume answered with an error."""


class Asked:
    """A request under way."""

    def __init__(self, command: Nbd, offset: int, length: int) -> None:
        self.command, self.offset = command, offset
        self.data = bytearray(length if command is Nbd.READ else 0)
        self.extents: list[tuple[int, int]] = []
        """Lengths in bytes and states of extents, from `offset` on."""
        self.error = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Connection:
    """One connection. `structured`: answers come in chunks, and the client may ask what is allocated."""

    def __init__(self, env: Env, stream: ByteStream, structured: bool) -> None:
        self._env, self._stream, self.structured = env, stream, structured
        self.size_bytes = 0
        self._under_way: dict[int, Asked] = {}
        self._cookie = 0
        self.over = False

    # ---- choosing the export ----

    async def greet(self) -> None:
        """Negotiate with the server. Raises ConnectionError when it is no such server, or it refuses."""
        async with asyncio.timeout(SILENT_S):
            _must((await self._take(18))[:16] == b"NBDMAGICIHAVEOPT", "no NBD server")
            await self._stream.write((3).to_bytes(4, "big"))
            if self.structured:
                _must((await self._option(8, b""))[-1][0] == 1, "no structured replies")
                export, query = (0).to_bytes(4, "big"), len(_CONTEXT).to_bytes(4, "big") + _CONTEXT
                _must(len(await self._option(10, export + (1).to_bytes(4, "big") + query)) == 2, "no base:allocation")
            replies = await self._option(7, bytes(6))
            _must(replies[-1][0] == 1, "the export was refused")
        self.size_bytes = next(int.from_bytes(data[2:10], "big") for _, data in replies if data[:2] == b"\0\0")
        self._env.spawn("NBD answers", self._answers())

    async def _option(self, number: int, data: bytes) -> list[tuple[int, bytes]]:
        await self._stream.write(b"IHAVEOPT" + struct.pack(">II", number, len(data)) + data)
        replies: list[tuple[int, bytes]] = []
        while not replies or replies[-1][0] in (3, 4):
            magic, again, kind, length = struct.unpack(">QIII", await self._take(20))
            _must((magic, again) == (0x3E889045565A9, number), "an answer to another option")
            replies.append((kind, await self._take(length)))
        return replies

    async def _take(self, count: int) -> bytes:
        data = bytearray(count)
        await self._stream.read_into(memoryview(data))
        return bytes(data)

    # ---- requests ----

    async def ask(self, command: Nbd, offset: int, length: int, data: bytes = b"", flags: int = 0) -> Asked:
        """Send a request and return it with its answer. Raises Failed when the answer is an error, ConnectionError
        when there is none."""
        if self.over:
            raise ConnectionResetError("the connection is over")
        self._cookie += 1
        asked = self._under_way[self._cookie] = Asked(command, offset, length)
        head = _REQUEST.pack(_REQUEST_MAGIC, flags, command, self._cookie, offset, length)
        try:
            await self._stream.write(head, data)
            async with asyncio.timeout(SILENT_S):
                await asked.done
        except TimeoutError as error:
            self.close()
            raise ConnectionResetError(f"no answer within {SILENT_S:g} s") from error
        if asked.error:
            raise Failed(f"error {asked.error}")
        return asked

    async def _answers(self) -> None:
        try:
            while not self.over:
                await self._answer()
        except ConnectionError:
            self.close()

    async def _answer(self) -> None:
        magic = int.from_bytes(await self._take(4), "big")
        if magic == _SIMPLE_MAGIC:
            error, cookie = _SIMPLE.unpack(await self._take(12))
            asked = self._known(cookie)
            asked.error = error
            if not error and asked.data:
                await self._stream.read_into(memoryview(asked.data))
            self._done(cookie)
            return
        _must(magic == _CHUNK_MAGIC and self.structured, f"no reply: {magic:#x}")
        flags, kind, cookie, length = _CHUNK.unpack(await self._take(16))
        self._chunk(self._known(cookie), kind, await self._take(length))
        if flags & 1:
            self._done(cookie)

    def _chunk(self, asked: Asked, kind: int, body: bytes) -> None:
        if kind & _ERROR:
            asked.error = int.from_bytes(body[:4], "big")
        elif kind == _STATUS:
            asked.extents += struct.iter_unpack(">II", body[4:])
        elif kind in (_DATA, _HOLE):
            at = int.from_bytes(body[:8], "big") - asked.offset
            content = body[8:] if kind == _DATA else bytes(int.from_bytes(body[8:], "big"))
            _must(at >= 0 and at + len(content) <= len(asked.data), "data of another place")
            asked.data[at : at + len(content)] = content

    def _known(self, cookie: int) -> Asked:
        _must(cookie in self._under_way, "an answer to nothing that was asked")
        return self._under_way[cookie]

    def _done(self, cookie: int) -> None:
        asked = self._under_way.pop(cookie)
        if not asked.done.done():
            asked.done.set_result(None)

    # ---- the end ----

    async def disconnect(self) -> None:
        """End the connection with the protocol's request; requests under way get no answer any more."""
        if not self.over:
            head = _REQUEST.pack(_REQUEST_MAGIC, 0, Nbd.DISCONNECT, 0, 0, 0)
            try:
                await self._stream.write(head)
            except ConnectionError:
                pass
            self.close()

    def close(self) -> None:
        """Close the connection; idempotent."""
        self.over = True
        self._stream.close()
        for asked in self._under_way.values():
            if not asked.done.done():
                asked.done.set_exception(ConnectionResetError("the connection is over"))
                asked.done.exception()  # whoever could not even send it does not wait
        self._under_way.clear()


def _must(right: bool, what: str) -> None:
    if not right:
        raise ConnectionAbortedError(what)
