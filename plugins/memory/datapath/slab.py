"""One slab of a volume, as its process sees it: who holds its pages, and who may hold newer ones than this host's disk.

      open_place                                 the link ends
none -----------> link (where writes go) -----------------------> reopening --> link, or none and `SlabLost`
                    `-> source, once a newer place is open        (its epoch, a few seconds)

after a restart of the process:  unsure (nothing is read that a lender may hold newer) --> link, or none
"""

import asyncio
from dataclasses import dataclass

from plugins.memory.datapath.control import OpenPlace, PlaceState
from plugins.memory.datapath.remote_slab import RemoteSlab


@dataclass
class Unsure:
    """A place of an earlier process: its lender may hold pages that this host's disk does not have."""

    place: OpenPlace
    why: str = "it has not answered yet"
    """Why it is not known yet what it holds, for people."""


class SlabMemory:
    """Its places and its counters."""

    def __init__(self, index: int, first: int, pages: int) -> None:
        self.index, self.first, self.pages = index, first, pages
        self.link: RemoteSlab | None = None
        """Where writes go."""
        self.source: RemoteSlab | None = None
        """The place being left: still good for reading what has not been copied or rewritten."""
        self.reopening: OpenPlace | None = None
        """Its link ended, and is being opened again under the same epoch."""
        self.unsure: dict[int, Unsure] = {}
        """By epoch."""
        self.sure = asyncio.Event()
        """Set while no place is unsure."""
        self.sure.set()
        self.requests = self.written = self.remote = 0
        self.changed = False
        """`remote` must be counted again."""

    def links(self) -> list[RemoteSlab]:
        return [link for link in (self.link, self.source) if link is not None]

    def holder(self, page: int, version: int) -> RemoteSlab | None:
        """The link to a lender that holds `version` of this page of the volume."""
        for link in (self.link, self.source):
            if link is not None and link.usable and link.held[page - self.first] == version:
                return link
        return None

    def adopt(self, link: RemoteSlab) -> RemoteSlab | None:
        """One more link: the newest epoch takes the writes, the one before serves what it holds. Returns the oldest
        of three: it is not used any more."""
        links = sorted([*self.links(), link], key=lambda link: link.place.epoch)
        self.link, self.source = links[-1], links[-2] if len(links) > 1 else None
        self.changed = True
        return links[0] if len(links) > 2 else None

    def drop(self, link: RemoteSlab) -> None:
        """An older place that is still open becomes the place again: it may serve what it holds, and take writes."""
        self.changed = True
        if self.link is link:
            self.link, self.source = self.source, None
        elif self.source is link:
            self.source = None

    def doubt(self, place: OpenPlace) -> None:
        self.unsure[place.epoch] = Unsure(place)
        self.sure.clear()

    def settle(self, epoch: int) -> None:
        """It is known what that lender holds, or that it holds nothing any more."""
        self.unsure.pop(epoch, None)
        if not self.unsure:
            self.sure.set()

    def state(self, epoch: int) -> PlaceState:
        """Of one of its places: `open`, `reopening`, `recovering` or `leaving`."""
        if any(link.place.epoch == epoch and link.usable for link in self.links()):
            return "open"
        if self.reopening is not None and self.reopening.epoch == epoch:
            return "reopening"
        return "recovering" if epoch in self.unsure else "leaving"
