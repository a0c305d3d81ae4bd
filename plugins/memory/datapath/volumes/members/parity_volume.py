"""The rules of a volume with parity (`--parity K+1`): each slab is in the memory of K + 1 other hosts, a page at one of
them, and for each row of K pages their parity at the last (`policy.parity` has the layout, and what a slot says).

    write   rows are locked. What the parity needs of pages that are not written is read first. Then the pages go to
            their members; when those have them, the slots go to theirs; acknowledged when both are there, and those
            that missed something are called not whole on this host's disk
    read    from the member of the page's column; when that one is gone or late, from a slot that has its copy, or from
            the slot and the row's other pages, with the row locked
    flush   as of a mirrored volume: nothing is on its way to anywhere

*One member gone.* Writes go on: while a column has no member, a row that is written gets a copy of its page of that
column in place of the parity, and only then the other pages. A row that is not written stays parity. So the page of a
lost member is in one place at every moment, whatever dies between two steps, and a write costs one message more than a
read at most. Another host is looked for; it is filled page by page from the others, at a bounded rate and with the row
locked, while it takes new writes; slots become parity again when it has everything.

*The write hole.* A crash between the pages and the slot leaves a row whose slot is older than one of its pages. Its
versions say so: no page is ever made from such a slot, and the next process gives these rows their parity before
anything is read. When a member was lost together with the process, at the very moment of a write, the pages that it had
in the rows being written cannot be made; they fail to be read, and are never something else.

*Who computes.* The process of the volume: lenders keep pages and know nothing of parity, so a lender's processor has no
new work, a slot is sealed like a page, and nobody else ever sees two pages of a row. The price is that a write of less
than a row reads up to K - 1 pages first.

Two members lost at once cost the pages of both, and of no other: they read as an error until they are written again.
"""

import asyncio
import errno
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from covey.ports.env import Env
from plugins.memory.datapath.links.remote_slab import AwaitedAnswer, RemoteSlab, SlabGone
from plugins.memory.datapath.volumes.lender_tasks import LentVolume
from plugins.memory.datapath.volumes.members.members_volume import AGAIN_S, WAIT_S, MembersVolume
from plugins.memory.datapath.volumes.members.mirror_slab import MirrorSlab
from plugins.memory.datapath.volumes.members.parity_lenders import ParityLenders
from plugins.memory.datapath.volumes.members.parity_rows import PLAINLY, LateRead, ParityRows, ReadHow
from plugins.memory.datapath.volumes.members.parity_slab import ParitySlab
from plugins.memory.datapath.volumes.paged_volume import Done, settle
from plugins.memory.datapath.wire.control import SlabCounts, Told
from plugins.memory.datapath.wire.shape import Shape, Undecided
from plugins.memory.datapath.wire.slabwire import Versions
from plugins.memory.policy import parity

if TYPE_CHECKING:
    from numpy.typing import NDArray


HEDGED = ReadHow(hedged=True)


class RowsWritten(NamedTuple):
    """A run of pages that is written, laid out in its rows."""

    row: int
    rows: int
    pages: "NDArray[np.uint8]"
    """Content, shape (rows, columns, page_bytes); pages that are not written are zeros until they are read."""
    mask: "NDArray[np.bool_]"
    """Whether each page is written, shape (rows, columns)."""
    are_zeros: bool

    def of_column(self, column: int) -> tuple[int, int]:
        """First of these rows in which that column is written, and in how many; 0: in none."""
        at = np.flatnonzero(self.mask[:, column])
        return (int(at[0]), len(at)) if len(at) else (0, 0)


class ParityVolume(MembersVolume[ParitySlab]):
    """A volume with parity, with the interface of `Volume` for clients and the agent. `shape.slab_bytes`: bytes of
    `data` slabs as lenders know them."""

    def __init__(
        self,
        env: Env,
        shape: Shape,
        prefix: str,
        deadline_s: float,
        tell: Callable[[Told], None],
        data: int,
        sealed: bool = False,
    ) -> None:
        self._data = data
        lent_pages = shape.slab_pages // data
        super().__init__(env, shape, prefix, deadline_s, sealed, self._make, data + 1, lent_pages)
        self._rows = ParityRows(shape.page_bytes, env.clock)
        self.lenders: ParityLenders = ParityLenders(
            env,
            LentVolume(self.slabs, shape.page_bytes, self.places, self._connect, self._fetch, tell),
            data + 1,
            self._rows,
            self._next_version,
        )

    def _make(self, index: int, first: int, pages: int, touched: Callable[[ParitySlab], None]) -> ParitySlab:
        newest = self._newest[first : first + self._slab_pages].reshape(-1, self._data)

        def changed(slab: MirrorSlab) -> None:
            assert isinstance(slab, ParitySlab)
            touched(slab)

        return ParitySlab(index, first, pages, changed, newest)

    def _next_version(self) -> int:
        self._version += parity.KINDS
        return self._version

    # ---- requests that nobody awaits ----

    def submit_write(self, first: int, count: int, pages: memoryview | None, done: Done) -> None:
        self._env.spawn("write", settle(self.write(first, count, pages), done))

    def submit_read(self, first: int, into: memoryview, done: Done) -> None:
        self._env.spawn("read", settle(self.read(first, into), done))

    # ---- writing ----

    async def _write_part(self, slab: ParitySlab, first: int, count: int, pages: memoryview | None) -> None:
        give_up_s = self._env.clock.now_s() + WAIT_S
        row, rows = parity.rows_of(first - slab.first, count, self._data)
        slab.requests += count
        while True:
            await self.lenders.known(slab)
            why = "too few whole members have a link"
            async with slab.locks.locked(row, rows):
                try:
                    if slab.mirror.serves and await self._write_rows(slab, first, count, pages):
                        return
                except (SlabGone, OSError) as error:
                    why = str(error)
            if self._env.clock.now_s() >= give_up_s:
                raise Undecided(errno.EIO, f"slab {slab.index} did not answer within {WAIT_S:g} s: {why}")
            await asyncio.sleep(AGAIN_S)

    async def _write_rows(self, slab: ParitySlab, first: int, count: int, pages: memoryview | None) -> bool:
        """Write rows under the next version. True: the write is acknowledged."""
        if slab.unrecorded and not await self._is_recorded(slab):
            return False  # whoever the disk does not call whole is none to rely on
        written, era = self._laid_out(slab, first, count, pages), slab.era
        missing: int | None = slab.missing()
        slots = await self._slots(slab, written, missing)
        if slab.era != era or slab.missing() != missing:
            return False
        version = self._next_version()
        slab.writes[version] = (first, count)
        try:
            self._begin(slab, written, version, missing)
            if missing is None:
                has = await self._send_pages(slab, written, version)
                if slab.era != era:
                    return False  # nobody served meanwhile: what the row is was found out without this write
                has += await self._send_slots(slab, written, version, slots, missing)
            else:
                has = await self._send_slots(slab, written, version, slots, missing)
                if not has or slab.era != era:
                    return False  # the copy is nowhere: whatever the slot was stays what the row is
                has += await self._send_pages(slab, written, version)
            return await self._acknowledged(slab, written, era, has)
        finally:
            slab.finish(version)
            slab.touch()

    def _laid_out(self, slab: ParitySlab, first: int, count: int, pages: memoryview | None) -> RowsWritten:
        size, data = self.shape.page_bytes, self._data
        row, rows = parity.rows_of(first - slab.first, count, data)
        at = first - slab.first - row * data
        content, mask = np.zeros((rows * data, size), np.uint8), np.zeros(rows * data, np.bool_)
        mask[at : at + count] = True
        if pages is not None:
            content[at : at + count] = np.frombuffer(pages, np.uint8).reshape(count, size)
        return RowsWritten(row, rows, content.reshape(rows, data, size), mask.reshape(rows, data), pages is None)

    async def _slots(self, slab: ParitySlab, written: RowsWritten, missing: int | None) -> "NDArray[np.uint8]":
        """Content of the slots of these rows, shape (rows, page_bytes): parity, or copies of the missing column."""
        columns = range(self._data) if missing is None else (missing,)
        rest = [
            (row, column)
            for row in sorted({0, written.rows - 1})
            for column in columns
            if not written.mask[row, column]
        ]
        if slab.of_column(self._data, slab.mirror.takes):
            found = await asyncio.gather(*(self._rows.read(slab, written.row + row, 1, column) for row, column in rest))
            for (row, column), content in zip(rest, found, strict=True):
                written.pages[row, column] = content[0]
        if missing is None:
            return parity.xor(written.pages[:, column] for column in columns)
        return np.ascontiguousarray(written.pages[:, missing])

    def _begin(self, slab: ParitySlab, written: RowsWritten, version: int, missing: int | None) -> None:
        """Mark these pages as the newest content, which no member has yet. Nothing awaits in here."""
        rows = slice(written.row, written.row + written.rows)
        newest = slab.newest[rows]
        slab.written += int((written.mask & (newest == 0)).sum())
        newest[written.mask] = version
        slab.slots[rows] = parity.slot_version(version, missing)
        for epoch, link in slab.links.items():
            column = slab.column(epoch)
            at, count = (0, written.rows) if column == self._data else written.of_column(column)
            if count:
                link.held.drop(written.row + at, count)
        slab.touch()

    async def _send_pages(self, slab: ParitySlab, written: RowsWritten, version: int) -> list[int]:
        """Send pages to the members of their columns; returns the epochs of those that have them."""
        sent: list[tuple[RemoteSlab, int, int, asyncio.Future[Versions | None]]] = []
        for column in range(self._data):
            at, count = written.of_column(column)
            if count:
                content = None
                if not written.are_zeros:
                    content = np.ascontiguousarray(written.pages[at : at + count, column]).data.cast("B")
                for link in slab.of_column(column, slab.mirror.takes):
                    sent.append((link, at, count, self._sent(link, written.row + at, count, version, content)))
        has: list[int] = []
        for link, at, count, done in sent:
            if await done is not None:
                link.held.add_run(written.row + at, count)
                has.append(link.place.epoch)
        return has

    async def _send_slots(
        self, slab: ParitySlab, written: RowsWritten, version: int, slots: "NDArray[np.uint8]", missing: int | None
    ) -> list[int]:
        """Send slots to their members; returns the epochs of those that have them."""
        content = np.ascontiguousarray(slots).data.cast("B")
        version = parity.slot_version(version, missing)
        links = slab.of_column(self._data, slab.mirror.takes)
        sent = [(link, self._sent(link, written.row, written.rows, version, content)) for link in links]
        has: list[int] = []
        for link, done in sent:
            if await done is not None:
                if missing is None:
                    link.held.add_run(written.row, written.rows)
                has.append(link.place.epoch)
        return has

    def _sent(
        self, link: RemoteSlab, row: int, count: int, version: int, content: memoryview | None
    ) -> "asyncio.Future[Versions | None]":
        """Send pages to one member. The result is None when the member does not have them."""
        answer = AwaitedAnswer()
        link.send_write(row, count, version, content, answer.answered)
        return answer.done

    async def _acknowledged(self, slab: ParitySlab, written: RowsWritten, era: int, has: list[int]) -> bool:
        """Decide whether a write is acknowledged. `has`: members that got what they should. Members that were to get
        nothing missed nothing."""
        touched = {column for column in range(self._data) if written.of_column(column)[1]} | {self._data}
        missed = {each for each in slab.mirror.on_record if slab.column(each) in touched and each not in has}
        if era != slab.era:
            return False
        behind = slab.mirror.written([each for each in slab.mirror.on_record if each not in missed])
        if behind is None:
            return False
        if behind:
            self.lenders.note(slab)
        return not slab.unrecorded or await self._is_recorded(slab)

    # ---- reading ----

    async def _fetch(self, slab: ParitySlab, first: int, into: memoryview) -> Versions:
        size = self.shape.page_bytes
        count = len(into) // size
        row, rows = parity.rows_of(first - slab.first, count, self._data)
        give_up_s = self._env.clock.now_s() + WAIT_S
        how = HEDGED
        while True:
            try:
                if how.hedged and not slab.locks.is_held(row, rows) and self._all_held(slab, first - slab.first, count):
                    await self._read_columns(slab, first, count, into, how)
                else:
                    async with slab.locks.locked(row, rows):
                        await self._read_columns(slab, first, count, into, how._replace(hedged=False))
                break
            except LateRead as late:
                how = ReadHow(avoid=late.link)
                continue
            except (SlabGone, OSError) as error:
                why = str(error)
                if self._is_lost(slab, first, count):
                    raise OSError(errno.EIO, f"page {first} is lost: {self._lost((slab.index,))}") from error
                if how.avoid is not None:
                    how = PLAINLY  # it cannot be made now: whoever is late is waited for
                    continue
            if self._env.clock.now_s() >= give_up_s:
                raise Undecided(errno.EIO, why)
            await asyncio.sleep(AGAIN_S)
        self._remote_read_bytes += size * int(np.count_nonzero(self._newest[first : first + count]))
        return array("Q", bytes(self._bytes[8 * first : 8 * (first + count)]))

    def _all_held(self, slab: ParitySlab, at: int, count: int) -> bool:
        """Does each of these pages, counted from the first of the slab, have a member that holds it?"""
        for page in range(at, at + count):
            row, column = divmod(page, self._data)
            links = slab.of_column(column, list(slab.links))
            if slab.newest[row, column] and not any(link.held.flags[row] for link in links):
                return False
        return True

    def _is_lost(self, slab: ParitySlab, first: int, count: int) -> bool:
        return slab.mirror.lost and not slab.mirror.asks and not self._newest[first : first + count].all()

    async def _read_columns(self, slab: ParitySlab, first: int, count: int, into: memoryview, how: ReadHow) -> None:
        if slab.mirror.asks:
            raise OSError(errno.EIO, self.lenders.doubts(slab))
        if self._is_lost(slab, first, count):
            raise OSError(errno.EIO, "it is lost")
        at, data, size = first - slab.first, self._data, self.shape.page_bytes
        parts = [(offset, (at + offset) // data, len(range(offset, count, data))) for offset in range(min(data, count))]
        found = await asyncio.gather(
            *(self._rows.read(slab, row, rows, (at + offset) % data, how) for offset, row, rows in parts)
        )
        pages = np.frombuffer(into, np.uint8).reshape(count, size)
        for (offset, _, _), content in zip(parts, found, strict=True):
            pages[offset::data] = content

    # ---- what people see ----

    def _lines(self, slab: ParitySlab) -> list[SlabCounts]:
        """Counts of each member; `written` counts the pages that should be there."""
        written = [*np.count_nonzero(slab.newest, axis=0).tolist(), np.count_nonzero(slab.newest.max(axis=1))]
        lines = zip(super()._lines(slab), written, strict=True)
        return [msgspec.structs.replace(line, written=int(own)) for line, own in lines]

    _alone = "lack one member, or have rows whose parity is not rebuilt yet; both are under way"

    def _lacks(self, slab: ParitySlab) -> bool:
        return slab.repairing or slab.missing() is not None or not slab.of_column(self._data, slab.mirror.whole)

    def _lost(self, slabs: tuple[int, ...]) -> str:
        which = ", ".join(map(str, slabs[:8])) + (" ..." if len(slabs) > 8 else "")
        return f"two members of slab {which} were lost; next: write or discard the lost pages"
