"""The rules of a volume: which copy of a page is the newest, and when a write may be acknowledged.

    write   the next version, into the spill queue; if the slab is mapped, to the lender as well
            acknowledged when the lender has it (the disk follows), or, unmapped or failed, when the disk has it
    read    spill queue -> lender, if it holds the newest version -> lender being left, likewise -> disk
    flush   every write acknowledged before is on disk and synced

So at any moment the newest content of a page is in the queue or on disk, and the lender's copy is a faster one of the
same version. Losing the lender loses nothing; losing this process loses only the queue, and what was acknowledged of it
is at the lenders: `recover` asks each of them which versions it holds and brings home what is newer than the disk.

The five holes of Infiniswap's released code are closed by this shape: (1) a page's version changes when a write
begins, so the lender's older copy is not valid from then on, whether or not the write succeeds; (2) the queue is read
before the disk, so a read never overtakes a disk write that has not landed; (3) versions held belong to a connection
and go with it, the queue stays; (4) `flush`; (5) every slab has its own state, so one eviction holds up nobody else.
"""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from operator import eq
from typing import NamedTuple

import msgspec

from covey.ports import Env
from plugins.memory.datapath.backing import Backing, Page
from plugins.memory.datapath.control import OpenPlace, PageCounts, SlabCopied, SlabCounts, SlabLost, Told
from plugins.memory.datapath.remote_slab import RemoteSlab, SlabGone, SlabStale
from plugins.memory.datapath.slabwire import Versions
from plugins.memory.datapath.spill import SpillQueue
from plugins.memory.policy.settings import REQUEST_PAGES_MAX

COPY_PAGES = 32
"""Pages sent at once when a slab is filled in the background: little enough that requests get their turn."""
RECOVER_S = 10.0
"""How long a lender may be away while this process finds its slabs again; after that the disk's content counts."""
RECOVER_PAUSE_S = 0.25
GENERATION_BITS = 20
"""Upper bits of a version: how often this volume's process has started. The rest counts writes."""


class VolumeRecord(msgspec.Struct, frozen=True):
    """What a volume is; file `volume`."""

    size_bytes: int
    page_bytes: int
    slab_bytes: int
    generation: int
    """Counts starts of its process."""


class PlacesRecord(msgspec.Struct, frozen=True):
    """Which lenders may hold pages that the disk does not have yet; file `places`."""

    places: tuple[OpenPlace, ...]


class Shape(NamedTuple):
    """Sizes of a volume, bytes, and what its lenders know it by."""

    name: str
    size_bytes: int
    page_bytes: int
    slab_bytes: int

    @property
    def pages(self) -> int:
        return -(-self.size_bytes // self.page_bytes)

    @property
    def slab_pages(self) -> int:
        return self.slab_bytes // self.page_bytes

    @property
    def slabs(self) -> int:
        return -(-self.pages // self.slab_pages)


class Slab:
    """One slab of the volume: its places and its counters."""

    def __init__(self, index: int, first: int, pages: int) -> None:
        self.index, self.first, self.pages = index, first, pages
        self.link: RemoteSlab | None = None
        """Where writes go."""
        self.source: RemoteSlab | None = None
        """The place being left: still good for reading what has not been copied or rewritten."""
        self.requests = self.written = self.remote = 0
        self.changed = False
        """`remote` must be counted again."""
        self.ready = asyncio.Event()
        """Set once its lenders have been asked what they hold."""
        self.ready.set()

    def links(self) -> list[RemoteSlab]:
        return [link for link in (self.link, self.source) if link is not None]

    def holder(self, page: int, version: int) -> RemoteSlab | None:
        """Whoever holds `version` of this page of the volume."""
        for link in (self.link, self.source):
            if link is not None and link.usable and link.held[page - self.first] == version:
                return link
        return None


class Volume:
    """Reads, writes and places of one volume. Its files start with `prefix`; `tell` hears of slabs lost and copied."""

    def __init__(
        self, env: Env, shape: Shape, prefix: str, queue_pages: int, deadline_s: float, tell: Callable[[Told], None]
    ):
        self.shape = shape
        self.backing = Backing(env.disk, prefix, shape.pages, shape.page_bytes)
        self.queue = SpillQueue(env, self.backing, queue_pages)
        self.slabs = [
            Slab(index, index * shape.slab_pages, min(shape.slab_pages, shape.pages - index * shape.slab_pages))
            for index in range(shape.slabs)
        ]
        self._env, self._prefix, self._deadline_s, self._tell = env, prefix, deadline_s, tell
        self._version = 0
        self._places: dict[tuple[int, int], OpenPlace] = {}
        """By slab and epoch: every lender that may hold what the disk does not."""
        self._recording = asyncio.Lock()
        self._read_bytes = self._written_bytes = self._remote_read_bytes = self._disk_read_bytes = 0

    # ---- life ----

    async def open(self) -> None:
        """Load what the disk knows, and begin to ask the lenders. ValueError when the files are of another size."""
        record = await self._load_record()
        await self._env.disk.replace(f"{self._prefix}/volume", msgspec.msgpack.encode(record))
        self._version = record.generation << (64 - GENERATION_BITS)
        await self.backing.load()
        for slab in self.slabs:
            versions = self.backing.version[slab.first : slab.first + slab.pages]
            slab.written = slab.pages - versions.count(0)
        places = await self._load_places()
        self._places = {(place.index, place.epoch): place for place in places}
        self._env.spawn("spill", self.queue.run())
        for index in sorted({place.index for place in places}):
            self.slabs[index].ready.clear()
            mine = sorted((place for place in places if place.index == index), key=lambda place: place.epoch)
            self._env.spawn(f"recover slab {index}", self._recover(self.slabs[index], mine))

    async def _load_record(self) -> VolumeRecord:
        shape = self.shape
        found = await self._env.disk.read(f"{self._prefix}/volume")
        generation = 1
        if found is not None:
            known = msgspec.msgpack.decode(found, type=VolumeRecord)
            if (known.size_bytes, known.page_bytes, known.slab_bytes) != shape[1:]:
                raise ValueError(f"the disk holds {shape.name} with other sizes: {known}")
            generation = known.generation + 1
        return VolumeRecord(shape.size_bytes, shape.page_bytes, shape.slab_bytes, generation)

    async def _load_places(self) -> tuple[OpenPlace, ...]:
        found = await self._env.disk.read(f"{self._prefix}/places")
        if found is None:
            return ()
        places = msgspec.msgpack.decode(found, type=PlacesRecord).places
        return tuple(place for place in places if place.index < len(self.slabs))

    async def forget(self) -> None:
        """Delete everything durable."""
        await self.queue.drop()
        for slab in self.slabs:
            for link in slab.links():
                link.fail("the volume is forgotten")
        await self.backing.delete()
        for name in ("places", "volume"):
            await self._env.disk.delete(f"{self._prefix}/{name}")

    # ---- reading and writing ----

    async def write(self, first: int, count: int, pages: memoryview | None) -> None:
        """Write a run of pages; None: zeros. Returns when acknowledged by the rules above. OSError when neither lender
        nor disk took it: then it may or may not be what later reads find, until it is written again."""
        size = self.shape.page_bytes
        for slab, start, run in self._parts(first, count):
            part = None if pages is None else pages[(start - first) * size : (start - first + run) * size]
            await self._write_part(slab, start, run, part)
        self._written_bytes += count * size

    async def _write_part(self, slab: Slab, first: int, count: int, pages: memoryview | None) -> None:
        await slab.ready.wait()
        await self.queue.room(count)
        version = self._begin(slab, first, count, pages)
        link = slab.link
        if link is not None and link.usable:
            try:
                await link.write(first - slab.first, array("Q", (version,)) * count, pages)
                return
            except SlabGone as gone:
                self._lost(slab, link, str(gone))
        await self.queue.written(first, count, version)

    def _begin(self, slab: Slab, first: int, count: int, pages: memoryview | None) -> int:
        """From here on this is the newest content, and no lender holds it. Nothing awaits in here."""
        size = self.shape.page_bytes
        zeros = bytes(size) if pages is None else b""
        self._version += 1
        for at in range(count):
            page = first + at
            slab.written += self.queue.version(page) == 0
            data = zeros if pages is None else bytes(pages[at * size : (at + 1) * size])
            self.queue.put(page, Page(self._version, data))
        slab.requests += count
        slab.changed = True
        return self._version

    async def read(self, first: int, into: memoryview) -> None:
        """Fill `into` with a run of pages. OSError when a page cannot be had from anywhere."""
        size = self.shape.page_bytes
        count = len(into) // size
        for slab, start, run in self._parts(first, count):
            await slab.ready.wait()
            slab.requests += run
            await self._fetch(slab, start, into[(start - first) * size : (start - first + run) * size])
        self._read_bytes += count * size

    async def _fetch(self, slab: Slab, first: int, into: memoryview) -> Versions:
        """Fill `into` from wherever the newest content is; the versions of what is in it. A lender that fails on the
        way is given up, and the rest comes from elsewhere."""
        size = self.shape.page_bytes
        versions = array("Q")
        while len(versions) < len(into) // size:
            page = first + len(versions)
            rest = into[len(versions) * size :]
            queued = self.queue.newest(page)
            if queued is not None:
                rest[:size] = queued.data
                versions.append(queued.version)
                continue
            holder, run = self._same_holder(slab, page, len(rest) // size)
            if holder is None:
                versions.extend(await self.backing.read(page, rest[: run * size]))
                self._disk_read_bytes += run * size
                continue
            try:
                versions.extend(await self._fetch_remote(slab, holder, page, rest[: run * size]))
            except SlabGone as gone:
                self._lost(slab, holder, str(gone))
        return versions

    def _same_holder(self, slab: Slab, page: int, most: int) -> tuple[RemoteSlab | None, int]:
        """Who holds the newest content of `page`, None for the disk, and of how many pages in a row."""
        holder, run = self._holder(slab, page), 1
        while run < most and self.queue.newest(page + run) is None and self._holder(slab, page + run) is holder:
            run += 1
        return holder, run

    def _holder(self, slab: Slab, page: int) -> RemoteSlab | None:
        version = self.backing.version[page]
        return slab.holder(page, version) if version else None

    async def _fetch_remote(self, slab: Slab, holder: RemoteSlab, first: int, into: memoryview) -> Versions:
        """SlabGone also when the lender answers with something older than it acknowledged."""
        count = len(into) // self.shape.page_bytes
        wanted = self.backing.version[first : first + count]
        versions = await holder.read(first - slab.first, into)
        if any(got < want for got, want in zip(versions, wanted, strict=True)):
            holder.fail(f"{holder.place.lender} answered with older content than it acknowledged")
            raise SlabGone(holder.why)
        self._remote_read_bytes += len(into)
        return versions

    async def flush(self) -> None:
        """Every write acknowledged before is on disk and synced. OSError when it is not."""
        await self.queue.flush()

    def _parts(self, first: int, count: int) -> list[tuple[Slab, int, int]]:
        """A run of pages cut at slab boundaries: slab, first page, pages."""
        parts: list[tuple[Slab, int, int]] = []
        while count:
            slab = self.slabs[first // self.shape.slab_pages]
            run = min(count, slab.first + slab.pages - first)
            parts.append((slab, first, run))
            first, count = first + run, count - run
        return parts

    # ---- places ----

    async def open_place(self, place: OpenPlace) -> None:
        """Writes go there from now on; what was written before is copied in the background. ValueError says why not."""
        slab = self._slab(place.index)
        await slab.ready.wait()
        if any(link.place.epoch == place.epoch and link.usable for link in slab.links()):
            return
        if slab.link is not None and slab.link.place.epoch > place.epoch:
            raise ValueError(f"slab {place.index} is open under the newer epoch {slab.link.place.epoch}")
        try:
            link = await self._connect(place)
        except SlabGone as gone:
            raise ValueError(str(gone)) from gone
        await self._record(add=place)
        if slab.source is not None:
            slab.source.fail("left for good")
        slab.source, slab.link = slab.link, link
        slab.changed = True
        self._env.spawn(f"copy slab {slab.index}", self._copy_up(slab, link))

    async def close_place(self, index: int, epoch: int) -> None:
        """Returns when no request uses it and every page it holds is on disk as well."""
        slab = self._slab(index)
        await slab.ready.wait()
        link = next((link for link in slab.links() if link.place.epoch == epoch), None)
        if link is not None:
            await link.retire()
            self._drop(slab, link)
        await self.queue.drained(slab.first, slab.pages)
        await self._record(remove=(index, epoch))

    def places(self) -> tuple[OpenPlace, ...]:
        """Those in use, and those of slabs whose lenders are still being asked."""
        asking = [place for place in self._places.values() if not self.slabs[place.index].ready.is_set()]
        return (*asking, *(link.place for slab in self.slabs for link in slab.links() if slab.ready.is_set()))

    def _slab(self, index: int) -> Slab:
        if not 0 <= index < len(self.slabs):
            raise ValueError(f"{self.shape.name} has slabs 0 to {len(self.slabs) - 1}, none with index {index}")
        return self.slabs[index]

    async def _connect(self, place: OpenPlace) -> RemoteSlab:
        """A slab at a lender has its full size, also the last one of a volume that is smaller."""
        shape = self.shape
        return await RemoteSlab.open(self._env, shape.name, place, shape.slab_pages, shape.page_bytes, self._deadline_s)

    def _drop(self, slab: Slab, link: RemoteSlab) -> None:
        slab.changed = True
        if slab.link is link:
            # An older place that is still open becomes the place again: it may serve what it holds, and take writes.
            slab.link, slab.source = slab.source, None
        elif slab.source is link:
            slab.source = None

    def _lost(self, slab: Slab, link: RemoteSlab, why: str) -> None:
        """Reads go to queue and disk from now on, and the agent hears of it; forgotten when the disk has all."""
        link.fail(why)
        if link in slab.links() and not link.retiring:  # while it retires, `close_place` sees to the rest
            self._drop(slab, link)
            self._env.log.warning("lost a slab", slab=slab.index, lender=link.place.lender, why=why)
            self._tell(SlabLost(slab.index, link.place.epoch, why[:400]))
            self._env.spawn(f"settle slab {slab.index}", self._settle(slab, link.place.epoch))

    async def _settle(self, slab: Slab, epoch: int) -> None:
        await self.queue.drained(slab.first, slab.pages)
        await self._record(remove=(slab.index, epoch))

    async def _record(self, add: OpenPlace | None = None, remove: tuple[int, int] | None = None) -> None:
        """Durable before the first page goes to a new place, and until the last page of an old one is on disk."""
        async with self._recording:
            if add is not None:
                self._places[add.index, add.epoch] = add
            if remove is not None and self._places.pop(remove, None) is None:
                return
            record = PlacesRecord(tuple(self._places.values()))
            await self._env.disk.replace(f"{self._prefix}/places", msgspec.msgpack.encode(record))

    async def _copy_up(self, slab: Slab, link: RemoteSlab) -> None:
        """What was written before the slab was mapped goes up too, so that reads find it there. The paper waits for the
        next page-out instead (Infiniswap §2.4.1); a slab read more than written would stay on disk for ever."""
        size = self.shape.page_bytes
        buffer = memoryview(bytearray(COPY_PAGES * size))
        try:
            page = slab.first
            while page < slab.first + slab.pages and link.usable:
                run = self._missing(slab, link, page)
                if run:
                    versions = await self._fetch(slab, page, buffer[: run * size])
                    await link.write(page - slab.first, versions, buffer[: run * size])
                    slab.changed = True
                page += run or 1
        except SlabGone as gone:
            self._lost(slab, link, str(gone))
            return
        except OSError as error:
            self._env.log.warning("cannot copy a slab to its lender", slab=slab.index, why=str(error))
            return
        if link.usable:
            self._tell(SlabCopied(slab.index, link.place.epoch))

    def _missing(self, slab: Slab, link: RemoteSlab, page: int) -> int:
        """How many pages from `page` on were written and are not at `link` in their newest version."""
        run = 0
        while run < COPY_PAGES and page + run < slab.first + slab.pages:
            version = self.queue.version(page + run)
            if version == 0 or link.held[page + run - slab.first] == version:
                break
            run += 1
        return run

    # ---- after a restart ----

    async def _recover(self, slab: Slab, places: Sequence[OpenPlace]) -> None:
        """Bring home what the lenders of a slab hold and the disk does not; then it is ready. Oldest place first, so
        that the newest ends up as the place for writing."""
        for place in places:
            try:
                link = await self._reconnect(place)
                await self._bring_home(slab, link)
                slab.source, slab.link = slab.link, link
            except SlabGone as gone:
                self._env.log.warning("a lender did not come back", slab=slab.index, lender=place.lender, why=str(gone))
                self._tell(SlabLost(slab.index, place.epoch, str(gone)[:400]))
                await self._record(remove=(slab.index, place.epoch))
        slab.changed = True
        slab.ready.set()
        if slab.link is not None:
            await self._copy_up(slab, slab.link)

    async def _reconnect(self, place: OpenPlace) -> RemoteSlab:
        """A lender that says no means it, and so does its machine when nothing listens there any more: that process and
        what it held are gone. One that is silent gets `RECOVER_S`."""
        give_up_s = self._env.clock.now_s() + RECOVER_S
        while True:
            try:
                return await self._connect(place)
            except SlabStale:
                raise
            except SlabGone as gone:
                if isinstance(gone.__cause__, ConnectionRefusedError) or self._env.clock.now_s() >= give_up_s:
                    raise
            await asyncio.sleep(RECOVER_PAUSE_S)

    async def _bring_home(self, slab: Slab, link: RemoteSlab) -> None:
        versions = await link.versions()
        size = self.shape.page_bytes
        buffer = memoryview(bytearray(REQUEST_PAGES_MAX * size))
        page = 0
        while page < slab.pages:
            run = 0
            while (
                page + run < slab.pages
                and run < REQUEST_PAGES_MAX
                and versions[page + run] > self._here(slab, page + run)
            ):
                run += 1
            if run:
                got = await link.read(page, buffer[: run * size])
                await self.queue.room(run)
                for at, version in enumerate(got):
                    content = Page(version, bytes(buffer[at * size : (at + 1) * size]))
                    self.queue.put(slab.first + page + at, content)
            page += run or 1
        await self.queue.drained(slab.first, slab.pages)
        link.held[:] = versions

    def _here(self, slab: Slab, page: int) -> int:
        return self.queue.version(slab.first + page)

    # ---- counting ----

    def counts(self, id: int) -> PageCounts:
        """What the agent asks once a second."""
        slabs = tuple(self._count(slab) for slab in self.slabs if slab.requests or slab.written)
        return PageCounts(
            id=id,
            slabs=slabs,
            read_bytes=self._read_bytes,
            written_bytes=self._written_bytes,
            remote_read_bytes=self._remote_read_bytes,
            disk_read_bytes=self._disk_read_bytes,
            queued_pages=len(self.queue),
            torn_pages=self.backing.torn,
        )

    def _count(self, slab: Slab) -> SlabCounts:
        if slab.changed:
            slab.remote, slab.changed = self._remote_pages(slab), False
        return SlabCounts(slab.index, slab.requests, slab.written, slab.remote)

    def _remote_pages(self, slab: Slab) -> int:
        """Pages whose newest version the place for writing holds."""
        link = slab.link
        if link is None or not link.usable:
            return 0
        newest = self.backing.version[slab.first : slab.first + slab.pages]
        for page in self.queue.pages():
            if slab.first <= page < slab.first + slab.pages:
                newest[page - slab.first] = self.queue.version(page)
        current: int = sum(map(eq, link.held, newest))
        return current - newest.count(0)
