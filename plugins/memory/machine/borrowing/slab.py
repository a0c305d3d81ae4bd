"""One slab of a volume, as its borrower knows it.

          it is hot              its place is open
     Cold -----------> Seeking --------------------> Mapped <-----------------.
     ^  ^ <------------'    ^                         | |                     |
     |    nobody has room   |              no longer  | | its lender wants it |
     |                      |        hot, or no link  | | back while it is hot|
     |                      |                         | v                     |
     |                      |                         | Migrating             |
     |                      |                         |  | the next place is  |
     |                      |                         v  v filled, or no link |
     '----------------------'---------------------- Closing ------------------'
                 its place is closed; left are: nothing, a search, the next place

These are the usual ones of the `TRANSITIONS` below, all of which `docs/design/STATES.md` draws. A slab that migrates
has a place, which serves reads, and beside it a search for the next place, or the next place while it is filled. What
is beside the place stays while the place is closed.

People see `mapped` only while the volume's process reports a working link, each second. Without one the slab is
`reopening` (the link ended, and is tried again under its epoch) or `recovering` (the process began anew, and the
lender has not said yet what it holds). A lender hears `Done` only when the process says that the place is closed:
until then its pages may be the only copy, should the process die.
"""

from collections.abc import Sequence
from math import inf

import msgspec

from covey.core.ids import HostId
from covey.core.transitions import StateTable
from plugins.memory.machine.borrowing import lender_search
from plugins.memory.machine.borrowing.lender_search import LenderSearch, Opening
from plugins.memory.machine.borrowing.place import Link, SlabPlace
from plugins.memory.machine.borrowing.slabs_by_host import NOWHERE, SlabsByHost, Whereabouts
from plugins.memory.messages import SlabRef
from plugins.memory.policy import budgets, mirroring

Onward = LenderSearch | SlabPlace | None
"""State beside a place that a slab leaves: a search for the next place, the next place while it is filled, or
nothing."""


class Cold(msgspec.Struct, frozen=True):
    """No host holds it, and none is asked: the disk serves it."""


class Seeking(msgspec.Struct, frozen=True):
    """No host holds it, and some are asked: the disk serves it."""

    search: LenderSearch


class AtLender(msgspec.Struct, frozen=True):
    place: SlabPlace
    link: Link
    """State of the link to `place`, as the volume's process reports it."""
    evicted: bool
    """The lender of `place` wants its memory back."""


class Mapped(AtLender, frozen=True):
    """A lender holds it."""


class Migrating(AtLender, frozen=True):
    """A lender holds it, and another one is asked for a place, or fills it."""

    onward: LenderSearch | SlabPlace


class Closing(AtLender, frozen=True):
    """The volume's process closes its place: `Done` follows."""

    lost: bool
    """Its link ended for good: the disk serves it already."""
    onward: Onward


Phase = Cold | Seeking | Mapped | Migrating | Closing
COLD = Cold()
TRANSITIONS: StateTable[Phase] = StateTable(
    "slab of a volume, at its borrower",
    {
        Cold: {
            Seeking: "it is hot: some hosts are asked for room",
            Mapped: "the volume's process was found, and has a place of it open",
            Closing: "the volume's process was found, and has two places of it open: the older one is closed",
        },
        Seeking: {
            Seeking: "its search goes on",
            Cold: "nobody has room, or the volume's process began anew and does not have the place",
            Mapped: "its place is open",
            Migrating: "the volume's process was found, and has a place of it open; the search goes on",
            Closing: "the volume's process was found, and has two places of it open: the older one is closed",
        },
        Mapped: {
            Mapped: "the volume's process says how its link is, or its lender wants it back",
            Migrating: "its lender wants it back while it is hot, or it makes way: hosts are asked for room",
            Closing: "it is cold, its link ended for good, its lender is gone, or wants it back in vain",
            Cold: "the volume's process does not have the place any more",
        },
        Migrating: {
            Migrating: "its search goes on or found a place, or the volume's process says how its link is",
            Mapped: "the search or the next place failed, or the volume's process has only the next one",
            Closing: "the next place is filled or failed, the grace is nearly over, or its link ended for good",
            Seeking: "the volume's process does not have the place any more; the search goes on",
            Cold: "the volume's process began anew and has none of its places",
        },
        Closing: {
            Closing: "its search goes on, found a place or ended, or the volume's process began anew",
            Mapped: "the place is closed: the next one serves it",
            Seeking: "the place is closed; the search for another one goes on",
            Cold: "the place is closed: the disk serves it",
        },
    },
)


def goes_on(phase: Phase, onward: Onward) -> Phase:
    """The phase with the same place, if it has one, and another search or next place beside it."""
    if isinstance(phase, Closing):
        return msgspec.structs.replace(phase, onward=onward)
    if isinstance(phase, AtLender):
        kept = (phase.place, phase.link, phase.evicted)
        return Mapped(*kept) if onward is None else Migrating(*kept, onward)
    if onward is None:
        return COLD
    return Mapped(onward, "open", evicted=False) if isinstance(onward, SlabPlace) else Seeking(onward)


class BorrowedSlab:
    """One slab of a volume, or one member of such a slab, and its phase.

    `left`: epoch -> lender of places that were given up and are being closed. `doubted`: seconds for which the process
    has
    not reported a place that is known here. `retry_at_s`: time before which no host is asked again, since none had
    room.
    `members`: members of the slab; with several this is one of them, and `index` its number (`policy.mirroring`).
    `had_place`: it has had one. `declined_s`: when no host had room for it last. `late_s`: when its last search ended,
    if a
    host that was asked did not answer in time.
    """

    __slots__ = (
        "_by_host", "_phase", "declined_s", "doubted", "had_place", "index", "late_s", "left", "members", "retries",
        "retry_at_s", "volume",
    )  # fmt: skip

    def __init__(self, volume: str, index: int, members: int = 1) -> None:
        self.volume, self.index, self.members = volume, index, members
        self._phase: Phase = TRANSITIONS.first(COLD)
        self._by_host: SlabsByHost | None = None
        self.left: dict[int, HostId] = {}
        self.doubted = self.retries = 0
        self.had_place = False
        self.declined_s = self.late_s = -inf
        self.retry_at_s = 0.0

    # ---- reading ----

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def subject(self) -> str:
        return f"slab/{self.volume}/{mirroring.slab_of(self.index, self.members)}"

    @property
    def place(self) -> SlabPlace | None:
        """The place that serves the slab now."""
        return self._phase.place if isinstance(self._phase, AtLender) else None

    @property
    def next(self) -> SlabPlace | None:
        """The place that is open and being filled, while `place` is on its way out."""
        onward = self._onward
        return onward if isinstance(onward, SlabPlace) else None

    @property
    def search(self) -> LenderSearch | None:
        if isinstance(self._phase, Seeking):
            return self._phase.search
        onward = self._onward
        return None if isinstance(onward, SlabPlace) else onward

    @property
    def _onward(self) -> Onward:
        return self._phase.onward if isinstance(self._phase, Migrating | Closing) else None

    @property
    def places(self) -> list[SlabPlace]:
        """Places that are open, as far as we know: the one that serves, and the one that is filled."""
        phase = self._phase
        if isinstance(phase, Cold | Seeking):
            return []
        following = None if isinstance(phase, Mapped) else self.next
        return [phase.place] if following is None else [phase.place, following]

    @property
    def state(self) -> str:
        """State for people: `cold`, `asking`, `mapped`, `filling`, `reopening`, `recovering`, `lost` or `moving`."""
        phase = self._phase
        if not isinstance(phase, AtLender):
            return "asking" if isinstance(phase, Seeking) else "cold"
        if phase.link in ("recovering", "filling"):
            return phase.link
        if isinstance(phase, Closing):
            return "lost" if phase.lost else "moving"
        if phase.evicted:
            return "moving"
        return "mapped" if phase.link == "open" else "reopening"

    @property
    def is_served(self) -> bool:
        """Does a lender serve its pages now?"""
        phase = self._phase
        return isinstance(phase, AtLender) and phase.link == "open" and not (isinstance(phase, Closing) and phase.lost)

    @property
    def is_evicted(self) -> bool:
        return isinstance(self._phase, AtLender) and self._phase.evicted

    @property
    def is_closing(self) -> bool:
        return isinstance(self._phase, Closing)

    @property
    def epochs(self) -> list[int]:
        """Every epoch under which a lender may hold it."""
        known = [place.epoch for place in self.places]
        return [*known, *([] if self.search is None else [self.search.epoch]), *self.left]

    def lenders(self) -> dict[int, HostId]:
        """Epoch -> lender that may hold it under that epoch: its places, the one it is being given, and those it gives
        up."""
        found = {place.epoch: place.lender for place in self.places}
        if self.search is not None and self.search.chosen is not None:
            found[self.search.epoch] = self.search.chosen
        return found | self.left

    def ref(self, epoch: int) -> SlabRef:
        return SlabRef(self.volume, self.index, epoch)

    def hosts(self) -> list[HostId]:
        """Every host that holds this slab or is being asked for it."""
        phase = self._phase
        match phase:
            case Cold():
                return []
            case Seeking():
                return list(phase.search.asked)
            case Mapped():
                return [phase.place.lender]
            case _:
                search = self.search
                return [*(place.lender for place in self.places), *(() if search is None else search.asked)]

    @property
    def whereabouts(self) -> Whereabouts:
        search = self.search
        chosen = [] if search is None or search.chosen is None else [search.chosen]
        return Whereabouts([*(place.lender for place in self.places), *chosen], self.hosts())

    def leaves(self, lender: HostId) -> bool:
        """Is it to leave this lender?"""
        return isinstance(self._phase, AtLender) and self._phase.evicted and self._phase.place.lender == lender

    # ---- transitions ----

    def counts_in(self, by_host: SlabsByHost) -> None:
        """Count the slab in `by_host` from now on."""
        self._by_host = by_host
        by_host.changed(NOWHERE, self.whereabouts)

    def _become(self, phase: Phase) -> None:
        before = self.whereabouts if self._by_host is not None else NOWHERE
        self._phase = TRANSITIONS.next(self._phase, phase)
        if self._by_host is not None:
            self._by_host.changed(before, self.whereabouts)

    def seek(self, search: LenderSearch) -> None:
        """Begin to search for a place: the slab has none, or leaves the one it has."""
        assert self._onward is None and not isinstance(self._phase, Seeking), f"{self.subject} searches twice"
        self._become(goes_on(self._phase, lender_search.TRANSITIONS.first(search)))

    def search_on(self, step: LenderSearch) -> None:
        """Continue its search with the next step."""
        before = self.search
        assert before is not None, f"{self.subject} does not search"
        self._become(goes_on(self._phase, lender_search.TRANSITIONS.next(before, step)))

    def search_ended(self, now_s: float, late: bool) -> None:
        """End the search, if there is one: no host has room, or gave it in time. `late`: a host did not answer."""
        self.declined_s = now_s
        if self.search is not None:
            self.late_s = now_s if late else -inf
            self._become(goes_on(self._phase, None))

    def opened(self) -> SlabPlace:
        """The place that was searched for serves the slab, or is filled from now on."""
        search = self.search
        assert isinstance(search, Opening), f"{self.subject} opens nothing"
        self._become(goes_on(self._phase, search.place))
        self.retries, self.had_place = 0, True
        return search.place

    def next_gone(self) -> SlabPlace:
        """Give up the place that is being filled."""
        gone = self.next
        assert gone is not None, f"{self.subject} does not move"
        self._become(goes_on(self._phase, None))
        return gone

    def linked(self, link: Link) -> None:
        """The volume's process reports the state of the link to its place."""
        phase = self._phase
        if isinstance(phase, AtLender) and phase.link != link:
            self._become(msgspec.structs.replace(phase, link=link))

    def evict(self) -> None:
        """The lender of its place wants its memory back."""
        phase = self._phase
        assert isinstance(phase, Mapped | Migrating), f"{self.subject} is evicted from nowhere"
        self._become(msgspec.structs.replace(phase, evicted=True))

    def close(self, lost: bool = False) -> SlabPlace:
        """Begin to close its place."""
        phase = self._phase
        assert isinstance(phase, Mapped | Migrating), f"{self.subject} closes nothing"
        self._become(Closing(phase.place, phase.link, phase.evicted, lost, self._onward))
        return phase.place

    def closed(self) -> SlabPlace | None:
        """Its place is closed: the next one serves the slab, or the disk (then None is returned)."""
        self._become(goes_on(COLD, self._onward))
        return self.place

    def found(self, open_now: Sequence[SlabPlace]) -> None:
        """The volume's process began anew, or we did: it has these places open, the oldest first. Of two the older one
        is closed, and a place that was being closed is closed again. A place that was being opened is among them, or
        was not opened."""
        search = None if isinstance(self.search, Opening) else self.search
        after = goes_on(COLD, search)
        if open_now:
            self.had_place = True
            first, *others = open_now
            place = self.place
            evicted = self.is_evicted and place is not None and any(place.epoch == each.epoch for each in open_now)
            after = goes_on(Mapped(first, "", evicted), search)
            if others or self.is_closing:  # of a search beside two places nothing is left: what it is granted goes back
                after = Closing(first, "", evicted, lost=False, onward=others[-1] if others else search)
        if after != self._phase:
            self._become(after)


class BorrowedVolume(msgspec.Struct):
    slab_bytes: int
    page_bytes: int
    slabs: list[BorrowedSlab]
    hot: float
    """Page requests per second above which a slab is placed."""
    cold: float | None
    """Page requests per second below which a placed slab is given back unasked (§2.4.1, ColdSlab); None: never."""
    rates: list[float] = []
    """Page requests per second of each slab, smoothed."""
    members: int = 1
    """Members of each slab; with several there is no disk, and `slabs` are the members."""
    tenant: str = ""
    job: str = ""
    by_host: SlabsByHost = msgspec.field(default_factory=SlabsByHost)

    def __post_init__(self) -> None:
        self.rates = self.rates or [0.0] * len(self.slabs)
        for slab in self.slabs:
            slab.counts_in(self.by_host)

    @property
    def counted_slab_bytes(self) -> int:
        """Bytes that a slab counts against budgets."""
        return budgets.plain_bytes(self.slab_bytes, self.page_bytes)

    def check(self) -> None:
        found = SlabsByHost()
        for slab in self.slabs:
            found.changed(NOWHERE, slab.whereabouts)
        assert (found.chosen, found.near) == (self.by_host.chosen, self.by_host.near), "slabs by host are counted wrong"


def counted(slabs: int) -> str:
    return "1 slab" if slabs == 1 else f"{slabs} slabs"


def rate_text(requests_per_s: float) -> str:
    """Rate as text for people."""
    return f"{requests_per_s:.0f}" if requests_per_s >= 10 else f"{requests_per_s:.3g}"
