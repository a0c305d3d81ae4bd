"""One slab of a volume with parity (`policy.parity`), as its process has it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from plugins.memory.datapath.links.remote_slab import RemoteSlab
from plugins.memory.datapath.volumes.members.mirror_slab import MirrorSlab
from plugins.memory.datapath.volumes.members.row_locks import RowLocks
from plugins.memory.datapath.wire.control import PlaceState
from plugins.memory.machine.mirror import Mirror, Whole
from plugins.memory.policy import parity

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ParitySlab(MirrorSlab):
    """A slab with parity. `newest`: versions of its pages, shape (rows, columns); those after a volume's end that fills
    no whole row stay 0. `held` of a link has a flag for each row: for a member with pages, that it has the newest; for
    one with slots, that the slot is parity."""

    __slots__ = ("data", "locks", "newest", "repairing", "slots")

    def __init__(
        self, index: int, first: int, pages: int, touched: Callable[["MirrorSlab"], None], newest: "NDArray[np.uint64]"
    ) -> None:
        super().__init__(index, first, pages, touched)
        self.newest = newest
        self.data: int = newest.shape[1]
        self.mirror = Mirror(needed=self.data, members=self.data + 1)
        self.slots: NDArray[np.uint64] = np.zeros(len(newest), np.uint64)
        """Version of each slot, shape (rows,)."""
        self.locks = RowLocks()
        self.repairing = False
        """Slots are being made parity."""

    @property
    def at_lender(self) -> int:
        return len(self.newest)

    def column(self, epoch: int) -> int:
        """Column of the member that has this epoch; the column of slots is `data`."""
        return self.places[epoch].index % (self.data + 1)

    def of_column(self, column: int, epochs: list[int]) -> list[RemoteSlab]:
        """Working links to those of these members that have this column."""
        return [
            link
            for epoch in epochs
            if (link := self.links.get(epoch)) is not None and link.usable and self.column(epoch) == column
        ]

    def missing(self) -> int | None:
        """The column with pages that no whole member has, if there is one."""
        whole = self.mirror.whole
        return next((column for column in range(self.data) if not self.of_column(column, whole)), None)

    def all_there(self) -> bool:
        """Does each column with pages have a whole member?"""
        return self.missing() is None

    def lacking(self) -> "NDArray[np.int64]":
        """Rows in which something was written, and the slot is not known to be parity at every member with slots."""
        held = np.ones(len(self.newest), np.bool_)
        for link in self.of_column(self.data, self.mirror.takes):
            held &= np.frombuffer(bytes(link.held.flags), np.bool_)[: len(held)]
        return np.flatnonzero((self.newest.max(axis=1) > 0) & ~held)

    def state(self, epoch: int) -> PlaceState:
        """State of a member; one whose slots are not all parity is still being filled."""
        found = super().state(epoch)
        is_slots = isinstance(self.mirror.of(epoch), Whole) and self.column(epoch) == self.data
        return "filling" if is_slots and self.repairing else found

    def kept(self, column: int) -> "NDArray[np.bool_]":
        """Rows in which the page of that column can be read from the slot, as a copy or with the others; shape
        (rows,)."""
        flags = np.zeros(len(self.newest), np.bool_)
        for link in self.of_column(self.data, self.mirror.whole):
            flags |= np.frombuffer(bytes(link.held.flags), np.bool_)[: len(flags)]
            flags |= parity.is_copy(self.slots, self.newest[:, column], column)
        return flags
