"""The rules of a volume without a disk (`--mirror 2`): each slab is in the memory of two other hosts, and nowhere else.

    write   the next version, to every member of the slab; acknowledged when every whole member has it, and those that
            do not are called not whole on this host's disk
    read    from the member that answers soonest of those that hold the newest version; when it is late, from the other
    flush   nothing is on its way to anywhere: it fails when something that was acknowledged is lost, until that is
            written again or discarded

So one lender that dies, is cut off, stops, or takes its memory back costs a read over the network; two at once cost the
slabs that both had, which read as an error and never as something else. This process keeps nothing that its successor
needs: that one asks the members which versions they hold (`mirror_lenders`). Without power on both lenders it is gone.
"""

import asyncio
import errno
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from covey import checked
from covey.ports import Env
from plugins.memory.datapath.control import SLABS_TOLD, OpenPlace, SlabCounts, Told
from plugins.memory.datapath.mirror_lenders import MirrorLenders
from plugins.memory.datapath.mirror_read import Found, LenderPaces, MirrorRead
from plugins.memory.datapath.mirror_slab import MirrorSlab
from plugins.memory.datapath.page_table import lazy_zeros, runs_of
from plugins.memory.datapath.paged_volume import Done, PagedVolume, settle
from plugins.memory.datapath.remote_slab import RemoteSlab
from plugins.memory.datapath.shape import Shape, VolumeRecord
from plugins.memory.datapath.slabwire import Versions
from plugins.memory.datapath.volume import Volume
from plugins.memory.policy import mirroring
from plugins.memory.policy.mirroring import MEMBERS

if TYPE_CHECKING:
    from numpy.typing import NDArray

WAIT_S = 30.0
"""How long a request is tried anew while links end and begin; then it fails."""
AGAIN_S = 0.05
"""Pause before that."""


class MirrorVolume(PagedVolume[MirrorSlab]):
    """The same to clients and to the agent as `Volume`. Its files start with `prefix`."""

    def __init__(
        self,
        env: Env,
        shape: Shape,
        prefix: str,
        deadline_s: float,
        tell: Callable[[Told], None],
        sealed: bool = False,
    ) -> None:
        super().__init__(env, shape, prefix, deadline_s, sealed, MirrorSlab)
        newest = lazy_zeros(8 * shape.pages)
        self._bytes, self._each = newest, newest.cast("Q")
        self._newest: NDArray[np.uint64] = np.frombuffer(newest, np.uint64)
        self.lenders: MirrorLenders = MirrorLenders(
            env, self.places, self.slabs, self._newest, shape.page_bytes, self._connect, self._fetch, tell
        )
        self._paces = LenderPaces(env.clock)

    # ---- life ----

    async def open(self) -> None:
        """Load what the disk knows, and begin to ask the members. ValueError when it is of another size, or damaged."""
        record = await self._record()
        await self.places.load(len(self.slabs) * MEMBERS)
        self.lenders.find_again()
        await self._writable_soon(record)

    async def _make_writable(self, record: VolumeRecord) -> None:
        """Before the first write its versions must be above all earlier ones."""
        await checked.save(self._env.disk, f"{self._prefix}/volume", record)
        await self.places.write()
        self.read_only = ""

    async def end(self) -> None:
        """Nothing is on its way: members and the disk know all that the next process needs."""

    async def close(self) -> None:
        """There is no other process."""

    # ---- requests that nobody awaits ----

    def submit_write(self, first: int, count: int, pages: memoryview | None, done: Done) -> None:
        """`write`, likewise `Volume.submit_write`."""
        slab = self._slab_of(first, count)
        if slab is None or self.read_only or not slab.mirror.serves:
            self._env.spawn("write", settle(self.write(first, count, pages), done))
            return

        began_s = self._env.clock.now_s()

        def over(did: bool) -> None:
            if did:
                self._written_bytes += count * self.shape.page_bytes
                self.latencies.writes["lender"].add(self._env.clock.now_s() - began_s)
                done(None)
            else:
                self.buffers.spoil(pages)
                self._env.spawn("write", settle(self.write(first, count, pages), done))

        self._send(slab, first, count, pages, over)

    def submit_read(self, first: int, into: memoryview, done: Done) -> None:
        count = len(into) // self.shape.page_bytes
        slab = self._slab_of(first, count)
        holders = []
        if slab is not None and slab.mirror.serves and not slab.is_written(first, count):
            holders = slab.hold_all(first - slab.first, count)
        if slab is None or not holders:
            self._env.spawn("read", settle(self.read(first, into), done))
            return
        slab.requests += count
        slab.touch()
        began_s = self._env.clock.now_s()

        def over(data: bytearray | None, versions: Versions) -> None:
            if data is None:
                self._env.spawn("read", settle(self.read(first, into), done))
                return
            into[:] = data
            self._read_bytes += len(into)
            self.latencies.reads["lender"].add(self._env.clock.now_s() - began_s)
            done(None)

        self._ask(slab, holders, first, count, over)

    # ---- writing ----

    async def write(self, first: int, count: int, pages: memoryview | None) -> None:
        """Write a run of pages; None: zeros. Returns when acknowledged by the rules above. OSError when no whole member
        could be reached for so long: then it may or may not be what later reads find, until it is written again."""
        if self.read_only:
            raise OSError(errno.EROFS, f"volume {self.shape.name} is read-only: {self.read_only}")
        size, began_s = self.shape.page_bytes, self._env.clock.now_s()
        for slab, start, run in self._parts(first, count):
            part = None if pages is None else pages[(start - first) * size : (start - first + run) * size]
            await self._write_part(slab, start, run, part)
        self._written_bytes += count * size
        self.latencies.writes["lender"].add(self._env.clock.now_s() - began_s)

    async def _write_part(self, slab: MirrorSlab, first: int, count: int, pages: memoryview | None) -> None:
        give_up_s = self._env.clock.now_s() + WAIT_S
        while True:
            await self.lenders.known(slab)
            done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self._send(slab, first, count, pages, lambda did, done=done: done.done() or done.set_result(did))  # type: ignore[misc]
            if await done:
                return
            self.buffers.spoil(pages)
            if self._env.clock.now_s() >= give_up_s:
                raise OSError(errno.EIO, f"no whole member of slab {slab.index} took it within {WAIT_S:g} s")
            await asyncio.sleep(AGAIN_S)

    def _send(
        self, slab: MirrorSlab, first: int, count: int, pages: memoryview | None, over: Callable[[bool], None]
    ) -> None:
        """To every member, under the next version. `over` is called once, with whether it is acknowledged."""
        self._version += 1
        version, era, at = self._version, slab.era, first - slab.first
        if count == 1:
            slab.written += not self._each[first]
            self._each[first] = version
        else:
            run = self._newest[first : first + count]
            slab.written += count - int(np.count_nonzero(run))
            run[:] = version
        slab.overwritten(at, count)
        slab.requests += count
        slab.writes[version] = (first, count)
        slab.touch()
        targets = slab.targets()
        has: list[int] = []
        left = len(targets)

        def answered(link: RemoteSlab, did: bool) -> None:
            nonlocal left
            left -= 1
            if did:
                has.append(link.place.epoch)
                self._held(slab, link, first, count, version)
            if not left:
                self._at(slab, version, era, has, over)

        for link in targets:
            link.send_write(at, count, version, pages, lambda did, link=link: answered(link, did))  # type: ignore[misc]
        if not targets:
            self._at(slab, version, era, has, over)

    def _held(self, slab: MirrorSlab, link: RemoteSlab, first: int, count: int, version: int) -> None:
        """Of pages that were not written again meanwhile."""
        if count == 1:
            if self._each[first] == version:
                link.held.add(first - slab.first)
            return
        for at in np.flatnonzero(self._newest[first : first + count] == version).tolist():
            link.held.add(first - slab.first + at)

    def _at(self, slab: MirrorSlab, version: int, era: int, has: list[int], over: Callable[[bool], None]) -> None:
        """Every member has answered. What was sent before nobody served is sent again: it may be anywhere."""
        behind = slab.mirror.written(has) if era == slab.era else None
        if behind is None:
            slab.finish(version)
            over(False)
            return
        if behind:
            self.lenders.note(slab)
        if slab.unrecorded:
            self._env.spawn("record", self._recorded(slab, version, over))
            return
        slab.finish(version)
        over(True)

    async def _recorded(self, slab: MirrorSlab, version: int, over: Callable[[bool], None]) -> None:
        try:
            await self.lenders.record(slab)
            did = True
        except OSError as error:
            self._env.log.error("the disk cannot say who is whole", slab=slab.index, why=str(error))
            did = False
        slab.finish(version)
        over(did)

    # ---- reading ----

    async def read(self, first: int, into: memoryview) -> None:
        """Fill `into` with a run of pages. OSError when no member that holds one can be reached for so long, or when
        all who held it were lost."""
        size, began_s, is_there = self.shape.page_bytes, self._env.clock.now_s(), False
        count = len(into) // size
        for slab, start, run in self._parts(first, count):
            slab.requests += run
            slab.touch()
            if slab.mirror.asks:
                await self.lenders.known(slab)
            versions = await self._fetch(slab, start, into[(start - first) * size : (start - first + run) * size])
            is_there = is_there or any(versions)
        self._read_bytes += count * size
        self.latencies.reads["lender" if is_there else "zeros"].add(self._env.clock.now_s() - began_s)

    async def _fetch(self, slab: MirrorSlab, first: int, into: memoryview) -> Versions:
        """Fill `into` from wherever the newest content is; the versions of what is in it."""
        size = self.shape.page_bytes
        versions = array("Q")
        give_up_s = self._env.clock.now_s() + WAIT_S
        while len(versions) < len(into) // size:
            at = len(versions)
            page, most = first + at, len(into) // size - at
            await slab.finished(page, 1)
            run = self._zeros(slab, page, most)
            if run:
                into[at * size : (at + run) * size] = bytes(run * size)
                versions.extend(array("Q", bytes(8 * run)))
                continue
            holders, run = self._same_holders(slab, page, most)
            found = await self._asked(slab, holders, page, run) if holders else None
            if found is not None:
                into[at * size : (at + run) * size] = found[0]
                versions.extend(found[1])
                continue
            if self._env.clock.now_s() >= give_up_s:
                raise OSError(errno.EIO, f"nobody who holds page {page} can be reached")
            await asyncio.sleep(AGAIN_S)
        return versions

    def _zeros(self, slab: MirrorSlab, page: int, most: int) -> int:
        """Pages from this one on that were never written. OSError when nobody can say that any more."""
        written = np.flatnonzero(self._newest[page : page + most])
        run = int(written[0]) if len(written) else most
        if run and slab.mirror.lost:
            raise OSError(errno.EIO, f"page {page} is lost: {self._lost((slab.index,))}")
        return run

    def _same_holders(self, slab: MirrorSlab, page: int, most: int) -> tuple[list[RemoteSlab], int]:
        """Who holds the newest content of `page`, and of how many in a row one of them does; none is being written."""
        at, run = page - slab.first, 1
        holders = slab.holders(at)
        while run < most and holders and not slab.is_written(page + run, 1):
            more = [link for link in holders if link.held.flags[at + run]]
            if not more:
                break
            holders, run = more, run + 1
        return holders, run

    async def _asked(
        self, slab: MirrorSlab, holders: list[RemoteSlab], first: int, count: int
    ) -> tuple[bytearray, Versions] | None:
        done: asyncio.Future[tuple[bytearray, Versions] | None] = asyncio.get_running_loop().create_future()

        def over(data: bytearray | None, versions: Versions) -> None:
            if not done.done():
                done.set_result(None if data is None else (data, versions))

        self._ask(slab, holders, first, count, over)
        return await done

    def _ask(self, slab: MirrorSlab, holders: list[RemoteSlab], first: int, count: int, over: Found) -> None:
        """Those who hold these pages."""

        def found(data: bytearray | None, versions: Versions) -> None:
            self._remote_read_bytes += len(data or b"")
            over(data, versions)

        read = MirrorRead(self._paces, self.shape.page_bytes, first - slab.first, self._run(first, count), found)
        read.begin(holders)

    def _run(self, first: int, count: int) -> Versions:
        """The versions of a run of pages."""
        found = array("Q")
        found.frombytes(self._bytes[8 * first : 8 * (first + count)])
        return found

    async def ever_written(self, first: int, count: int) -> bool:
        """Was any of these pages, which lie in one slab? Members that have not answered may know better, and what is
        lost may have been."""
        return not self.never_written(first, count)

    def never_written(self, first: int, count: int) -> bool:
        """Is it known now, without asking anybody, that none of these pages ever was?"""
        slab = self._slab_of(first, count)
        if slab is None or slab.mirror.asks or slab.mirror.lost:
            return False
        return not self._newest[first : first + count].any()

    def are_zeros(self, first: int, count: int) -> bool:
        """As of `Volume`."""
        return all(self.never_written(start, run) for _, start, run in self._parts(first, count))

    def allocation(self, first: int, count: int, most: int) -> list[tuple[int, int, bool]]:
        """As of `Volume`."""
        size = self.shape.slab_pages
        slabs = self.slabs.used(first // size, (first + count - 1) // size + 1)
        unsure = [(slab.first, slab.first + slab.pages) for slab in slabs if slab.mirror.asks or slab.mirror.lost]
        return runs_of(self._newest[first : first + count] == 0, first, most, unsure)

    async def flush(self) -> None:
        """OSError while something that was acknowledged cannot be read: nobody may hear of it otherwise."""
        for slab in self.slabs:
            if slab.mirror.asks:
                await self.lenders.known(slab)
        lost = self._lost_slabs()
        if lost:
            raise OSError(errno.EIO, self._lost(lost))

    def _lost_slabs(self) -> tuple[int, ...]:
        """Those in which something is lost that was not written again."""
        return tuple(slab.index for slab in self.slabs if slab.mirror.lost and slab.written < slab.pages)

    def _lost(self, slabs: tuple[int, ...]) -> str:
        which = ", ".join(map(str, slabs[:8])) + (" ..." if len(slabs) > 8 else "")
        return f"both members of slab {which} were lost; next: write anew, or discard, what was there"

    # ---- places ----

    def _index_of(self, number: int) -> int:
        return mirroring.slab_of(number, MEMBERS)

    async def open_place(self, place: OpenPlace) -> None:
        """A member from now on. ValueError says why not."""
        if self.read_only:
            raise ValueError(self.read_only)
        await self.lenders.open(self.slab(place.index), place)

    async def close_place(self, number: int, epoch: int) -> None:
        """Returns when nothing acknowledged depends on it."""
        await self.lenders.close(self.slab(number), number, epoch)

    # ---- counting ----

    def _lines(self, slab: MirrorSlab) -> list[SlabCounts]:
        """Requests are the slab's in each line, or lenders would take the member that is read less for idle."""
        held = {link.place.index: link.held.count for _, link in sorted(slab.links.items()) if link.usable}
        numbers = [mirroring.member_number(slab.index, member, MEMBERS) for member in range(MEMBERS)]
        return [SlabCounts(number, slab.requests, slab.written, held.get(number, 0)) for number in numbers]

    @property
    def _slabs_told(self) -> int:
        return SLABS_TOLD // MEMBERS

    @property
    def trouble(self) -> str:
        """For people."""
        if self.read_only:
            return f"read-only: {self.read_only}"
        lost = self._lost_slabs()
        if lost:
            return self._lost(lost)
        fewer = [slab for slab in self.slabs if slab.written and len(slab.mirror.whole) < MEMBERS]
        if not fewer:
            return ""
        alone = sum(slab.mirror.serves for slab in fewer)
        said = f"{alone} of {len(self.slabs)} slabs have one whole member, and another one is looked for or filled"
        return said if alone == len(fewer) else f"{said}; {self.lenders.doubts(_first_asking(fewer))}"


def _first_asking(slabs: list[MirrorSlab]) -> MirrorSlab:
    return next(slab for slab in slabs if not slab.mirror.serves)


AnyVolume = Volume | MirrorVolume
