"""The job's end of remote memory against a real volume process, through real sockets; the agent is a stand-in."""

import asyncio
import random
import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from covey.arrays import remote_memory, volume_link
from covey.core.ids import HostId, JobId
from covey.core.version import VERSION
from covey.ports.streams import ByteStream
from covey.remote import RemoteMemory, RemoteMemoryError
from covey.wire import headers
from covey.wire import job as wire
from covey.wire import volume_wire as volumewire
from covey.wire.frames import read_frame, write_frame
from plugins.memory.datapath.vold import VoldConfig, run_vold
from plugins.memory.datapath.wire.control import (
    ClientRefused,
    ListPlaces,
    Told,
)
from plugins.memory.datapath.wire.control_ends import ControlClient
from tests.plugins.memory.ports import SHAPE, Bench, a_bench, soon
from tests.quiet import until_blocked

T = TypeVar("T")
TOKEN = b"t" * 32
SIZE = SHAPE.size_bytes
PAGE = SHAPE.page_bytes
CONFIG = VoldConfig(
    volume="data",
    size_bytes=SIZE,
    page_bytes=PAGE,
    slab_bytes=SHAPE.slab_bytes,
    token=TOKEN,
    secret=b"c" * 32,
    queue_pages=512,
    deadline_s=2.0,
)


class Agent:
    """A stand-in that answers on `jobs.sock` as the memory plugin would; `vold` is the volume's process."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.path = f"{bench.env.run_dir}/jobs.sock"
        self.asked: list[wire.Frame] = []
        self.refuse: wire.Refusal | None = None
        self.welcome = wire.Joined(HostId("h1"), protocol=wire.PROTOCOL, version=VERSION)
        self.vold: Any = None
        self.coming: list[str] = []
        """Reasons why a volume that is attached is not ready yet."""

    async def serve(self, stream: ByteStream) -> None:
        first: wire.FrameUnion = await read_frame(stream, wire.decoder)
        assert isinstance(first, wire.Join)
        await write_frame(stream, self.welcome)
        question: wire.FrameUnion = await read_frame(stream, wire.decoder)
        self.asked.append(question)
        for why in self.coming:
            await write_frame(stream, wire.VolumeComing("data", why))
        if self.refuse is not None:
            await write_frame(stream, self.refuse)
        elif isinstance(question, wire.VolumeWanted):
            path = f"{self.bench.env.run_dir}/vol-data.sock"
            await write_frame(stream, wire.VolumeAt("data", SIZE, PAGE, path, TOKEN))
        else:
            await write_frame(stream, wire.VolumeRemoved("data"))

    def start_vold(self) -> None:
        self.vold = asyncio.ensure_future(run_vold(self.bench.env, CONFIG))

    async def stop_vold(self) -> None:
        self.vold.cancel()
        await asyncio.gather(self.vold, return_exceptions=True)


@asynccontextmanager
async def an_agent() -> AsyncIterator[Agent]:
    async with a_bench() as bench:
        agent = Agent(bench)
        listener = await bench.env.bytes.listen(f"unix:{agent.path}", agent.serve)
        agent.start_vold()
        try:
            yield agent
        finally:
            await agent.stop_vold()
            await listener.close()


async def in_a_thread(work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(None, work)


@pytest.mark.parametrize("pages_max", [volumewire.REQUEST_PAGES_MAX, 4])
async def test_what_is_written_is_read_back_also_off_the_page_grid_and_cut_up(
    pages_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_link, "REQUEST_PAGES_MAX", pages_max)
    monkeypatch.setattr(remote_memory, "REQUEST_PAGES_MAX", pages_max)

    def script(path: str) -> None:
        rng = random.Random(1)
        shadow = bytearray(SIZE)
        with RemoteMemory.open("data", SIZE, path) as memory:
            assert (len(memory), memory.page) == (SIZE, PAGE)
            for _ in range(60):
                offset = rng.randrange(SIZE)
                data = rng.randbytes(rng.randint(0, min(3 * PAGE, SIZE - offset)))
                memory.write(offset, data)
                shadow[offset : offset + len(data)] = data
                offset = rng.randrange(SIZE)
                size = rng.randint(0, SIZE - offset)
                assert memory.read(offset, size) == shadow[offset : offset + size]
            memory.flush()
            memory.discard(PAGE, PAGE)
            shadow[PAGE : 2 * PAGE] = bytes(PAGE)
        with RemoteMemory.open("data", SIZE, path) as memory:
            assert memory.read(0, SIZE) == shadow

    async with an_agent() as agent:
        await in_a_thread(lambda: script(agent.path))


async def test_an_agent_that_speaks_otherwise_is_named_with_both_versions() -> None:
    async with an_agent() as agent:
        agent.welcome = wire.Joined(HostId("h1"), protocol=wire.PROTOCOL + 1, version="9.8.7")
        with pytest.raises(RemoteMemoryError, match=f"covey-agent 9.8.7 .*covey-job {re.escape(VERSION)} here"):
            await in_a_thread(lambda: RemoteMemory.open("data", SIZE, agent.path))


async def test_a_volume_process_that_ends_and_comes_back_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume_link, "PAUSE_S", 0.01)
    found: list[bytes] = []
    async with an_agent() as agent:
        memory = await in_a_thread(lambda: RemoteMemory.open("data", SIZE, agent.path))
        await in_a_thread(lambda: memory.write(0, b"a" * PAGE))
        await agent.stop_vold()
        reading = threading.Thread(target=lambda: found.append(memory.read(0, PAGE)), daemon=True)
        reading.start()
        until_blocked(reading, volume_link.VolumeLink.finish)
        assert not found
        agent.start_vold()
        await in_a_thread(reading.join)
        assert found == [b"a" * PAGE]
        memory.close()


async def test_open_waits_for_as_long_as_the_agent_is_at_work_and_says_what_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote_memory, "TELL_S", 0.0)
    async with an_agent() as agent:
        agent.coming = ["its process is still starting", "2 of 4 slabs have two hosts so far"]
        memory = await in_a_thread(lambda: RemoteMemory.open("data", SIZE, agent.path))
        memory.close()
        said = [record.getMessage() for record in caplog.records if record.name == "covey.remote"]
        assert [line.rpartition(": ")[2] for line in said] == agent.coming
        assert said[0].startswith("volume data is not ready yet, and is waited for: ")


async def test_whoever_has_it_open_does_not_make_it_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The volume was detached, or cannot be opened: requests fail with the agent's words, and say what to do."""
    monkeypatch.setattr(volume_link, "PAUSE_S", 0.01)
    monkeypatch.setattr(volume_link, "RECONNECT_S", 0.2)
    async with an_agent() as agent:
        memory = await in_a_thread(lambda: RemoteMemory.open("data", SIZE, agent.path))
        await agent.stop_vold()
        agent.refuse = wire.Refusal("no volume data", "h1 has none of that name: it was removed", "agentctl volume ls")
        agent.asked.clear()
        with pytest.raises(RemoteMemoryError, match=r"it was removed; next: agentctl volume ls"):
            await in_a_thread(lambda: memory.read(0, PAGE))
        assert set(agent.asked) == {wire.VolumeWanted("data", SIZE, make="never")}
        agent.refuse, agent.coming = None, ["slab 0 waits for its lender: h2; next: agentctl volume give-up data"]
        with pytest.raises(
            RemoteMemoryError, match="slab 0 waits for its lender: h2"
        ):  # a request has a time of its own
            await in_a_thread(lambda: memory.read(0, PAGE))
        memory.close()


@pytest.mark.parametrize(("create", "make"), [(None, ""), (True, "anew"), (False, "never")])
async def test_the_word_that_it_is_made_anew_reaches_the_agent(create: bool | None, make: wire.Make) -> None:
    async with an_agent() as agent:
        await in_a_thread(lambda: RemoteMemory.open("data", SIZE, agent.path, create=create).close())
        assert agent.asked[0] == wire.VolumeWanted("data", SIZE, make=make)


async def test_threads_take_turns() -> None:
    def script(path: str) -> list[str]:
        wrong: list[str] = []
        with RemoteMemory.open("data", SIZE, path) as memory:

            def own_pages(number: int) -> None:
                for step in range(20):
                    data = bytes([number, step]) * (PAGE // 2)
                    memory.write(number * PAGE, data)
                    if memory.read(number * PAGE, PAGE) != data:
                        wrong.append(f"thread {number} step {step}")

            threads = [threading.Thread(target=own_pages, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return wrong

    async with an_agent() as agent:
        assert await in_a_thread(lambda: script(agent.path)) == []


async def test_detach_asks_the_agent_to_forget_it() -> None:
    async with an_agent() as agent:
        memory = await in_a_thread(lambda: RemoteMemory.open("data", "128 KiB", agent.path))
        await in_a_thread(memory.remove)
        assert (agent.asked[0], agent.asked[-1]) == (wire.VolumeWanted("data", SIZE), wire.RemoveVolume("data"))
        with pytest.raises(ValueError, match="closed here"):
            memory.read(0, 1)


async def test_a_volume_that_a_process_of_a_job_opens_is_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    async with an_agent() as agent:
        for name, value in {"JOB_ID": "j1", "EPOCH": "3", "TOKEN": "secret", "SOCKET": agent.path}.items():
            monkeypatch.setenv(f"COVEY_{name}", value)
        await in_a_thread(lambda: RemoteMemory.open("data", SIZE).close())
        assert agent.asked[0] == wire.VolumeWanted("data", SIZE, job=JobId("j1"), epoch=3, token="secret")
        agent.asked.clear()
        monkeypatch.setenv("COVEY_SOCKET", "/of/another/agent")
        await in_a_thread(lambda: RemoteMemory.open("data", SIZE, agent.path).close())
        assert agent.asked[0] == wire.VolumeWanted("data", SIZE), "whose jobs that agent does not know"


async def test_a_refusal_says_what_why_and_what_next() -> None:
    async with an_agent() as agent:
        agent.refuse = wire.Refusal("cannot open volume data", "it belongs to another user", "choose another name")
        with pytest.raises(RemoteMemoryError, match=r"another user.*next: choose another name"):
            await in_a_thread(lambda: RemoteMemory.open("data", SIZE, agent.path))


async def test_bytes_outside_the_volume_are_refused_before_anything_is_sent() -> None:
    def script(path: str) -> None:
        with RemoteMemory.open("data", SIZE, path) as memory:
            for offset, size in ((-1, 1), (0, SIZE + 1), (SIZE, 1)):
                with pytest.raises(ValueError, match="outside"):
                    memory.read(offset, size)
            with pytest.raises(ValueError, match="outside"):
                memory.write(SIZE - 1, b"ab")
            with pytest.raises(ValueError, match="whole pages"):
                memory.discard(1, PAGE)

    async with an_agent() as agent:
        await in_a_thread(lambda: script(agent.path))


def test_without_an_agent_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COVEY_SOCKET", raising=False)
    with pytest.raises(RemoteMemoryError, match="COVEY_SOCKET is not set; next: "):
        RemoteMemory.open("data", SIZE)
    monkeypatch.setenv("COVEY_SOCKET", "/nonexistent/jobs.sock")
    with pytest.raises(RemoteMemoryError, match="does not answer"):
        RemoteMemory.open("data", SIZE)


async def test_a_volume_tells_nothing_to_who_lacks_its_token_and_survives_nonsense() -> None:
    async with an_agent() as agent:
        memory = await in_a_thread(lambda: RemoteMemory.open("data", SIZE, agent.path))
        address = f"unix:{agent.bench.env.run_dir}/vol-data.sock"
        stream = await agent.bench.env.bytes.connect(address)
        await stream.write(volumewire.pack_hello(b"x" * 32))
        answer = bytearray(headers.WELCOME_BYTES)
        await stream.read_into(memoryview(answer))
        assert headers.welcome(answer) == headers.Welcome(headers.Status.REFUSED, 0, 0)
        for nonsense in (b"\0" * 500, b"GET / HTTP/1.1\r\n\r\n" * 30, volumewire.pack_hello(TOKEN) + b"\xff" * 24):
            stream = await agent.bench.env.bytes.connect(address)
            await stream.write(nonsense)
            with pytest.raises(ConnectionError):
                await stream.read_into(memoryview(bytearray(10_000)))
        control = await agent.bench.env.bytes.connect(f"unix:{agent.bench.env.run_dir}/vold-data.sock")
        await control.write(b"\xff" * 100)
        with pytest.raises(ConnectionError):
            await control.read_into(memoryview(bytearray(1)))
        await in_a_thread(lambda: memory.write(0, b"still here"))
        assert await in_a_thread(lambda: memory.read(0, 10)) == b"still here"
        memory.close()


# ---- versions --------------------------------------------------------------------------------------------------------


async def heard(bench: Bench, hello: bytes) -> headers.Welcome:
    """The volume's welcome to a new connection, which is then closed."""
    stream = await bench.env.bytes.connect(f"unix:{bench.env.run_dir}/vol-data.sock")
    await stream.write(hello)
    answer = bytearray(headers.WELCOME_BYTES)
    await stream.read_into(memoryview(answer))
    with pytest.raises(ConnectionError):
        await stream.read_into(memoryview(bytearray(1)))
    return headers.welcome(answer)


async def agent_of(bench: Bench, told: list[Told]) -> ControlClient:
    client = await ControlClient.connect(bench.env, "vold-data", CONFIG.secret, told.append)
    await client.ask(ListPlaces(client.next_id), 5.0)
    return client


@pytest.mark.parametrize(
    ("magic", "speaks", "step"),
    [
        (b"coveyvl0", "it speaks version 0", "install the covey-job of this agent"),
        (b"coveyvl2", "it speaks version 2", "end this process"),
    ],
)
async def test_another_version_is_told_so_and_the_agent_hears_what_to_do_once_a_minute(
    magic: bytes, speaks: str, step: str
) -> None:
    async with an_agent() as agent:
        memory = await in_a_thread(lambda: RemoteMemory.open("data", SIZE, agent.path))
        told: list[Told] = []
        control = await agent_of(agent.bench, told)
        for _ in range(3):
            answer = await heard(agent.bench, magic + TOKEN)
            assert answer == headers.Welcome(headers.Status.VERSION, 0, 0)
        await soon(lambda: bool(told))
        await control.ask(ListPlaces(control.next_id), 5.0)
        assert len(told) == 1
        assert isinstance(told[0], ClientRefused)
        assert told[0].why.startswith(f"{speaks} of the volume protocol, this process 1; {step}")
        await in_a_thread(lambda: memory.write(0, b"served as before"))
        memory.close()
        control.close()


class Other:
    """A stand-in for a volume's process: receives a hello, sends `answer` and hangs up."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.hellos: list[bytes] = []

    async def serve(self, stream: ByteStream) -> None:
        hello = bytearray(volumewire.HELLO_BYTES)
        await stream.read_into(memoryview(hello))
        self.hellos.append(bytes(hello))
        if self.answer:
            await stream.write(self.answer)


@asynccontextmanager
async def instead_of_the_volume(agent: Agent, answer: bytes) -> AsyncIterator[Other]:
    await agent.stop_vold()
    other = Other(answer)
    listener = await agent.bench.env.bytes.listen(f"unix:{agent.bench.env.run_dir}/vol-data.sock", other.serve)
    try:
        yield other
    finally:
        await listener.close()


async def test_a_script_of_another_version_fails_at_once_and_says_what_to_install() -> None:
    newer = headers.pack_welcome(headers.Welcome(headers.Status.VERSION, 0, 0))
    async with an_agent() as agent, instead_of_the_volume(agent, newer) as other:
        with pytest.raises(
            RemoteMemoryError, match=r"another version of the volume protocol.*next: install the covey-job of this host"
        ):
            await in_a_thread(lambda: RemoteMemory.open("data", SIZE, agent.path))
        assert other.hellos == [b"coveyvl1" + TOKEN]
