"""The members of mirrored slabs: what each should hold, how one is filled, and how all are made equal after a crash
(`member_lenders` has the rest)."""

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from covey.ports.env import Env
from plugins.memory.datapath.links.remote_slab import RemoteSlab, SlabGone
from plugins.memory.datapath.volumes.lender_tasks import (
    COPY_PAGES,
    PAUSE_S,
    TROUBLE_MAX_S,
    LentVolume,
    held_flags,
    runs_of,
)
from plugins.memory.datapath.volumes.members.member_lenders import MemberLenders
from plugins.memory.datapath.volumes.members.mirror_slab import MirrorSlab
from plugins.memory.datapath.wire.control import SlabCopiedFrame
from plugins.memory.machine.mirror import Filling
from plugins.memory.policy import mirroring

if TYPE_CHECKING:
    from numpy.typing import NDArray


class MirrorLenders(MemberLenders[MirrorSlab]):
    """The members of a mirrored volume. `newest`: version of every page of the volume, shape (pages,)."""

    def __init__(self, env: Env, volume: LentVolume[MirrorSlab], newest: "NDArray[np.uint64]") -> None:
        super().__init__(env, volume, mirroring.MEMBERS)
        self._newest = newest

    def _of(self, slab: MirrorSlab) -> "NDArray[np.uint64]":
        """Versions of the slab's pages, shape (pages,)."""
        return self._newest[slab.first : slab.first + slab.pages]

    def _holds(self, slab: MirrorSlab, link: RemoteSlab, found: "NDArray[np.uint64]") -> None:
        link.held.set_all(held_flags(found, self._of(slab), link.pages))

    def acknowledged(self, slab: MirrorSlab, link: RemoteSlab, first: int, versions: Iterable[int]) -> None:
        """The lender has these versions of a run of pages of the volume; it holds those that are the newest."""
        for page, version in enumerate(versions, first):
            if version == self._newest[page]:
                link.held.add(page - slab.first)

    def _expected(self, slab: MirrorSlab, link: RemoteSlab) -> "NDArray[np.uint64]":
        return self._of(slab)

    def _nothing_is_left(self, slab: MirrorSlab) -> None:
        self._of(slab)[:] = 0
        slab.written = 0

    # ---- filling ----

    async def _fill(self, slab: MirrorSlab, link: RemoteSlab) -> None:
        """Fill a member. Lenders keep the newer of two versions, so a copy never replaces what is written meanwhile."""
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
        """Runs of pages, counted from the first of the slab, whose newest content the member does not hold."""
        flags = np.frombuffer(bytes(link.held.flags[: slab.pages]), np.uint8)
        return runs_of(np.flatnonzero((self._of(slab) > 0) & (flags == 0)), COPY_PAGES)

    # ---- nobody serves ----

    async def _equal(self, slab: MirrorSlab, answered: list[int]) -> None:
        found = {epoch: slab.answers[epoch] for epoch in answered}
        newest = mirroring.newest(list(found.values()))
        self._of(slab)[:] = newest
        slab.written = int(np.count_nonzero(newest))
        for epoch in answered:
            self._holds(slab, slab.links[epoch], found[epoch])
        for epoch in answered:
            await self._equalise(slab, slab.links[epoch], found[epoch], newest)

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
