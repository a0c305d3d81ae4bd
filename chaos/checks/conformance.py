"""What every implementation of the ports promises, as small programs that run on any of them.

The same coroutine runs on the simulated ports (inside a world) and on the real ones (on asyncio): where the two differ
the simulator would prove something about a machine that does not exist. Each raises AssertionError when a promise is
not kept. `bind` is an address of this host with port 0.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from covey.ports.addresses import Address
from covey.ports.datagrams import Datagrams
from covey.ports.disk import Disk
from covey.ports.streams import Bytes, ByteStream
from covey.wire.driven import driven

# ---- disk ------------------------------------------------------------------------------------------------------------


async def disk_reads_what_was_replaced(disk: Disk) -> None:
    assert await disk.read("a/b") is None
    await disk.replace("a/b", b"old")
    await disk.replace("a/b", b"new one")
    assert await disk.read("a/b") == b"new one"


async def disk_appends_behind_what_is_there(disk: Disk) -> None:
    for number in range(5):
        await disk.append("log", bytes([number]) * 3)
    assert await disk.read("log") == b"".join(bytes([number]) * 3 for number in range(5))
    await disk.truncate("log", 4)
    assert await disk.read("log") == b"\0\0\0\1"


async def disk_keeps_appends_in_the_order_they_were_asked_for(disk: Disk) -> None:
    await asyncio.gather(*(disk.append("order", bytes([number])) for number in range(50)))
    assert await disk.read("order") == bytes(range(50))


async def disk_reads_holes_as_zeros(disk: Disk) -> None:
    await disk.write_at("pages", 8192, b"page")
    await disk.sync("pages")
    assert await disk.read_at("pages", 8190, 8) == b"\0\0page\0\0"
    assert await disk.read_at("pages", 0, 4) == bytes(4)
    assert await disk.read_at("nowhere", 5, 3) == bytes(3)


async def disk_lists_names_by_prefix(disk: Disk) -> None:
    for name in ("z", "jobs/2", "jobs/1", "job"):
        await disk.replace(name, b"")
    assert await disk.names("job") == ["job", "jobs/1", "jobs/2"]
    assert await disk.names("jobs/") == ["jobs/1", "jobs/2"]
    await disk.delete("jobs/1")
    await disk.delete("jobs/1")
    assert await disk.names("jobs/") == ["jobs/2"]


async def disk_refuses_names_that_lead_out(disk: Disk) -> None:
    for name in ("../x", "/etc/passwd", "a/../b", "a//b", "", "a\n"):
        for refused in (disk.read(name), disk.replace(name, b"")):
            try:
                await refused
            except OSError:
                continue
            raise AssertionError(f"{name!r} was taken for a name")


DISK: tuple[Callable[[Disk], Awaitable[None]], ...] = (
    disk_reads_what_was_replaced,
    disk_appends_behind_what_is_there,
    disk_keeps_appends_in_the_order_they_were_asked_for,
    disk_reads_holes_as_zeros,
    disk_lists_names_by_prefix,
    disk_refuses_names_that_lead_out,
)

# ---- bytes -----------------------------------------------------------------------------------------------------------


async def _echo(stream: ByteStream) -> None:
    """Read a u8 length and that many bytes; write them back in two parts."""
    header = bytearray(1)
    while True:
        await stream.read_into(memoryview(header))
        body = bytearray(header[0])
        await stream.read_into(memoryview(body))
        await stream.write(header, body)


async def bytes_come_back_in_order(port: Bytes, bind: Address) -> None:
    listener = await port.listen(bind, _echo)
    stream = await port.connect(listener.address)
    for size in (1, 5, 255):
        await stream.write(bytes([size]), bytes([size]) * size)
    for size in (1, 5, 255):
        back = bytearray(1 + size)
        await stream.read_into(memoryview(back))
        assert back == bytes([size]) * (size + 1)
    stream.close()
    await listener.close()


async def bytes_writers_wait_for_a_reader_that_does_not_read(port: Bytes, bind: Address) -> None:
    held = asyncio.Event()
    got = asyncio.get_running_loop().create_future()
    total = 16 << 20

    async def reader(stream: ByteStream) -> None:
        await held.wait()
        room = bytearray(total)
        await stream.read_into(memoryview(room))
        got.set_result(room == bytes(total))

    listener = await port.listen(bind, reader)
    stream = await port.connect(listener.address)
    writing = asyncio.ensure_future(stream.write(bytes(total)))
    await asyncio.sleep(0.05)
    assert not writing.done(), "16 MiB went into an unread stream without waiting"
    held.set()
    await writing
    assert await got
    stream.close()
    await listener.close()


async def bytes_end_with_connection_error(port: Bytes, bind: Address) -> None:
    async def rude(stream: ByteStream) -> None:
        await stream.write(b"half")

    listener = await port.listen(bind, rude)
    stream = await port.connect(listener.address)
    back = bytearray(8)
    await _refused(stream.read_into(memoryview(back)))
    assert back[:4] == b"half"
    await _refused(stream.read_into(memoryview(back)))
    stream.close()
    await _refused(stream.write(b"more"))
    await listener.close()


async def bytes_are_refused_where_nobody_listens(port: Bytes, bind: Address) -> None:
    listener = await port.listen(bind, _echo)
    address = listener.address
    await listener.close()
    await listener.close()
    await _refused(port.connect(address, timeout_s=1.0))


async def bytes_addresses_have_one_listener(port: Bytes, bind: Address) -> None:
    listener = await port.listen(bind, _echo)
    try:
        await port.listen(listener.address, _echo)
    except OSError:
        await listener.close()
        return
    raise AssertionError("two listeners on one address")


async def bytes_closing_a_listener_ends_what_it_accepted(port: Bytes, bind: Address) -> None:
    listener = await port.listen(bind, _echo)
    stream = await port.connect(listener.address)
    await stream.write(b"\1x")
    back = bytearray(2)
    await stream.read_into(memoryview(back))
    await listener.close()
    await _refused(stream.read_into(memoryview(back)))
    stream.close()


class _Echoes:
    """A `Driven` that reads a u32 length and that many bytes, and sends them back in two parts when the turn is
    over."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = driven(stream)
        self.size: int | None = None
        self.body = bytearray()
        self.header = bytearray(4)
        self.out: list[bytes] = []
        self.came = 0
        self.over: list[str] = []
        self.done = asyncio.Event()

    def wanted(self) -> memoryview:
        return memoryview(self.header if self.size is None else self.body)

    def filled(self) -> None:
        if self.size is None:
            self.size = int.from_bytes(self.header, "little")
            self.body = bytearray(self.size)
            return
        self.size = None
        self.came += 1
        self.out += [bytes(self.header), bytes(self.body)]

    def turn(self) -> None:
        out, self.out = self.out, []
        if out:
            self.stream.send(out)

    def ended(self, error: ConnectionError) -> None:
        self.over.append(str(error))
        self.done.set()


async def bytes_drive_a_machine(port: Bytes, bind: Address) -> None:
    machines: list[_Echoes] = []

    async def accept(stream: ByteStream) -> None:
        await stream.read_into(memoryview(bytearray(1)))
        machines.append(_Echoes(stream))
        machines[0].stream.drive(machines[0], polite=True)
        await machines[0].done.wait()

    listener = await port.listen(bind, accept)
    stream = await port.connect(listener.address)
    sizes = (1, 4096, 3, 300_000, 70_000, 2)
    bodies = [bytes([at + 1]) * size for at, size in enumerate(sizes)]
    await stream.write(b"x" + b"".join(len(body).to_bytes(4, "little") + body for body in bodies[:2]))
    for body in bodies[2:]:
        await stream.write(len(body).to_bytes(4, "little"), body)
    for body in bodies:
        back = bytearray(4 + len(body))
        await stream.read_into(memoryview(back))
        assert back == len(body).to_bytes(4, "little") + body
    stream.close()
    async with asyncio.timeout(5.0):
        await machines[0].done.wait()
    assert machines[0].came == len(sizes) and len(machines[0].over) == 1
    machines[0].stream.send([b"late"])
    await listener.close()


async def bytes_drive_no_machine_further_than_its_peer_reads(port: Bytes, bind: Address) -> None:
    machines: list[_Echoes] = []

    async def accept(stream: ByteStream) -> None:
        machines.append(_Echoes(stream))
        machines[0].stream.drive(machines[0], polite=True)
        await machines[0].done.wait()

    listener = await port.listen(bind, accept)
    stream = await port.connect(listener.address)
    body = bytes(100_000)
    count = 400

    async def ask() -> None:
        for _ in range(count):
            await stream.write(len(body).to_bytes(4, "little"), body)

    asking = asyncio.ensure_future(ask())
    await asyncio.sleep(0.3)
    assert machines[0].came < count / 2, "40 MB were answered to somebody who reads nothing"
    back = bytearray(4 + len(body))
    for _ in range(count):
        await stream.read_into(memoryview(back))
    await asking
    machines[0].stream.close()
    async with asyncio.timeout(5.0):
        await machines[0].done.wait()
    await _refused(stream.read_into(memoryview(back)))
    assert len(machines[0].over) == 1
    stream.close()
    await listener.close()


class Speaks:
    """A `Driven` that says what it is told to, and hears nothing."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = driven(stream)

    def wanted(self) -> memoryview:
        return memoryview(bytearray(1))

    def filled(self) -> None: ...
    def turn(self) -> None: ...
    def ended(self, error: ConnectionError) -> None: ...


async def bytes_sent_before_a_close_arrive_though_nobody_reads_yet(port: Bytes, bind: Address) -> None:
    """More bytes than kernels hold are sent, and some while a writer waits."""
    held = asyncio.Event()
    parts = [bytes([number + 1]) * (2 << 20) for number in range(4)]
    whole: list[asyncio.Future[bytes]] = []

    async def reader(stream: ByteStream) -> None:
        got = asyncio.get_running_loop().create_future()
        whole.append(got)
        await held.wait()
        room = bytearray(sum(map(len, parts)))
        await stream.read_into(memoryview(room))
        await _refused(stream.read_into(memoryview(bytearray(1))))
        got.set_result(bytes(room))

    listener = await port.listen(bind, reader)
    driving, writing = await port.connect(listener.address), await port.connect(listener.address)
    speaks = Speaks(driving)
    speaks.stream.drive(speaks, polite=False)
    for part in parts:
        speaks.stream.send([part])
    written = asyncio.ensure_future(writing.write(*parts))
    await asyncio.sleep(0.05)
    driving.close()
    writing.close()
    await _refused(written)
    held.set()
    async with asyncio.timeout(10.0):
        assert [await got for got in whole] == [b"".join(parts)] * 2
    await listener.close()


async def _refused(waiting: Awaitable[Any]) -> None:
    try:
        async with asyncio.timeout(5.0):
            await waiting
    except ConnectionError:
        return
    raise AssertionError("no ConnectionError")


BYTES: tuple[Callable[[Bytes, Address], Awaitable[None]], ...] = (
    bytes_come_back_in_order,
    bytes_writers_wait_for_a_reader_that_does_not_read,
    bytes_end_with_connection_error,
    bytes_are_refused_where_nobody_listens,
    bytes_addresses_have_one_listener,
    bytes_closing_a_listener_ends_what_it_accepted,
    bytes_drive_a_machine,
    bytes_drive_no_machine_further_than_its_peer_reads,
    bytes_sent_before_a_close_arrive_though_nobody_reads_yet,
)

# ---- datagrams -------------------------------------------------------------------------------------------------------


async def datagrams_arrive_whole_with_their_sender(port: Datagrams, bind: Address) -> None:
    got: asyncio.Queue[tuple[bytes, Address]] = asyncio.Queue()
    one = await port.open(bind, lambda data, sender: got.put_nowait((data, sender)))
    two = await port.open(bind, lambda data, sender: None)
    async with asyncio.timeout(30.0):
        while got.empty():  # one may be lost
            two.send(b"x" * 1400, one.address)
            await asyncio.sleep(0.1)
    assert got.get_nowait() == (b"x" * 1400, two.address)
    two.close()
    two.send(b"late", one.address)
    one.send(b"to nobody", two.address)
    one.close()


async def datagram_addresses_have_one_socket(port: Datagrams, bind: Address) -> None:
    one = await port.open(bind, lambda data, sender: None)
    try:
        await port.open(one.address, lambda data, sender: None)
    except OSError:
        one.close()
        return
    raise AssertionError("two sockets on one address")


DATAGRAMS: tuple[Callable[[Datagrams, Address], Awaitable[None]], ...] = (
    datagrams_arrive_whole_with_their_sender,
    datagram_addresses_have_one_socket,
)
