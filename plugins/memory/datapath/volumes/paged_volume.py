"""What every volume is, with or without a disk: cut into slabs, asked without waiting, written once its files can be,
and counted. Which copy of a page is the newest, and when a write may be acknowledged, are the rules of `volume` and
`mirror_volume`."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from covey.ports.env import Env
from covey.wire import checked
from plugins.memory.datapath.links.lender_link import LenderLinks
from plugins.memory.datapath.links.one_sided import OwnDisk
from plugins.memory.datapath.links.remote_slab import RemoteSlab
from plugins.memory.datapath.links.sealing import PageSeal
from plugins.memory.datapath.links.write_buffers import WriteBuffers
from plugins.memory.datapath.spill.places import Places
from plugins.memory.datapath.volumes.latencies import Latencies
from plugins.memory.datapath.volumes.lender_tasks import LenderTasks, PlacedSlab
from plugins.memory.datapath.volumes.slab import Slabs
from plugins.memory.datapath.wire.control import SLABS_TOLD, OpenPlace, PageCounts, SlabCounts
from plugins.memory.datapath.wire.shape import GENERATION_BITS, Shape, VolumeRecord, next_life, record_decoder

Done = Callable[[OSError | None], None]
"""Called once when a request is done; with the reason if it failed, else None."""
WRITABLE_S = 1.0
"""Seconds to pause before a volume that cannot be written looks at its disk again."""


async def settle(work: Coroutine[Any, Any, None], done: Done) -> None:
    """Await the work, and call `done` with its result."""
    try:
        await work
    except OSError as error:
        done(error)
    else:
        done(None)


class PagedSlab(PlacedSlab, Protocol):
    """Slab with pages `first` to `first` + `pages` - 1 of the volume."""

    first: int
    pages: int


V = TypeVar("V", bound=PagedSlab)


class PagedVolume(ABC, Generic[V]):
    """A volume whose files start with `prefix`. `slabs` are made by `make`, as `Slabs` wants it, with
    `shape.slab_pages` pages each, of which `lent_pages` are at each lender; 0: all."""

    lenders: LenderTasks[Any]

    def __init__(
        self,
        env: Env,
        shape: Shape,
        prefix: str,
        deadline_s: float,
        sealed: bool,
        make: Callable[[int, int, int, Callable[[V], None]], V],
        disk: OwnDisk | None = None,
        lent_pages: int = 0,
    ) -> None:
        self.shape = shape
        self._page_bytes, self._slab_pages = shape.page_bytes, shape.slab_pages
        """Copies for the request path: one of them is a property of `shape`, which is slow even when compiled."""
        self.slabs = Slabs(shape.pages, shape.slab_pages, make)
        self.places = Places(env.disk, env.log, prefix)
        self.read_only = ""
        """Why the volume cannot be written, for people; empty: it can."""
        self.opening = "it reads its record"
        """Why the volume does not answer yet, for people."""
        self.buffers = WriteBuffers()
        self.latencies = Latencies()
        self._env, self._prefix, self._sealed = env, prefix, sealed
        self._links = LenderLinks(env, shape.name, lent_pages or shape.slab_pages, shape.page_bytes, deadline_s, disk)
        """Links to the lenders. A slab at a lender has full size, even the last one of a volume, which may be
        smaller."""
        self._version = 0
        self._life = int.from_bytes(env.entropy(7), "little")
        self._read_bytes = self._written_bytes = self._remote_read_bytes = 0

    def may_map(self, may: bool) -> None:
        """Allow or forbid to map slabs of this host that are attached from now on."""
        self._links.may_map = may

    # ---- life ----

    async def _record(self) -> VolumeRecord:
        """The record of the volume that this process will write. ValueError when the disk has another kind of volume,
        or is damaged."""
        known = await checked.load(self._env.disk, f"{self._prefix}/volume", record_decoder)
        record = next_life(known, self.shape, self._sealed, self._env.entropy)
        self._links.seal_with(PageSeal(record.key, self.shape.page_bytes, self._env.entropy) if record.key else None)
        self._version = record.generation << (64 - GENERATION_BITS)
        return record

    @abstractmethod
    async def _make_writable(self, record: VolumeRecord) -> None:
        """Make the volume writable: before the first write, versions must be above all earlier ones. OSError when the
        disk refuses."""

    async def _writable_soon(self, record: VolumeRecord) -> None:
        """Make the volume writable now, or as soon as the disk allows: a disk that can be read but not written is no
        reason not to serve reads."""
        try:
            await self._make_writable(record)
        except OSError as error:
            self._refuse_writes(record, error)

    def _refuse_writes(self, record: VolumeRecord, error: OSError) -> None:
        self.read_only = f"its files cannot be written: {error}"
        self._env.log.error("the volume is read-only until its files can be written", why=str(error))
        self._env.spawn("make the volume writable", self._wait_writable(record))

    async def _wait_writable(self, record: VolumeRecord) -> None:
        while self.read_only:
            await asyncio.sleep(WRITABLE_S)
            try:
                await self._make_writable(record)
            except OSError as error:
                self.read_only = f"its files cannot be written: {error}"
        self._env.log.info("the volume can be written again")

    async def forget(self) -> None:
        """Delete everything durable."""
        self.lenders.shut()
        await self._delete_pages()
        await self.places.delete()
        await self._env.disk.delete(f"{self._prefix}/volume")

    async def _delete_pages(self) -> None:
        """Delete the pages on this host's disk."""

    # ---- requests ----

    @abstractmethod
    async def flush(self) -> None:
        """Make everything acknowledged before safe. OSError: not all of it is."""

    def submit_flush(self, done: Done) -> None:
        self._env.spawn("flush", settle(self.flush(), done))

    def _slab_of(self, first: int, count: int) -> V | None:
        """The slab that has all of these pages; None when they are in several."""
        size = self._slab_pages
        index = first // size
        return self.slabs[index] if (first + count - 1) // size == index else None

    def _parts(self, first: int, count: int) -> list[tuple[V, int, int]]:
        """A run of pages cut at slab boundaries: slab, first page, pages."""
        parts: list[tuple[V, int, int]] = []
        while count:
            slab = self.slabs[first // self._slab_pages]
            run = min(count, slab.first + slab.pages - first)
            parts.append((slab, first, run))
            first, count = first + run, count - run
        return parts

    # ---- places ----

    def slab(self, number: int) -> V:
        """The slab of which lenders know a place under this number. ValueError when there is none."""
        try:
            return self.slabs[self._index_of(number)]
        except IndexError as error:
            raise ValueError(f"{self.shape.name} has {error}") from error

    def _index_of(self, number: int) -> int:
        return number

    async def give_up(self, number: int, epoch: int, why: str) -> None:
        """The lender of this place has lost it. ValueError when there is no such slab."""
        await self.lenders.give_up(self.slab(number), epoch, why)

    def _requested(self) -> int:
        """Bytes ever read and written by requests."""
        return self._read_bytes + self._written_bytes

    async def _connect(self, place: OpenPlace, within_s: float | None) -> RemoteSlab:
        return await self._links.open(self.places.now(place), within_s)

    # ---- counting ----

    @property
    @abstractmethod
    def trouble(self) -> str:
        """Trouble of the volume, for people; empty: none."""

    @abstractmethod
    def _lines(self, slab: V) -> Iterable[SlabCounts]:
        """Counts of the slab: one for each number under which lenders know a part of it."""

    @property
    def _on_disk(self) -> tuple[int, int, int]:
        """Bytes read from this host's disk, pages that wait for it, pages found torn there."""
        return 0, 0, 0

    def counts(self, id: int, life: int = 0, since: int = 0) -> PageCounts:
        """Counts for the agent's question once a second: it costs time for the slabs that changed since an answer with
        this `life` and `upto`, and none for the others."""
        changed, upto = self.slabs.changed(since if life == self._life else 0, self._slabs_told)
        disk_read_bytes, queued_pages, torn_pages = self._on_disk
        return PageCounts(
            id=id,
            slabs=self._all_lines(changed),
            read_bytes=self._read_bytes,
            written_bytes=self._written_bytes,
            remote_read_bytes=self._remote_read_bytes,
            disk_read_bytes=disk_read_bytes,
            queued_pages=queued_pages,
            torn_pages=torn_pages,
            places=self.lenders.now(changed),
            links_reopened=self.lenders.reopened,
            unrecovered=self.lenders.unrecovered,
            trouble=self.trouble[:400],
            life=self._life,
            upto=upto,
            latencies=self.latencies.told(),
            rdma_slabs=self._links.one_sided,
            map_why=self._links.map_why[:400],
            mapped_slabs=self._links.mapped,
            rdma_failed=self._links.verbs.failed,
            rdma_why=self._links.verbs.why[:400],
            pages_refused=self._links.refused,
        )

    @property
    def _slabs_told(self) -> int:
        """Most slabs that are reported in one answer."""
        return SLABS_TOLD

    def _all_lines(self, changed: Sequence[V]) -> tuple[SlabCounts, ...]:
        return tuple(line for slab in changed for line in self._lines(slab))
