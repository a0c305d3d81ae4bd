"""The members of slabs without a disk, mirrored or with parity: opened, closed, opened again when their links end, and
asked what they hold when too few are left to serve. `machine.mirror` decides; this module acts. What a member should
hold, and how it is filled, is in `mirror_lenders` and `parity_lenders`.

What this host's disk says, a few bytes for each member, is changed before anything depends on it: a member is whole
only when all is there, and a write is acknowledged without one only when the disk calls that one not whole any more.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from covey.ports.env import Env
from plugins.memory.datapath.links.remote_slab import RemoteSlab, SlabGone, SlabStale
from plugins.memory.datapath.volumes.lender_tasks import (
    PAUSE_MAX_S,
    PAUSE_S,
    REOPEN_S,
    UNSURE_S,
    LenderTasks,
    LentVolume,
)
from plugins.memory.datapath.volumes.members.mirror_slab import MirrorSlab
from plugins.memory.datapath.wire.control import OpenPlace, SlabLost
from plugins.memory.datapath.wire.slabwire import Versions
from plugins.memory.machine.mirror import Awaited, Behind, Filling, Out, Unlinked
from plugins.memory.policy import mirroring

if TYPE_CHECKING:
    from numpy.typing import NDArray

LOOK_S = 0.25
"""Seconds between two checks whether a slab can do without a member."""
TORN_S = 56.0
"""Further seconds that a slab waits for a silent member that has pages nothing else can give: with `REOPEN_S`, as long
as its lender keeps it by default (`[memory] lease`)."""
M = TypeVar("M", bound=MirrorSlab)


class MemberLenders(LenderTasks[M]):
    """The members of one volume's slabs, `members` of each."""

    def __init__(self, env: Env, volume: LentVolume[M], members: int) -> None:
        super().__init__(env, volume)
        self._members = members
        self._copied_s = 0.0
        """Time from which the next part may be copied."""

    # ---- what a member holds ----

    def _column(self, place: OpenPlace) -> int | None:
        """Column of the slab that is at this place; None: all pages."""
        return None

    @abstractmethod
    def _holds(self, slab: M, link: RemoteSlab, found: "NDArray[np.uint64]") -> None:
        """Take in which versions the member has, shape (pages at the lender,)."""

    @abstractmethod
    def _expected(self, slab: M, link: RemoteSlab) -> "NDArray[np.uint64]":
        """The versions that the member would have if it had missed nothing."""

    @abstractmethod
    async def _fill(self, slab: M, link: RemoteSlab) -> None:
        """Send the member what it lacks, while it is `Filling`."""

    @abstractmethod
    async def _equal(self, slab: M, answered: list[int]) -> None:
        """Make these members, which have answered, equal: what each page is follows from `slab.answers`. OSError,
        SlabGone or KeyError when a link ended meanwhile."""

    def _loses(self, slab: M, answered: list[int]) -> bool:
        """Do silent members have something that cannot be made from what `answered` have?"""
        return False

    @abstractmethod
    def _nothing_is_left(self, slab: M) -> None:
        """Nothing is left of what was written to this slab."""

    # ---- what this host's disk says ----

    def note(self, slab: M) -> None:
        """Mark the slab for recording if the set of whole members has changed."""
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

    async def record(self, slab: M) -> None:
        """Record changes; returns when the disk has them. OSError: it does not."""
        while slab.unrecorded:
            changes = slab.changes
            await self._places.write()
            slab.recorded = max(slab.recorded, changes)

    # ---- opening and closing ----

    async def open(self, slab: M, place: OpenPlace) -> None:
        """Open a member: writes go there too from now on; what was written before is copied in the background.
        ValueError says why not, OSError that the disk cannot remember the place."""
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
        slab.mirror.opened(place.epoch, self._column(place))
        self._use(slab, link)

    def _check_open(self, slab: M, place: OpenPlace) -> None:
        if slab.mirror.asks:
            raise ValueError(self.doubts(slab))
        for epoch, other in slab.places.items():
            if other.lender == place.lender and epoch != place.epoch and not isinstance(slab.mirror.of(epoch), Out):
                raise ValueError(f"{place.lender} has a member of slab {slab.index} already, under epoch {epoch}")

    def _use(self, slab: M, link: RemoteSlab) -> None:
        slab.links[link.place.epoch] = link
        link.ended = lambda ended: self._ended(slab, ended)
        if link.why:
            self._ended(slab, link)  # it ended before `link.ended` was set
        elif isinstance(slab.mirror.of(link.place.epoch), Filling):
            self._guard(slab, "fill", self._fill, slab, link)
        slab.touch()

    async def close(self, slab: M, number: int, epoch: int) -> None:
        """Close a member. Returns when nothing acknowledged depends on it: not before another member is whole, unless
        nothing was ever written. OSError: this host's disk cannot record that yet."""
        while not self._may_leave(slab, epoch):  # noqa: ASYNC110
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

    def _may_leave(self, slab: M, epoch: int) -> bool:
        return slab.mirror.may_leave(epoch, empty=not slab.written and not slab.writes)

    def _links_of(self, slab: M) -> list[RemoteSlab]:
        return list(slab.links.values())

    # ---- a link ends ----

    def _ended(self, slab: M, link: RemoteSlab) -> None:
        epoch = link.place.epoch
        if self.closed or link.retiring or slab.links.get(epoch) is not link:
            return
        del slab.links[epoch]
        slab.answers.pop(epoch, None)
        slab.why[epoch] = link.why
        self._env.log.warning("a link to a lender ended", slab=slab.index, lender=link.place.lender, why=link.why)
        asked_before = slab.mirror.asks
        for each in slab.mirror.link_ended(epoch):
            self._out(slab, each, "too few whole members had a link")
        if slab.mirror.asks and not asked_before:
            slab.era += 1
            for asked in slab.mirror.asked:
                if (other := slab.links.pop(asked, None)) is not None:
                    other.fail("its members are asked again")
            self._guard(slab, "recover", self._recover, slab)
        elif isinstance(slab.mirror.of(epoch), Unlinked | Behind):
            self._guard(slab, "reopen", self._reopen, slab, link.place, link.why)
        slab.touch()

    def _out(self, slab: M, epoch: int, why: str) -> None:
        """The machine has put the member out: tell the agent, which closes it."""
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

    async def _reopen(self, slab: M, place: OpenPlace, why: str) -> None:
        """Open a member's link again while others serve. It lacks what was written meanwhile, and is filled with that
        alone."""
        give_up_s = self._env.clock.now_s() + REOPEN_S
        pause_s = PAUSE_S
        while isinstance(slab.mirror.of(place.epoch), Unlinked | Behind):
            left_s = give_up_s - self._env.clock.now_s()
            try:
                async with self._linked(place, max(left_s / 2, PAUSE_S)) as link:
                    await self._reopened(slab, place, link, await link.versions())
            except (SlabGone, OSError) as gone:
                final = isinstance(gone, SlabStale) or isinstance(gone.__cause__, ConnectionRefusedError)
                if final or left_s <= pause_s:
                    await self._give_up_link(slab, place, f"{why}; not opened again: {gone}")
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(PAUSE_MAX_S, 2 * pause_s)
            else:
                return

    async def _give_up_link(self, slab: M, place: OpenPlace, why: str) -> None:
        if isinstance(slab.mirror.of(place.epoch), Unlinked | Behind):
            slab.mirror.leave(place.epoch)
            self._out(slab, place.epoch, why)
            await self.record(slab)

    async def _reopened(self, slab: M, place: OpenPlace, link: RemoteSlab, versions: Versions) -> None:
        if not isinstance(slab.mirror.of(place.epoch), Unlinked | Behind):
            link.fail("no longer needed when it was opened again")
            return
        found = np.array(versions)[: slab.at_lender]
        expected = self._expected(slab, link)
        if (found > expected).any():
            link.fail("it holds pages that were never acknowledged")
            await self._give_up_link(slab, place, f"{place.lender} holds pages that were never acknowledged")
            return
        self._holds(slab, link, found)
        if (found != expected).any():
            slab.mirror.falls_behind(place.epoch)
        slab.mirror.works_again(place.epoch)
        self.note(slab)
        self.reopened += 1
        self._env.log.info("a link is open again", slab=slab.index, lender=place.lender, epoch=place.epoch)
        self._use(slab, link)

    async def _paced(self, copied_bytes: int) -> None:
        """Pause after a copy so that requests get their turn."""
        now_s = self._env.clock.now_s()
        self._copied_s = max(now_s, self._copied_s) + mirroring.rebuild_pause_s(copied_bytes)
        await asyncio.sleep(self._copied_s - now_s)

    # ---- nobody serves ----

    def find_again(self) -> None:
        """Take over places of an earlier process: those that its disk calls whole are asked, and the others left to
        their lenders, which hear of it from the agent."""
        for place in self._places.all():
            slab = self._slabs[mirroring.slab_of(place.index, self._members)]
            if (place.index, place.epoch) in self._places.whole:
                slab.places[place.epoch] = place
                slab.mirror.found(place.epoch, self._column(place))
            else:
                self._places.forget(place.index, place.epoch)
        for index in self._places.lost:
            self._slabs[index].mirror.lost = True
        for slab in self._slabs:
            slab.touch()
            if slab.mirror.asks:
                self._guard(slab, "recover", self._recover, slab)

    async def _recover(self, slab: M) -> None:
        """Ask all members that are recorded as whole. A member that does not answer is out once enough others have:
        they have everything that was acknowledged. But of a row that was being written when the process ended they may
        not have the other pages: if that member was cut off, it comes back with them."""
        give_up_s = self._env.clock.now_s() + REOPEN_S
        pause_s = PAUSE_S
        stale: set[int] = set()
        while slab.mirror.asks:
            missing = [epoch for epoch in slab.mirror.asked if epoch not in slab.answers]
            found = await asyncio.gather(*(self._ask(slab, epoch) for epoch in missing))
            stale |= {epoch for epoch, is_lent in zip(missing, found, strict=True) if not is_lent}
            asked = slab.mirror.asked
            answered = [epoch for epoch in asked if epoch in slab.answers]
            silent = set(asked) - set(answered) - stale
            waits = bool(silent and answered) and self._loses(slab, answered)
            late = self._env.clock.now_s() >= give_up_s + TORN_S * waits
            are_all = len(answered) == len(asked)
            enough = are_all or (late and slab.mirror.enough(answered))
            if answered and enough and await self._agree(slab, answered):
                return
            await asyncio.sleep(pause_s)
            pause_s = min(PAUSE_MAX_S, 2 * pause_s)

    async def _ask(self, slab: M, epoch: int) -> bool:
        """Ask a member for its versions. False: its lender does not lend it any more."""
        place = slab.places[epoch]
        try:
            async with self._linked(place, REOPEN_S / 2) as link:
                versions = await link.versions()
        except (SlabGone, OSError) as error:
            slab.why[epoch] = str(error)
            slab.touch()
            return not isinstance(error, SlabStale)
        if not isinstance(slab.mirror.of(epoch), Awaited):
            link.fail("given up meanwhile")
            return True
        slab.answers[epoch] = np.array(versions)[: slab.at_lender]
        self._use(slab, link)
        return True

    async def _agree(self, slab: M, answered: list[int]) -> bool:
        """Let all of these members hold what they should from now on, and serve. False: a link ended meanwhile."""
        try:
            await self._equal(slab, answered)
        except (SlabGone, KeyError, OSError) as error:
            self._env.log.warning("its members are not equal yet", slab=slab.index, why=str(error))
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

    async def give_up(self, slab: M, epoch: int, why: str) -> OpenPlace | None:
        """Give up a member: its lender has lost it, or a person does not want to wait. Pages that only it had are lost,
        and reads of them fail instead of returning something else. Returns the place, if it was asked."""
        place = slab.places.get(epoch)
        if place is None or not isinstance(slab.mirror.of(epoch), Awaited):
            return None
        self.unrecovered += 1
        slab.answers.pop(epoch, None)
        if slab.mirror.given_up(epoch):
            if not slab.mirror.on_record:
                self._nothing_is_left(slab)
            why = f"{why}; pages that only it had are lost"
        self._out(slab, epoch, why)
        await self.record(slab)
        return place

    def _silent(self, slab: M) -> list[int]:
        return [epoch for epoch in slab.mirror.asked if epoch not in slab.answers]

    # ---- waiting, and looking ----

    async def known(self, slab: M) -> None:
        """Wait until enough members serve. OSError says whose answer is missing when that takes too long."""
        await self._wait_known(slab, slab.serving, UNSURE_S)

    @property
    def _hosts(self) -> str:
        return {2: "two"}.get(self._members, str(self._members))

    def doubts(self, slab: M) -> str:
        """Why no member serves, for people."""
        if not slab.mirror.asks:
            return f"slab {slab.index} waits for {self._hosts} hosts with room for it"
        said = [f"{slab.places[epoch].lender} ({slab.why.get(epoch, 'no answer yet')})" for epoch in slab.mirror.asked]
        waits = f"slab {slab.index} waits for its members: {'; '.join(said)}"
        return f"{waits[:300]}; next: bring those hosts back, or lose their pages: {self._to_give_up}"

    def _places_of(self, slab: M) -> Iterable[OpenPlace]:
        return [place for _, place in sorted(slab.places.items())]

    def _why(self, slab: M, epoch: int) -> str:
        return slab.why.get(epoch, "") if epoch not in slab.links else ""

    async def _tried(self, slab: M, name: str, work: Coroutine[Any, Any, None]) -> bool:
        try:
            await work
        except OSError as error:  # this host's disk refuses: again
            self._env.log.error("a slab is in trouble", task=name, slab=slab.index, why=str(error))
            return False
        return True
