"""The common part of volumes without a disk, mirrored or with parity: each slab is in the memory of several other
hosts, and nowhere else. Which of them serve is decided by `machine.mirror`; the rules are those of `mirror_volume` and
`parity_volume`."""

import errno
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from covey.ports.env import Env
from covey.wire import checked
from plugins.memory.datapath.spill.page_table import lazy_zeros, runs_of
from plugins.memory.datapath.volumes.members.member_lenders import M, MemberLenders
from plugins.memory.datapath.volumes.paged_volume import Done, PagedVolume
from plugins.memory.datapath.wire.control import SLABS_TOLD, OpenPlace, SlabCounts
from plugins.memory.datapath.wire.shape import Shape, VolumeRecord
from plugins.memory.datapath.wire.slabwire import Versions
from plugins.memory.policy import mirroring

if TYPE_CHECKING:
    from numpy.typing import NDArray

WAIT_S = 30.0
"""Seconds for which a request is tried anew while links end and begin; then it fails."""
AGAIN_S = 0.05
"""Seconds to pause before such a retry."""


class MembersVolume(PagedVolume[M]):
    """A volume with `members` members of each slab. `lent_pages` pages of it are at each of its lenders; 0: all."""

    lenders: MemberLenders[M]

    def __init__(
        self,
        env: Env,
        shape: Shape,
        prefix: str,
        deadline_s: float,
        sealed: bool,
        make: Callable[[int, int, int, Callable[[M], None]], M],
        members: int,
        lent_pages: int = 0,
    ) -> None:
        super().__init__(env, shape, prefix, deadline_s, sealed, make, lent_pages=lent_pages)
        self._members = members
        newest = lazy_zeros(8 * shape.slabs * shape.slab_pages)
        self._bytes, self._each = newest, newest.cast("Q")
        self._newest: NDArray[np.uint64] = np.frombuffer(newest, np.uint64)
        """Version of every page, shape (pages of all slabs at full size,); the last slab may lack some of them."""

    # ---- as the rules have it ----

    @abstractmethod
    def submit_write(self, first: int, count: int, pages: memoryview | None, done: Done) -> None:
        """`write` with a callback, as `Volume.submit_write`."""

    @abstractmethod
    def submit_read(self, first: int, into: memoryview, done: Done) -> None:
        """`read` with a callback, as `Volume.submit_read`."""

    @abstractmethod
    async def _write_part(self, slab: M, first: int, count: int, pages: memoryview | None) -> None:
        """Write pages of one slab, as `write` does."""

    @abstractmethod
    async def _fetch(self, slab: M, first: int, into: memoryview) -> Versions:
        """Fill `into` from wherever the newest content is, and return its versions."""

    @abstractmethod
    def _lost(self, slabs: tuple[int, ...]) -> str:
        """The loss in these slabs, in words for people."""

    @abstractmethod
    def _lacks(self, slab: M) -> bool:
        """Would the next loss of a member cost pages?"""

    _alone = ""
    """State of slabs that lack something and serve, for people."""

    # ---- life ----

    async def open(self) -> None:
        """Load what the disk knows, and begin to ask the members. ValueError when it is of another size, or damaged."""
        record = await self._record()
        await self.places.load(len(self.slabs) * self._members)
        self.lenders.find_again()
        await self._writable_soon(record)

    async def _make_writable(self, record: VolumeRecord) -> None:
        """Make the volume writable: before the first write its versions must be above all earlier ones."""
        await checked.save(self._env.disk, f"{self._prefix}/volume", record)
        await self.places.write()
        self.read_only = ""

    async def end(self) -> None:
        """End in good order. Nothing needs to be done: members and the disk know all that the next process needs."""

    async def close(self) -> None:
        """Close the volume. There is no other process to end."""

    # ---- writing and reading ----

    async def write(self, first: int, count: int, pages: memoryview | None) -> None:
        """Write a run of pages; None: zeros. Returns when acknowledged by the rules above. OSError when no whole member
        could be reached for `WAIT_S`: then it may or may not be what later reads find, until it is written again."""
        if self.read_only:
            raise OSError(errno.EROFS, f"volume {self.shape.name} is read-only: {self.read_only}")
        size, began_s = self.shape.page_bytes, self._env.clock.now_s()
        for slab, start, run in self._parts(first, count):
            part = None if pages is None else pages[(start - first) * size : (start - first + run) * size]
            await self._write_part(slab, start, run, part)
        self._written_bytes += count * size
        self.latencies.writes["lender"].add(self._env.clock.now_s() - began_s)

    async def _is_recorded(self, slab: M) -> bool:
        """Wait until the disk has recorded which members are whole; False: it cannot."""
        try:
            await self.lenders.record(slab)
            return True
        except OSError as error:
            self._env.log.error("the record of whole members cannot be written", slab=slab.index, why=str(error))
            return False

    async def read(self, first: int, into: memoryview) -> None:
        """Fill `into` with a run of pages. OSError when no member that holds one can be reached for `WAIT_S`, or when
        all that held it were lost."""
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

    async def ever_written(self, first: int, count: int) -> bool:
        """Was any of these pages, which are in one slab, ever written? Members that have not answered may have more,
        and lost pages may have been."""
        return not self.never_written(first, count)

    def never_written(self, first: int, count: int) -> bool:
        """Is it known now, without asking a member, that none of these pages was ever written?"""
        slab = self._slab_of(first, count)
        if slab is None or slab.mirror.asks or slab.mirror.lost:
            return False
        return not self._newest[first : first + count].any()

    def are_zeros(self, first: int, count: int) -> bool:
        """Do these pages read as zeros? As in `Volume.are_zeros`."""
        return all(self.never_written(start, run) for _, start, run in self._parts(first, count))

    def allocation(self, first: int, count: int, most: int) -> list[tuple[int, int, bool]]:
        """Runs of pages (first, count, whether they are zeros), as in `Volume.allocation`."""
        size = self._slab_pages
        slabs = self.slabs.used(first // size, (first + count - 1) // size + 1)
        unsure = [(slab.first, slab.first + slab.pages) for slab in slabs if slab.mirror.asks or slab.mirror.lost]
        return runs_of(self._newest[first : first + count] == 0, first, most, unsure)

    async def flush(self) -> None:
        """Wait until members serve. OSError while something that was acknowledged cannot be read: nothing else would
        report it."""
        for slab in self.slabs:
            if slab.mirror.asks:
                await self.lenders.known(slab)
        lost = self._lost_slabs()
        if lost:
            raise OSError(errno.EIO, self._lost(lost))

    def _lost_slabs(self) -> tuple[int, ...]:
        """Slabs in which something is lost that was not written again."""
        return tuple(slab.index for slab in self.slabs if slab.mirror.lost and slab.written < slab.pages)

    # ---- places ----

    def _index_of(self, number: int) -> int:
        return mirroring.slab_of(number, self._members)

    async def open_place(self, place: OpenPlace) -> None:
        """Open a place as a member. ValueError says why not."""
        if self.read_only:
            raise ValueError(self.read_only)
        await self.lenders.open(self.slab(place.index), place)

    async def close_place(self, number: int, epoch: int) -> None:
        """Close a place. Returns when nothing acknowledged depends on it."""
        await self.lenders.close(self.slab(number), number, epoch)

    # ---- counting ----

    def _lines(self, slab: M) -> list[SlabCounts]:
        """Counts of each member. Requests are the slab's in each, or lenders would take the member that is read less
        for idle."""
        held = {link.place.index: link.held.count for _, link in sorted(slab.links.items()) if link.usable}
        numbers = [mirroring.member_number(slab.index, member, self._members) for member in range(self._members)]
        return [SlabCounts(number, slab.requests, slab.written, held.get(number, 0)) for number in numbers]

    @property
    def _slabs_told(self) -> int:
        return SLABS_TOLD // self._members

    @property
    def trouble(self) -> str:
        """Trouble of the volume, for people; empty: none."""
        if self.read_only:
            return f"read-only: {self.read_only}"
        lost = self._lost_slabs()
        if lost:
            return self._lost(lost)
        fewer = [slab for slab in self.slabs if slab.written and self._lacks(slab)]
        if not fewer:
            return ""
        alone = sum(slab.mirror.serves for slab in fewer)
        said = f"{alone} of {len(self.slabs)} slabs {self._alone}"
        return said if alone == len(fewer) else f"{said}; {self.lenders.doubts(_first_asking(fewer))}"


def _first_asking(slabs: list[M]) -> M:
    return next(slab for slab in slabs if not slab.mirror.serves)
