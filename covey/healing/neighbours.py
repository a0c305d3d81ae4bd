"""The process of a rank that may be lost, the two ranks that keep its own state (`covey.healing.healing`), and the
hosts of all ranks as one rank knows them.

A gang starts with consecutive ranks on each host, and the environment says which. From then on only successors change
hosts: a successor names its host to all others when it asks for the state, and each answers with its own host. So every
rank knows which ranks are on its host, also after several moves. With its knowledge at the start it might leave its own
state with ranks that have come to its host since, and that would be lost together with it.
"""

from collections.abc import Collection
from typing import NamedTuple


class HealedRank(NamedTuple):
    """The process of a rank that may be lost, when it begins."""

    rank: int
    world_size: int
    incarnation: int = 0
    """How many processes of this rank were lost before."""
    here: Collection[int] = ()
    """The ranks on the same host, with or without this one."""
    host: str = ""
    """The name of that host; empty: it is not known, and the ranks here never change."""
    step: int = 0
    """The first step of the script, unless this is a successor."""
    alike: Collection[int] = ()
    """The ranks that hold the same state, with or without this one; empty: all do."""


def neighbours_of(rank: int, here: Collection[int], world_size: int) -> list[int]:
    """Two ranks that keep this rank's own state: on other hosts than the ranks `here`, if there are any."""
    first = min(here)
    ring = [(first + at) % world_size for at in range(world_size)]
    away = [other for other in ring if other not in here] or [other for other in sorted(here) if other != rank]
    at = sorted(here).index(rank)
    return sorted({away[at % len(away)], away[-1 - at % len(away)]}) if away else []


class Beside:
    """The ranks on the host of one rank."""

    def __init__(self, me: HealedRank) -> None:
        self.host = me.host
        self._rank, self._world_size, self._here = me.rank, me.world_size, {*me.here, me.rank}

    def is_at(self, rank: int, host: str) -> None:
        """The newest process of that rank is on this host; empty: it does not say, and nothing changes."""
        if host and self.host and rank != self._rank:
            (self._here.add if host == self.host else self._here.discard)(rank)

    @property
    def neighbours(self) -> tuple[int, ...]:
        return tuple(neighbours_of(self._rank, self._here, self._world_size))
