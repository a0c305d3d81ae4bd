"""Pages of rows, from wherever their newest content is: the member of their column, a slot that has a copy, or the slot
and the row's other pages (`policy.parity`). Whoever asks has locked the rows, so nothing is written to them meanwhile.

What is read is what was sealed for that member, row and version, so a page that is made from others is as good as they
are: each was authenticated, and their versions say that they belong together. A slot is sealed like any page, under a
nonce of its own."""

import asyncio
import errno
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from covey.ports.clock import Clock
from plugins.memory.datapath.links.remote_slab import RemoteSlab, SlabGone
from plugins.memory.datapath.volumes.members.mirror_read import LenderPaces
from plugins.memory.datapath.volumes.members.parity_slab import ParitySlab
from plugins.memory.datapath.wire.slabwire import Versions
from plugins.memory.policy import mirroring, parity

if TYPE_CHECKING:
    from numpy.typing import NDArray


class LateRead(SlabGone):
    """This member did not answer within its usual time."""

    def __init__(self, link: RemoteSlab) -> None:
        super().__init__(f"{link.place.lender} is late")
        self.link = link


class ReadHow(NamedTuple):
    """Ways in which pages may be read."""

    make: bool = True
    """Pages may be made from others, where no member has them."""
    avoid: RemoteSlab | None = None
    """A member that is not asked."""
    hedged: bool = False
    """Raise LateRead when a member is late; its answer is thrown away."""


PLAINLY, DIRECTLY = ReadHow(), ReadHow(make=False)


class RowSource(NamedTuple):
    """Source of pages of a column."""

    link: RemoteSlab | None
    """The link to read from; None: the pages are zeros."""
    is_slot: bool = False
    is_made: bool = False
    """The pages are made from the slot and the other columns."""


ZEROS = RowSource(None)


class ParityRows:
    """Reads and writes rows of one volume."""

    def __init__(self, page_bytes: int, clock: Clock) -> None:
        self._page_bytes, self._clock = page_bytes, clock
        self._paces = LenderPaces(clock)

    async def read(
        self, slab: ParitySlab, row: int, count: int, column: int, how: ReadHow = PLAINLY
    ) -> "NDArray[np.uint8]":
        """The pages of a column, shape (count, page_bytes). OSError when they cannot be had now, SlabGone when a link
        ended meanwhile."""
        found = np.zeros((count, self._page_bytes), np.uint8)
        for source, at, run in self._sources(slab, row, count, column, how):
            if source.link is not None:
                content = await self._from(source, slab, at, run, column, how)
                found[at - row : at - row + run] = content
        return found

    async def read_all(
        self, slab: ParitySlab, row: int, count: int, columns: Iterable[int]
    ) -> list["NDArray[np.uint8]"]:
        """The pages of several columns at once."""
        return list(await asyncio.gather(*(self.read(slab, row, count, column) for column in columns)))

    def _sources(
        self, slab: ParitySlab, row: int, count: int, column: int, how: ReadHow
    ) -> list[tuple[RowSource, int, int]]:
        """Runs of rows with one source: the source, first row, and number of rows."""
        found: list[tuple[RowSource, int, int]] = []
        for at in range(row, row + count):
            source = self._source(slab, at, column, how)
            if found and found[-1][0] == source:
                found[-1] = (source, found[-1][1], found[-1][2] + 1)
            else:
                found.append((source, at, 1))
        return found

    def _source(self, slab: ParitySlab, row: int, column: int, how: ReadHow) -> RowSource:
        if not slab.newest[row, column]:
            return ZEROS
        for link in slab.of_column(column, list(slab.links)):
            if link.held.flags[row] and link is not how.avoid:
                return RowSource(link)
        for link in slab.of_column(slab.data, list(slab.links)) if how.make else ():
            if link.held.flags[row]:
                return RowSource(link, is_slot=True, is_made=True)
        one = slice(row, row + 1)
        for link in slab.of_column(slab.data, [*slab.mirror.whole, *slab.answers]) if how.make else ():
            if parity.is_copy(slab.slots[one], slab.newest[one, column], column)[0]:
                return RowSource(link, is_slot=True)
        page = slab.first + row * slab.data + column
        raise OSError(errno.EIO, f"no host that holds page {page} can be reached")

    async def _from(
        self, source: RowSource, slab: ParitySlab, row: int, count: int, column: int, how: ReadHow
    ) -> "NDArray[np.uint8]":
        assert source.link is not None
        rows = slice(row, row + count)
        if not source.is_slot:
            return await self.at(source.link, row, slab.newest[rows, column], how.hedged)
        if not source.is_made:
            return await self.at(source.link, row, slab.slots[rows])
        others = [other for other in range(slab.data) if other != column]
        return parity.xor(
            await asyncio.gather(
                self.at(source.link, row, slab.slots[rows]),
                *(self.read(slab, row, count, other, DIRECTLY) for other in others),
            )
        )

    async def at(
        self, link: RemoteSlab, row: int, wanted: "NDArray[np.uint64]", hedged: bool = False
    ) -> "NDArray[np.uint8]":
        """Read rows from that member, whose versions there are `wanted`. SlabGone, also when it has something else than
        it acknowledged. `wanted` counts as it is now: rows that are not locked may be written meanwhile."""
        wanted, data = wanted.copy(), bytearray(len(wanted) * self._page_bytes)
        done: asyncio.Future[Versions | None] = asyncio.get_running_loop().create_future()

        def answered(did: bool, versions: Versions) -> None:
            if not done.done():
                done.set_result(versions if did else None)

        sent_s = self._clock.now_s()
        link.send_read(row, memoryview(data), answered)
        if hedged:
            await asyncio.wait({done}, timeout=mirroring.hedge_after_s(self._paces.of(link)))
            if not done.done():
                raise LateRead(link)
        versions = await done
        if versions is None:
            raise SlabGone(link.why or "given up")
        self._paces.answered(link, self._clock.now_s() - sent_s)
        found = np.frombuffer(versions, np.uint64)
        if (found < wanted).any():
            link.lied = True
            link.fail(f"{link.place.lender} returned older content than it acknowledged")
        if (found != wanted).any():
            raise SlabGone(link.why or "it was written meanwhile")
        return np.frombuffer(data, np.uint8).reshape(len(wanted), self._page_bytes)

    async def write_slots(self, slab: ParitySlab, row: int, slots: "NDArray[np.uint8]", version: int) -> None:
        """Write parity of rows, shape (rows, page_bytes), to every member with slots. SlabGone when a link ended."""
        count = len(slots)
        slab.slots[row : row + count] = version
        links = slab.of_column(slab.data, list(slab.links))
        for link in links:
            link.held.drop(row, count)
        content, versions = np.ascontiguousarray(slots).data.cast("B"), array("Q", [version]) * count
        await asyncio.gather(*(link.write(row, versions, content) for link in links))
        for link in links:
            link.held.add_run(row, count)
