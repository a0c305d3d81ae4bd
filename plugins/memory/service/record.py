"""Record of what this plugin must find again after a restart of the agent: its processes and volumes. File
`memory/agent`.

Where each slab is placed is not in it: the volume's process knows that, and is asked; so is the slab process about
slabs lent.

The file is stored twice. Without it the agent would not know the secrets of its own processes, which keep running and
refuse it, nor that a volume whose pages are all here exists; so a lost or damaged one is read from its copy.
"""

import asyncio

import msgspec

from covey.ports.disk import Disk
from covey.ports.log import Logger
from covey.ports.processes import ProcessId
from covey.wire import checked
from plugins.memory.datapath import vold
from plugins.memory.machine.lending.earlier_volumes import EarlierVolume
from plugins.memory.policy.budgets import lent_bytes

FILE, COPY = "memory/agent", "memory/copy-of-agent"


class KnownProcess(msgspec.Struct, frozen=True):
    """One byte process of this plugin."""

    secret: bytes
    """Secret that the agent says on its control socket."""
    process: ProcessId | None = None
    """Its process id; None before the first start."""


class KnownVolume(msgspec.Struct, frozen=True):
    volume: str
    size_bytes: int
    page_bytes: int
    slab_bytes: int
    token: bytes
    """Token that a process must present to read and write."""
    uid: int
    """User to whom it belongs; -1: any user of this host."""
    process: KnownProcess
    tenant: str = ""
    """Tenant against whose budget it counts; empty: none."""
    job: str = ""
    """Job whose rank made it; empty: none."""
    sealed: bool = False
    """Its pages are sealed before they leave this host."""
    exports: tuple[str, ...] = ()
    """Unix sockets where it is offered as a block device."""
    swap: str = ""
    """Backend of the device as which it is swap of this host; empty: it is not."""
    members: int = 1
    """Members of each slab; with several the volume has no disk."""
    formed: bool = False
    """For a volume without a disk: every slab once had all of its members."""
    parity: bool = False
    """One member of each slab has the parity of the others' pages; otherwise each has all pages."""
    scratch: ProcessId | None = None
    """The process with which the volume goes; None: it stays until it is removed."""

    @property
    def data(self) -> int:
        """Members among which the pages of a slab are divided."""
        return self.members - 1 if self.parity else 1

    @property
    def slabs(self) -> int:
        return -(-self.size_bytes // (self.slab_bytes * self.data))

    @property
    def taken_bytes(self) -> int:
        """Bytes of other hosts' memory, when all of it is there, in whole slabs."""
        return self.slabs * self.slab_bytes * self.members

    @property
    def lent_page_bytes(self) -> int:
        """Bytes of a page at its lender."""
        return lent_bytes(self.page_bytes, self.page_bytes, self.sealed)

    @property
    def lent_slab_bytes(self) -> int:
        return lent_bytes(self.slab_bytes, self.page_bytes, self.sealed)


class VolumeOwner(msgspec.Struct, frozen=True):
    """Owner of a volume, in a file beside the volume's own files: these outlive a lost record of the agent."""

    uid: int
    """User of this host; -1: any."""


class SlabsOnDisk(msgspec.Struct, frozen=True):
    lending: KnownProcess | None = None
    volumes: tuple[KnownVolume, ...] = ()
    since: int = 0
    """Boot of the agent that began this record: it knows of every volume of this and later boots."""
    earlier: tuple[EarlierVolume, ...] = ()
    """Volumes of other hosts whose slabs here were freed without their borrower's word."""


_remembered = msgspec.msgpack.Decoder(SlabsOnDisk)
_owner = msgspec.msgpack.Decoder(VolumeOwner)


def owner_file(volume: str) -> str:
    return f"{vold.prefix(volume)}/owner"


class SlabRecord:
    """The record in memory and on disk. ValueError when both files are damaged, or one is and the other is lost."""

    def __init__(self, disk: Disk, log: Logger) -> None:
        self.now = SlabsOnDisk()
        self._disk, self._log = disk, log
        self._lock = asyncio.Lock()

    @property
    def since(self) -> int:
        return self.now.since

    async def load(self, boot: int) -> None:
        """Load the record. `boot`: boot of this agent, under which a record begins if there is none."""
        found, why = await self._read(FILE)
        if found is None:
            found, why_no_copy = await self._read(COPY)
            if found is not None:
                self._log.warning(
                    "a record was lost", file=self._disk.path(FILE), why=why or "no such file", next="its copy is used"
                )
            elif why or why_no_copy:
                both = f"{self._disk.path(FILE)} and {self._disk.path(COPY)}"
                what_then = f"restore one of them; or end slabd and every vold of this host, and delete {both}"
                raise ValueError(f"{why or why_no_copy}, and there is no other copy; {what_then}")
        self.now = found or SlabsOnDisk(since=boot)

    async def _read(self, name: str) -> tuple[SlabsOnDisk | None, str]:
        """The record, or why this file does not give it; neither when the file is not there."""
        try:
            return await checked.load(self._disk, name, _remembered), ""
        except checked.Damaged as error:
            return None, str(error)

    async def set_lending(self, lending: KnownProcess) -> None:
        await self._write(msgspec.structs.replace(self.now, lending=lending))

    async def make_volume(self, volume: KnownVolume) -> None:
        """Record a new volume, its owner first."""
        await checked.save(self._disk, owner_file(volume.volume), VolumeOwner(volume.uid))
        await self.set_volume(volume)

    async def has_files(self, volume: str) -> bool:
        """Does this host have the volume's pages, or the files that say where they are?"""
        return any(name != owner_file(volume) for name in await self._disk.names(f"{vold.prefix(volume)}/"))

    async def owner(self, volume: str) -> int | None:
        """The owner of a volume by its own files; None: they do not say."""
        try:
            found = await checked.load(self._disk, owner_file(volume), _owner)
        except (checked.Damaged, checked.OtherFormat):
            return None
        return None if found is None else found.uid

    async def set_volume(self, volume: KnownVolume) -> None:
        others = tuple(known for known in self.now.volumes if known.volume != volume.volume)
        await self._write(msgspec.structs.replace(self.now, volumes=(*others, volume)))

    async def set_earlier(self, earlier: tuple[EarlierVolume, ...]) -> None:
        await self._write(msgspec.structs.replace(self.now, earlier=earlier))

    async def forget_volume(self, name: str) -> None:
        others = tuple(known for known in self.now.volumes if known.volume != name)
        await self._write(msgspec.structs.replace(self.now, volumes=others))

    async def _write(self, new: SlabsOnDisk) -> None:
        """Write the record; it is durable on return. Concurrent calls all write the newest content."""
        self.now = new
        async with self._lock:
            await checked.save(self._disk, FILE, self.now)
            await checked.save(self._disk, COPY, self.now)
