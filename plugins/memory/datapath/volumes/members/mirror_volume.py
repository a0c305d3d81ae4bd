"""The rules of a volume without a disk (`--mirror 2`): each slab is in the memory of two other hosts, and nowhere else.

    write   the next version, to every member of the slab; acknowledged when every whole member has it, and those that
            do not are called not whole on this host's disk
    read    from the member that answers soonest of those that hold the newest version; when it is late, from the other
    flush   nothing is on its way to anywhere: it fails when something that was acknowledged is lost, until that is
            written again or discarded

So one lender that dies, is cut off, stops, or takes its memory back costs a read over the network; two at once cost the
slabs that both had, which read as an error and never as something else. This process keeps nothing that its successor
needs: that one asks the members which versions they hold (`mirror_lenders`). If both lenders lose power it is gone.

It is no volume with parity 1+1 (`parity_volume`), although the XOR of one page is its copy: there a slot is sent after
its page, rows are locked, and reads ask the page's own member first. With one member of pages and one of slots, that
volume does 0.82 of the small writes, 0.6 of the small reads and a third of the long requests of this one, for two to
three times the processor (docs/results/memory.md). Both share `MembersVolume`, `MirrorSlab` and `machine.mirror`.
"""

import asyncio
import errno
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from covey.ports.env import Env
from plugins.memory.datapath.links.remote_slab import RemoteSlab
from plugins.memory.datapath.volumes.lender_tasks import LentVolume
from plugins.memory.datapath.volumes.members.members_volume import AGAIN_S, WAIT_S, MembersVolume
from plugins.memory.datapath.volumes.members.mirror_lenders import MirrorLenders
from plugins.memory.datapath.volumes.members.mirror_read import Found, LenderPaces, MirrorRead
from plugins.memory.datapath.volumes.members.mirror_slab import MirrorSlab
from plugins.memory.datapath.volumes.paged_volume import Done, settle
from plugins.memory.datapath.volumes.volume import Volume
from plugins.memory.datapath.wire.control import Told
from plugins.memory.datapath.wire.shape import Shape, Undecided
from plugins.memory.datapath.wire.slabwire import Versions
from plugins.memory.policy.mirroring import MEMBERS


class MirrorWrite:
    """A write under way to every member of a slab. `left`: members that have not answered; `has`: epochs of those that
    have it."""

    __slots__ = ("count", "era", "first", "has", "left", "over", "pages", "slab", "version")

    def __init__(
        self,
        slab: MirrorSlab,
        first: int,
        count: int,
        pages: memoryview | None,
        version: int,
        era: int,
        left: int,
        over: Callable[[bool], None],
    ) -> None:
        self.slab, self.first, self.count, self.pages = slab, first, count, pages
        self.version, self.era, self.left, self.over = version, era, left, over
        self.has: list[int] = []


def _resolve(done: "asyncio.Future[bool]", did: bool) -> None:
    if not done.done():
        done.set_result(did)


def _resolve_read(
    done: "asyncio.Future[tuple[bytearray, Versions] | None]", data: bytearray | None, versions: Versions
) -> None:
    if not done.done():
        done.set_result(None if data is None else (data, versions))


class MirrorVolume(MembersVolume[MirrorSlab]):
    """A mirrored volume, with the interface of `Volume` for clients and the agent. Its files start with `prefix`."""

    def __init__(
        self,
        env: Env,
        shape: Shape,
        prefix: str,
        deadline_s: float,
        tell: Callable[[Told], None],
        sealed: bool = False,
    ) -> None:
        super().__init__(env, shape, prefix, deadline_s, sealed, MirrorSlab, MEMBERS)
        self.lenders: MirrorLenders = MirrorLenders(
            env,
            LentVolume(self.slabs, shape.page_bytes, self.places, self._connect, self._fetch, tell),
            self._newest,
        )
        self._paces = LenderPaces(env.clock)
        self._now_s = env.clock.now_s

    # ---- life ----

    # ---- requests that nobody awaits ----

    def submit_write(self, first: int, count: int, pages: memoryview | None, done: Done) -> None:
        slab = self._slab_of(first, count)
        if slab is None or self.read_only or not slab.mirror.serves:
            self._env.spawn("write", settle(self.write(first, count, pages), done))
            return

        began_s = self._now_s()
        self._send(slab, first, count, pages, partial(self._write_over, first, count, pages, began_s, done))

    def _write_over(
        self, first: int, count: int, pages: memoryview | None, began_s: float, done: Done, did: bool
    ) -> None:
        if did:
            self._written_bytes += count * self.shape.page_bytes
            self.latencies.writes["lender"].add(self._now_s() - began_s)
            done(None)
        else:
            self._env.spawn("write", settle(self.write(first, count, pages), done))

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
        self._ask(slab, holders, first, count, partial(self._read_over, first, into, self._now_s(), done))

    def _read_over(
        self, first: int, into: memoryview, began_s: float, done: Done, data: bytearray | None, versions: Versions
    ) -> None:
        if data is None:
            self._env.spawn("read", settle(self.read(first, into), done))
            return
        into[:] = data
        self._read_bytes += len(into)
        self.latencies.reads["lender"].add(self._now_s() - began_s)
        done(None)

    # ---- writing ----

    async def _write_part(self, slab: MirrorSlab, first: int, count: int, pages: memoryview | None) -> None:
        give_up_s = self._env.clock.now_s() + WAIT_S
        while True:
            await self.lenders.known(slab)
            done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self._send(slab, first, count, pages, partial(_resolve, done))
            if await done:
                return
            if self._env.clock.now_s() >= give_up_s:
                raise Undecided(errno.EIO, f"no whole member of slab {slab.index} answered within {WAIT_S:g} s")
            await asyncio.sleep(AGAIN_S)

    def _send(
        self, slab: MirrorSlab, first: int, count: int, pages: memoryview | None, over: Callable[[bool], None]
    ) -> None:
        """Send pages to every member under the next version. `over` is called once, with whether the write is
        acknowledged."""
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
        sent = MirrorWrite(slab, first, count, pages, version, era, len(targets), over)
        for link in targets:
            link.send_write(at, count, version, pages, partial(self._answered, sent, link))
        if not targets:
            self._at(slab, version, era, sent.has, over)

    def _answered(self, sent: MirrorWrite, link: RemoteSlab, did: bool, _: Versions) -> None:
        sent.left -= 1
        if did:
            sent.has.append(link.place.epoch)
            self._held(sent.slab, link, sent.first, sent.count, sent.version)
        else:
            self.buffers.spoil(sent.pages)  # its connection may still send them, though the others acknowledge
        if not sent.left:
            self._at(sent.slab, sent.version, sent.era, sent.has, sent.over)

    def _held(self, slab: MirrorSlab, link: RemoteSlab, first: int, count: int, version: int) -> None:
        """Note that the lender holds those of these pages that were not written again meanwhile."""
        if count == 1:
            if self._each[first] == version:
                link.held.add(first - slab.first)
            return
        for at in np.flatnonzero(self._newest[first : first + count] == version).tolist():
            link.held.add(first - slab.first + at)

    def _at(self, slab: MirrorSlab, version: int, era: int, has: list[int], over: Callable[[bool], None]) -> None:
        """Every member has answered a write. A write that was sent before no member served is sent again: it may be
        anywhere."""
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
        did = await self._is_recorded(slab)
        slab.finish(version)
        over(did)

    # ---- reading ----

    async def _fetch(self, slab: MirrorSlab, first: int, into: memoryview) -> Versions:
        """Fill `into` from wherever the newest content is, and return its versions."""
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
                raise Undecided(errno.EIO, f"no host that holds page {page} can be reached")
            await asyncio.sleep(AGAIN_S)
        return versions

    def _zeros(self, slab: MirrorSlab, page: int, most: int) -> int:
        """Number of pages from this one on that were never written. OSError when that cannot be known any more."""
        written = np.flatnonzero(self._newest[page : page + most])
        run = int(written[0]) if len(written) else most
        if run and slab.mirror.lost:
            raise OSError(errno.EIO, f"page {page} is lost: {self._lost((slab.index,))}")
        return run

    def _same_holders(self, slab: MirrorSlab, page: int, most: int) -> tuple[list[RemoteSlab], int]:
        """Links that hold the newest content of `page`, and how many pages in a row one of them holds; none is being
        written."""
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
        self._ask(slab, holders, first, count, partial(_resolve_read, done))
        return await done

    def _ask(self, slab: MirrorSlab, holders: list[RemoteSlab], first: int, count: int, over: Found) -> None:
        """Ask the links that hold these pages."""
        wanted, found = self._run(first, count), partial(self._found, over)
        MirrorRead(self._paces, self.shape.page_bytes, first - slab.first, wanted, found).begin(holders)

    def _found(self, over: Found, data: bytearray | None, versions: Versions) -> None:
        self._remote_read_bytes += len(data or b"")
        over(data, versions)

    def _run(self, first: int, count: int) -> Versions:
        """Versions of a run of pages."""
        found = array("Q")
        found.frombytes(self._bytes[8 * first : 8 * (first + count)])
        return found

    _alone = "have one whole member; another is being searched for or filled"

    def _lacks(self, slab: MirrorSlab) -> bool:
        return len(slab.mirror.whole) < MEMBERS

    def _lost(self, slabs: tuple[int, ...]) -> str:
        which = ", ".join(map(str, slabs[:8])) + (" ..." if len(slabs) > 8 else "")
        return f"both members of slab {which} were lost; next: write or discard the lost pages"


AnyVolume = Volume | MembersVolume[Any]
