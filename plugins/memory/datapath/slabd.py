"""The slab process: one per lending host. It keeps slabs in memory and serves their pages over TCP.

It outlives the agent, and does what the agent's `Lender` tells it on `slabd.sock`: register a slab, free a slab. A slab
is an anonymous mapping, so the kernel hands it out zeroed and takes it back whole; no borrower ever sees what another
wrote.

Whoever connects proves first that it knows the slab's secret (`covey.handshake`); until then it costs a task and a few
hundred bytes, and few such connections are admitted.

A page arrives in a buffer of the connection first and is moved into the slab only when it is there whole: a borrower
that dies in the middle of a write leaves the older page, complete, under its older version.
"""

import asyncio
import mmap
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from covey import handshake, headers
from covey.handshake import HANDSHAKE_S, NONCE_BYTES, PROOF_BYTES, Strangers
from covey.headers import Op, Reply, Request, Status, Welcome, WireError
from covey.ports import Address, ByteStream, Env
from plugins.memory.datapath import control, slabwire
from plugins.memory.datapath.control import Answer, ControlServer, HeldSlab, No, Question, SlabList, Yes
from plugins.memory.datapath.slabwire import Versions
from plugins.memory.policy.settings import REQUEST_PAGES_MAX

Key = tuple[str, str, int]
"""Borrower, volume, index."""


class SlabdConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent gives the slab process at its start."""

    bind: Address
    """Where the byte path listens; port 0 takes a free one."""
    secret: bytes
    """What an agent must say on the control socket."""
    lend_bytes: int
    """Never hold more than this, whatever the agent says."""
    control: str = "slabd"
    """Name of the control socket."""


@dataclass
class HostedSlab:
    """The memory of one slab under one epoch."""

    borrower: str
    volume: str
    index: int
    epoch: int
    secret: bytes
    page_bytes: int
    memory: mmap.mmap
    versions: Versions
    streams: list[ByteStream] = field(default_factory=list)
    touched: int = 0
    """Pages that have a version."""
    live: bool = True
    on_touched: Callable[[int], None] = lambda bytes: None
    """Called with the bytes of pages that were written for the first time."""

    def has(self, first: int, count: int) -> memoryview:
        """Bytes of a run of pages."""
        return memoryview(self.memory)[first * self.page_bytes : (first + count) * self.page_bytes]

    def put(self, first: int, versions: Versions, pages: memoryview | None) -> None:
        """Keep every page that is newer than what is here; None: zeros."""
        size = self.page_bytes
        here = self.versions[first : first + len(versions)]
        if 0 in here:
            touched = sum(old == 0 < new for new, old in zip(versions, here, strict=True))
            self.touched += touched
            self.on_touched(touched * size)
        if pages is not None and all(new > old for new, old in zip(versions, here, strict=True)):
            self.memory[first * size : (first + len(versions)) * size] = pages
            self.versions[first : first + len(versions)] = versions
            return
        for at, (new, old) in enumerate(zip(versions, here, strict=True)):
            if new > old:
                page = bytes(size) if pages is None else pages[at * size : (at + 1) * size]
                self.memory[(first + at) * size : (first + at + 1) * size] = page
                self.versions[first + at] = new


class SlabStore:
    """Every slab of this process."""

    def __init__(self, lend_bytes: int) -> None:
        self.slabs: dict[Key, HostedSlab] = {}
        self.refused = self.held_bytes = self.touched_bytes = 0
        self._lend_bytes = lend_bytes

    def listed(self, after: Key, most: int) -> tuple[tuple[HeldSlab, ...], bool]:
        """At most so many slabs after that key, and whether there are more."""
        keys = sorted(key for key in self.slabs if key > after) if most else []
        return tuple(_held(self.slabs[key]) for key in keys[:most]), len(keys) > most

    def _touched(self, touched_bytes: int) -> None:
        self.touched_bytes += touched_bytes

    def register(self, asked: control.RegisterSlabFrame) -> None:
        """ValueError says why not. Sizes are checked before anything is allocated. A higher epoch replaces a lower."""
        key = (asked.borrower, asked.volume, asked.index)
        known = self.slabs.get(key)
        if known is not None and (known.epoch, known.secret) == (asked.epoch, asked.secret):
            return
        if known is not None and known.epoch >= asked.epoch:
            raise ValueError(f"epoch {asked.epoch} is not newer than {known.epoch}")
        if not 512 <= asked.page_bytes <= 1 << 16 or asked.slab_bytes < 1 or asked.slab_bytes % asked.page_bytes:
            raise ValueError(f"a slab of {asked.slab_bytes} bytes is not a whole number of pages of {asked.page_bytes}")
        if known is not None:
            self.free(known.borrower, known.volume, known.index, known.epoch)
        if self.held_bytes + asked.slab_bytes > self._lend_bytes:
            raise ValueError(f"{self.held_bytes} bytes are lent, {self._lend_bytes} is the most")
        memory = mmap.mmap(-1, asked.slab_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        versions = array("Q", bytes(asked.slab_bytes // asked.page_bytes * 8))
        self.slabs[key] = HostedSlab(
            asked.borrower, asked.volume, asked.index, asked.epoch, asked.secret, asked.page_bytes, memory, versions
        )
        self.slabs[key].on_touched = self._touched
        self.held_bytes += asked.slab_bytes

    def free(self, borrower: str, volume: str, index: int, epoch: int) -> None:
        """The mapping goes back to the kernel with its last user; connections to it are cut."""
        slab = self.slabs.get((borrower, volume, index))
        if slab is None or slab.epoch != epoch:
            return
        del self.slabs[borrower, volume, index]
        slab.live = False
        self.held_bytes -= len(slab.memory)
        self.touched_bytes -= slab.touched * slab.page_bytes
        slab.on_touched = lambda bytes: None
        for stream in slab.streams:
            stream.close()

    def find(self, hello: slabwire.SlabHello) -> HostedSlab | None:
        """None for an unknown slab and for a stale epoch."""
        slab = self.slabs.get((hello.borrower, hello.volume, hello.slab))
        return slab if slab is not None and slab.epoch == hello.epoch else None


class SlabServer:
    """The byte path: one connection per slab."""

    def __init__(self, env: Env, store: SlabStore) -> None:
        self._env, self._store = env, store
        self.strangers: Strangers[ByteStream] = Strangers()
        self._nobodys = env.entropy(NONCE_BYTES)
        """The key of slabs that are not here: strangers cannot tell them from others."""

    async def serve(self, stream: ByteStream) -> None:
        crowded_out = self.strangers.come(stream, stream.peer.rpartition(":")[0])
        if crowded_out is not None:
            self._store.refused += 1
            crowded_out.close()
        try:
            slab = await self._welcome(stream)
            self.strangers.go(stream)
            if slab is None:
                return
            for older in slab.streams:
                older.close()  # the borrower connected anew: whatever the older connection still holds is stale
            slab.streams = [stream]
            await self._requests(stream, slab)
        except WireError as error:
            self._store.refused += 1
            self._env.log.debug("dropped a slab connection", peer=stream.peer, why=str(error))
        finally:
            self.strangers.go(stream)

    async def _welcome(self, stream: ByteStream) -> HostedSlab | None:
        """The slab that this connection has proven to know the secret of. An unknown slab, a stale epoch and a wrong
        proof get the same no."""
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                slab = await self._proven(stream)
        except slabwire.OtherSlabVersion:
            await stream.write(headers.pack_welcome(Welcome(Status.VERSION, 0, 0)))
            raise
        except TimeoutError as error:
            raise WireError(f"it did not prove who it is within {HANDSHAKE_S:g} s") from error
        if slab is None or not slab.live:
            self._store.refused += 1
            await stream.write(headers.pack_welcome(Welcome(Status.REFUSED, 0, 0)))
            return None
        await stream.write(headers.pack_welcome(Welcome(Status.OK, slab.page_bytes, len(slab.memory))))
        return slab

    async def _proven(self, stream: ByteStream) -> HostedSlab | None:
        data = bytearray(slabwire.HELLO_BYTES)
        await stream.read_into(memoryview(data))
        hello = bytes(data)
        slab = self._store.find(slabwire.hello(hello))
        key = self._nobodys if slab is None else slab.secret
        nonce = self._env.entropy(NONCE_BYTES)
        await stream.write(handshake.challenge(key, hello, nonce))
        found = bytearray(PROOF_BYTES)
        await stream.read_into(memoryview(found))
        return slab if handshake.is_proof(bytes(found), handshake.proof_of_client(key, hello, nonce)) else None

    async def _requests(self, stream: ByteStream, slab: HostedSlab) -> None:
        header = bytearray(headers.REQUEST_BYTES)
        buffer = bytearray(REQUEST_PAGES_MAX * slab.page_bytes)
        while True:
            await stream.read_into(memoryview(header))
            try:
                request = headers.request(header, len(slab.versions), slabwire.OPERATIONS)
            except WireError:
                await stream.write(headers.pack_reply(Reply(Status.BAD, 0, 0)))
                raise
            match request.op:
                case Op.READ | Op.VERSIONS:
                    await self._read(stream, slab, request)
                case Op.WRITE | Op.DISCARD:
                    await self._write(stream, slab, request, memoryview(buffer))
                case Op.FLUSH:
                    raise AssertionError("not among the operations of a slab")

    async def _read(self, stream: ByteStream, slab: HostedSlab, request: Request) -> None:
        if not slab.live:
            raise WireError("the slab was taken back")
        first, count = request.page, request.pages
        reply = headers.pack_reply(Reply(Status.OK, count, request.tag))
        versions = memoryview(slab.versions)[first : first + count].cast("B").tobytes()
        if request.op is Op.VERSIONS:
            await stream.write(reply, versions)
        else:
            await stream.write(reply, versions, slab.has(first, count))

    async def _write(self, stream: ByteStream, slab: HostedSlab, request: Request, buffer: memoryview) -> None:
        versions = array("Q", bytes(request.pages * slabwire.VERSION_BYTES))
        await stream.read_into(memoryview(versions).cast("B"))
        pages = None
        if request.op is Op.WRITE:
            pages = buffer[: request.pages * slab.page_bytes]
            await stream.read_into(pages)
        if not slab.live:
            raise WireError("the slab was taken back")
        slab.put(request.page, versions, pages)
        await stream.write(headers.pack_reply(Reply(Status.OK, request.pages, request.tag)))


async def run_slabd(env: Env, config: SlabdConfig) -> None:
    """The program. Ends when the agent says `Stop`, or by SIGTERM; the slabs go with it."""
    store, stopped = SlabStore(config.lend_bytes), asyncio.Event()

    async def answer(question: Question) -> Answer:
        match question:
            case control.RegisterSlabFrame():
                store.register(question)
            case control.FreeSlabFrame():
                store.free(question.borrower, question.volume, question.index, question.epoch)
            case control.ListSlabs():
                held, more = store.listed(question.after, question.most)
                return SlabList(question.id, listener.address, held, store.refused, store.touched_bytes, more)
            case control.StopProgram():
                asyncio.get_running_loop().call_later(0.05, stopped.set)
            case _:
                return No(question.id, f"a slab process does not know {type(question).__name__}")
        return Yes(question.id)

    server = ControlServer(env, config.secret, answer)
    listener = await env.bytes.listen(config.bind, SlabServer(env, store).serve)
    try:
        await server.open(config.control)
        env.log.info("slab process serves", address=listener.address)
        await stopped.wait()
    finally:
        await server.close()
        await listener.close()


def _held(slab: HostedSlab) -> HeldSlab:
    touched = slab.touched * slab.page_bytes
    return HeldSlab(slab.borrower, slab.volume, slab.index, slab.epoch, len(slab.memory), slab.secret, touched)
