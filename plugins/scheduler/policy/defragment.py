"""Which places of running gangs move elsewhere so that a gang that waits fits.

    h1 [AA..]  h2 [BB..]  h3 [CCC.]      4 GPUs on one host are wanted, and there are 5 in gaps
    h1 [AABB]  h2 [....]                 B's ranks move: cheapest, since B is narrow; C would not fit anywhere

A gang that fits already, on several hosts, and is slower there, waits for moves too if it lies on one host after them:

    h1 [AA..]  h2 [....]                 4 GPUs, and it minds being spread: A's ranks move to h2, and it starts on h1

Such moves pay if the gang would lose more to the network, in the time that it is expected to run, than all that move
lose by standing still.

A gang that runs on several hosts, and is slower there, moves together once one of them has room for all of it:

    h1 [AA..]  h2 [BBBA]                 B has ended: A's rank on h2 moves to h1

Only gangs that can continue without a host can move (`machine/log/replacing.py`); each waits for some seconds
meanwhile, whole. Nothing moves from where that would cost more room than it makes. This is Covey's own: no scheduler of
the six papers can do it, since a job's processes would begin anew there.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from covey.core.ids import HostId, JobId
from plugins.scheduler.policy.eligible import GangShape

MOVES_MAX = 4
"""The most places that move for one gang."""
PAUSE_S = 3.0
"""Seconds for which a gang stands still while a part of it moves (measured: 0.4 s with numpy, 2 s with PyTorch)."""
WAIT_LEAST_S = 30.0
"""The least time, in seconds, that a gang that cannot start is expected to wait longer: others run for minutes.
Otherwise it is expected to wait as long again as it has."""


RUN_LEAST_S = 300.0
"""The least time, in seconds, that a gang that has not run yet is expected to run (a third of those of 2 to 8 GPUs in
the Philly trace run for less). Otherwise it is expected to run as long again as it has."""
STARTS_LATER_S = 5.0
"""How much later a gang starts when others move first, s: the moves, and until their end is known everywhere."""
TOGETHER_MAX = 2
"""The most places that move for a gang that could start without moves."""


class Movable(NamedTuple):
    """A place of a gang that can continue elsewhere."""

    job: JobId
    host: HostId
    gpus: int
    width: int
    """GPUs of the whole gang, which waits while the place moves."""
    hosts: frozenset[HostId]
    """Hosts where the gang is, or may not be: the place does not move there."""


class Departure(NamedTuple):
    """A place that moves, and the host where it goes."""

    place: Movable
    to: HostId


class Apart(NamedTuple):
    """A gang that runs on several hosts."""

    places: tuple[tuple[HostId, int], ...]
    """The gang's hosts, and its GPUs on each."""

    @property
    def width(self) -> int:
        return sum(gpus for _, gpus in self.places)


def departures(shape: GangShape, free: Mapping[HostId, int], movable: Iterable[Movable]) -> list[Departure] | None:
    """Moves after which the gang fits; None: there are none. `free`: GPUs that it may start on, of each host that takes
    jobs, those with 0 too. Hosts are cleared first for which the fewest GPUs stand still."""
    left, chosen = dict(sorted(free.items())), list[Departure]()
    places: dict[HostId, list[Movable]] = {}
    for place in sorted(movable):
        places.setdefault(place.host, []).append(place)
    while sum(map(shape.slots, left.values())) < shape.workers:
        moved = {departure.place.job for departure in chosen}
        found = [
            steps
            for host in places
            if (steps := _cleared(shape, host, left, [place for place in places[host] if place.job not in moved]))
        ]
        if not found:
            return None
        steps = min(found, key=lambda steps: (sum(step.place.width for step in steps), steps))
        for place, to in steps:
            left[place.host] += place.gpus
            left[to] -= place.gpus
        chosen += steps
        if len(chosen) > MOVES_MAX:
            return None
    return chosen


def together(workers: int, each: int, free: Mapping[HostId, int], movable: Iterable[Movable]) -> list[Departure] | None:
    """Moves after which a gang that fits on several hosts fits on one; None: there are none, or too many."""
    found = departures(GangShape(workers, each, "host"), free, movable)
    return found if found and len(found) <= TOGETHER_MAX else None


def _cleared(shape: GangShape, host: HostId, free: Mapping[HostId, int], places: Sequence[Movable]) -> list[Departure]:
    """Moves away from this host that give it one slot more, and take none from others; empty: there are none."""
    missing = shape.missing(free[host]) if host in free else None
    if missing is None:
        return []
    enough = sorted((place for place in places if place.gpus >= missing), key=lambda place: (place.width, place))
    options = [[place] for place in enough]
    options.append(sorted(places, key=lambda place: (-place.gpus, place.width, place)))
    for option in options:
        left, steps = dict(free), list[Departure]()
        for place in option:
            if sum(step.place.gpus for step in steps) >= missing:
                break
            to = _refuge(shape, place, left)
            if to is not None:
                left[to] -= place.gpus
                steps.append(Departure(place, to))
        if sum(step.place.gpus for step in steps) >= missing:
            return steps
    return []


def _refuge(shape: GangShape, place: Movable, free: Mapping[HostId, int]) -> HostId | None:
    """The tightest host that has room for this place, and afterwards no slot less for the gang that waits."""
    able = [
        (gpus, host)
        for host, gpus in free.items()
        if host not in place.hosts and gpus >= place.gpus and shape.slots(gpus - place.gpus) == shape.slots(gpus)
    ]
    return min(able)[1] if able else None


def merging(gang: Apart, free: Mapping[HostId, int]) -> list[tuple[HostId, HostId]] | None:
    """Moves, as (from, to), after which a gang fits on one of its hosts: the one that has most of it, with the lowest
    name among equals. None: no host has room for the rest of it, or too many places would move. `free`: as in
    `departures`."""
    able = [(-gpus, host) for host, gpus in gang.places if host in free and free[host] >= gang.width - gpus]
    if len(gang.places) < 2 or len(gang.places) - 1 > TOGETHER_MAX or not able:
        return None
    to = min(able)[1]
    return [(host, to) for host, _ in gang.places if host != to]


def merging_gains(gang: Apart, ran_s: float, loss: float, moves: int) -> bool:
    """Whether a gang loses more GPU·s on several hosts than it stands still for moving together. `loss`, `ran_s`: as in
    `gains`."""
    return loss * gang.width * max(ran_s, RUN_LEAST_S) > PAUSE_S * gang.width * moves


def pays(gpus: int, waited_s: float, steps: Sequence[Departure]) -> bool:
    """Whether the gang that waits gains more GPU·s than stand still while these move."""
    return gpus * max(waited_s, WAIT_LEAST_S) > PAUSE_S * sum(step.place.width for step in steps)


def gains(gpus: int, ran_s: float, loss: float, steps: Sequence[Departure]) -> bool:
    """Whether a gang that could start on several hosts loses more GPU·s there than stand still while these move, its
    own too. `loss`: as in `packing.loss`; `ran_s`: seconds for which it has run, in earlier starts."""
    stands = STARTS_LATER_S * gpus + PAUSE_S * sum(step.place.width for step in steps)
    return loss * gpus * max(ran_s, RUN_LEAST_S) > stands
