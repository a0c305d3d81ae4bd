"""A slab's search for a lender: some hosts are asked for room, the freest is asked for a slab, and it is opened.

A host that was chosen and declines is out, and the next best one is asked under a new epoch: a late answer of the first
is not taken for one of the second. A search ends when its place is open, or when nobody is left to ask.
"""

from collections.abc import Mapping, Sequence

import msgspec

from covey.core.ids import HostId
from covey.core.transitions import StateTable
from plugins.memory.machine.borrowing.place import SlabPlace


class AskedHosts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about the asked hosts that are known in every step."""

    asked: tuple[HostId, ...]
    offers: Mapping[HostId, int]
    """Slabs that each host could lend; 0 for one that declined or was late. A host that has not answered is absent."""
    late: bool = False
    """A host did not answer in time."""

    @property
    def said(self) -> str:
        """The answer of each host that was asked, for people."""
        answered = [host for host in self.asked if host in self.offers]
        said = [f"{host} offers {self.offers[host]}" for host in answered]
        silent = [host for host in self.asked if host not in self.offers]
        return ", ".join([*said, f"{names(silent)} silent"] if silent else said)


class Querying(AskedHosts, frozen=True, kw_only=True):
    """`QueryMem` is sent to all of them, and not all have answered."""

    epoch: int

    @property
    def chosen(self) -> None:
        """The host that `Map` was sent to."""
        return None

    def offered(self, host: HostId, slabs: int, late: bool = False) -> "Querying":
        offers = {**self.offers, host: slabs}
        return Querying(epoch=self.epoch, asked=self.asked, offers=offers, late=self.late or late)

    def over(self) -> "Querying":
        """The query after its time is over: no host is waited for any longer."""
        late = self.late or len(self.offers) < len(self.asked)
        return Querying(epoch=self.epoch, asked=self.asked, offers=self.offers, late=late)

    def requesting(self, chosen: HostId) -> "Requesting":
        return Requesting(epoch=self.epoch, asked=self.asked, offers=self.offers, late=self.late, chosen=chosen)


class Requesting(AskedHosts, frozen=True, kw_only=True):
    """`Map` is sent to the freest, which has not answered."""

    epoch: int
    chosen: HostId

    def granted(self, address: str, secret: bytes) -> "Opening":
        place = SlabPlace(self.epoch, self.chosen, address, secret)
        return Opening(asked=self.asked, offers=self.offers, late=self.late, place=place)


class Opening(AskedHosts, frozen=True, kw_only=True):
    """The lender granted a place, and the volume's process opens it."""

    place: SlabPlace
    copied: bool = False
    """The process has reported that the place is filled before it reported that it is open."""

    @property
    def epoch(self) -> int:
        return self.place.epoch

    @property
    def chosen(self) -> HostId:
        return self.place.lender


LenderSearch = Querying | Requesting | Opening
TRANSITIONS: StateTable[LenderSearch] = StateTable(
    "search for a lender",
    {
        Querying: {
            Querying: "a host answered, others have not",
            Requesting: "all answered, or their time is over: the freest is asked for a slab",
        },
        Requesting: {
            Opening: "it granted one, and the volume's process is told to open it",
            Requesting: "it declined or did not answer: the next best is asked, under a new epoch",
        },
        Opening: {
            Opening: "its process says that it is filled, before it says that it is open",
            Requesting: "it was not opened, or its lender wants it back: the next best is asked, under a new epoch",
        },
    },
)


def without(search: Requesting | Opening, epoch: int, late: bool) -> Querying:
    """The search with the hosts that are left when the chosen one declines or is late, under the next epoch."""
    offers = {**search.offers, search.chosen: 0}
    return Querying(epoch=epoch, asked=search.asked, offers=offers, late=search.late or late)


def names(hosts: Sequence[HostId]) -> str:
    """Names of hosts, for people."""
    return " and ".join(hosts) if hosts else "none"
