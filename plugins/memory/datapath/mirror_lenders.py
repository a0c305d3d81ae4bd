"""The members of slabs without a disk: opened, filled, closed, opened again when their links end, and asked what they
hold when nobody is left who serves. `machine.mirror` decides; here it is done.

What this host's disk says, a few bytes for each member, is changed before anything depends on it: a member is whole
only when all is there, and a write is acknowledged without one only when the disk calls that one not whole any more.
"""

import asyncio
import errno
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from covey.ports import Env
from plugins.memory.datapath.control import OpenPlace, PlaceNow, SlabCopiedFrame, SlabLost, Told
from plugins.memory.datapath.lenders import (
    COPY_PAGES,
    PAUSE_MAX_S,
    PAUSE_S,
    REOPEN_S,
    TOLD_PLACES,
    TROUBLE_MAX_S,
    UNSURE_S,
    runs_of,
)
from plugins.memory.datapath.mirror_slab import MirrorSlab
from plugins.memory.datapath.places import Places
from plugins.memory.datapath.remote_slab import RemoteSlab, SlabGone, SlabStale
from plugins.memory.datapath.shape import Undecided
from plugins.memory.datapath.slab import Slabs
from plugins.memory.datapath.slabwire import Versions
from plugins.memory.machine.mirror import Awaited, Behind, Filling, Out, Unlinked
from plugins.memory.policy import mirroring

if TYPE_CHECKING:
    from numpy.typing import NDArray

LOOK_S = 0.25
"""Between two looks whether a slab can do without a member."""
Fetch = Callable[[MirrorSlab, int, memoryview], Awaitable[Versions]]


class MirrorLenders:
    """`newest`: the version of every page of the volume, shape (pages,). `connect` opens a link, `fetch` reads pages
    from whoever holds them, `tell` is called when a member is lost or filled."""

    def __init__(
        self,
        env: Env,
        places: Places,
        slabs: Slabs[MirrorSlab],
        newest: "NDArray[np.uint64]",
        page_bytes: int,
        connect: Callable[[OpenPlace, float | None], Awaitable[RemoteSlab]],
        fetch: Fetch,
        tell: Callable[[Told], None],
    ) -> None:
        self.reopened = self.unrecovered = 0
        self.closed = False
        """The process is ending."""
        self._env, self._places, self._slabs, self._newest = env, places, slabs, newest
        self._page_bytes = page_bytes
        self._connect, self._fetch, self._tell = connect, fetch, tell
        self._copied_s = 0.0
        """When the next part may be copied."""

    # ---- what this host's disk says ----

    def note(self, slab: MirrorSlab) -> None:
        """After a change of the machine: who is whole is to be written."""
        keys = {(place.index, epoch) for epoch, place in slab.places.items()}
        whole = {(slab.places[epoch].index, epoch) for epoch in slab.mirror.on_record if epoch in slab.places}
        lost = slab.mirror.lost and slab.index not in self._places.lost
        if whole != keys & self._places.whole or lost:
            self._places.whole -= keys
            self._places.whole |= whole
            if lost:
                self._places.lost.add(slab.index)
            slab.changes += 1
        slab.touch()

    async def record(self, slab: MirrorSlab) -> None:
        """Returns when the disk has it. OSError: it does not."""
        while slab.unrecorded:
            changes = slab.changes
            await self._places.write()
            slab.recorded = max(slab.recorded, changes)

    # ---- opening and closing ----

    async def open(self, slab: MirrorSlab, place: OpenPlace) -> None:
        """Writes go there too from now on; what was written before is copied in the background. ValueError says why
        not, OSError that the disk cannot remember the place."""
        self._check_open(slab, place)
        if place.epoch in slab.places:
            return
        try:
            link = await self._connect(place, None)
        except SlabGone as gone:
            raise ValueError(str(gone)) from gone
        try:
            await self._places.add(place)
            self._check_open(slab, place)
        except (OSError, ValueError) as error:
            link.fail(f"not opened: {error}")
            self._places.forget(place.index, place.epoch)
            raise
        slab.places[place.epoch] = place
        slab.mirror.opened(place.epoch)
        self._use(slab, link)

    def _check_open(self, slab: MirrorSlab, place: OpenPlace) -> None:
        if slab.mirror.asks:
            raise ValueError(self.doubts(slab))
        for epoch, other in slab.places.items():
            if other.lender == place.lender and epoch != place.epoch and not isinstance(slab.mirror.of(epoch), Out):
                raise ValueError(f"{place.lender} has a member of slab {slab.index} already, under epoch {epoch}")

    def _use(self, slab: MirrorSlab, link: RemoteSlab) -> None:
        slab.links[link.place.epoch] = link
        link.ended = lambda ended: self._ended(slab, ended)
        if link.why:
            self._ended(slab, link)  # it ended before `link.ended` was set
        elif isinstance(slab.mirror.of(link.place.epoch), Filling):
            self._guard(slab, "fill", self._fill, slab, link)
        slab.touch()

    async def close(self, slab: MirrorSlab, number: int, epoch: int) -> None:
        """Returns when nothing acknowledged depends on it: not before another member is whole, unless nothing was ever
        written. OSError: this host's disk cannot say so yet."""
        while not slab.mirror.may_leave(epoch, empty=not slab.written and not slab.writes):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        slab.mirror.leave(epoch)
        self.note(slab)
        await self.record(slab)
        link = slab.links.get(epoch)
        if link is not None:
            await link.retire()
            slab.links.pop(epoch, None)
        slab.places.pop(epoch, None)
        await self._places.remove(number, epoch)
        slab.touch()
        if self._places.late:
            self._guard(slab, "places", self._places.catch_up)

    def shut(self) -> None:
        """Close every link."""
        self.closed = True
        for slab in self._slabs:
            for link in list(slab.links.values()):
                link.fail("the volume's process ends")

    # ---- a link ends ----

    def _ended(self, slab: MirrorSlab, link: RemoteSlab) -> None:
        epoch = link.place.epoch
        if self.closed or link.retiring or slab.links.get(epoch) is not link:
            return
        del slab.links[epoch]
        slab.answers.pop(epoch, None)
        slab.why[epoch] = link.why
        self._env.log.warning("a link to a lender ended", slab=slab.index, lender=link.place.lender, why=link.why)
        asked_before = slab.mirror.asks
        for each in slab.mirror.link_ended(epoch):
            self._out(slab, each, "no whole member had a link")
        if slab.mirror.asks and not asked_before:
            slab.era += 1
            self._guard(slab, "recover", self._recover, slab)
        elif isinstance(slab.mirror.of(epoch), Unlinked | Behind):
            self._guard(slab, "reopen", self._reopen, slab, link.place, link.why)
        slab.touch()

    def _out(self, slab: MirrorSlab, epoch: int, why: str) -> None:
        """The machine has put it out. The agent is told, and closes it."""
        place, link = slab.places.get(epoch), slab.links.pop(epoch, None)
        self.note(slab)
        if link is not None:
            link.fail(why)
        if place is not None:
            del slab.places[epoch]
            self._places.forget(place.index, epoch)
            self._env.log.warning("lost a member of a slab", slab=slab.index, lender=place.lender, why=why)
            self._tell(SlabLost(place.index, epoch, why[:400]))
            self._guard(slab, "leave", self._places.write)
        slab.touch()

    async def _reopen(self, slab: MirrorSlab, place: OpenPlace, why: str) -> None:
        """While others serve. It lacks what was written meanwhile, and is filled with that alone."""
        give_up_s = self._env.clock.now_s() + REOPEN_S
        pause_s = PAUSE_S
        while isinstance(slab.mirror.of(place.epoch), Unlinked | Behind):
            left_s = give_up_s - self._env.clock.now_s()
            try:
                link = await self._connect(place, max(left_s / 2, PAUSE_S))
                versions = await link.versions()
            except (SlabGone, OSError) as gone:
                final = isinstance(gone, SlabStale) or isinstance(gone.__cause__, ConnectionRefusedError)
                if final or left_s <= pause_s:
                    await self._give_up_link(slab, place, f"{why}; not opened again: {gone}")
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(PAUSE_MAX_S, 2 * pause_s)
            else:
                await self._reopened(slab, place, link, versions)
                return

    async def _give_up_link(self, slab: MirrorSlab, place: OpenPlace, why: str) -> None:
        if isinstance(slab.mirror.of(place.epoch), Unlinked | Behind):
            slab.mirror.leave(place.epoch)
            self._out(slab, place.epoch, why)
            await self.record(slab)

    async def _reopened(self, slab: MirrorSlab, place: OpenPlace, link: RemoteSlab, versions: Versions) -> None:
        if not isinstance(slab.mirror.of(place.epoch), Unlinked | Behind):
            link.fail("not wanted any more when it was opened again")
            return
        found = np.array(versions)[: slab.pages]
        if (found > self._of(slab)).any():
            link.fail("it holds what was never acknowledged")
            await self._give_up_link(slab, place, f"{place.lender} holds what was never acknowledged")
            return
        self._holds(slab, link, found)
        if self._missing(slab, link):
            slab.mirror.falls_behind(place.epoch)
        slab.mirror.works_again(place.epoch)
        self.note(slab)
        self.reopened += 1
        self._env.log.info("a link is open again", slab=slab.index, lender=place.lender, epoch=place.epoch)
        self._use(slab, link)

    def _of(self, slab: MirrorSlab) -> "NDArray[np.uint64]":
        """The versions of its pages."""
        return self._newest[slab.first : slab.first + slab.pages]

    def _holds(self, slab: MirrorSlab, link: RemoteSlab, found: "NDArray[np.uint64]") -> None:
        newest = self._of(slab)
        link.held.set_all(((found == newest) & (newest > 0)).tobytes().ljust(link.pages, b"\0"))

    def acknowledged(self, slab: MirrorSlab, link: RemoteSlab, first: int, versions: Iterable[int]) -> None:
        """The lender has these versions of a run of pages of the volume; it holds those that are the newest."""
        for page, version in enumerate(versions, first):
            if version == self._newest[page]:
                link.held.add(page - slab.first)

    # ---- filling ----

    async def _fill(self, slab: MirrorSlab, link: RemoteSlab) -> None:
        """Lenders keep the newer of two versions, so what is copied never replaces what is written meanwhile."""
        epoch, size = link.place.epoch, self._page_bytes
        buffer = memoryview(bytearray(COPY_PAGES * size))
        pause_s = PAUSE_S
        while link.usable and isinstance(slab.mirror.of(epoch), Filling):
            try:
                for run_at, count in self._missing(slab, link):
                    first = slab.first + run_at
                    versions = await self._fetch(slab, first, buffer[: count * size])
                    await link.write(run_at, versions, buffer[: count * size])
                    self.acknowledged(slab, link, first, versions)
                    await self._paced(count * size)
                if not self._missing(slab, link):
                    slab.mirror.whole_now(slab.mirror.filled(epoch))
                    self.note(slab)
                    break
            except SlabGone:
                return  # `_ended` was called
            except OSError as error:
                slab.why[epoch] = str(error)
                await asyncio.sleep(pause_s)
                pause_s = min(TROUBLE_MAX_S, 2 * pause_s)
        await self.record(slab)
        for each in slab.mirror.whole:
            self._tell(SlabCopiedFrame(slab.places[each].index, each))

    def _missing(self, slab: MirrorSlab, link: RemoteSlab) -> list[tuple[int, int]]:
        """Runs of pages, counted from the first of the slab, whose newest content is not there."""
        flags = np.frombuffer(bytes(link.held.flags[: slab.pages]), np.uint8)
        return runs_of(np.flatnonzero((self._of(slab) > 0) & (flags == 0)), COPY_PAGES)

    async def _paced(self, copied_bytes: int) -> None:
        """Requests get their turn."""
        now_s = self._env.clock.now_s()
        self._copied_s = max(now_s, self._copied_s) + mirroring.rebuild_pause_s(copied_bytes)
        await asyncio.sleep(self._copied_s - now_s)

    # ---- nobody serves ----

    def find_again(self) -> None:
        """Places of an earlier process: those that its disk calls whole are asked, and the others left to their
        lenders, who hear of it by the agent."""
        for place in self._places.all():
            slab = self._slabs[mirroring.slab_of(place.index, mirroring.MEMBERS)]
            if (place.index, place.epoch) in self._places.whole:
                slab.places[place.epoch] = place
                slab.mirror.found(place.epoch)
            else:
                self._places.forget(place.index, place.epoch)
        for index in self._places.lost:
            self._slabs[index].mirror.lost = True
        for slab in self._slabs:
            slab.touch()
            if slab.mirror.asks:
                self._guard(slab, "recover", self._recover, slab)

    async def _recover(self, slab: MirrorSlab) -> None:
        """A member that does not answer is out once another has: that one has everything that was acknowledged."""
        give_up_s = self._env.clock.now_s() + REOPEN_S
        pause_s = PAUSE_S
        while slab.mirror.asks:
            missing = [epoch for epoch in slab.mirror.asked if epoch not in slab.answers]
            await asyncio.gather(*(self._ask(slab, epoch) for epoch in missing))
            asked = slab.mirror.asked
            answered = [epoch for epoch in asked if epoch in slab.answers]
            late = self._env.clock.now_s() >= give_up_s
            if answered and (late or len(answered) == len(asked)) and await self._agree(slab, answered):
                return
            await asyncio.sleep(pause_s)
            pause_s = min(PAUSE_MAX_S, 2 * pause_s)

    async def _ask(self, slab: MirrorSlab, epoch: int) -> None:
        place = slab.places[epoch]
        try:
            link = await self._connect(place, REOPEN_S / 2)
            versions = await link.versions()
        except (SlabGone, OSError) as error:
            slab.why[epoch] = str(error)
            slab.touch()
            return
        if not isinstance(slab.mirror.of(epoch), Awaited):
            link.fail("given up meanwhile")
            return
        slab.answers[epoch] = np.array(versions)[: slab.pages]
        self._use(slab, link)

    async def _agree(self, slab: MirrorSlab, answered: list[int]) -> bool:
        """All of these hold the same from now on, and serve. False: a link ended meanwhile."""
        found = {epoch: slab.answers[epoch] for epoch in answered}
        newest = mirroring.newest(list(found.values()))
        self._of(slab)[:] = newest
        slab.written = int(np.count_nonzero(newest))
        for epoch in answered:
            self._holds(slab, slab.links[epoch], found[epoch])
        try:
            for epoch in answered:
                await self._equalise(slab, slab.links[epoch], found[epoch], newest)
        except (SlabGone, KeyError, OSError) as error:
            self._env.log.warning("members are not equal yet", slab=slab.index, why=str(error))
            return False
        silent = [epoch for epoch in slab.mirror.asked if epoch not in answered]
        if silent:
            self._places.whole -= {(slab.places[epoch].index, epoch) for epoch in silent}
            await self._places.write()
        if any(epoch not in slab.links for epoch in answered):
            return False
        slab.answers.clear()
        for epoch in slab.mirror.answered(answered):
            self._out(slab, epoch, f"it did not answer: {slab.why.get(epoch, '')}")
        self.reopened += len(answered)
        self.note(slab)
        return True

    async def _equalise(
        self, slab: MirrorSlab, link: RemoteSlab, found: "NDArray[np.uint64]", newest: "NDArray[np.uint64]"
    ) -> None:
        size = self._page_bytes
        buffer = memoryview(bytearray(COPY_PAGES * size))
        for run_at, count in runs_of(mirroring.unequal(found, newest), COPY_PAGES):
            versions = await self._fetch(slab, slab.first + run_at, buffer[: count * size])
            await link.write(run_at, versions, buffer[: count * size])
            self.acknowledged(slab, link, slab.first + run_at, versions)
            found[run_at : run_at + count] = versions

    async def give_up(self, slab: MirrorSlab, epoch: int, why: str) -> OpenPlace | None:
        """Its lender has lost it, or a person does not want to wait. With the last one all that was written there is
        lost, and is said to be: it is not read as something else. The place, if it was asked."""
        place = slab.places.get(epoch)
        if place is None or not isinstance(slab.mirror.of(epoch), Awaited):
            return None
        self.unrecovered += 1
        slab.answers.pop(epoch, None)
        if slab.mirror.given_up(epoch):
            self._of(slab)[:] = 0
            slab.written = 0
            why = f"{why}; it was the last one, what was written there is lost"
        self._out(slab, epoch, why)
        await self.record(slab)
        return place

    async def give_up_all(self, why: str, most: int = 1 << 20) -> tuple[OpenPlace, ...]:
        """At most so many; those given up. A member that has answered is kept."""
        silent = [(slab, epoch) for slab in self._slabs for epoch in slab.mirror.asked if epoch not in slab.answers]
        found = [await self.give_up(slab, epoch, why) for slab, epoch in silent[:most]]
        return tuple(place for place in found if place is not None)

    # ---- waiting, and looking ----

    async def known(self, slab: MirrorSlab) -> None:
        """Wait until somebody serves. OSError says whom it waits for when that takes too long."""
        try:
            async with asyncio.timeout(UNSURE_S):
                await slab.serving.wait()
        except TimeoutError as error:
            raise Undecided(errno.EIO, self.doubts(slab)) from error

    def doubts(self, slab: MirrorSlab) -> str:
        """Why nobody serves, for people."""
        if not slab.mirror.asks:
            return f"slab {slab.index} waits for two hosts with room for it"
        said = [f"{slab.places[epoch].lender} ({slab.why.get(epoch, 'no answer yet')})" for epoch in slab.mirror.asked]
        return f"slab {slab.index} waits for its members: {'; '.join(said)}"[:400]

    def now(self, slabs: Iterable[MirrorSlab]) -> tuple[PlaceNow, ...]:
        """Every place of these, and how it is."""
        found: list[PlaceNow] = []
        told = 0
        for slab in slabs:
            for epoch, place in sorted(slab.places.items()):
                why = slab.why.get(epoch, "")[:200] if epoch not in slab.links and told < TOLD_PLACES else ""
                told += bool(why)
                found.append(PlaceNow(place.index, epoch, slab.state(epoch), why))
        return tuple(found)

    def _guard(self, slab: MirrorSlab, name: str, work: Callable[..., Coroutine[Any, Any, None]], *what: Any) -> None:
        """Run `work(*what)` as a task whose failure is this slab's trouble, and no other's."""
        self._env.spawn(f"{name} slab {slab.index}", self._guarded(slab, name, work, *what))

    async def _guarded(
        self, slab: MirrorSlab, name: str, work: Callable[..., Coroutine[Any, Any, None]], *what: Any
    ) -> None:
        pause_s = PAUSE_MAX_S
        while not self.closed:
            try:
                await work(*what)
                return
            except OSError as error:  # this host's disk refuses: again
                self._env.log.error("a slab is in trouble", task=name, slab=slab.index, why=str(error))
            await asyncio.sleep(pause_s)
            pause_s = min(TROUBLE_MAX_S, 2 * pause_s)
