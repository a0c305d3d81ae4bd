"""Which two ranks keep what is a rank's own (`covey.healing.healing`), and where each rank is, as far as this one
knows.

A gang starts with ranks in a row on each host, which the environment says. From then on only a successor is elsewhere
than its rank was: it says its host to all others when it asks for what it needs, and each answers with its own. So
every rank knows who is beside it, also after several moves: what it knew at its start would have it keep its own with
ranks that have come to its host, and would all be lost with that.
"""

from collections.abc import Collection


def neighbours_of(rank: int, here: Collection[int], world_size: int) -> list[int]:
    """Two ranks on other hosts than that of the ranks `here`, if there are any, who keep what is this rank's own."""
    first = min(here)
    ring = [(first + at) % world_size for at in range(world_size)]
    away = [other for other in ring if other not in here] or [other for other in sorted(here) if other != rank]
    at = sorted(here).index(rank)
    return sorted({away[at % len(away)], away[-1 - at % len(away)]}) if away else []


class Beside:
    """Of one rank: which others are on its host."""

    def __init__(self, rank: int, world_size: int, here: Collection[int], host: str) -> None:
        """`here`: the ranks that were on this `host` when this process started, itself among them."""
        self.host = host
        self._rank, self._world_size, self._here = rank, world_size, {*here, rank}

    def is_at(self, rank: int, host: str) -> None:
        """The newest process of that rank is on this host; empty: it does not say, and nothing is learnt."""
        if host and self.host and rank != self._rank:
            (self._here.add if host == self.host else self._here.discard)(rank)

    @property
    def neighbours(self) -> tuple[int, ...]:
        return tuple(neighbours_of(self._rank, self._here, self._world_size))
