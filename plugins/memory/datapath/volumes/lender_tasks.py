"""The work of every volume on its places: the common part of the rules of a volume with a disk (`lenders`) and of one
without (`mirror_lenders`)."""

import asyncio
import errno
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from covey.ports.env import Env
from plugins.memory.datapath.links.remote_slab import RemoteSlab
from plugins.memory.datapath.spill.places import Places
from plugins.memory.datapath.volumes.slab import CountedSlab, Slabs
from plugins.memory.datapath.wire.control import OpenPlace, PlaceNow, PlaceState, Told
from plugins.memory.datapath.wire.shape import Undecided
from plugins.memory.datapath.wire.slabwire import Versions

if TYPE_CHECKING:
    from numpy.typing import NDArray

COPY_PAGES = 32
"""Pages sent at once when a slab is filled in the background: few enough that requests get their turn."""
REOPEN_S = 4.0
"""Seconds for which a link that ended is tried again under its epoch; a slab called mapped has a working link within 5
s."""
UNSURE_S = 30.0
"""Seconds that a request waits for lenders that may hold its pages; then it fails."""
PAUSE_S, PAUSE_MAX_S = 0.1, 1.0
"""First and longest pause in seconds between two tries to reach a lender."""
TROUBLE_MAX_S = 60.0
"""Longest pause in seconds before a task of a slab that failed, or a copy, is tried again."""
TOLD_PLACES = 64
"""Places for which `PageCounts` says why the lender does not answer; for the others the reason is the same."""


class PlacedSlab(CountedSlab, Protocol):
    """A slab and its places, as far as these tasks see them."""

    def state(self, epoch: int) -> PlaceState: ...


P = TypeVar("P", bound=PlacedSlab)
Connect = Callable[[OpenPlace, float | None], Awaitable[RemoteSlab]]
"""Opens a link, with at most this many seconds for each step. SlabGone."""


@dataclass(frozen=True)
class LentVolume(Generic[P]):
    """A volume as the tasks of its lenders see it."""

    slabs: Slabs[P]
    page_bytes: int
    places: Places
    """The places of the slabs that the disk has on record."""
    connect: Connect
    fetch: Callable[[P, int, memoryview], Awaitable[Versions]]
    """Reads pages from wherever they are newest."""
    tell: Callable[[Told], None]
    """Called when a place is lost or filled."""


class LenderTasks(ABC, Generic[P]):
    """The places of one volume."""

    def __init__(self, env: Env, volume: LentVolume[P]) -> None:
        self.reopened = self.unrecovered = 0
        self.closed = False
        """The process is ending: the end of a link is not reported any more."""
        self._to_give_up = f"agentctl volume give-up {volume.places.volume}"
        self._env, self._places, self._slabs, self._page_bytes = env, volume.places, volume.slabs, volume.page_bytes
        self._connect, self._fetch, self._tell = volume.connect, volume.fetch, volume.tell

    # ---- as the rules of the volume have it ----

    @abstractmethod
    def _links_of(self, slab: P) -> list[RemoteSlab]:
        """All links of the slab."""

    @abstractmethod
    def _silent(self, slab: P) -> list[int]:
        """Epochs of places that may hold pages which are nowhere else, and have not said so."""

    @abstractmethod
    def _places_of(self, slab: P) -> Iterable[OpenPlace]:
        """The slab's places in the order in which they are reported."""

    @abstractmethod
    def _why(self, slab: P, epoch: int) -> str:
        """Why that place does not answer, for people; empty: it does."""

    @abstractmethod
    def doubts(self, slab: P) -> str:
        """Whose answer is missing, for people."""

    @abstractmethod
    async def give_up(self, slab: P, epoch: int, why: str) -> OpenPlace | None:
        """Give up a place: its lender has lost it, or a person does not want to wait. Returns the place, if it was
        asked."""

    @abstractmethod
    async def _tried(self, slab: P, name: str, work: Coroutine[Any, Any, None]) -> bool:
        """Run a task of a slab. False: it failed in a way that affects this slab only."""

    # ---- the same for all ----

    @asynccontextmanager
    async def _linked(self, place: OpenPlace, within_s: float | None) -> AsyncIterator[RemoteSlab]:
        """Context of a new link, which is closed when the work with it fails, whatever the error: a place that is open
        cannot be opened another time. SlabGone."""
        link = await self._connect(place, within_s)
        with ExitStack() as undo:
            undo.callback(link.fail, "requests under way on it failed")
            yield link
            undo.pop_all()

    def shut(self) -> None:
        """Close every link."""
        self.closed = True
        for slab in self._slabs:
            for link in self._links_of(slab):
                link.fail("the volume's process ends")

    async def give_up_all(self, why: str, most: int = 1 << 20) -> tuple[OpenPlace, ...]:
        """Give up at most `most` silent places; returns those given up. A place that has answered is kept."""
        silent = [(slab, epoch) for slab in self._slabs for epoch in self._silent(slab)]
        found = [await self.give_up(slab, epoch, why) for slab, epoch in silent[:most]]
        return tuple(place for place in found if place is not None)

    async def _wait_known(self, slab: P, known: asyncio.Event, within_s: float) -> None:
        """Wait until `known` is set. OSError says whose answer is missing when that takes longer."""
        try:
            async with asyncio.timeout(within_s):
                await known.wait()
        except TimeoutError as error:
            raise Undecided(errno.EIO, self.doubts(slab)) from error

    def now(self, slabs: Iterable[P]) -> tuple[PlaceNow, ...]:
        """Every place of these slabs, with its state."""
        found: list[PlaceNow] = []
        told = 0
        for slab in slabs:
            for place in self._places_of(slab):
                why = self._why(slab, place.epoch)[:200] if told < TOLD_PLACES else ""
                told += bool(why)
                found.append(PlaceNow(place.index, place.epoch, slab.state(place.epoch), why))
        return tuple(found)

    def _guard(self, slab: P, name: str, work: Callable[..., Coroutine[Any, Any, None]], *what: Any) -> None:
        """Run `work(*what)` as a task whose failure affects this slab only."""
        self._env.spawn(f"{name} slab {slab.index}", self._guarded(slab, name, work, *what))

    async def _guarded(self, slab: P, name: str, work: Callable[..., Coroutine[Any, Any, None]], *what: Any) -> None:
        pause_s = PAUSE_MAX_S
        while not self.closed and not await self._tried(slab, name, work(*what)):
            await asyncio.sleep(pause_s)
            pause_s = min(TROUBLE_MAX_S, 2 * pause_s)


def held_flags(found: "NDArray[np.uint64]", newest: "NDArray[np.uint64]", pages: int) -> bytes:
    """A byte for each of `pages` pages at a lender, 1 where it holds the newest version; `found` and `newest` have
    shape (pages of the slab,), which may be fewer."""
    flags: bytes = ((found == newest) & (newest > 0)).tobytes()
    return flags.ljust(pages, b"\0")


def runs_of(pages: "NDArray[np.int64]", most: int) -> list[tuple[int, int]]:
    """First page and length of each run of consecutive pages, at most `most` long; `pages`, shape (pages,), are
    sorted."""
    runs: list[tuple[int, int]] = []
    for part in np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1) if len(pages) else ():
        runs += [(int(part[at]), min(most, len(part) - at)) for at in range(0, len(part), most)]
    return runs
