"""Where a rank pushes the Blocks of one table now, and where next.

An owner that is lost is replaced at once. One that hands its table over (another host is to have it) goes on until it
ends its connections, which it does between two iterations, when no round is under way: all ranks then change together,
and nothing has to be pushed twice. Should it not do so, ranks leave it after `HANDOVER_S`.

    owner of epoch 4 --told of 5, lost--------------------------------------------> owner of epoch 5
    owner of epoch 4 --told of 5, handed over--> goes on --its connection ended--> owner of epoch 5
"""

from covey.tensors.numbers.tensor_wire import grant_of
from covey.wire.job import AggregatorAt

HANDOVER_S = 60.0
"""How long a rank stays with an owner that hands its table over; the owner ends that earlier, if it can."""


class PresentOwner:
    def __init__(self) -> None:
        self.at: AggregatorAt | None = None
        self._next: AggregatorAt | None = None
        self._leave_s = 0.0

    def told(self, at: AggregatorAt, connected: bool, now_s: float) -> bool:
        """The agent names an owner. Whether to go there at once; else when this one ends the connection. A lower epoch
        than those known is left out."""
        known = self._next or self.at
        if known is not None and at.epoch <= known.epoch:
            return False
        stays = self.at is not None and grant_of(at.epoch) == grant_of(self.at.epoch)
        if at.handed_over and connected and stays:
            self._next, self._leave_s = at, now_s + HANDOVER_S
            return False
        self.at, self._next = at, None
        return True

    def ended(self, at: AggregatorAt) -> AggregatorAt | None:
        """The connection to that one ended: where to go next, if it was the present one and hands over."""
        if self._next is None or self.at is not at:
            return None
        self.at, self._next = self._next, None
        return self.at

    def overdue(self, now_s: float) -> bool:
        """This one was to end the connection long ago."""
        return self._next is not None and now_s > self._leave_s
