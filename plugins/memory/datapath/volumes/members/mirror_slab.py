"""One slab of a volume without a disk, as its process has it: links to its members, and the writes under way.

Which content of a page is the newest is one number in this process, its version. A member holds it when its lender has
that version, so a read asks only those that do, and compares what comes. While a write is under way no member holds its
pages: a read waits for it, or it might find the new content at one member and the old one at the other afterwards.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from plugins.memory.datapath.links.remote_slab import RemoteSlab
from plugins.memory.datapath.wire.control import OpenPlace, PlaceState
from plugins.memory.machine.mirror import Awaited, Filling, Mirror, Out, Whole

if TYPE_CHECKING:
    from numpy.typing import NDArray


class MirrorSlab:
    """A slab of a volume without a disk. `touched` is called whenever something changes that people see."""

    __slots__ = (
        "_finished", "_touched", "answers", "changes", "era", "first", "index", "links", "mirror", "pages", "places",
        "recorded", "requests", "serving", "stamp", "why", "writes", "written",
    )  # fmt: skip

    def __init__(self, index: int, first: int, pages: int, touched: Callable[["MirrorSlab"], None]) -> None:
        self.index, self.first, self.pages = index, first, pages
        self.mirror = Mirror()
        self.places: dict[int, OpenPlace] = {}
        """Epoch -> place; the dictionaries that follow are by epoch, too."""
        self.links: dict[int, RemoteSlab] = {}
        """Links that work, or were not seen to end."""
        self.answers: dict[int, NDArray[np.uint64]] = {}
        """While the slab asks: the versions that a member said it holds, shape (pages,)."""
        self.why: dict[int, str] = {}
        """Why a member does not answer, for people."""
        self.era = 0
        """Number of times that no member served: writes sent before the last one are sent again."""
        self.changes = self.recorded = 0
        """How often the set of whole members has changed, and up to which change this host's disk has recorded it."""
        self.serving = asyncio.Event()
        self.writes: dict[int, tuple[int, int]] = {}
        """Version -> first page and pages of a write under way."""
        self._finished: list[asyncio.Future[None]] = []
        self.requests = self.written = self.stamp = 0
        self._touched = touched

    @property
    def at_lender(self) -> int:
        """Number of its pages that a member has."""
        return self.pages

    def touch(self) -> None:
        if self.mirror.serves is not self.serving.is_set():
            (self.serving.set if self.mirror.serves else self.serving.clear)()
        self._touched(self)

    @property
    def unrecorded(self) -> bool:
        """This host's disk has not recorded yet which members are whole: nothing is acknowledged before it has."""
        return self.changes != self.recorded

    def targets(self) -> list[RemoteSlab]:
        """Links to which a write is sent."""
        return [self.links[epoch] for epoch in self.mirror.takes if epoch in self.links]

    def holders(self, at: int) -> list[RemoteSlab]:
        """Links that have the newest content of this page of the slab."""
        return [link for link in self.links.values() if link.held.flags[at] and link.usable]

    def hold_all(self, at: int, count: int) -> list[RemoteSlab]:
        """Links that have the newest content of all of these pages."""
        if count == 1:
            return self.holders(at)
        return [link for link in self.links.values() if link.usable and link.held.flags.find(0, at, at + count) < 0]

    def overwritten(self, at: int, count: int) -> None:
        for link in self.links.values():
            link.held.drop(at, count)

    # ---- writes under way ----

    def is_written(self, first: int, count: int) -> bool:
        """Is a write to one of these pages of the volume under way?"""
        return any(start < first + count and first < start + run for start, run in self.writes.values())

    async def finished(self, first: int, count: int) -> None:
        """Wait until no write to these pages is under way."""
        while self.is_written(first, count):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._finished.append(future)
            await future

    def finish(self, version: int) -> None:
        del self.writes[version]
        finished, self._finished = self._finished, []
        for future in finished:
            if not future.done():
                future.set_result(None)

    # ---- what people see ----

    def state(self, epoch: int) -> PlaceState:
        match self.mirror.of(epoch):
            case Whole():
                return "open"
            case Filling():
                return "filling"
            case Awaited():
                return "recovering"
            case Out():
                return "leaving"
            case _:
                return "reopening"
