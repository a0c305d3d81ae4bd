"""Ranks of a job that have left (`covey.tensors.owner.leaving`), and rounds that wait for them in vain: ranks that have
pushed are told.

A rank that is in `leave()` says so on its connection, and counts as gone while that holds: if its process is lost
a successor may push again. One whose process ended with 0 has none. Another rank may speak for it, and still push what
it gave, so only those count that speak for themselves. What was sent just before the end may still be on its way: a
round has to wait for a while first.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from covey.tensors.numbers.spoken import Spoken

VAIN_S = 0.5
"""Seconds that a round waits for a rank that has left until others are told."""
SENDING_S = 2.0
"""Seconds until others are told while the connection of a rank that has ended is still open: its last bytes may be on
their way."""
LOOK_S = 0.25
"""Seconds between two looks at rounds, once a rank has left."""


class RoundSaid(NamedTuple):
    """The ranks that have said or pushed something for one tensor's round."""

    missing: Collection[int]
    """Ranks whose part is not here. While the version is not known: ranks of which it is not known what they hold. Once
    the sum is there: the rank that has yet to say that it has the moments."""
    pushed: Collection[int]
    """Ranks of which something of this round is here."""
    here: Collection[int]
    """Ranks that have opened the tensor on the connection that they have now."""
    spoken: Mapping[int, Spoken]
    """Rank that speaks -> for which ranks."""
    is_begun: bool
    """Its version is known here, and it is not complete."""

    def speaks_for(self, rank: int) -> int | None:
        """The rank that pushes what this rank gives; None: no rank has said so."""
        return next((by for by, spoken in self.spoken.items() if spoken.ranks[0] <= rank < spoken.ranks[1]), None)

    @property
    def pushers(self) -> list[int]:
        """Ranks that wait and are connected, among those that speak."""
        return sorted(by for by, spoken in self.spoken.items() if by in self.here and spoken.ranks[0] in self.pushed)


def in_vain(said: RoundSaid, ended: Collection[int], leaving: Collection[int], together: Collection[int]) -> int | None:
    """A rank that has left, and whose part of the round will never come; None: there is none, as far as is known.
    `ended`, `leaving`: as in `RanksAwayHere`; `together`: ranks for which another one speaks somewhere."""
    for rank in said.missing:
        by = said.speaks_for(rank)
        if rank in ended and (by == rank or (by is None and rank not in together)):
            return rank
        if rank in leaving and by == rank and rank in said.here and said.is_begun:
            return rank
    return None


def spoken_for(tensors: Iterable[RoundSaid]) -> set[int]:
    """Ranks for which another one speaks."""
    each = ((by, spoken.ranks) for said in tensors for by, spoken in said.spoken.items())
    return {rank for by, ranks in each for rank in range(*ranks) if rank != by}


class RanksAwayHere:
    """The ranks of one job that have left, at its aggregator."""

    def __init__(self) -> None:
        self.ended: dict[int, str] = {}
        """Rank whose process ended with 0 -> who that is, in words."""
        self.leaving: dict[int, str] = {}
        """Rank -> who that is, in words, for ranks whose connection said that they leave."""
        self._since: dict[int, tuple[int, float]] = {}
        """Tensor -> rank for which it waits in vain, and since when that is known."""

    @property
    def has_left(self) -> bool:
        """Whether a rank is known to have left."""
        return bool(self.ended or self.leaving)

    def look(self, rounds: Mapping[int, RoundSaid], last: int, now_s: float) -> list[tuple[int, int, str]]:
        """Tensors, ranks that wait for them, and who they wait for in words, once it is time to tell. `rounds`: those
        under way, by tensor; `last`: the tensor with which ranks leave."""
        if not self.has_left:
            return []
        together = spoken_for(rounds.values())
        found: list[tuple[int, int, str]] = []
        before, self._since = self._since, {}
        for key, said in rounds.items():
            rank = in_vain(said, self.ended, () if key == last else self.leaving, together)
            if rank is None:
                continue
            known = before.get(key, (rank, now_s))
            self._since[key] = known if known[0] == rank else (rank, now_s)
            is_sending = rank in self.ended and rank in said.here
            if now_s - self._since[key][1] >= (SENDING_S if is_sending else VAIN_S):
                words = self.ended.get(rank) or self.leaving[rank]
                found += [(key, waits, words) for waits in said.pushers]
        return found
