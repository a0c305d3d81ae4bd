"""Streams over real sockets, on both event loops. (Promises that simulated streams share stand in
chaos/checks/conformance.py.)"""

import asyncio
import fcntl
import itertools
import os
import random
import select
import shutil
import socket
import stat
import sys
import tempfile
import termios
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.ports.network.bytes import SocketBytes, SocketListener
from agent.ports.network.stream import DIRECT_BYTES, SPILL_BYTES
from agent.program import JsonLog
from covey.ports.streams import UNKNOWN_USER, ByteStream, Listener
from tests.agent.here import LOOPS, Lines, both_loops, run_on, until
from tests.families import examples

LINES = Lines()
PORT = SocketBytes(JsonLog(LINES, "debug"))  # type: ignore[arg-type]


@pytest.fixture
def short() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="covey-") as directory:
        yield directory


async def pair(bind: str = "127.0.0.1:0", bulk: bool = False) -> tuple[Listener, ByteStream, ByteStream]:
    """A listener, and both ends of one connection to it."""
    met: asyncio.Future[ByteStream] = asyncio.get_running_loop().create_future()

    async def accept(stream: ByteStream) -> None:
        met.set_result(stream)
        await asyncio.Event().wait()

    listener = await PORT.listen(bind, accept, bulk=bulk)
    near = await PORT.connect(listener.address)
    return listener, near, await met


def held_up(writer: Any, reader: Any) -> bool:
    """Whether the reader's process takes no more, and the writer's kernel neither: nothing moves by itself."""
    if not (reader._reading_paused and writer._writing_paused):
        return False
    return not select.select([], [writer._transport.get_extra_info("socket")], [], 0)[1]


async def read(stream: ByteStream, size: int) -> bytes:
    data = bytearray(size)
    await stream.read_into(memoryview(data))
    return bytes(data)


@pytest.mark.parametrize("loop", LOOPS)
def test_bytes_arrive_in_order_whatever_the_sizes_of_writes_and_reads(loop: str) -> None:
    @settings(max_examples=examples(15), deadline=None)
    @given(
        st.lists(st.integers(0, 3 * SPILL_BYTES), min_size=1, max_size=8),
        st.lists(st.integers(500, 2 * SPILL_BYTES), min_size=1, max_size=8),
        st.integers(0, 1000),
    )
    def story(writes: list[int], reads: list[int], seed: int) -> None:
        run_on(loop, _carry(writes, reads, random.Random(seed)))

    story()


async def _carry(writes: list[int], reads: list[int], rng: random.Random) -> None:
    listener, near, far = await pair()
    sent = [rng.randbytes(size) for size in writes]
    whole = b"".join(sent)

    async def send() -> None:
        for part in sent:
            cut = len(part) // 2
            await near.write(part[:cut], memoryview(bytearray(part[cut:])))

    sending = asyncio.ensure_future(send())
    got = bytearray()
    for size in itertools.cycle(reads):
        got += await read(far, min(size, len(whole) - len(got)))
        if len(got) == len(whole):
            break
    await sending
    assert got == whole
    near.close()
    await listener.close()


@both_loops
async def test_large_reads_land_in_the_readers_own_memory() -> None:
    listener, near, far = await pair()
    memory = bytearray(8 << 20)
    reading = asyncio.ensure_future(far.read_into(memoryview(memory)))
    await asyncio.sleep(0)
    await near.write(memoryview(b"\xab" * len(memory)))
    await reading
    assert memory == b"\xab" * len(memory)
    numbers = memoryview(bytearray(8 * 100_000)).cast("q")
    numbers[99_999] = -7
    await near.write(numbers)
    copies = memoryview(bytearray(8 * 100_000)).cast("q")
    await far.read_into(copies)
    assert copies[99_999] == -7
    near.close()
    await listener.close()


@both_loops
async def test_a_writer_waits_for_a_slow_reader_and_its_buffer_is_its_own_again_after_that() -> None:
    listener, near, far = await pair()
    size, count, written = 1 << 20, 64, 0
    buffer = bytearray(size)

    async def send() -> None:
        nonlocal written
        for number in range(count):
            buffer[:] = bytes([number]) * size
            await near.write(buffer)
            written += 1

    sending = asyncio.ensure_future(send())
    await until(lambda: sending.done() or held_up(near, far))
    assert written < count // 2, "nothing held the writer up"
    for number in range(count):
        assert await read(far, size) == bytes([number]) * size
    await sending
    near.close()
    await listener.close()


@both_loops
async def test_units_of_concurrent_writers_are_never_interleaved() -> None:
    listener, near, far = await pair()
    size, writers, each = 300_000, 8, 5

    async def send(letter: int) -> None:
        for _ in range(each):
            await near.write(bytes([letter]) * (size // 2), bytearray([letter]) * (size // 2))

    sending = [asyncio.ensure_future(send(letter)) for letter in range(writers)]
    seen = [await read(far, size) for _ in range(writers * each)]
    await asyncio.gather(*sending)
    assert all(unit == unit[:1] * size for unit in seen)
    assert sorted(unit[0] for unit in seen) == sorted(list(range(writers)) * each)
    near.close()
    await listener.close()


@both_loops
async def test_a_reader_that_does_not_read_holds_little() -> None:
    listener, near, far = await pair()
    sending = asyncio.ensure_future(near.write(bytes(64 << 20)))
    await until(lambda: sending.done() or held_up(near, far))
    assert not sending.done()
    assert far._end - far._start <= SPILL_BYTES  # type: ignore[attr-defined]
    assert await read(far, DIRECT_BYTES) == bytes(DIRECT_BYTES)
    near.close()
    with pytest.raises(ConnectionError):
        await sending
    await listener.close()


@both_loops
async def test_a_unix_socket_for_bulk_bytes_takes_more_before_it_waits(short: str) -> None:
    took = []
    for name, bulk in (("plain", False), ("bulk", True)):
        listener, near, far = await pair(f"unix:{short}/{name}.sock", bulk)
        answering = asyncio.ensure_future(far.write(bytes(64 << 20)))
        took.append(await until_full(near))
        assert not answering.done()
        near.close()
        with pytest.raises(ConnectionError):
            await answering
        await listener.close()
    assert took[1] > 1.5 * took[0], "as much as net.core.wmem_max allows, that is at least twice as much"


@both_loops
async def test_both_ends_of_a_pair_are_for_bulk_bytes() -> None:
    plain, other = socket.socketpair()
    near, handed = await PORT.pair()
    for number in (near._transport.get_extra_info("socket").fileno(), handed.descriptor):  # type: ignore[attr-defined]
        with socket.socket(fileno=os.dup(number)) as end:
            assert size_to_send(end) > 1.5 * size_to_send(plain)
    near.close()
    handed.close()
    plain.close()
    other.close()


def size_to_send(end: socket.socket) -> int:
    return end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


async def until_full(reader: ByteStream) -> int:
    """The number of bytes that wait for a reader who reads none, once it grows no more."""
    number, before = reader._transport.get_extra_info("socket").fileno(), -1  # type: ignore[attr-defined]
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    while True:
        await asyncio.sleep(0.05)
        there = int.from_bytes(fcntl.ioctl(number, termios.FIONREAD, bytes(4)), sys.byteorder)
        if there == before:
            return there
        before = there


@both_loops
async def test_the_end_of_a_peer_is_a_connection_error_wherever_it_strikes() -> None:
    listener, near, far = await pair()
    await near.write(b"half")
    near.close()
    assert await read(far, 2) == b"ha"
    with pytest.raises(ConnectionError):
        await read(far, 3)
    with pytest.raises(ConnectionError):
        for _ in range(100):
            await far.write(bytes(100_000))
    with pytest.raises(ConnectionError):
        await near.write(b"x")
    await listener.close()


@both_loops
async def test_a_write_given_up_half_way_ends_the_connection() -> None:
    listener, near, far = await pair()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await near.write(bytearray(64 << 20))
    with pytest.raises(ConnectionError):
        await near.write(b"more")
    with pytest.raises(ConnectionError):
        await read(far, 64 << 20)
    await listener.close()


@both_loops
async def test_nobody_at_an_address_is_a_connection_error(short: str) -> None:
    for nowhere in ("127.0.0.1:1", f"unix:{short}/none.sock", "nonsense", "unix:" + "x" * 200):
        with pytest.raises(ConnectionError):
            await PORT.connect(nowhere)


@both_loops
async def test_a_unix_socket_is_its_owners_and_tells_who_connects(short: str) -> None:
    path = f"{short}/run/x.sock"
    listener, near, far = await pair(f"unix:{path}")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(f"{short}/run").st_mode) == 0o700
    assert (near.uid, far.uid) == (os.getuid(), os.getuid())
    near.close()
    await listener.close()
    assert os.listdir(f"{short}/run") == []


@both_loops
async def test_over_tcp_nobody_tells_who_connects() -> None:
    listener, near, far = await pair("[::1]:0")
    assert (near.uid, far.uid) == (UNKNOWN_USER, UNKNOWN_USER)
    assert near.peer == listener.address
    near.close()
    await listener.close()


@both_loops
async def test_a_socket_file_left_by_a_dead_process_is_replaced_and_a_living_ones_is_not(short: str) -> None:
    path = f"{short}/x.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    listener, near, _ = await pair(f"unix:{path}")
    with pytest.raises(OSError, match="already listens"):
        await PORT.listen(f"unix:{path}", _nobody)
    near.close()
    os.unlink(path)
    other, _, _ = await pair(f"unix:{path}")
    await listener.close()
    assert os.listdir(short) == ["x.sock"], "closing the first listener took the second one's file"
    await other.close()
    os.close(os.open(path, os.O_CREAT))
    with pytest.raises(OSError, match="is not a socket"):
        await PORT.listen(f"unix:{path}", _nobody)


async def _nobody(_stream: ByteStream) -> None:
    """Accept nobody."""


@both_loops
async def test_a_unix_socket_whose_folder_is_removed_and_made_again_comes_back(
    short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.ports.network.bytes.FOUND_CHECK_S", 0.01)
    folder = f"{short}/run"
    path = f"{folder}/x.sock"
    looks, is_lost = 0, SocketListener._is_lost

    def counted(self: SocketListener, path: str) -> bool:
        nonlocal looks
        looks += 1
        return is_lost(self, path)

    monkeypatch.setattr(SocketListener, "_is_lost", counted)
    listener, near, far = await pair(f"unix:{path}")

    async def looked_again() -> None:
        """Wait until the listener has looked for its socket again, more than once."""
        before = looks
        await until(lambda: looks >= before + 3)

    def said() -> list[str]:
        return [line for line in LINES.text.splitlines() if "no process can reach" in line and path in line]

    shutil.rmtree(folder)
    await looked_again()
    assert os.listdir(short) == [], "it is not ours to make"
    os.mkdir(folder)
    await until(lambda: os.path.exists(path))
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    (await PORT.connect(f"unix:{path}")).close()
    await near.write(b"still here")
    assert await read(far, 10) == b"still here"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"{folder}/y.sock")
        other.listen(8)
        os.rename(f"{folder}/y.sock", path)
        inode = os.stat(path).st_ino
        await until(said)
        await looked_again()
        assert len(said()) == 1
        await listener.close()
        assert os.stat(path).st_ino == inode, "another process listens there"
    near.close()


@both_loops
async def test_closing_a_listener_ends_what_it_accepted() -> None:
    listener, near, far = await pair()
    await listener.close()
    await listener.close()
    with pytest.raises(ConnectionError):
        await read(near, 1)
    with pytest.raises(ConnectionError):
        await read(far, 1)
    with pytest.raises(ConnectionError):
        await PORT.connect(listener.address)


@both_loops
async def test_a_handler_that_fails_closes_its_stream_and_is_logged() -> None:
    LINES.text = ""

    async def fail(_stream: ByteStream) -> None:
        raise ValueError("a mistake of ours")

    listener = await PORT.listen("127.0.0.1:0", fail)
    near = await PORT.connect(listener.address)
    with pytest.raises(ConnectionError):
        await read(near, 1)
    await until(lambda: "a mistake of ours" in LINES.text)
    assert (await PORT.connect(listener.address)).peer == listener.address
    await listener.close()


@both_loops
async def test_two_readers_at_once_are_our_mistake() -> None:
    listener, near, far = await pair()
    first = asyncio.ensure_future(read(far, 1))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="two readers"):
        await read(far, 1)
    await near.write(b"x")
    assert await first == b"x"
    near.close()
    await listener.close()


def test_a_held_port_refuses_who_connects_and_is_nobody_elses() -> None:
    async def story() -> None:
        held = PORT.hold("127.0.0.1")
        with pytest.raises(OSError):
            PORT.hold("127.0.0.1", held.port)
        with pytest.raises(ConnectionError):
            await PORT.connect(f"127.0.0.1:{held.port}")
        held.release()
        PORT.hold("127.0.0.1", held.port).release()

    run_on("asyncio", story())
