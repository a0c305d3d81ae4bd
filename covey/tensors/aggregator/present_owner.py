"""The owner to which a rank pushes the Blocks of one table now, and the one that comes next.

An owner that is lost is replaced at once. One that hands its table over to another host continues until it ends its
connections, which it does between two iterations, when no round is under way: all ranks then change together, and
nothing has to be pushed twice. If it does not do so, ranks leave it after `HANDOVER_S`.

    owner of epoch 4 --told of 5, lost---------------------------------------------> owner of epoch 5
    owner of epoch 4 --told of 5, handed over--> continues --its connection ended--> owner of epoch 5
"""

from covey.tensors.numbers.tensor_wire import grant_of
from covey.wire.job import AggregatorAt

HANDOVER_S = 60.0
"""Seconds that a rank stays with an owner that hands its table over; the owner ends that earlier, if it can."""


class PresentOwner:
    def __init__(self) -> None:
        self.at: AggregatorAt | None = None
        self._next: AggregatorAt | None = None
        self._leave_s = 0.0

    def begin_as(self, other: "PresentOwner") -> None:
        """Begin with the owner at which another rank of this process is, also while that hands its table over: the next
        owner has none of the ranks that wait for this one."""
        self.at, self._next, self._leave_s = other.at, other._next, other._leave_s

    def told(self, at: AggregatorAt, connected: bool, now_s: float) -> bool:
        """Take an owner that the agent names. Whether to go there at once; otherwise the rank goes when the present
        owner ends the connection. An epoch that is not higher than the known one is ignored."""
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
        """The connection to that owner ended. Returns where to go next, if it was the present owner and hands over."""
        if self._next is None or self.at is not at:
            return None
        self.at, self._next = self._next, None
        return self.at

    def overdue(self, now_s: float) -> bool:
        """Whether the present owner should have ended the connection by now."""
        return self._next is not None and now_s > self._leave_s
