"""The members of slabs with parity: what each should hold, how one is filled from the others, how slots are made parity
again, and what a slab is after a crash (`member_lenders` has the rest, `policy.parity` decides)."""

import asyncio
import errno
from array import array
from collections.abc import Callable
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
from plugins.memory.datapath.volumes.members.parity_rows import ParityRows
from plugins.memory.datapath.volumes.members.parity_slab import ParitySlab
from plugins.memory.datapath.wire.control import OpenPlace, SlabCopiedFrame
from plugins.memory.machine.mirror import Filling, Whole
from plugins.memory.policy import parity
from plugins.memory.policy.parity import SettledRows

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ParityLenders(MemberLenders[ParitySlab]):
    """The members of a volume with parity. `rows` reads rows; `next_version` gives a version above all that were
    used."""

    def __init__(
        self,
        env: Env,
        volume: LentVolume[ParitySlab],
        members: int,
        rows: ParityRows,
        next_version: Callable[[], int],
    ) -> None:
        super().__init__(env, volume, members)
        self._rows, self._next_version = rows, next_version

    # ---- what a member holds ----

    def _column(self, place: OpenPlace) -> int:
        return place.index % self._members

    def _expected(self, slab: ParitySlab, link: RemoteSlab) -> "NDArray[np.uint64]":
        column = self._column(link.place)
        found: NDArray[np.uint64] = slab.slots if column == slab.data else slab.newest[:, column]
        return found

    def _holds(self, slab: ParitySlab, link: RemoteSlab, found: "NDArray[np.uint64]") -> None:
        column = self._column(link.place)
        if column < slab.data:
            link.held.set_all(held_flags(found, slab.newest[:, column], link.pages))
        else:
            held = (found == slab.slots) & parity.is_parity(found, slab.newest)
            link.held.set_all(held.tobytes().ljust(link.pages, b"\0"))

    def _nothing_is_left(self, slab: ParitySlab) -> None:
        slab.newest[:] = 0
        slab.slots[:] = 0
        slab.written = 0

    def _use(self, slab: ParitySlab, link: RemoteSlab) -> None:
        super()._use(slab, link)
        self._repair_soon(slab)

    def _may_leave(self, slab: ParitySlab, epoch: int) -> bool:
        """May this member leave? Not while a row's slot is no parity yet, if its page is nowhere else."""
        if not super()._may_leave(slab, epoch):
            return False
        if epoch not in slab.places or not isinstance(slab.mirror.of(epoch), Whole):
            return True
        column = slab.column(epoch)
        if column == slab.data or slab.of_column(column, [each for each in slab.mirror.whole if each != epoch]):
            return True
        return not self._only_there(slab, column).any()

    def _only_there(self, slab: ParitySlab, column: int) -> "NDArray[np.bool_]":
        """Rows whose page of that column no slot can give, shape (rows,). Rows that are being written do not count:
        their slot will follow."""
        found: NDArray[np.bool_] = (slab.newest[:, column] > 0) & ~slab.kept(column)
        for first, count in slab.writes.values():
            row, rows = parity.rows_of(first - slab.first, count, slab.data)
            found[row : row + rows] = False
        return found

    def _out(self, slab: ParitySlab, epoch: int, why: str) -> None:
        column = slab.column(epoch) if epoch in slab.places else slab.data
        super()._out(slab, epoch, why)
        if column < slab.data and not slab.mirror.asks:
            self._lose(slab, column)

    def _lose(self, slab: ParitySlab, column: int) -> None:
        """Mark as lost what only that member had, if it was the last one of its column."""
        if any(slab.column(epoch) == column for epoch in slab.mirror.on_record if epoch in slab.places):
            return
        lost = self._only_there(slab, column)
        for link in slab.of_column(column, list(slab.links)):
            lost &= np.frombuffer(bytes(link.held.flags), np.uint8)[: len(lost)] == 0
        if lost.any():
            slab.newest[lost, column] = 0
            slab.written = int(np.count_nonzero(slab.newest))
            slab.mirror.lost = True
            self.note(slab)
            self._guard(slab, "lose", self.record, slab)

    # ---- filling ----

    async def _fill(self, slab: ParitySlab, link: RemoteSlab) -> None:
        epoch, column = link.place.epoch, self._column(link.place)
        pause_s = PAUSE_S
        while link.usable and isinstance(slab.mirror.of(epoch), Filling):
            try:
                if column == slab.data:
                    await self._repair_rows(slab)
                    missing = bool(len(slab.lacking()))
                else:
                    await self._fill_column(slab, link, column)
                    missing = bool(len(self._missing(slab, link, column)))
                if not missing:
                    slab.mirror.whole_now(slab.mirror.filled(epoch))
                    self.note(slab)
                    break
            except (SlabGone, OSError) as error:
                if link.why:
                    return  # `_ended` was called
                slab.why[epoch] = str(error)
                await asyncio.sleep(pause_s)
                pause_s = min(TROUBLE_MAX_S, 2 * pause_s)
        await self.record(slab)
        for each in slab.mirror.whole:
            self._tell(SlabCopiedFrame(slab.places[each].index, each))
        self._repair_soon(slab)

    def _missing(self, slab: ParitySlab, link: RemoteSlab, column: int) -> "NDArray[np.int64]":
        flags = np.frombuffer(bytes(link.held.flags), np.uint8)[: slab.at_lender]
        return np.flatnonzero((slab.newest[:, column] > 0) & (flags == 0))

    async def _fill_column(self, slab: ParitySlab, link: RemoteSlab, column: int) -> None:
        for row, count in runs_of(self._missing(slab, link, column), COPY_PAGES):
            async with slab.locks.locked(row, count):
                await self._bring(slab, link, row, count, column)
            await self._paced(count * self._page_bytes)

    async def _bring(self, slab: ParitySlab, link: RemoteSlab, row: int, count: int, column: int) -> None:
        """Send a member pages of rows that are locked, or not used by anybody yet."""
        content = await self._rows.read(slab, row, count, column)
        versions = array("Q", slab.newest[row : row + count, column].tobytes())
        await link.write(row, versions, content.data.cast("B"))
        for at, version in enumerate(versions, row):
            if version and version == slab.newest[at, column]:
                link.held.add(at)

    # ---- slots ----

    def _repair_soon(self, slab: ParitySlab) -> None:
        """Make slots parity that are not, once every column has a member again."""
        if not slab.repairing and not slab.mirror.asks and slab.all_there() and len(slab.lacking()):
            slab.repairing = True
            self._guard(slab, "repair", self._repair, slab)

    async def _repair(self, slab: ParitySlab) -> None:
        pause_s = PAUSE_S
        try:
            while not slab.mirror.asks and slab.all_there() and len(slab.lacking()):
                try:
                    await self._repair_rows(slab)
                except (SlabGone, OSError) as error:
                    self._env.log.debug("slots are no parity yet", slab=slab.index, why=str(error))
                    await asyncio.sleep(pause_s)
                    pause_s = min(TROUBLE_MAX_S, 2 * pause_s)
                if not slab.of_column(slab.data, slab.mirror.takes):
                    break
        finally:
            slab.repairing = False
            slab.touch()

    async def _repair_rows(self, slab: ParitySlab) -> None:
        for row, count in runs_of(slab.lacking(), COPY_PAGES):
            async with slab.locks.locked(row, count):
                if not slab.all_there():
                    raise OSError(errno.EIO, "a column has no member")
                await self._make_parity(slab, row, count)
            await self._paced(count * self._page_bytes)

    async def _make_parity(self, slab: ParitySlab, row: int, count: int) -> None:
        """Make the slots of these rows parity. The rows are locked, or not used by anybody yet."""
        columns = await self._rows.read_all(slab, row, count, range(slab.data))
        await self._rows.write_slots(slab, row, parity.xor(columns), self._next_version())

    # ---- too few serve ----

    def _settled(self, slab: ParitySlab, answered: list[int]) -> SettledRows:
        columns = [self._answer(slab, answered, column) for column in range(slab.data)]
        return parity.settled(columns, self._answer(slab, answered, slab.data))

    def _loses(self, slab: ParitySlab, answered: list[int]) -> bool:
        return self._settled(slab, answered).lost

    async def _equal(self, slab: ParitySlab, answered: list[int]) -> None:
        columns = [self._answer(slab, answered, column) for column in range(slab.data)]
        slots = self._answer(slab, answered, slab.data)
        found = self._settled(slab, answered)
        slab.newest[:] = found.newest
        slab.slots[:] = 0 if slots is None else slots
        slab.written = int(np.count_nonzero(slab.newest))
        if found.lost and not slab.mirror.lost:
            slab.mirror.lost = True
            self.note(slab)
            await self.record(slab)
        for epoch in answered:
            self._holds(slab, slab.links[epoch], slab.answers[epoch])
        for epoch in answered:
            link = slab.links[epoch]
            if self._column(link.place) < slab.data and columns[self._column(link.place)] is not None:
                for row, count in runs_of(self._missing(slab, link, self._column(link.place)), COPY_PAGES):
                    await self._bring(slab, link, row, count, self._column(link.place))
        for row, count in runs_of(found.stale, COPY_PAGES):
            await self._make_parity(slab, row, count)
        for epoch in answered:
            slab.answers[epoch] = np.array(self._expected(slab, slab.links[epoch]))

    def _answer(self, slab: ParitySlab, answered: list[int], column: int) -> "NDArray[np.uint64] | None":
        """Versions that members of that column report; None: none of them does."""
        said = [slab.answers[epoch] for epoch in answered if slab.column(epoch) == column]
        found: NDArray[np.uint64] | None = np.maximum.reduce(said) if said else None
        return found

    async def _agree(self, slab: ParitySlab, answered: list[int]) -> bool:
        did = await super()._agree(slab, answered)
        if did:
            self._repair_soon(slab)
        return did
