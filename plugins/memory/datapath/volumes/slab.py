"""One slab of a volume in its process: which lenders hold its pages, and which may hold newer ones than the disk.

      open_place                                 the link ends
none -----------> link (where writes go) -----------------------> reopening --> link, or none and `SlabLost`
                    `-> source, once a newer place is open        (its epoch, a few seconds)

after a restart of the process:  unsure (nothing is read that a lender may hold newer) --> link, or none

`Slabs` makes one only for slabs that were ever used, and knows which changed since it was asked last.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from plugins.memory.datapath.links.remote_slab import RemoteSlab
from plugins.memory.datapath.wire.control import OpenPlace, PlaceState


@dataclass
class Unsure:
    """A place of an earlier process: its lender may hold pages that this host's disk does not have."""

    place: OpenPlace
    why: str = "it has not answered yet"
    """Why its content is not known yet, for people."""


class SlabMemory:
    """The places and counters of one slab. `touched` is called whenever something changes that people see."""

    __slots__ = (
        "_reopening", "_touched", "first", "index", "link", "opening", "pages", "put", "requests", "source", "stamp",
        "sure", "unsure", "written",
    )  # fmt: skip

    def __init__(self, index: int, first: int, pages: int, touched: Callable[["SlabMemory"], None]) -> None:
        self.index, self.first, self.pages = index, first, pages
        self.link: RemoteSlab | None = None
        """Link to the place for writes."""
        self.source: RemoteSlab | None = None
        """Link to the place being left: still good for reading what has not been copied or rewritten."""
        self.opening: dict[int, RemoteSlab] = {}
        """Epoch -> link that is open, but to which no page is sent before the disk has it on record."""
        self.put = 0
        """Number of the record after the last one that this process put into the log's ring for this slab."""
        self._reopening: OpenPlace | None = None
        self.unsure: dict[int, Unsure] = {}
        """Epoch -> place of an earlier process that has not answered."""
        self.sure = asyncio.Event()
        """Set while no place is unsure."""
        self.sure.set()
        self.requests = self.written = 0
        self.stamp = 0
        """Stamp of its last change, as `Slabs` counts."""
        self._touched = touched

    def touch(self) -> None:
        self._touched(self)

    @property
    def reopening(self) -> OpenPlace | None:
        """The place whose link ended, and is being opened again under the same epoch."""
        return self._reopening

    @reopening.setter
    def reopening(self, place: OpenPlace | None) -> None:
        self._reopening = place
        self.touch()

    @property
    def remote(self) -> int:
        """Number of pages whose newest content the place for writes holds."""
        return self.link.held.count if self.link is not None and self.link.usable else 0

    def links(self) -> list[RemoteSlab]:
        return [link for link in (self.link, self.source) if link is not None]

    def holder(self, page: int) -> RemoteSlab | None:
        """The link to a lender that holds the newest content of this page of the volume."""
        link, at = self.link, page - self.first
        if link is not None and link.held.flags[at] and link.usable:
            return link
        source = self.source
        return source if source is not None and source.held.flags[at] and source.usable else None

    def overwritten(self, first: int, count: int) -> None:
        """Note that no lender holds the newest content of these pages of the volume any more."""
        at, link, source = first - self.first, self.link, self.source
        if link is not None:
            link.held.drop(at, count)
        if source is not None:
            source.held.drop(at, count)

    def adopt(self, link: RemoteSlab) -> RemoteSlab | None:
        """Add a link: the newest epoch takes the writes, the one before serves what it holds. Returns the oldest of
        three, which is not used any more."""
        links = sorted([*self.links(), link], key=lambda link: link.place.epoch)
        self.link, self.source = links[-1], links[-2] if len(links) > 1 else None
        self.touch()
        return links[0] if len(links) > 2 else None

    def drop(self, link: RemoteSlab) -> None:
        """Remove a link. An older place that is still open becomes the place again: it may serve what it holds, and
        take writes."""
        if self.link is link:
            self.link, self.source = self.source, None
        elif self.source is link:
            self.source = None
        self.touch()

    def doubt(self, place: OpenPlace) -> None:
        self.unsure[place.epoch] = Unsure(place)
        self.sure.clear()
        self.touch()

    def settle(self, epoch: int) -> None:
        """It is known what this lender holds, or that it holds nothing any more."""
        self.unsure.pop(epoch, None)
        if not self.unsure:
            self.sure.set()
        self.touch()

    def state(self, epoch: int) -> PlaceState:
        """State of one of the slab's places: `open`, `reopening`, `recovering` or `leaving`."""
        if any(link.place.epoch == epoch and link.usable for link in (*self.links(), *self.opening.values())):
            return "open"
        if self.reopening is not None and self.reopening.epoch == epoch:
            return "reopening"
        return "recovering" if epoch in self.unsure else "leaving"


class CountedSlab(Protocol):
    """The facts about a slab that `Slabs` needs."""

    index: int
    stamp: int
    """Stamp of its last change, as `Slabs` counts."""


S = TypeVar("S", bound=CountedSlab)


class Slabs(Generic[S]):
    """The slabs of a volume of `pages` pages, `slab_pages` in each. Iterating gives those that were used. `make` is
    called with the index, first page and pages of a slab, and a function that the slab calls when it changes."""

    def __init__(self, pages: int, slab_pages: int, make: Callable[[int, int, int, Callable[[S], None]], S]) -> None:
        self._pages, self._slab_pages, self._make = pages, slab_pages, make
        self._used: dict[int, S] = {}
        self._changed: dict[int, S] = {}
        """Index -> slab that ever changed, in the order of their stamps."""
        self._stamp = self._told = 0

    def __len__(self) -> int:
        return (self._pages + self._slab_pages - 1) // self._slab_pages

    def __iter__(self) -> Iterator[S]:
        return iter(list(self._used.values()))

    def __getitem__(self, index: int) -> S:
        """The slab, made if it was never used. IndexError when the volume has none of that number."""
        found = self._used.get(index)
        if found is None:
            if not 0 <= index < len(self):
                raise IndexError(f"slabs 0 to {len(self) - 1}, none with index {index}")
            first = index * self._slab_pages
            found = self._make(index, first, min(self._slab_pages, self._pages - first), self._touched)
            self._used[index] = found
        return found

    def used(self, first: int, end: int) -> list[S]:
        """The used slabs among numbers `first` to `end` - 1."""
        return [slab for index in range(first, end) if (slab := self._used.get(index)) is not None]

    def _touched(self, slab: S) -> None:
        """Note a change. A slab that has changed already since the last report keeps its stamp."""
        if slab.stamp <= self._told:
            self._stamp += 1
            slab.stamp = self._stamp
            self._changed.pop(slab.index, None)
            self._changed[slab.index] = slab

    def changed(self, since: int, most: int) -> tuple[list[S], int]:
        """At most `most` slabs that changed after stamp `since`, and the stamp up to which these are all."""
        found: list[S] = []
        for slab in reversed(self._changed.values()):
            if slab.stamp <= since:
                break
            found.append(slab)
        found.reverse()
        del found[most:]
        upto = found[-1].stamp if found else max(since, self._stamp)
        self._told = max(self._told, upto)
        return found, upto
