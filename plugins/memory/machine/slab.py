"""One slab of a volume, as its borrower knows it.

           hot                  two answered            MrInfo              vold opened it
cold -------------> asking ------------------> asking --------> asking ----------------------> mapped
 ^  <- nobody has room -'     (Map to the freest)                                               |   |
 |                                                                                              |   |
 |<------------------- lender lost, or its connection failed -----------------------------------'   | Evict
 |                                                                                                  v
 '<- closed, `Done` -------------- moving: asks again while the old place still serves reads -------'
                                    '- copied to the new place, old one closed, `Done` -> mapped
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from covey.core import HostId
from plugins.memory.messages import SlabRef


@dataclass(frozen=True)
class Place:
    """Where a slab lies: one mapping, under one epoch."""

    epoch: int
    lender: HostId
    address: str
    secret: bytes


@dataclass
class Search:
    """A slab looking for a place: two hosts are asked, the freer one is taken."""

    epoch: int
    asked: tuple[HostId, ...]
    offers: dict[HostId, int] = field(default_factory=dict)
    """Slabs each could lend; 0 for one that did not answer or refused."""
    chosen: HostId | None = None
    place: Place | None = None
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


@dataclass
class Slab:
    volume: str
    index: int
    requests_per_s: float = 0.0
    place: Place | None = None
    """Serving now."""
    next: Place | None = None
    """Open and being filled, while `place` is on its way out."""
    search: Search | None = None
    evicted: bool = False
    """The lender of `place` wants it back."""
    closing: bool = False
    """`place` is being closed."""
    retry_at_s: float = 0.0
    """Nobody had room: do not ask before."""
    retries: int = 0

    @property
    def subject(self) -> str:
        return f"slab/{self.volume}/{self.index}"

    @property
    def state(self) -> str:
        """`cold`, `asking`, `mapped` or `moving`."""
        if self.place is not None:
            return "moving" if self.evicted or self.closing else "mapped"
        return "cold" if self.search is None else "asking"

    def ref(self, epoch: int) -> SlabRef:
        return SlabRef(self.volume, self.index, epoch)

    def hosts(self) -> list[HostId]:
        """Every host that holds this slab or is being asked for it."""
        places = [place.lender for place in (self.place, self.next) if place is not None]
        return [*places, *(self.search.asked if self.search is not None else ())]

    def leaves(self, lender: HostId) -> bool:
        """Is it to go away from there?"""
        return self.evicted and self.place is not None and self.place.lender == lender

    def check(self) -> None:
        assert self.place is not None or not self.closing, f"{self.subject} closes nothing"
        assert self.place is not None or not self.evicted, f"{self.subject} is evicted from nowhere"
        assert self.place is not None or self.next is None, f"{self.subject} moves from nowhere"
        assert self.next is None or self.search is None, f"{self.subject} searches twice"


class Volume(msgspec.Struct):
    slab_bytes: int
    page_bytes: int
    slabs: list[Slab]
    hot: float
    """Page requests per second above which a slab is placed."""
    cold: float | None
    """Page requests per second below which a placed slab is given back unasked (§2.4.1, ColdSlab); None: never."""

    def lenders(self) -> Counter[HostId]:
        """How many of its slabs each host holds or was chosen for."""
        chosen: Counter[HostId] = Counter()
        for slab in self.slabs:
            chosen.update(place.lender for place in (slab.place, slab.next) if place is not None)
            if slab.search is not None and slab.search.chosen is not None:
                chosen[slab.search.chosen] += 1
        return chosen


def names(hosts: Sequence[HostId]) -> str:
    """For people."""
    return " and ".join(hosts) if hosts else "none"


def counted(slabs: int) -> str:
    return "1 slab" if slabs == 1 else f"{slabs} slabs"
