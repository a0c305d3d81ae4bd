"""The two ranks that keep a rank's own state (`covey.healing.healing`), and the hosts of all ranks as one rank knows
them.

A gang starts with consecutive ranks on each host, and the environment says which. From then on only successors change
hosts: a successor names its host to all others when it asks for the state, and each answers with its own host. So every
rank knows which ranks are on its host, also after several moves. With its knowledge at the start it might leave its own
state with ranks that have come to its host since, and that would be lost together with it.
"""

from collections.abc import Collection


def neighbours_of(rank: int, here: Collection[int], world_size: int) -> list[int]:
    """Two ranks that keep this rank's own state: on other hosts than the ranks `here`, if there are any."""
    first = min(here)
    ring = [(first + at) % world_size for at in range(world_size)]
    away = [other for other in ring if other not in here] or [other for other in sorted(here) if other != rank]
    at = sorted(here).index(rank)
    return sorted({away[at % len(away)], away[-1 - at % len(away)]}) if away else []


class Beside:
    """The ranks on the host of one rank."""

    def __init__(self, rank: int, world_size: int, here: Collection[int], host: str) -> None:
        """`here`: the ranks that were on this `host` when this process started, this rank among them."""
        self.host = host
        self._rank, self._world_size, self._here = rank, world_size, {*here, rank}

    def is_at(self, rank: int, host: str) -> None:
        """The newest process of that rank is on this host; empty: it does not say, and nothing changes."""
        if host and self.host and rank != self._rank:
            (self._here.add if host == self.host else self._here.discard)(rank)

    @property
    def neighbours(self) -> tuple[int, ...]:
        return tuple(neighbours_of(self._rank, self._here, self._world_size))
