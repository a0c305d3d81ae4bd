"""A volume of this host, put together from what its process reports once a second: only what changed."""

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from covey.core.errors import Refused
from covey.core.ids import HostId
from covey.core.metrics import MetricSeries
from plugins.memory.datapath.wire.control import LatencyCounts, OpenPlace, PageCounts, PlaceNow, SlabCounts
from plugins.memory.machine.borrowing.place import Link, SlabPlace
from plugins.memory.policy import mirroring
from plugins.memory.service import metrics
from plugins.memory.service.process import ByteProcess
from plugins.memory.service.record import KnownVolume

LATENCIES_EVERY, LATENCIES_KEPT = 10, 6
"""Latencies are shown for the last minute: every tenth answer is kept, six in all."""


def slab_place(place: OpenPlace) -> SlabPlace:
    return SlabPlace(place.epoch, HostId(place.lender), place.address, place.secret)


@dataclass
class OpenVolume:
    """A volume of this host and its process."""

    known: KnownVolume
    process: ByteProcess
    counts: PageCounts | None = None
    """The last answer; it holds only what changed."""
    counted: dict[int, SlabCounts] = field(default_factory=dict)
    """Slab number -> counts, of slabs that were ever used."""
    places: dict[int, tuple[PlaceNow, ...]] = field(default_factory=dict)
    """Slab -> its places, as its process reported last."""
    links: dict[int, Link] = field(default_factory=dict)
    """Epoch -> state of the link to that place."""
    older: deque[tuple[LatencyCounts, ...]] = field(default_factory=lambda: deque(maxlen=LATENCIES_KEPT))
    """Latencies that its process reported up to a minute ago, the oldest first."""
    settled: asyncio.Event | None = None
    """Set when it is known whether it has a place for everything; None: no task looks for places."""
    refused: Refused | None = None
    """Why it has no place for everything."""
    ending: bool = False
    """It is swap, and was to end when its process was asked last."""
    _answers: int = 0
    _opening: bool = False
    trouble: str = ""
    """Trouble with reading and writing it, as its event log says now; empty: none."""
    died: str = ""
    """The cause of the last death of its process, as its event log says."""

    def opens(self, why: str) -> bool:
        """Take in why its process does not answer yet; empty: it does. True: that is news for people."""
        if not why:
            self._opening, self.trouble = False, "" if self._opening else self.trouble
            return False
        self._opening, news, self.trouble = True, why != self.trouble, why
        return news

    @property
    def slabs(self) -> int:
        return self.known.slabs

    @property
    def numbers(self) -> int:
        """Number of slabs as lenders count: each member is one."""
        return self.slabs * self.known.members

    def formed(self) -> int:
        """Number of slabs whose members all hold everything, as its process reported last."""
        whole = Counter(
            mirroring.slab_of(number, self.known.members)
            for number, places in self.places.items()
            if any(place.state == "open" for place in places)
        )
        return sum(count >= self.known.members for count in whole.values())

    def since(self) -> tuple[int, int]:
        """Life and change from which its process is asked to continue."""
        return (0, 0) if self.counts is None else (self.counts.life, self.counts.upto)

    def take(self, counts: PageCounts) -> list[int]:
        """Page requests to each slab since the last answer. A process that started anew counts from 0."""
        if self.counts is None or counts.life != self.counts.life:
            self.counted, self.places, self.links = {}, {}, {}
            self.older.clear()
        if self._answers % LATENCIES_EVERY == 0:
            self.older.append(counts.latencies)
        self._answers += 1
        self.counts = counts
        requested = [0] * self.numbers
        for slab in counts.slabs:
            if slab.index < self.numbers:
                before = self.counted.get(slab.index)
                requested[slab.index] = slab.requests - (0 if before is None else before.requests)
            self.counted[slab.index] = slab
            for place in self.places.pop(slab.index, ()):
                self.links.pop(place.epoch, None)
        for place in counts.places:
            self.places[place.index] = (*self.places.get(place.index, ()), place)
            self.links[place.epoch] = place.state
        return requested

    def empty(self) -> list[int]:
        """Slabs of which everything was discarded."""
        return [index for index, counts in self.counted.items() if counts.empty]

    def recovering(self) -> list[PlaceNow]:
        """Places whose content its process does not know, since it began anew."""
        if "recovering" not in self.links.values():
            return []
        return [place for places in self.places.values() for place in places if place.state == "recovering"]


def stalls(counted: Sequence[PageCounts]) -> dict[MetricSeries, float]:
    """Metrics of the loops of volumes' processes."""
    return {
        metrics.STALL_LONGEST_SECONDS.of("vold"): max((each.stall_s_longest for each in counted), default=0.0),
        metrics.PROCESSOR_WAIT_LONGEST_SECONDS.of("vold"): max((each.wait_s_longest for each in counted), default=0.0),
    }


def lacking(volumes: Iterable[OpenVolume]) -> list[str]:
    """The privileges that volumes' processes lack, for people; they are the same for all. Only a volume that is offered
    as a block device can be behind this host's own swap or file system."""
    lacks: set[str] = set()
    for volume in volumes:
        for why in volume.counts.lacks.split("; ") if volume.counts is not None else ():
            if volume.known.exports or volume.known.swap or "IO_FLUSHER" not in why:
                lacks.add(why)
    return [f"vold: {why}" for why in sorted(lacks) if why]
