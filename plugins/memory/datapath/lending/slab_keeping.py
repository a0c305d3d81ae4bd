"""A slab process's end of its keeper: what was held is taken up, what is lent is handed over, and another keeper is
started when one ends.

Handing over costs a borrower nothing: a slab is lent at once, and outlives this process from when the keeper has it, a
fraction of a millisecond later. What was freed is dropped in the same way; until then its memory says itself that it
does not count (`slab_memory`).
"""

import asyncio
from collections import deque

from covey.ports.env import Env
from covey.ports.streams import ByteStream
from covey.wire.frames import read_frame, write_frame
from plugins.memory.datapath.lending.slab_keeper import (
    SOCKET,
    DropMemory,
    EndKeeper,
    KeeperConfig,
    KeeperDone,
    KeeperHello,
    KeepMemory,
    KeptAddress,
    KeptMemory,
    KeptNow,
    Told,
    said_decoder,
)
from plugins.memory.datapath.lending.slab_store import SlabStore
from plugins.memory.datapath.wire.slab_memory import SlabPages

PAUSE_S = 2.0
"""Seconds before another keeper is started: when memory runs out the kernel kills the keeper first, and the slab
process next."""
LOOK_S = 0.02
ANSWER_S = 5.0
LOOK_AGAIN_S = 1.0
"""Seconds within which the end of a keeper is noticed while nothing is sent to it."""


class SlabKeeping:
    """The link of one slab process to its keeper. Call `take_up` first, then run `run` as a task."""

    def __init__(self, env: Env, secret: bytes, store: SlabStore) -> None:
        self.why = "slab-keeper starts"
        """Why slabs end with this process, for people; empty: they do not."""
        self._env, self._secret, self._store = env, secret, store
        self._stream: ByteStream | None = None
        self._numbers: dict[SlabPages, int] = {}
        self._next = 1
        self._address = ""
        self._todo: deque[Told] = deque()
        self._wake = asyncio.Event()
        store.on_kept, store.on_freed = self._lent, self._freed

    async def take_up(self) -> str:
        """Put the slabs that an earlier process of this host lent into the store; returns where that one listened.
        Without a keeper there are no slabs, and no address."""
        try:
            address, memories = await self._connect()
        except (OSError, TimeoutError):
            return ""
        for memory in memories:
            self._next = max(self._next, memory.number + 1)
        for memory in memories:
            if not self._take_up(memory):
                self._tell(DropMemory(memory.number))
        self._env.log.info("slabs taken up", slabs=len(self._numbers), of=len(memories), address=address)
        return address

    def _take_up(self, memory: KeptMemory) -> bool:
        try:
            shared = self._env.pages.open_ring(memory.name, memory.size, sparse=True)
        except OSError as error:
            self._env.log.warning("the memory of a slab cannot be taken up", number=memory.number, why=str(error))
            return False
        kept = self._store.take_up(shared)
        if kept is None:
            shared.close()
            return False
        self._numbers[kept] = memory.number
        return True

    def listens(self, address: str) -> None:
        """Remember where this process listens: the next process of this host will try to listen there too."""
        self._address = address
        self._tell(KeptAddress(address))

    # ---- what changes ----

    def _lent(self, slab: SlabPages) -> None:
        self._numbers[slab] = self._next
        self._next += 1
        self._tell(self._keep(slab))

    def _keep(self, slab: SlabPages) -> KeepMemory:
        return KeepMemory(self._numbers[slab], slab.shared.name, slab.size)

    def _freed(self, slab: SlabPages) -> None:
        number = self._numbers.pop(slab, None)
        if number is not None:
            self._tell(DropMemory(number))

    def _tell(self, what: Told) -> None:
        """Send to the keeper, in order; nothing while there is none, since the next one is told everything."""
        if self._stream is not None:
            self._todo.append(what)
            self._wake.set()

    # ---- the keeper ----

    async def run(self) -> None:
        """Keep a keeper running for as long as the slab process runs."""
        while True:
            try:
                if self._stream is None:
                    await self._found_or_started()
                self.why = ""
                await self._go_on()
            except (OSError, TimeoutError) as error:
                self.why = f"slab-keeper does not run: {str(error) or type(error).__name__}"[:200]
                self._env.log.warning("slab-keeper is gone; another one is started", why=str(error))
            self._let_go()
            await asyncio.sleep(PAUSE_S)

    async def _found_or_started(self) -> None:
        try:
            _, memories = await self._connect()
        except ConnectionError:
            await self._start()
            _, memories = await self._connect()
        held = {memory.number for memory in memories}
        ours = set(self._numbers.values())
        for number in sorted(held - ours):
            self._tell(DropMemory(number))
        for slab, number in self._numbers.items():
            if number not in held:
                self._tell(self._keep(slab))
        if self._address:
            self._tell(KeptAddress(self._address))

    async def _start(self) -> None:
        started = await self._env.processes.start_program("keeper", SOCKET, KeeperConfig(secret=self._secret))
        while self._env.processes.find(started.id) is not None:
            try:
                (await self._env.bytes.connect(f"unix:{self._env.run_dir}/{SOCKET}.sock")).close()
                return
            except ConnectionError:
                await asyncio.sleep(LOOK_S)
        raise ConnectionRefusedError(f"slab-keeper ended; see logs/{SOCKET}.log")

    async def _connect(self) -> tuple[str, list[KeptMemory]]:
        """Connect; returns where the earlier slab process listened, and what is held. ConnectionError when there is no
        keeper, TimeoutError when it is silent."""
        stream = await self._env.bytes.connect(f"unix:{self._env.run_dir}/{SOCKET}.sock")
        memories: list[KeptMemory] = []
        try:
            async with asyncio.timeout(ANSWER_S):
                await write_frame(stream, KeeperHello(self._secret))
                said = await read_frame(stream, said_decoder)
                while isinstance(said, KeptNow):
                    memories += said.memories
                    if not said.more:
                        self._stream = stream
                        return said.address, memories
                    said = await read_frame(stream, said_decoder)
            raise ConnectionAbortedError("slab-keeper gave an unexpected answer")
        finally:
            if self._stream is not stream:
                stream.close()

    async def _go_on(self) -> None:
        """Send what is to be told. ConnectionError when the keeper ends, noticed at the next message or within
        `LOOK_AGAIN_S`."""
        stream = self._stream
        assert stream is not None
        while True:
            while self._todo:
                await self._ask(stream, self._todo.popleft())
            self._wake.clear()
            try:
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self._wake.wait()
            except TimeoutError:
                await self._ask(stream, KeptAddress(self._address))

    async def _ask(self, stream: ByteStream, what: Told) -> None:
        async with asyncio.timeout(ANSWER_S):
            await write_frame(stream, what)
            said = await read_frame(stream, said_decoder)
        lent = isinstance(what, KeepMemory) and what.number in self._numbers.values()
        if lent and isinstance(said, KeeperDone) and said.why:
            self._env.log.warning("a slab is not kept", why=said.why)

    def _let_go(self) -> None:
        stream, self._stream = self._stream, None
        self._todo.clear()
        if stream is not None:
            stream.close()

    async def end(self) -> None:
        """End for good and in good order: the keeper frees what it holds, and ends."""
        if self._stream is not None:
            try:
                await self._ask(self._stream, EndKeeper())
            except (OSError, TimeoutError):
                self._env.log.warning("slab-keeper did not end")
        self._let_go()
