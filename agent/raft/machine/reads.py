"""Reads that decide: a leader answers one only once a majority has said, after the read came, that it still leads.

A lease says the same for nothing, by clocks; but the clock of a virtual machine stands still while it is suspended, and
afterwards its lease seems to run although others have elected a leader and decided. So a read waits for a round of
heartbeats that began after it came (ReadIndex, Raft thesis §6.4). One round is for all reads that wait: those that come
while it is under way share the next one.
"""

from collections.abc import Sequence


class RoundReads:
    """The reads that wait on one leader, as (number, index): the state that answers must have applied that entry."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int]] = []
        self._asked: list[tuple[int, int]] = []
        """The reads for which round `_round`, or a later one, has to be confirmed."""
        self._round = 0

    def ask(self, number: int, index: int) -> None:
        self._waiting.append((number, index))

    @property
    def wants_round(self) -> bool:
        """Whether a round should begin for the reads that wait."""
        return bool(self._waiting) and not self._asked

    def began(self, round_number: int) -> None:
        """Note that a round begins: the reads that wait belong to it, unless an earlier one is under way."""
        if self.wants_round:
            self._asked, self._waiting, self._round = self._waiting, [], round_number

    def confirmed(self, round_number: int) -> Sequence[tuple[int, int]]:
        """The reads that may be answered now: a majority answered this round."""
        if not self._asked or round_number < self._round:
            return ()
        done, self._asked = self._asked, []
        return done

    @property
    def all(self) -> Sequence[tuple[int, int]]:
        return (*self._asked, *self._waiting)
