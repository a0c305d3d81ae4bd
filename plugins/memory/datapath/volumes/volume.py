"""The rules of a volume: which copy of a page is the newest, and when a write may be acknowledged.

    write   the next version, into the ring of the spill log; if the slab is mapped, to the lender as well
            acknowledged when the lender has it (the disk follows), or, unmapped or failed, when the log has it
    read    ring -> lender, if it holds the newest version -> lender being left, if it does -> spill log
    flush   every write acknowledged before is in the log and synced

So at any moment the newest content of a page is in the ring or in the log, and the lender's copy is a faster one of the
same version. Losing the lender loses nothing, nor does the death of the writer alone, nor that of this process alone,
after which the log's writer saves what of the ring is not durable in the log. Losing both, or power, loses only the
ring, and what was acknowledged of it is at the lenders: the next process asks each of them which versions it holds and
copies what is newer than the log back to this host (`lenders`). Until a lender has answered, reads of pages of which it
may hold a newer version wait; they are not answered from the disk. It cannot hold a newer one of a page that was
flushed and not written since (`flushed_regions`).

The five holes of Infiniswap's released code are closed by this shape: (1) a page's version changes when a write
begins, so the lender's older copy is not valid from then on, whether or not the write succeeds; (2) the ring is read
before the disk, so a read never overtakes a disk write that has not landed; (3) versions held belong to a connection
and go with it, the ring stays; (4) `flush`; (5) every slab has its own state, so one eviction holds up nobody else.
"""

import contextlib
import errno
from array import array
from collections.abc import Callable
from operator import ge

import numpy as np

from covey.ports.env import Env
from covey.wire import checked
from plugins.memory.datapath.links.remote_slab import RemoteSlab, SlabGone
from plugins.memory.datapath.links.write_buffers import WriteBuffers
from plugins.memory.datapath.spill.spill import Spill, named
from plugins.memory.datapath.volumes.flushed_regions import FlushedRegions
from plugins.memory.datapath.volumes.latencies import Answerer
from plugins.memory.datapath.volumes.lender_tasks import LentVolume
from plugins.memory.datapath.volumes.lenders import Lenders
from plugins.memory.datapath.volumes.paged_volume import Done, PagedVolume, settle
from plugins.memory.datapath.volumes.slab import SlabMemory
from plugins.memory.datapath.wire.control import OpenPlace, SlabCounts, Told
from plugins.memory.datapath.wire.shape import Shape, VolumeRecord
from plugins.memory.datapath.wire.slabwire import Versions

FEW = 16
"""Pages of a slab that are looked at first."""


class SubmittedWrite:
    """A write under way to a lender; its last record in the ring is the one before number `number`."""

    __slots__ = ("began_s", "count", "done", "first", "link", "number", "pages", "slab", "version", "volume")

    def __init__(
        self,
        volume: "Volume",
        slab: SlabMemory,
        link: RemoteSlab,
        first: int,
        count: int,
        pages: memoryview | None,
        began_s: float,
        done: Done,
    ) -> None:
        self.volume, self.slab, self.link = volume, slab, link
        self.first, self.count, self.pages = first, count, pages
        self.began_s, self.done = began_s, done
        self.version = self.number = 0

    def answered(self, did: bool, versions: Versions) -> None:
        self.volume.write_answered(self, did)


class SubmittedRead:
    """A read of pages whose newest content a lender is known to hold."""

    __slots__ = ("began_s", "done", "first", "into", "link", "volume", "wanted")

    def __init__(
        self,
        volume: "Volume",
        link: RemoteSlab,
        first: int,
        into: memoryview,
        wanted: Versions,
        began_s: float,
        done: Done,
    ) -> None:
        self.volume, self.link, self.first, self.into = volume, link, first, into
        self.wanted, self.began_s, self.done = wanted, began_s, done

    def answered(self, did: bool, versions: Versions) -> None:
        self.volume.read_answered(self, did, versions)


class Volume(PagedVolume[SlabMemory]):
    """Reads, writes and places of one volume. Its files start with `prefix`; `tell` is called when a slab is
    lost or copied."""

    def __init__(
        self,
        env: Env,
        shape: Shape,
        prefix: str,
        queue_pages: int,
        deadline_s: float,
        tell: Callable[[Told], None],
        sealed: bool = False,
    ):
        spill = Spill(env, shape.name, prefix, shape.pages, shape.page_bytes, queue_pages)
        super().__init__(env, shape, prefix, deadline_s, sealed, SlabMemory, spill)
        self.spill = spill
        self.buffers = WriteBuffers(shape.page_bytes)
        self.lenders: Lenders = Lenders(
            env,
            LentVolume(self.slabs, shape.page_bytes, self.places, self._connect, self._fetch, tell),
            spill,
            self._requested,
        )
        self.regions = FlushedRegions(env, prefix, shape.slab_pages)
        self.opening = "it reads its log"
        self._ours = 0
        self._opened = False
        self._now_s = env.clock.now_s
        self._disk_read_bytes = 0

    # ---- life ----

    async def open(self) -> None:
        """Load what the disk knows, and begin to ask the lenders. ValueError when the files are of another size, or are
        damaged. A disk that can be read but not written is no reason not to serve reads."""
        record = await self._record()
        self._ours = self._version
        await self.spill.open(record.generation)
        await self.places.load(len(self.slabs))
        await self.regions.load()
        await self._writable_soon(record)
        self._env.spawn("spill", self.spill.run())
        self._count_written()
        self.lenders.find_again(self.places.all(), self.places.clean)
        self._opened = True  # whoever ends before leaves the lenders to the next one

    def _count_written(self) -> None:
        """Count written pages slab by slab, where the disk has any."""
        size = self._slab_pages
        for index in self.spill.table.slabs_in_use(size):
            slab = self.slabs[index]
            slab.written = self.spill.count_written(slab.first, slab.pages)
            slab.touch()

    async def _make_writable(self, record: VolumeRecord) -> None:
        """Make the volume writable. Before the first write its versions must be above all earlier ones, records that a
        loss of power left torn must be settled, and the file of places must not say any more that the last process
        ended in good order."""
        await checked.save(self._env.disk, f"{self._prefix}/volume", record)
        await self.spill.settle()
        await self.regions.take_over()
        if self.places.clean:
            await self.places.write()
        self.read_only = ""

    async def end(self) -> None:
        """End in good order: everything is on disk, and the file of places says so. Nothing may be written any more.
        OSError when it is not. A volume that could not be opened writes nothing: it does not know which records are
        torn, nor where pages are."""
        if not self._opened:
            return
        await self.spill.flush()
        if not self.read_only and all(slab.sure.is_set() for slab in self.slabs):
            await self.places.write(clean=True)
        await self.spill.stop()

    async def _delete_pages(self) -> None:
        await self.spill.delete()
        await self.regions.delete()

    async def close(self) -> None:
        """End the log's writer; nothing is written any more."""
        await self.spill.close()

    # ---- requests that nobody awaits ----

    def submit_write(self, first: int, count: int, pages: memoryview | None, done: Done) -> None:
        """`write` for callers that have many under way: `done` is called once, with None or why not. No task is made
        when the slab's lender takes the write at once. `pages` must stay as it is until then, and for good unless it
        came from `buffers`."""
        slab = self._slab_of(first, count)
        link = None if slab is None else slab.link
        spill = self.spill
        plain = not self.read_only and spill.fits(count) and self.regions.covers(first, count)
        if slab is None or link is None or not link.usable or not plain:
            self._env.spawn("write", settle(self.write(first, count, pages), done))
            return
        write = SubmittedWrite(self, slab, link, first, count, pages, self._now_s(), done)
        write.version = self._begin(slab, first, count, pages)
        write.number = spill.log.put
        link.send_write(first - slab.first, count, write.version, pages, write.answered)

    def write_answered(self, write: SubmittedWrite, did: bool) -> None:
        """The lender answered a write, or its link did with no."""
        self._written_bytes += write.count * self._page_bytes
        if did:
            self._acknowledged(write.slab, write.link, write.first, write.count, write.version)
            self.latencies.to_lenders.add(self._now_s() - write.began_s)
            write.done(None)
        else:
            self.buffers.spoil(write.pages)
            self._env.spawn("write", settle(self._wait_written(write.number, write.began_s), write.done))

    def _acknowledged(self, slab: SlabMemory, link: RemoteSlab, first: int, count: int, version: int) -> None:
        """Note that the lender has a run of pages under one version; pages that are still the newest count as held."""
        table = self.spill.table
        if count == 1:
            if table.versions[first] == version:
                link.held.add(first - slab.first)
        elif (newest := table.all_versions[first : first + count] == version).all():
            link.held.add_run(first - slab.first, count)
        else:
            for at in np.flatnonzero(newest).tolist():
                link.held.add(first - slab.first + at)
        slab.touch()

    async def _wait_written(self, number: int, began_s: float) -> None:
        await self.spill.written(number)
        self.latencies.writes["disk"].add(self._now_s() - began_s)

    def submit_read(self, first: int, into: memoryview, done: Done) -> None:
        """`read` with a callback, as `submit_write` is `write`. `into` is not touched any more once `done` is
        called."""
        count = len(into) // self._page_bytes
        slab = self._slab_of(first, count)
        link = None if slab is None else slab.link
        if slab is None or link is None or slab.unsure or not link.usable:
            self._env.spawn("read", settle(self.read(first, into), done))
            return
        began_s = self._now_s()
        at, spill = first - slab.first, self.spill
        if spill.has_any(first, count) or not link.held.has_all(at, count):
            if spill.is_here(first, count):
                slab.requests += count
                slab.touch()
                spill.read_here(first, into)
                self._read_bytes += len(into)
                self._was_here(first, count, began_s)
                done(None)
                return
            self._env.spawn("read", settle(self.read(first, into), done))
            return
        slab.requests += count
        slab.touch()
        if count == 1 and link.is_at_hand(at):
            self._read_at_hand(link, first, at, into, began_s, done)
            return
        wanted = spill.versions(first, count)
        link.send_read(at, into, SubmittedRead(self, link, first, into, wanted, began_s, done).answered)

    def read_answered(self, read: SubmittedRead, did: bool, versions: Versions) -> None:
        """The lender answered a read, or its link did with no."""
        wanted = read.wanted
        if did and (versions == wanted or all(map(ge, versions, wanted))):
            self._was_there(len(read.into), read.began_s)
            read.done(None)
            return
        if did:
            self._found_out(read.link)
        self._env.spawn("read", settle(self.read(read.first, read.into), read.done))

    def _read_at_hand(
        self, link: RemoteSlab, first: int, at: int, into: memoryview, began_s: float, done: Done
    ) -> None:
        """Read one page of a lender on this host: nothing is sent, so nothing needs to be remembered meanwhile."""
        version = link.read_one(at, into)
        if version >= self.spill.version(first):
            self._was_there(len(into), began_s)
            done(None)
            return
        if version >= 0:
            self._found_out(link)
        self._env.spawn("read", settle(self.read(first, into), done))

    def _was_there(self, size_bytes: int, began_s: float) -> None:
        """Count pages read from a lender."""
        self._remote_read_bytes += size_bytes
        self._read_bytes += size_bytes
        self.latencies.from_lenders.add(self._now_s() - began_s)

    def _was_here(self, first: int, count: int, began_s: float) -> None:
        """Count pages read that were zeros or in the ring."""
        answerer: Answerer = "zeros" if self.spill.table.are_zeros(first, count) else "ring"
        self.latencies.reads[answerer].add(self._now_s() - began_s)

    # ---- reading and writing ----

    async def write(self, first: int, count: int, pages: memoryview | None) -> None:
        """Write a run of pages; None: zeros. Returns when acknowledged by the rules above. OSError when neither lender
        nor disk took it: then it may or may not be what later reads find, until it is written again."""
        if self.read_only:
            raise OSError(errno.EROFS, f"volume {self.shape.name} is read-only: {self.read_only}")
        size, began_s, at_lenders = self.shape.page_bytes, self._now_s(), True
        for slab, start, run in self._parts(first, count):
            part = None if pages is None else pages[(start - first) * size : (start - first + run) * size]
            at_lenders &= await self._write_part(slab, start, run, part)
        self._written_bytes += count * size
        self.latencies.writes["lender" if at_lenders else "disk"].add(self._now_s() - began_s)

    async def _write_part(
        self, slab: SlabMemory, first: int, count: int, pages: memoryview | None, only: int | None = None
    ) -> bool:
        """Write pages of one slab. They are newer than any page of a lender that has not answered yet, so a write does
        not wait for it. `only`: do nothing if the page has another version by now. True: a lender has them."""
        await self.spill.room(count)
        while not self.regions.covers(first, count):
            await self.regions.add(first, count)
            await self.spill.room(count)
        if only is not None and self.spill.version(first) != only:
            return False
        version = self._begin(slab, first, count, pages)
        number, link = self.spill.log.put, slab.link
        if link is not None and link.usable:
            with contextlib.suppress(SlabGone):  # `lenders` is called when a link ends
                versions = array("Q", (version,)) * count
                await link.write(first - slab.first, versions, pages)
                self._acknowledged(slab, link, first, count, version)
                return True
            self.buffers.spoil(pages)
        await self.spill.written(number)
        return False

    def _begin(self, slab: SlabMemory, first: int, count: int, pages: memoryview | None) -> int:
        """Put pages into the ring and return their version: from here on they are the newest content, and no lender
        holds them. Nothing awaits in here."""
        self._version += 1
        self.regions.begun(first, count)
        slab.written += count - self.spill.put(first, count, self._version, pages)
        slab.put = self.spill.log.put
        slab.requests += count
        slab.overwritten(first, count)
        slab.touch()
        return self._version

    async def read(self, first: int, into: memoryview) -> None:
        """Fill `into` with a run of pages. OSError when a page cannot be had from anywhere, or when a lender that may
        hold a newer one has not answered since this process began."""
        size, began_s = self.shape.page_bytes, self._now_s()
        count = len(into) // size
        asked: list[Answerer] = []
        for slab, start, run in self._parts(first, count):
            slab.requests += run
            slab.touch()
            if slab.unsure and self._may_be_newer(start, run):
                await self.lenders.known(slab)
            await self._fetch(slab, start, into[(start - first) * size : (start - first + run) * size], asked)
        self._read_bytes += count * size
        if asked:
            self.latencies.reads["disk" if "disk" in asked else "lender"].add(self._now_s() - began_s)
        else:
            self._was_here(first, count, began_s)

    def _may_be_newer(self, first: int, count: int) -> bool:
        """May a lender that has not said what it holds have a newer page: was any of these neither flushed nor written
        by this process?"""
        if self.regions.were_flushed(first, count):
            return False
        return any(version < self._ours for version in self.spill.versions(first, count))

    async def _fetch(
        self, slab: SlabMemory, first: int, into: memoryview, asked: list[Answerer] | None = None
    ) -> Versions:
        """Fill `into` from wherever the newest content is, and return its versions. When a link ends on the way, the
        rest comes from elsewhere. Answerers that had to be asked are added to `asked`."""
        asked = [] if asked is None else asked
        size = self.shape.page_bytes
        versions = array("Q")
        while len(versions) < len(into) // size:
            page = first + len(versions)
            rest = into[len(versions) * size :]
            if self.spill.is_here(page, 1):
                versions.append(self.spill.version(page))
                self.spill.read_here(page, rest[:size])
                continue
            holder, run = self._same_holder(slab, page, len(rest) // size)
            asked.append("lender" if holder is not None else "disk")
            if holder is None:
                versions.extend(await self.spill.read(page, rest[: run * size]))
                self._disk_read_bytes += run * size
                continue
            with contextlib.suppress(SlabGone):
                versions.extend(await self._fetch_remote(slab, holder, page, rest[: run * size]))
        return versions

    def _same_holder(self, slab: SlabMemory, page: int, most: int) -> tuple[RemoteSlab | None, int]:
        """The link that holds the newest content of `page`, None for the disk, and how many pages in a row it holds."""
        holder, run = slab.holder(page), 1
        while run < most and not self.spill.is_here(page + run, 1) and slab.holder(page + run) is holder:
            run += 1
        return holder, run

    async def _fetch_remote(self, slab: SlabMemory, holder: RemoteSlab, first: int, into: memoryview) -> Versions:
        """Read pages from a lender. SlabGone also when it answers with something older than it acknowledged."""
        count = len(into) // self.shape.page_bytes
        wanted = self.spill.versions(first, count)
        versions = await holder.read(first - slab.first, into)
        if not all(map(ge, versions, wanted)):
            self._found_out(holder)
            raise SlabGone(holder.why)
        self._remote_read_bytes += len(into)
        return versions

    async def ever_written(self, first: int, count: int) -> bool:
        """Was any of these pages, which are in one slab, ever written? A lender that has not answered may have more."""
        slab = self.slabs[first // self._slab_pages]
        return bool(slab.unsure) or self.spill.ever_written(first, count)

    def are_zeros(self, first: int, count: int) -> bool:
        """Is it known now, without reading the disk, that all of these pages read as zeros?"""
        if not self.spill.table.are_zeros(first, 1):
            return False
        slab = self._slab_of(first, count)
        return slab is not None and not slab.unsure and self.spill.table.are_zeros(first, count)

    def _is_empty(self, slab: SlabMemory) -> bool:
        """Was everything in the slab discarded? A look at a few pages says no for most: this is asked of each slab that
        changed, once a second."""
        few = range(slab.first, slab.first + slab.pages, max(1, slab.pages // FEW))
        return (
            bool(slab.written)
            and all(self.spill.table.are_zeros(page, 1) for page in few)
            and self.are_zeros(slab.first, slab.pages)
        )

    def allocation(self, first: int, count: int, most: int) -> list[tuple[int, int, bool]]:
        """Runs of these pages that follow one another, at most `most` of them: first page, pages, whether they are
        known to read as zeros. Pages that a lender may hold newer are not known to."""
        size = self._slab_pages
        slabs = self.slabs.used(first // size, (first + count - 1) // size + 1)
        unsure = [(slab.first, slab.first + slab.pages) for slab in slabs if slab.unsure]
        return self.spill.table.zero_runs(first, count, most, unsure)

    def never_written(self, first: int, count: int) -> bool:
        """Is it known now, without reading the disk, that none of these pages was ever written?"""
        slab = self._slab_of(first, count)
        return slab is not None and not slab.unsure and not self.spill.ever_written(first, count)

    def _found_out(self, holder: RemoteSlab) -> None:
        holder.lied = True
        holder.fail(f"{holder.place.lender} returned older content than it acknowledged")

    async def flush(self) -> None:
        """Bring every write acknowledged before, also to an earlier process, to the disk, synced. OSError: not all of
        it is."""
        for slab in self.slabs:
            if slab.unsure:
                await self.lenders.known(slab)
        await self._restore()
        if self.read_only or self.spill.keeper.lost(dropped=False):
            await self.spill.flush()
            return
        async with self.regions.flushing():
            await self.spill.flush()

    async def _restore(self) -> None:
        """Write pages anew that this host's disk lost, and of which a lender holds the newest content."""
        for page in self.spill.keeper.lost(dropped=False):
            slab, version = self.slabs[page // self._slab_pages], self.spill.version(page)
            data = memoryview(bytearray(self.shape.page_bytes))
            holder = slab.holder(page)
            if holder is None:
                continue
            with contextlib.suppress(SlabGone, OSError):
                await self._fetch_remote(slab, holder, page, data)
                await self._write_part(slab, page, 1, data, only=version)

    # ---- places ----

    async def open_place(self, place: OpenPlace) -> None:
        """Open a place: writes go there from now on; what was written before is copied in the background. ValueError
        says why not."""
        await self.lenders.open(self.slab(place.index), place)

    async def close_place(self, index: int, epoch: int) -> None:
        """Close a place. Returns when no request uses it and every page it holds is on disk as well."""
        await self._restore()
        await self.lenders.close(self.slab(index), epoch)

    # ---- counting ----

    def _lines(self, slab: SlabMemory) -> list[SlabCounts]:
        return [SlabCounts(slab.index, slab.requests, slab.written, slab.remote, self._is_empty(slab))]

    @property
    def _on_disk(self) -> tuple[int, int, int]:
        return self._disk_read_bytes, len(self.spill), self.spill.torn

    @property
    def trouble(self) -> str:
        """The trouble with the disk now, for people."""
        if self.read_only:
            return f"read-only: {self.read_only}"
        lost = self.spill.keeper.lost(dropped=False)
        if lost:
            return f"the disk lost {named(lost)}; next: check the disk, then write or discard the lost pages"
        return f"pages wait for the disk, which does not take them: {self.spill.refused}" if self.spill.refused else ""
