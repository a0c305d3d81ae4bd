"""One slab of a volume, as its borrower knows it.

           hot                  two answered            MrInfo              vold opened it
cold -------------> asking ------------------> asking --------> asking ----------------------> mapped <--> reopening
 ^  <- nobody has room -'     (Map to the freest)                                               |   |
 |                                                                                              |   |
 |<- closed, `Done` --- lost: its link ended for good, or its lender is gone <------------------'   | Evict
 |                                                                                                  v
 '<- closed, `Done` -------------- moving: asks again while the old place still serves reads -------'
                                    '- copied to the new place, old one closed, `Done` -> mapped

`mapped` is what has a working link, by the word of the volume's process a second ago at most. Without one it is
`reopening` (the link ended, and is tried again under its epoch) or `recovering` (the process began anew, and the lender
has not said yet what it holds). A lender hears `Done` only when the process says that the place is closed: until then
its pages may be the only copy, should the process die.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from covey.core import HostId
from plugins.memory.messages import SlabRef

Link = Literal["", "open", "reopening", "recovering", "leaving"]
"""What the volume's process says of the link to a place."""


@dataclass(frozen=True)
class SlabPlace:
    """Where a slab lies: one mapping, under one epoch."""

    epoch: int
    lender: HostId
    address: str
    secret: bytes


@dataclass
class LenderSearch:
    """A slab looking for a place: two hosts are asked, the freer one is taken."""

    epoch: int
    asked: tuple[HostId, ...]
    offers: dict[HostId, int] = field(default_factory=dict)
    """Slabs each could lend; 0 for one that did not answer or refused."""
    chosen: HostId | None = None
    place: SlabPlace | None = None
    """Granted by `chosen`, being opened by the volume's process."""
    copied: bool = False
    """Filled already: we heard that before we heard that it is open."""

    @property
    def said(self) -> str:
        """What each of the hosts asked said, for people."""
        answered = [host for host in self.asked if host in self.offers]
        said = [f"{host} offers {self.offers[host]}" for host in answered]
        silent = [host for host in self.asked if host not in self.offers]
        return ", ".join([*said, f"{names(silent)} silent"] if silent else said)


@dataclass(slots=True)
class BorrowedSlab:
    volume: str
    index: int
    place: SlabPlace | None = None
    """Serving now."""
    next: SlabPlace | None = None
    """Open and being filled, while `place` is on its way out."""
    search: LenderSearch | None = None
    evicted: bool = False
    """The lender of `place` wants it back."""
    closing: bool = False
    """`place` is being closed."""
    lost: bool = False
    """Since its link ended for good."""
    link: Link = ""
    """To `place`, as its volume's process says; empty while that does not answer."""
    doubted: int = 0
    """Seconds for which the process has not known a place that we believe in."""
    left: dict[int, HostId] = field(default_factory=dict)
    """Epoch -> lender of places that came to nothing and are being closed."""
    retry_at_s: float = 0.0
    """Nobody had room: do not ask before."""
    retries: int = 0

    @property
    def subject(self) -> str:
        return f"slab/{self.volume}/{self.index}"

    @property
    def state(self) -> str:
        """`cold`, `asking`, `mapped`, `reopening`, `recovering`, `lost` or `moving`."""
        if self.place is None:
            return "cold" if self.search is None else "asking"
        if self.link == "recovering":
            return self.link
        if self.lost:
            return "lost"
        if self.evicted or self.closing:
            return "moving"
        return "mapped" if self.link == "open" else "reopening"

    @property
    def is_served(self) -> bool:
        """Has it a lender that serves its pages now?"""
        return self.place is not None and self.link == "open" and not self.lost

    def ref(self, epoch: int) -> SlabRef:
        return SlabRef(self.volume, self.index, epoch)

    def hosts(self) -> list[HostId]:
        """Every host that holds this slab or is being asked for it."""
        found = [] if self.place is None else [self.place.lender]
        if self.next is not None:
            found.append(self.next.lender)
        if self.search is not None:
            found += self.search.asked
        return found

    def leaves(self, lender: HostId) -> bool:
        """Is it to go away from there?"""
        return self.evicted and self.place is not None and self.place.lender == lender

    def check(self) -> None:
        assert self.place is not None or not self.closing, f"{self.subject} closes nothing"
        assert self.closing or not self.lost, f"{self.subject} is lost and not being closed"
        assert self.place is not None or not self.evicted, f"{self.subject} is evicted from nowhere"
        assert self.place is not None or self.next is None, f"{self.subject} moves from nowhere"
        assert self.next is None or self.search is None, f"{self.subject} searches twice"


class BorrowedVolume(msgspec.Struct):
    slab_bytes: int
    page_bytes: int
    slabs: list[BorrowedSlab]
    rates: list[float]
    """Page requests per second of each of them, smoothed."""
    hot: float
    """Page requests per second above which a slab is placed."""
    cold: float | None
    """Page requests per second below which a placed slab is given back unasked (§2.4.1, ColdSlab); None: never."""

    def lenders(self) -> Counter[HostId]:
        """How many of its slabs each host holds or was chosen for."""
        chosen: Counter[HostId] = Counter()
        for slab in self.slabs:
            for place in (slab.place, slab.next):
                if place is not None:
                    chosen[place.lender] += 1
            if slab.search is not None and slab.search.chosen is not None:
                chosen[slab.search.chosen] += 1
        return chosen


def names(hosts: Sequence[HostId]) -> str:
    """For people."""
    return " and ".join(hosts) if hosts else "none"


def counted(slabs: int) -> str:
    return "1 slab" if slabs == 1 else f"{slabs} slabs"
