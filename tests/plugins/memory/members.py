"""Volumes without a disk over loopback sockets: their members are slabs of one store, which listens at an address for
each lender."""

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar, cast

from agent.tasks import Tasks
from covey.ports.env import Env
from plugins.memory.datapath.lending.slab_store import HostedSlab
from plugins.memory.datapath.volumes.members.mirror_volume import MirrorVolume
from plugins.memory.datapath.volumes.members.parity_volume import ParityVolume
from plugins.memory.datapath.wire.control import OpenPlace
from plugins.memory.datapath.wire.shape import Shape

from .ports import PAGE, SHAPE, Bench, QuietLog, page, soon

V = TypeVar("V", MirrorVolume, ParityVolume)
NAMES = {0: "h2", 1: "h3"}


class Membered(ABC, Generic[V]):
    """The volume and its processes, which run one after another."""

    volume: V
    _tasks: Tasks

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    @abstractmethod
    def make(self, env: Env, deadline_s: float) -> V: ...

    async def start(self, deadline_s: float = 5.0) -> None:
        self._tasks = Tasks(QuietLog(), lambda name, error: self.bench.failures.append(error))
        env = Env(**{**self.bench.env.__dict__, "spawn": self._tasks.spawn})
        self.volume = self.make(env, deadline_s)
        await self.volume.open()

    async def die(self) -> None:
        self.volume.lenders.shut()
        await self._tasks.cancel_all()

    def whole(self) -> list[int]:
        return self.volume.slab(0).mirror.whole

    def at(self, number: int) -> HostedSlab:
        """The slab that the lender of this member holds."""
        return self.bench.store.slabs["h1", "data", number]

    def word(self, number: int, at: int) -> int:
        return int.from_bytes(self.at(number).has(at, 1)[:8], "little")

    def sessions(self, number: int) -> list[Any]:
        return [cast(Any, user) for user in self.at(number).users]

    def ignore(self, number: int) -> None:
        """Let requests about that member arrive, and do nothing about them."""
        for session in self.sessions(number):
            do: Any = session._do
            session._do = lambda asked, slab, do=do: None if slab is self.at(number) else do(asked, slab)

    def free(self, number: int) -> None:
        """Have the lender of this member take its slab back at once."""
        self.bench.store.free("h1", "data", number, self.at(number).epoch)

    async def write(self, first: int, *words: int) -> None:
        await self.volume.write(first, len(words), memoryview(b"".join(page(word) for word in words)))

    async def read(self, first: int, count: int) -> list[int]:
        data = bytearray(count * PAGE)
        await self.volume.read(first, memoryview(data))
        words = [int.from_bytes(data[at * PAGE : at * PAGE + 8], "little") for at in range(count)]
        assert data == b"".join(page(word) for word in words)
        return words


class Mirrored(Membered[MirrorVolume]):
    """A mirrored volume of two members."""

    second: Any = None
    """The server at whose address the lenders of the second members listen."""

    def make(self, env: Env, deadline_s: float) -> MirrorVolume:
        return MirrorVolume(env, SHAPE, "memory/volumes/data", deadline_s, self.bench.told.append, self.bench.sealed)

    def place(self, number: int, epoch: int, lender: str = "") -> OpenPlace:
        found = self.bench.register(number, epoch)
        address = self.second.address if number % 2 and self.second is not None else found.address
        return OpenPlace(number, epoch, lender or NAMES[number], address, found.secret)

    async def form(self) -> None:
        """Open slab 0 on h2 (epoch 1) and on h3 (epoch 2)."""
        await self.volume.open_place(self.place(0, 1))
        await self.volume.open_place(self.place(1, 2))
        await soon(lambda: self.whole() == [1, 2])

    def cut(self, number: int) -> None:
        """Break the connections to that member, while its lender goes on."""
        for session in self.sessions(number):
            session._stream.close()


class Striped(Membered[ParityVolume]):
    """A volume with parity. Member m of a slab is at a lender of its own."""

    def __init__(self, bench: Bench, data: int = 2) -> None:
        super().__init__(bench)
        self.data = data
        self.listening: list[Any] = []

    def make(self, env: Env, deadline_s: float) -> ParityVolume:
        slab_pages = SHAPE.slab_pages * self.data
        shape = Shape("data", (slab_pages + 7) * PAGE, PAGE, slab_pages * PAGE)
        tell, sealed = self.bench.told.append, self.bench.sealed
        return ParityVolume(env, shape, "memory/volumes/data", deadline_s, tell, self.data, sealed)

    async def place(self, number: int, epoch: int) -> OpenPlace:
        """A place at a lender that no other place has."""
        found = self.bench.register(number, epoch)
        self.listening.append(await self.bench.env.bytes.listen("127.0.0.1:0", self.bench.server.serve))
        return OpenPlace(number, epoch, f"l{epoch}", self.listening[-1].address, found.secret)

    async def open(self, number: int, epoch: int) -> None:
        await self.volume.open_place(await self.place(number, epoch))

    async def form(self) -> None:
        """Open member m of slab 0 under epoch m + 1."""
        for number in range(self.data + 1):
            await self.open(number, number + 1)
        await soon(lambda: self.whole() == list(range(1, self.data + 2)))
