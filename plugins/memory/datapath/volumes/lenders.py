"""A volume's lenders: places opened, closed, opened again when their link ends, and asked what they hold after a crash.

While this process lives a lender holds nothing but copies: the newest content of every page is in the ring or the log.
So no page is lost with a link. It is opened again under its epoch for `REOPEN_S`, since a connection may break while
both ends keep running; then the place is given up, and the agent is told.

After a crash what was only in the queue is at the lenders alone. Each place of the earlier process is *unsure* until
its lender has answered, is known to have lost it, or a person gives it up. It is known when the lender's agent says so
(`PlaceDead`), over an authenticated link. It is not known from a refused connection (a firewall refuses, too), from a
refusal by a process that may have the lender's TCP port now, from silence, or from gossip that calls the host gone: a
host that is only cut off is called gone too, and still has the pages. The lender's agent also says where it serves what
it holds (`PlaceAt`): where another program took its port that is elsewhere than before.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import numpy as np

from covey.ports.env import Env
from plugins.memory.datapath.links.remote_slab import RemoteSlab, SlabGone, SlabStale
from plugins.memory.datapath.spill.spill import Spill
from plugins.memory.datapath.volumes.lender_tasks import (
    COPY_PAGES,
    PAUSE_MAX_S,
    PAUSE_S,
    REOPEN_S,
    TROUBLE_MAX_S,
    UNSURE_S,
    LenderTasks,
    LentVolume,
    held_flags,
    runs_of,
)
from plugins.memory.datapath.volumes.slab import SlabMemory, Unsure
from plugins.memory.datapath.wire.control import OpenPlace, SlabCopiedFrame, SlabLost
from plugins.memory.datapath.wire.slabwire import Versions
from plugins.memory.policy import copying
from plugins.memory.policy.settings import REQUEST_PAGES_MAX

STEP_PAGES = 4096
"""Pages of a slab that are looked at before requests get their turn."""


class Lenders(LenderTasks[SlabMemory]):
    """The lenders of one volume with a disk. `requested`: bytes ever read and written by requests."""

    def __init__(self, env: Env, volume: LentVolume[SlabMemory], spill: Spill, requested: Callable[[], int]) -> None:
        super().__init__(env, volume)
        self._spill, self._requested = spill, requested
        self._copying: dict[RemoteSlab, SlabMemory] = {}
        """Links that are being filled with the pages that they lack."""
        self._copied_s = 0.0
        """Time from which the next piece may be copied."""
        self._seen = 0
        """Value of `requested`, in bytes, after the last piece was copied."""
        self._began_s = env.clock.now_s()

    # ---- opening and closing ----

    async def open(self, slab: SlabMemory, place: OpenPlace) -> None:
        """Open a place. Writes go there once the disk has it on record, a few milliseconds later, and what was written
        before is copied in the background. ValueError says why not. If the disk refuses, the place is lost like any
        other."""
        if place.epoch in slab.opening or any(link.place.epoch == place.epoch and link.usable for link in slab.links()):
            return
        if slab.unsure:
            raise ValueError(self.doubts(slab))
        if slab.link is not None and slab.link.place.epoch > place.epoch:
            raise ValueError(f"slab {place.index} is open under a newer epoch: {slab.link.place.epoch}")
        try:
            link = await self._connect(place, None)
        except SlabGone as gone:
            raise ValueError(str(gone)) from gone
        slab.opening[place.epoch] = link
        self._places.plan(place)
        self._guard(slab, "open", self._on_record, slab, place, link)

    async def _on_record(self, slab: SlabMemory, place: OpenPlace, link: RemoteSlab) -> None:
        """Record a place, and use it from then on: a process that starts after a crash finds it."""
        why = ""
        try:
            await self._places.add(place)
        except OSError as error:
            why = f"its record cannot be written: {error}"
        if slab.opening.pop(place.epoch, None) is not link:
            await self._places.remove(place.index, place.epoch)  # closed meanwhile
            return
        try:
            if not why:
                self._take(slab, place, link)
        except ValueError as error:
            why = str(error)
        if why:
            link.fail(f"not opened: {why}")
            self._lost(slab, place, why)

    def _take(self, slab: SlabMemory, place: OpenPlace, link: RemoteSlab) -> None:
        """Use a place. ValueError when it is too late for it. Nothing awaits in here."""
        if slab.link is not None and slab.link.place.epoch > place.epoch:
            raise ValueError(f"slab {place.index} is open under a newer epoch: {slab.link.place.epoch}")
        older, slab.reopening = slab.reopening, None
        if older is not None and older.epoch != place.epoch:
            self._lost(slab, older, "its link had ended when a newer slab was opened")
        self._use(slab, link)

    def _use(self, slab: SlabMemory, link: RemoteSlab) -> None:
        link.ended = lambda ended: self._ended(slab, ended)
        link.adopted()
        oldest = slab.adopt(link)
        if oldest is not None:
            oldest.fail("there are two newer slabs")
            self._lost(slab, oldest.place, oldest.why)
        if link.why:
            self._ended(slab, link)  # it ended before `link.ended` was set
        elif slab.link is link:
            self._guard(slab, "copy", self._copy_up, slab, link)

    async def close(self, slab: SlabMemory, epoch: int) -> None:
        """Close a place. Returns when no request uses it and every page it holds is on disk as well."""
        if slab.reopening is not None and slab.reopening.epoch == epoch:
            slab.reopening = None
        while epoch in slab.unsure:
            await slab.sure.wait()
        link = slab.opening.pop(epoch, None)
        if link is not None:
            link.fail("closed before it was used")
        link = next((link for link in slab.links() if link.place.epoch == epoch), None)
        if link is not None:
            slab.touch()
            await link.retire()
            slab.drop(link)
        await self._leave(slab, epoch)

    async def _leave(self, slab: SlabMemory, epoch: int) -> None:
        """Forget a place. When this returns, everything written to the slab survives a loss of power. The place is
        taken off the record in the background: a process that still finds it there asks a lender once more than
        needed."""
        await self._spill.kept(slab.put)
        self._guard(slab, "forget", self._forget, slab, epoch)

    async def _forget(self, slab: SlabMemory, epoch: int) -> None:
        await self._places.remove(slab.index, epoch)
        slab.touch()
        await self._places.catch_up()

    def _links_of(self, slab: SlabMemory) -> list[RemoteSlab]:
        return [*slab.links(), *slab.opening.values()]

    # ---- a link ends ----

    def _ended(self, slab: SlabMemory, link: RemoteSlab) -> None:
        """A link ended: reads go to queue and disk from now on, and writes wait for the disk, until it is open
        again."""
        if self.closed or link.retiring or link not in slab.links():
            return  # while it retires, `close` sees to the rest
        slab.drop(link)
        lender = link.place.lender
        self._env.log.warning("a link to a lender ended", slab=slab.index, lender=lender, why=link.why)
        if link.lied or slab.link is not None or slab.reopening is not None:
            self._lost(slab, link.place, link.why)
            return
        slab.reopening = link.place
        self._guard(slab, "reopen", self._reopen, slab, link.place, link.why)

    def _lost(self, slab: SlabMemory, place: OpenPlace, why: str) -> None:
        """Tell the agent that a place is lost; the place is forgotten when the disk has all that it held."""
        self._env.log.warning("lost a slab", slab=slab.index, lender=place.lender, why=why)
        self._tell(SlabLost(slab.index, place.epoch, why[:400]))
        self._guard(slab, "leave", self._leave, slab, place.epoch)

    async def _reopen(self, slab: SlabMemory, place: OpenPlace, why: str) -> None:
        """Open a link again. The place holds nothing that this host lacks, so it is given up when its lender says that
        it is gone. A refused connection does not say that: a slab process that was killed is back in a second or two,
        with it."""
        give_up_s = self._env.clock.now_s() + REOPEN_S
        pause_s = PAUSE_S
        while slab.reopening is place:
            left_s = give_up_s - self._env.clock.now_s()
            try:
                async with self._linked(place, max(left_s / 2, PAUSE_S)) as link:
                    self._reopened(slab, place, link, await link.versions())
            except (SlabGone, OSError) as gone:
                if slab.reopening is place and (isinstance(gone, SlabStale) or left_s <= pause_s):
                    slab.reopening = None
                    self._lost(slab, place, f"{why}; not opened again: {gone}")
                await asyncio.sleep(pause_s)
                pause_s = min(PAUSE_MAX_S, 2 * pause_s)
            else:
                return

    def _reopened(self, slab: SlabMemory, place: OpenPlace, link: RemoteSlab, versions: Versions) -> None:
        if slab.reopening is not place:
            link.fail("closed while it was opened again")
            return
        self._holds(slab, link, versions)
        slab.reopening = None
        self.reopened += 1
        self._env.log.info("a link is open again", slab=slab.index, lender=place.lender, epoch=place.epoch)
        self._use(slab, link)

    def _holds(self, slab: SlabMemory, link: RemoteSlab, versions: Versions) -> None:
        """Take in which versions the lender has; those that are the newest count as held. Nothing awaits in here."""
        newest = np.array(self._spill.versions(slab.first, slab.pages))
        found = np.array(versions)[: slab.pages]
        link.held.set_all(held_flags(found, newest, link.pages))

    def acknowledged(self, slab: SlabMemory, link: RemoteSlab, first: int, versions: Iterable[int]) -> None:
        """The lender has these versions of a run of pages; it holds those that were not written again meanwhile."""
        held, version_of = link.held, self._spill.version
        for page, version in enumerate(versions, first):
            if version == version_of(page):
                held.add(page - slab.first)
        slab.touch()

    # ---- filling ----

    async def _copy_up(self, slab: SlabMemory, link: RemoteSlab) -> None:
        """Copy what was written before the slab was mapped to the lender too, so that reads find it there. The paper
        waits for the next page-out instead (Infiniswap §2.4.1); a slab read more than written would stay on disk for
        ever. Pages that a disk cannot read now are tried again: until they are copied, a slab that moves keeps its old
        place."""
        pause_s = PAUSE_S
        self._copying[link] = slab
        try:
            while link.usable:
                try:
                    await self._copy_missing(slab, link)
                except SlabGone:
                    return  # `_ended` was called
                except OSError as error:
                    self._env.log.warning("cannot copy a slab to its lender", slab=slab.index, why=str(error))
                    await asyncio.sleep(pause_s)
                    pause_s = min(TROUBLE_MAX_S, 2 * pause_s)
                else:
                    if link.usable:
                        self._tell(SlabCopiedFrame(slab.index, link.place.epoch))
                    return
        finally:
            del self._copying[link]

    async def _copy_missing(self, slab: SlabMemory, link: RemoteSlab) -> None:
        size = self._page_bytes
        buffer = memoryview(bytearray(COPY_PAGES * size))
        for at in range(0, slab.pages, STEP_PAGES):
            for run_at, count in self._missing(slab, link, at, min(STEP_PAGES, slab.pages - at)):
                if not link.usable:
                    return
                first, began_s = slab.first + run_at, self._env.clock.now_s()
                versions = await self._fetch(slab, first, buffer[: count * size])
                await link.write(run_at, versions, buffer[: count * size])
                self.acknowledged(slab, link, first, versions)
                await self._make_way(self._env.clock.now_s() - began_s, count * size)
            await asyncio.sleep(0)  # requests get their turn

    async def _make_way(self, took_s: float, copied_bytes: int) -> None:
        """Pause after a piece so that requests get their turn; all slabs that are copied share the time that is
        left."""
        waiting = sum(max(0, slab.written - link.held.count) for link, slab in self._copying.items())
        requested = self._requested()
        busy, self._seen = requested != self._seen, requested
        pause_s = copying.pause_s(took_s, copied_bytes, waiting * self._page_bytes, busy)
        if pause_s:
            now_s = self._env.clock.now_s()
            self._copied_s = max(now_s, self._copied_s) + pause_s
            await asyncio.sleep(self._copied_s - now_s)

    def _missing(self, slab: SlabMemory, link: RemoteSlab, at: int, count: int) -> list[tuple[int, int]]:
        """Runs of pages, counted from the first of the slab, whose newest content the lender does not hold."""
        newest = np.array(self._spill.versions(slab.first + at, count))
        flags = np.frombuffer(bytes(link.held.flags[at : at + count]), np.uint8)
        return runs_of(at + np.flatnonzero((newest > 0) & (flags == 0)), COPY_PAGES)

    # ---- after a restart ----

    def find_again(self, places: Iterable[OpenPlace], clean: bool) -> None:
        """Take over places of an earlier process. `clean`: it ended in good order, and the disk has what they hold."""
        for place in sorted(places, key=lambda place: (place.index, -place.epoch)):
            slab = self._slabs[place.index]
            if not clean:
                slab.doubt(place)
                self._guard(slab, "recover", self._recover, slab, place)
            elif slab.reopening is None:
                slab.reopening = place
                self._guard(slab, "reopen", self._reopen, slab, place, "this process was restarted")
            else:
                self._lost(slab, place, "its slab was being moved away when the process ended")

    async def _recover(self, slab: SlabMemory, place: OpenPlace) -> None:
        """Copy to this host the pages that are newer at the lender; then the place is in use again."""
        pause_s = PAUSE_S
        while (unsure := slab.unsure.get(place.epoch)) is not None:
            try:
                async with self._linked(place, None) as link:
                    await self._copy_back(slab, link)
            except (SlabGone, OSError) as error:  # a refusal too: whoever refuses did not authenticate
                unsure.why = str(error)
                slab.touch()
            else:
                if place.epoch not in slab.unsure:
                    link.fail("given up meanwhile")
                    return
                if link.lied:
                    link.fail(f"{place.lender} holds pages that fail authentication")
                    await self.give_up(slab, place.epoch, link.why)
                    return
                slab.settle(place.epoch)
                self._use(slab, link)
                return
            await asyncio.sleep(pause_s)
            pause_s = min(PAUSE_MAX_S, 2 * pause_s)

    async def _copy_back(self, slab: SlabMemory, link: RemoteSlab) -> None:
        """Copy newer pages from the lender into the queue, which is read before the disk. OSError when the queue is
        full and the disk takes nothing."""
        versions = await link.versions()
        size = self._page_bytes
        buffer = memoryview(bytearray(REQUEST_PAGES_MAX * size))
        for at in range(0, slab.pages, STEP_PAGES):
            for run_at, count in self._newer(slab, versions, at, min(STEP_PAGES, slab.pages - at)):
                got, wrong = await link.read_what_is_ours(run_at, buffer[: count * size])
                for position in wrong:
                    got[position] = 0  # older than anything
                link.lied = link.lied or bool(wrong)
                await self._spill.room(count)
                self._put(slab, slab.first + run_at, got, buffer)
            await asyncio.sleep(0)
        self._holds(slab, link, versions)

    def _newer(self, slab: SlabMemory, versions: Versions, at: int, count: int) -> list[tuple[int, int]]:
        """Runs of pages, counted from the first of the slab, that the lender holds in a newer version than queue and
        disk."""
        newest = np.array(self._spill.versions(slab.first + at, count))
        return runs_of(at + np.flatnonzero(np.array(versions[at : at + count]) > newest), REQUEST_PAGES_MAX)

    def _put(self, slab: SlabMemory, first: int, versions: Versions, pages: memoryview) -> None:
        """Put pages of a lender into the queue, except those that were written here meanwhile. Nothing awaits in
        here."""
        size = self._page_bytes
        for at, version in enumerate(versions):
            known = self._spill.version(first + at)
            if version > known:
                slab.written += known == 0
                slab.overwritten(first + at, 1)
                self._spill.put(first + at, 1, version, pages[at * size : (at + 1) * size])
                slab.put = self._spill.log.put

    async def give_up(self, slab: SlabMemory, epoch: int, why: str) -> OpenPlace | None:
        """Give up an unsure place: reads are answered from the disk from now on, since the lender has lost its pages,
        or a person does not want to wait. Returns the place, if it was unsure."""
        unsure = slab.unsure.get(epoch)
        if unsure is None:
            return None
        self.unrecovered += 1
        slab.settle(epoch)
        self._lost(slab, unsure.place, f"{why}; pages written there last may read older")
        return unsure.place

    def _silent(self, slab: SlabMemory) -> list[int]:
        return sorted(slab.unsure)

    async def known(self, slab: SlabMemory) -> None:
        """Wait until every lender of the slab has answered or is known to have lost it. OSError says whose answer is
        missing when that takes too long."""
        left_s = self._began_s + UNSURE_S - self._env.clock.now_s()
        await self._wait_known(slab, slab.sure, max(0.0, left_s))

    def doubts(self, slab: SlabMemory) -> str:
        age_s = self._env.clock.now_s() - self._began_s
        said = [f"{unsure.place.lender} may hold newer pages ({unsure.why})" for unsure in slab.unsure.values()]
        waits = f"slab {slab.index} waits for its lender, for {age_s:.0f} s so far: {'; '.join(said)}"
        return f"{waits[:300]}; next: bring that host back, or read older pages: {self._to_give_up}"

    # ---- looking ----

    def _places_of(self, slab: SlabMemory) -> Iterable[OpenPlace]:
        return self._places.of(slab.index)

    def _why(self, slab: SlabMemory, epoch: int) -> str:
        unsure: Unsure | None = slab.unsure.get(epoch)
        return "" if unsure is None else unsure.why

    async def _tried(self, slab: SlabMemory, name: str, work: Coroutine[Any, Any, None]) -> bool:
        try:
            await work
        except Exception as error:  # whatever it is: the other slabs go on, and this one is tried again
            self._env.log.error("a slab is in trouble", task=name, slab=slab.index, why=repr(error), exc_info=error)
            return False
        return True
