"""Real ports in one process, for tests of the byte path: loopback sockets, files in a directory, a real clock."""

import asyncio
import os
import random
import tempfile
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from agent.ports.clock import RealClock
from agent.ports.disk import DirectoryDisk
from agent.ports.memory.pages import MemfdPages
from agent.ports.network.bytes import SocketBytes
from agent.tasks import Tasks
from chaos.world.clock import SimLoopStalls
from covey.core.ids import HostId
from covey.ports.datagrams import Datagrams
from covey.ports.disk import Disk
from covey.ports.env import Env
from covey.ports.links import Links
from covey.ports.probes import Probes
from covey.ports.processes import Processes, ProcessId
from covey.ports.streams import ByteStream
from covey.ports.verbs import NO_VERBS_HERE, Verbs
from covey.verbs.pyverbs_port import PyVerbs
from plugins.memory.datapath.lending.slab_keeper import KeeperConfig, run_keeper
from plugins.memory.datapath.lending.slab_session import SlabSession
from plugins.memory.datapath.lending.slab_store import SlabStore
from plugins.memory.datapath.lending.slabd import SlabServer
from plugins.memory.datapath.links.lender_link import LenderLinks
from plugins.memory.datapath.links.remote_slab import RemoteSlab
from plugins.memory.datapath.spill.spill_writer import SpillConfig, run_spill
from plugins.memory.datapath.volumes.members.mirror_volume import AnyVolume
from plugins.memory.datapath.volumes.volume import Volume
from plugins.memory.datapath.wire.control import OpenPlace, RegisterSlabFrame, SlabCopiedFrame, Told
from plugins.memory.datapath.wire.shape import Shape
from plugins.memory.datapath.wire.slabwire import SlabOp, Versions
from plugins.memory.policy.settings import SEAL_BYTES

RDMA = os.environ.get("COVEY_TEST_RDMA") == "1"
"""Whether pages go one-sided over the device of this machine: in the emulated guest (`make rdma`)."""
SLOW = 10 if RDMA else 1
"""The factor by which time limits are longer in that guest, where every instruction is translated."""
MAPPED = os.environ.get("COVEY_TEST_MAPPED") == "1"
"""Whether slabs are mapped, as those of a lender on the same host are."""
THIS_MACHINES: Verbs = PyVerbs() if RDMA else NO_VERBS_HERE
PAGE = 4096
SHAPE = Shape("data", 32 * PAGE, PAGE, 16 * PAGE)
SECRET = b"s" * 16
SEALED = os.environ.get("COVEY_TEST_SEALED") == "1"
"""Whether volumes of a bench seal their pages, unless it says otherwise."""


class QuietLog:
    def debug(self, event: str, **fields: Any) -> None: ...
    def info(self, event: str, **fields: Any) -> None: ...
    def warning(self, event: str, **fields: Any) -> None: ...
    def error(self, event: str, **fields: Any) -> None: ...


class QuietProbes:
    """Answers to what programs ask of `covey.ports.probes.Probes`: the process of the tests is not locked."""

    def cores(self) -> int:
        return 1

    def stay_in_memory(self, flushes: bool) -> str:
        return ""

    def keep_heap(self, size_bytes: int) -> str:
        return ""

    def watch_loop(self) -> SimLoopStalls:
        return SimLoopStalls()


class GateDisk:
    """A disk whose `write_at` waits while the gate is shut, and which counts syncs; both fail when told to."""

    def __init__(self, disk: DirectoryDisk) -> None:
        self._disk = disk
        self.gate = asyncio.Event()
        self.gate.set()
        self.syncs = 0
        self.fail = self.sync_fail = self.replace_fail = False
        self.reads_failing = 0
        """The number of reads that fail before the disk reads again."""

    async def write_at(self, name: str, offset: int, data: bytes | bytearray | memoryview) -> None:
        await self.gate.wait()
        if self.fail:
            raise OSError(28, "no space left in this test")
        await self._disk.write_at(name, offset, data)

    async def write_parts_at(self, name: str, offset: int, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        await self.write_at(name, offset, b"".join(parts))

    async def read_at(self, name: str, offset: int, size: int) -> bytes:
        if self.reads_failing:
            self.reads_failing -= 1
            raise OSError(5, "unreadable in this test")
        return await self._disk.read_at(name, offset, size)

    async def read_into_at(self, name: str, offset: int, into: memoryview) -> None:
        into[:] = await self.read_at(name, offset, len(into))

    async def replace(self, name: str, data: bytes) -> None:
        if self.replace_fail:
            raise OSError(30, "read-only in this test")
        await self._disk.replace(name, data)

    async def sync(self, name: str) -> None:
        self.syncs += 1
        if self.sync_fail:
            raise OSError(5, "broken")
        await self._disk.sync(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)


class LocalProcess:
    """A Covey program as a task of this process."""

    loaded = True

    def __init__(self, id: ProcessId, task: "asyncio.Task[None]") -> None:
        self.id, self._task = id, task

    @property
    def alive(self) -> bool:
        return not self._task.done()

    async def wait(self) -> int | None:
        await asyncio.wait([self._task])
        return 0

    def signal(self, number: int) -> None:
        self._task.cancel()


class LocalProcesses:
    """`start_program` of `covey.ports.processes.Processes`: the writer of a spill log."""

    def __init__(self, bench: "Bench") -> None:
        self._bench = bench
        self.started: list[LocalProcess] = []

    async def start_program(self, program: str, name: str, config: msgspec.Struct) -> LocalProcess:
        if isinstance(config, KeeperConfig):
            work = run_keeper(self._bench.env, config)
        else:
            assert isinstance(config, SpillConfig)
            work = run_spill(self._bench.env, config)
        process = LocalProcess(ProcessId(len(self.started) + 1, 0), asyncio.get_running_loop().create_task(work))
        self.started.append(process)
        return process

    def find(self, process: ProcessId) -> LocalProcess | None:
        found = self.started[process.pid - 1]
        return found if found.alive else None


class SentHere:
    """`OwnDisk` of a borrower without a volume: everything is durable, and the newest is what was sent last."""

    def __init__(self) -> None:
        self.newest: dict[int, int] = {}

    def marks(self) -> tuple[int, int]:
        return 0, 0

    def versions(self, first: int, count: int) -> "array[int]":
        return array("Q", [self.newest.get(page, 0) for page in range(first, first + count)])

    def watch(self, slab: RemoteSlab) -> None:
        """Note from now on what is written to this borrower."""
        write, at = slab.write, slab.place.index * slab.pages

        async def written(first: int, versions: Versions, pages: memoryview | None) -> None:
            for page, version in enumerate(versions, at + first):
                self.newest[page] = max(version, self.newest.get(page, 0))
            await write(first, versions, pages)

        slab.write = written  # type: ignore[method-assign]


def borrowers_links(env: Env, deadline_s: float = 2.0, always: bool = RDMA or MAPPED) -> LenderLinks:
    """Links of a volume whose slabs have 16 pages, without the volume. `always`: all requests go one-sided."""
    disk = SentHere()
    links = LenderLinks(env, "data", 16, PAGE, deadline_s, disk)
    links.may_map = MAPPED
    if always:
        one_sided_first(links, disk.watch)
    return links


def one_sided_first(links: LenderLinks, seen: Callable[[RemoteSlab], None] = lambda slab: None) -> None:
    """A slab is open when its pages go one-sided, so that no test says something about TCP alone. Why the link before
    did not is no answer: `verbs.why` says that of a queue pair that failed until there is another one."""
    opened = links.open

    async def open(place: OpenPlace, within_s: float | None = None) -> RemoteSlab:
        slab, why = await opened(place, within_s), links.verbs.why
        link = links._links[place.address]
        with ExitStack() as undo:
            undo.callback(slab.fail, "it did not go one-sided")  # whoever tries again finds nothing open
            await soon(lambda: slab.one_sided or slab.why or link.pairing.waits or links.verbs.why != why, 20.0)
            assert slab.one_sided or slab.why or not RDMA, links.verbs.why
            undo.pop_all()
        seen(slab)
        return slab

    links.open = open  # type: ignore[method-assign]


def replaces_a_method() -> None:
    """Skip a test that replaces a method of a compiled object: its own calls would use the original one (`make
    compiled`)."""
    if os.environ.get("COVEY_COMPILED"):
        pytest.skip("it replaces a method")


def asks_the_lender() -> None:
    """A mapped slab needs no answer of its lender's process."""
    if MAPPED:
        pytest.skip("it is about a lender that does not answer")


class Bench:
    """Ports, a lender in the same process, and volumes made on demand."""

    def __init__(self, directory: str, verbs: Verbs = THIS_MACHINES) -> None:
        self.failures: list[BaseException] = []
        self.tasks = Tasks(QuietLog(), lambda name, error: self.failures.append(error))
        self.directory = DirectoryDisk(directory)
        self.disk = GateDisk(self.directory)
        self.env = Env(
            host=HostId("h1"),
            clock=RealClock(),
            rng=random.Random(1),
            entropy=random.Random(2).randbytes,
            spawn=self.tasks.spawn,
            log=QuietLog(),
            datagrams=cast(Datagrams, None),
            links=cast(Links, None),
            bytes=SocketBytes(QuietLog()),
            disk=cast(Disk, self.disk),
            processes=cast(Processes, None),
            probes=cast(Probes, QuietProbes()),
            pages=MemfdPages(),
            run_dir=directory,
            verbs=verbs,
        )
        self.processes = LocalProcesses(self)
        self.env = Env(**{**self.env.__dict__, "processes": self.processes})
        self.store = SlabStore(1 << 30, self.env.pages)
        self.server = SlabServer(self.env, self.store)
        self.address = ""
        self.sealed = SEALED
        self.told: list[Told] = []
        self.mapped = MAPPED
        self.one_sided = False
        """Whether volumes wait until a slab goes one-sided, or says why not."""
        self._listener: Any = None
        self._volumes: list[tuple[Volume, Tasks]] = []

    async def lend(self) -> None:
        bind = self.address or "127.0.0.1:0"  # the second time: at the same place
        self._listener = await self.env.bytes.listen(bind, self.server.serve)
        self.address = self._listener.address

    async def cut_lender(self) -> None:
        """Break every connection and listen no more; the lender's memory stays."""
        await self._listener.close()

    def break_links(self) -> None:
        """Break every connection, while the lender goes on."""
        for user in [user for slab in self.store.slabs.values() for user in slab.users]:
            cast(SlabSession, user)._stream.close()

    def ignore_requests(self) -> None:
        """Let requests over the present connections arrive, and do nothing about them."""
        for user in [user for slab in self.store.slabs.values() for user in slab.users]:
            cast(SlabSession, user)._do = lambda asked, slab: None  # type: ignore[method-assign]
            end = cast(SlabSession, user)._verbs._pair
            if end is not None:
                end.pair.close()  # nobody is told

    def asked(self) -> list[SlabOp]:
        """The requests that the lender's process gets from now on."""
        found: list[SlabOp] = []
        for user in [user for slab in self.store.slabs.values() for user in slab.users]:
            session = cast(Any, user)

            def do(asked: Any, slab: Any, do: Any = session._do) -> None:
                found.append(asked.op)
                do(asked, slab)

            session._do = do
        return found

    async def mute_lender(self) -> None:
        """Break every connection; a client that connects anew is accepted and hears nothing: a stopped process."""
        await self.cut_lender()

        async def silence(stream: ByteStream) -> None:
            await asyncio.Event().wait()

        self._listener = await self.env.bytes.listen(self.address, silence)

    async def wake_lender(self) -> None:
        await self.cut_lender()
        await self.lend()

    def register(self, index: int, epoch: int = 1, secret: bytes = SECRET) -> OpenPlace:
        page_bytes = PAGE + SEAL_BYTES * self.sealed
        size = SHAPE.slab_pages * page_bytes
        self.store.register(RegisterSlabFrame(1, "h1", "data", index, epoch, size, page_bytes, secret))
        return OpenPlace(index, epoch, "h2", self.address, secret)

    async def volume(self, deadline_s: float = 5.0, queue_pages: int = 512) -> Volume:
        """Make a volume that is a process of its own as far as tasks go: `die` ends them without a word."""
        tasks = Tasks(QuietLog(), lambda name, error: self.failures.append(error))
        env = Env(**{**self.env.__dict__, "spawn": tasks.spawn})
        volume = Volume(env, SHAPE, "memory/volumes/data", queue_pages, deadline_s, self.told.append, self.sealed)
        self._volumes.append((volume, tasks))
        volume.may_map(self.mapped)
        if RDMA or self.mapped or self.one_sided:
            one_sided_first(volume._links)
        await volume.open()
        return volume

    async def die(self, volume: Volume) -> None:
        """End the volume as by kill -9 of its process and of the writer of its log: records that were only in the ring
        are gone."""
        for slab in volume.slabs:
            for link in slab.links():
                link.fail("killed")
        writer = volume.spill.writer._process
        if writer is not None:
            writer.signal(9)
            await writer.wait()
        for known, tasks in self._volumes:
            if known is volume:
                await tasks.cancel_all()

    async def close(self) -> None:
        self.disk.gate.set()
        for volume, _ in self._volumes:
            await self.die(volume)
        if self._listener is not None:
            await self._listener.close()
        await self.tasks.cancel_all()
        self.directory.close()
        assert self.failures == []


@asynccontextmanager
async def a_bench(verbs: Verbs = THIS_MACHINES) -> AsyncIterator[Bench]:
    """Make a bench with short directory names: a socket path has 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="cv", ignore_cleanup_errors=True) as directory:
        bench = Bench(str(Path(directory)), verbs)
        await bench.lend()
        try:
            yield bench
        finally:
            await bench.close()


@asynccontextmanager
async def a_volume() -> AsyncIterator[tuple[Bench, Volume]]:
    async with a_bench() as bench:
        yield bench, await bench.volume()


async def placed(volume: Volume, place: OpenPlace) -> None:
    """Wait until the slab is open and on record, so that writes go to it from now on."""
    await volume.open_place(place)
    await soon(lambda: not volume.slab(place.index).opening)


async def copied(bench: Bench, epoch: int = 1, index: int = 0) -> None:
    """Wait until that place has all that was written before it was used."""
    found = SlabCopiedFrame(index, epoch)
    await soon(lambda: found in bench.told)


def page(word: int) -> bytes:
    return word.to_bytes(8, "little") * (PAGE // 8)


async def write(volume: Volume, first: int, *words: int) -> None:
    data = b"".join(page(word) for word in words)
    await volume.write(first, len(words), memoryview(data))


async def read(volume: Volume, first: int, count: int) -> list[int]:
    """Read the word of each page; every page must be whole."""
    data = bytearray(count * PAGE)
    await volume.read(first, memoryview(data))
    words = [int.from_bytes(data[at * PAGE : at * PAGE + 8], "little") for at in range(count)]
    assert data == b"".join(page(word) for word in words)
    return words


def submitted(volume: AnyVolume, first: int, *words: int) -> "tuple[memoryview, asyncio.Future[OSError | None]]":
    """Begin a write as a client over NBD has it; return its memory, which is the volume's, and how it went."""
    data = volume.buffers.take(len(words) * PAGE)
    data[:] = b"".join(page(word) for word in words)
    done: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
    volume.submit_write(first, len(words), data, done.set_result)
    return data, done


async def is_used_again(volume: AnyVolume, data: memoryview, done: "asyncio.Future[OSError | None]") -> bool:
    """Whether the memory of this write, once it is acknowledged, becomes that of the next write of its size."""
    assert await done is None
    volume.buffers.give(data)
    return volume.buffers.take(len(data)).obj is data.obj


async def soon(what: Any, within_s: float = 5.0) -> None:
    """Wait until `what()` is true."""
    async with asyncio.timeout(within_s * SLOW):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
