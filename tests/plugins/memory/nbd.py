"""A client of the block device of a volume, and a volume that is exported."""

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from covey.ports.streams import ByteStream
from plugins.memory.datapath.doors.exports import Exports
from plugins.memory.datapath.doors.nbdwire import NbdAnswer, NbdCommand, NbdOption
from plugins.memory.datapath.volumes.volume import Volume
from tests.plugins.memory.ports import SHAPE, Bench, a_volume, placed

SIZE = SHAPE.size_bytes


class Client:
    """A small client of the protocol, one request at a time unless told otherwise."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.cookie = 0

    async def take(self, count: int) -> bytes:
        data = bytearray(count)
        await self.stream.read_into(memoryview(data))
        return bytes(data)

    async def greet(self, flags: int = 3) -> None:
        assert (await self.take(18))[:16] == b"NBDMAGICIHAVEOPT"
        await self.stream.write(flags.to_bytes(4, "big"))

    async def option(self, number: int, data: bytes = b"") -> list[tuple[int, bytes]]:
        """Send an option and read its replies up to the last one."""
        await self.stream.write(b"IHAVEOPT" + struct.pack(">II", number, len(data)) + data)
        found: list[tuple[int, bytes]] = []
        while not found or found[-1][0] in (NbdAnswer.SERVER, NbdAnswer.INFO, NbdAnswer.META_CONTEXT):
            magic, again, kind, length = struct.unpack(">QIII", await self.take(20))
            assert (magic, again) == (0x3E889045565A9, number)
            found.append((kind, await self.take(length)))
        return found

    async def go(self, name: bytes = b"", size_bytes: int = SIZE) -> None:
        replies = await self.option(NbdOption.GO, len(name).to_bytes(4, "big") + name + b"\0\0")
        assert replies[-1][0] == NbdAnswer.ACK
        sizes = [struct.unpack(">HQH", data)[1] for _, data in replies if data[:2] == b"\0\0"]
        assert sizes == [size_bytes]

    async def send(self, command: int, offset: int, length: int, data: bytes = b"", flags: int = 0) -> int:
        self.cookie += 1
        head = struct.pack(">IHHQQI", 0x25609513, flags, command, self.cookie, offset, length)
        await self.stream.write(head, data)
        return self.cookie

    async def reply(self) -> tuple[int, int]:
        """The error and the cookie of a simple reply."""
        magic, error, cookie = struct.unpack(">IIQ", await self.take(16))
        assert magic == 0x67446698
        return error, cookie

    async def ask(self, command: int, offset: int, length: int, data: bytes = b"", flags: int = 0) -> int:
        cookie = await self.send(command, offset, length, data, flags)
        error, found = await self.reply()
        assert found == cookie
        return error

    async def write(self, offset: int, data: bytes, flags: int = 0) -> int:
        return await self.ask(NbdCommand.WRITE, offset, len(data), data, flags)

    async def read(self, offset: int, length: int) -> bytes:
        assert await self.ask(NbdCommand.READ, offset, length) == 0
        return await self.take(length)


async def connected(bench: Bench, go: bool = True) -> Client:
    client = Client(await bench.env.bytes.connect(f"unix:{bench.env.run_dir}/nbd.sock"))
    if go:
        await client.greet()
        await client.go()
    return client


@asynccontextmanager
async def exported(lent: bool = True) -> AsyncIterator[tuple[Bench, Volume, Exports]]:
    async with a_volume() as (bench, volume):
        if lent:
            for index in range(SHAPE.slabs):
                await placed(volume, bench.register(index))
        exports = Exports(bench.env, volume)
        await exports.open(f"{bench.env.run_dir}/nbd.sock")
        yield bench, volume, exports
        await exports.close_all()
