"""What this plugin must find again after a restart of the agent: its processes and volumes. File `memory/agent`.

Which slab lies where is not in it: the volume's process knows that, and is asked. The same for slabs lent.
"""

import asyncio

import msgspec

from covey.ports import Disk, ProcessId
from covey.wire import checked
from plugins.memory.machine.lending.earlier_volumes import EarlierVolume
from plugins.memory.policy.budgets import lent_bytes

FILE = "memory/agent"


class KnownProcess(msgspec.Struct, frozen=True):
    """One of our byte processes."""

    secret: bytes
    """What we say on its control socket."""
    process: ProcessId | None = None
    """None before the first start."""


class KnownVolume(msgspec.Struct, frozen=True):
    volume: str
    size_bytes: int
    page_bytes: int
    slab_bytes: int
    token: bytes
    """What a process must present to read and write."""
    uid: int
    """Whose it is; -1: any user of this host."""
    process: KnownProcess
    tenant: str = ""
    """Against whose budget it counts; empty: nobody's."""
    job: str = ""
    """Whose rank made it; empty: nobody's."""
    sealed: bool = False
    """Its pages are sealed before they leave this host."""
    exports: tuple[str, ...] = ()
    """Unix sockets where it is offered as a block device."""
    swap: str = ""
    """The backend of the device as which it is swap of this host; empty: it is not."""
    members: int = 1
    """Of each slab; with several it has no disk."""
    formed: bool = False
    """Of one without a disk: every slab once had all of its members."""
    parity: bool = False
    """One member of each slab has the parity of the others' pages; otherwise each has all pages."""

    @property
    def data(self) -> int:
        """Members among which the pages of a slab are divided."""
        return self.members - 1 if self.parity else 1

    @property
    def slabs(self) -> int:
        return -(-self.size_bytes // (self.slab_bytes * self.data))

    @property
    def taken_bytes(self) -> int:
        """Of other hosts' memory, when all of it is there, in whole slabs."""
        return self.slabs * self.slab_bytes * self.members

    @property
    def lent_page_bytes(self) -> int:
        """Of a page at its lender."""
        return lent_bytes(self.page_bytes, self.page_bytes, self.sealed)

    @property
    def lent_slab_bytes(self) -> int:
        return lent_bytes(self.slab_bytes, self.page_bytes, self.sealed)


class SlabsOnDisk(msgspec.Struct, frozen=True):
    lending: KnownProcess | None = None
    volumes: tuple[KnownVolume, ...] = ()
    since: int = 0
    """The boot of the agent that began this record: it knows of every volume of later ones."""
    earlier: tuple[EarlierVolume, ...] = ()
    """Of which other hosts had slabs here that were freed without their word."""


_remembered = msgspec.msgpack.Decoder(SlabsOnDisk)


class SlabRecord:
    """The record in memory and on disk. ValueError when the file is damaged."""

    def __init__(self, disk: Disk) -> None:
        self.now = SlabsOnDisk()
        self._disk = disk
        self._lock = asyncio.Lock()

    @property
    def since(self) -> int:
        return self.now.since

    async def load(self, boot: int) -> None:
        """`boot`: of this agent, under which a record begins that is not there."""
        try:
            self.now = await checked.load(self._disk, FILE, _remembered) or SlabsOnDisk(since=boot)
        except checked.Damaged as error:
            what_then = "put it back from a copy; or end slabd and every vold of this host, and delete it"
            raise ValueError(f"{error}; {what_then}") from error

    async def set_lending(self, lending: KnownProcess) -> None:
        await self._write(msgspec.structs.replace(self.now, lending=lending))

    async def set_volume(self, volume: KnownVolume) -> None:
        others = tuple(known for known in self.now.volumes if known.volume != volume.volume)
        await self._write(msgspec.structs.replace(self.now, volumes=(*others, volume)))

    async def set_earlier(self, earlier: tuple[EarlierVolume, ...]) -> None:
        await self._write(msgspec.structs.replace(self.now, earlier=earlier))

    async def forget_volume(self, name: str) -> None:
        others = tuple(known for known in self.now.volumes if known.volume != name)
        await self._write(msgspec.structs.replace(self.now, volumes=others))

    async def _write(self, new: SlabsOnDisk) -> None:
        """Durable on return. The newest content is written, whoever comes first."""
        self.now = new
        async with self._lock:
            await checked.save(self._disk, FILE, self.now)
