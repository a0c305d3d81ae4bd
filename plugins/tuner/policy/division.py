"""How the ranks and tables of an elastic job are best divided among its hosts, each a worker, a server, or both.

The paper's hosts are workers or servers (`cost.py`, `search.py`). A host of Covey may be both, and the number of ranks
is fixed, so a step has as many passes as ever, whoever computes them. Two things decide how long it takes:

    computing   the host that is last: seconds of one pass, times the ranks that one of its processes carries
    traffic     the card that is last: first it carries what its ranks push to tables elsewhere and, in the other
                direction, what ranks elsewhere push to its tables; then the results, which go the other way round

        pushed = n (U - t) M / U, taken = t (V - n) M / U     n of V ranks, t of U tables, M bytes in all tables
        step = longest computing + longest of 2 max(pushed, taken) / card

Ranks and tables that meet on one host use no card. A sum is there once the last rank has pushed, and no rank goes on
before the last result is here, therefore the longest of both add up. Ranks and tables are whole, and there are at most
64 and 16 of them, so nothing is rounded: for a bound on computing and one on traffic it is known how many tables a host
can own beside n ranks, and dynamic programming over hosts tells whether all find a place. The least sum of two such
bounds is the shortest step.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import product

import msgspec
import numpy as np
import numpy.typing as npt

from covey.core.ids import HostId

SLACK = 0.01
"""Share of the shortest step by which traffic may last longer, if fewer ranks and tables change hosts then."""
BOUNDS_MAX = 256
"""Most bounds on computing that are tried: all of them, unless tens of hosts all differ."""
IMPOSSIBLE = -(1 << 20)
ROUNDING = 1e-9
Counts = npt.NDArray[np.int64]


class DividedJob(msgspec.Struct, frozen=True):
    """One elastic job as this model sees it."""

    ranks: int
    """V: the number of its ranks, for ever."""
    tables: int
    """U: the number of tables that have tensors in them."""
    model_bytes: float
    """M: bytes of all tensors that a rank pushes in a step."""


class HostPace(msgspec.Struct, frozen=True):
    """One host as this model sees it."""

    host: HostId
    pass_s: float
    """Seconds that one of its processes computes for one rank in a step, > 0."""
    card_bytes_per_s: float
    """Bytes per second that its card carries in each direction, > 0."""
    processes: int
    """Number of the job's processes there; 0: it only owns tables. Each carries a rank at least."""
    may_end: bool = False
    """Whether its processes may end, and others carry their ranks; or, where it has none, a first one begin."""


class HostPart(msgspec.Struct, frozen=True):
    """The part of a job that one host has."""

    ranks: int
    tables: int

    @property
    def role(self) -> str:
        """What the host is to the job: `worker`, `server`, `both`, or `none`."""
        roles = {(True, True): "both", (True, False): "worker", (False, True): "server", (False, False): "none"}
        return roles[bool(self.ranks), bool(self.tables)]


Division = Mapping[HostId, HostPart]


def computing_s(pace: HostPace, ranks: int) -> float:
    """Seconds that a host computes in a step: its processes run side by side, a process passes rank after rank."""
    return pace.pass_s * math.ceil(ranks / max(1, pace.processes))


def card_bytes(job: DividedJob, part: HostPart) -> float:
    """Bytes that a host's card carries in its busier direction while ranks push, and again, in the other direction,
    while results come."""
    most = max(part.ranks * (job.tables - part.tables), part.tables * (job.ranks - part.ranks))
    return most * job.model_bytes / job.tables


def card_s(job: DividedJob, pace: HostPace, part: HostPart) -> float:
    """Seconds that a host's card needs for a step: for pushes, and then for results."""
    return 2 * card_bytes(job, part) / pace.card_bytes_per_s


def step_s(job: DividedJob, paces: Sequence[HostPace], division: Division) -> float:
    """Seconds of a step: the longest computing and the longest traffic of all hosts."""
    parts = [(pace, division.get(pace.host, HostPart(0, 0))) for pace in paces]
    computing = max(computing_s(pace, part.ranks) for pace, part in parts)
    return computing + max(card_s(job, pace, part) for pace, part in parts)


def best_division(job: DividedJob, paces: Sequence[HostPace], now: Division, processes_min: int = 1) -> Division:
    """The division with the shortest step; of those within `SLACK` of it one that changes least. `processes_min`:
    fewest processes that the job may have; of those that would end the fastest stay until there are as many.
    ValueError when no division gives each process a rank."""
    ordered = sorted(paces, key=lambda pace: pace.host)
    found = _best(job, ordered, now)
    while found is not None and sum(_processes(pace, found[pace.host]) for pace in ordered) < processes_min:
        ends = [pace for pace in ordered if pace.processes and not found[pace.host].ranks]
        if not ends:
            break
        stays = min(ends, key=lambda pace: (pace.pass_s, -pace.card_bytes_per_s, pace.host))
        ordered = [msgspec.structs.replace(pace, may_end=False) if pace is stays else pace for pace in ordered]
        found = _best(job, ordered, now)
    if found is None:
        raise ValueError(f"{job.ranks} ranks cannot be divided among the processes of {len(paces)} hosts")
    return found


def may_be(paces: Sequence[HostPace], division: Division, processes_min: int = 1) -> bool:
    """Whether the job may be divided so now: ranks lie only where processes are or may begin, processes without ranks
    may end, and no fewer processes than `processes_min` stay."""
    parts = [(pace, division.get(pace.host, HostPart(0, 0))) for pace in paces]
    stay = sum(_processes(pace, part) for pace, part in parts)
    return stay >= processes_min and all(_may_carry(pace, part.ranks) for pace, part in parts)


def exhaustive(job: DividedJob, paces: Sequence[HostPace]) -> float:
    """The shortest step of all divisions, in seconds, tried one by one: what `best_division` is measured against."""
    shortest = math.inf
    for ranks in product(*(range(job.ranks + 1) for _ in paces)):
        if sum(ranks) == job.ranks and all(_may_carry(pace, n) for pace, n in zip(paces, ranks, strict=True)):
            for tables in product(*(range(job.tables + 1) for _ in paces)):
                if sum(tables) == job.tables:
                    parts = {pace.host: HostPart(*has) for pace, *has in zip(paces, ranks, tables, strict=True)}
                    shortest = min(shortest, step_s(job, paces, parts))
    return shortest


def _processes(pace: HostPace, part: HostPart) -> int:
    return max(1, pace.processes) if part.ranks else 0


def _may_carry(pace: HostPace, ranks: int) -> bool:
    if not ranks:
        return pace.may_end or not pace.processes
    return ranks >= max(1, pace.processes) and (pace.may_end or pace.processes > 0)


def _best(job: DividedJob, paces: Sequence[HostPace], now: Division) -> Division | None:
    search = _Search(job, paces)
    bounds = search.shortest()
    if bounds is None:
        return None
    computing, traffic = bounds
    return search.nearest(computing, traffic + SLACK * (computing + traffic), now)


class _Search:
    """All numbers of ranks and tables of all hosts at once."""

    def __init__(self, job: DividedJob, paces: Sequence[HostPace]) -> None:
        self._job, self._paces = job, paces
        ranks, tables = np.arange(job.ranks + 1), np.arange(job.tables + 1)
        may = [[_may_carry(pace, int(n)) for n in ranks] for pace in paces]
        self._computing = np.array(
            [
                [computing_s(pace, int(n)) if can else np.inf for n, can in zip(ranks, row, strict=True)]
                for pace, row in zip(paces, may, strict=True)
            ]
        )
        """Seconds of computing, shape (hosts, ranks + 1); inf: it may not carry so many."""
        self._traffic = np.array(
            [[[card_s(job, pace, HostPart(int(n), int(t))) for t in tables] for n in ranks] for pace in paces]
        )
        """Seconds of traffic, shape (hosts, ranks + 1, tables + 1)."""
        self._taken = np.subtract.outer(ranks, ranks)
        """Ranks that are left of r when n of them are taken; negative: there are not so many."""

    def shortest(self) -> tuple[float, float] | None:
        """Bounds on computing and on traffic with the least sum; None: there is no division at all."""
        finite = self._computing[np.isfinite(self._computing)]
        limits = _thinned(np.unique(finite))
        times = np.unique(self._traffic)
        found: tuple[float, float] | None = None
        for limit in limits:
            room = np.where(self._computing <= limit * (1 + ROUNDING), np.arange(self._job.ranks + 1), 0)
            if int(room.max(axis=1).sum()) < self._job.ranks:
                continue
            most = math.inf if found is None else sum(found) * (1 - ROUNDING) - limit
            below = times[times < most]
            if not len(below):
                break
            if not self._fits(limit, float(below[-1])):
                continue
            low, high = 0, len(below) - 1
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if self._fits(limit, float(below[middle])) else (middle + 1, high)
            found = float(limit), float(below[low])
        return found

    def _fits(self, computing: float, traffic: float) -> bool:
        """Whether all ranks and tables find a host within these bounds. A host with more than half of the ranks may
        need tables to be in time; only one host can, so the most tables of each are what counts."""
        most = self._tables_at_most(computing, traffic)
        all_ranks = self._job.ranks
        own = np.full(all_ranks + 1, IMPOSSIBLE, dtype=np.int64)
        own[0] = 0
        for row in most:
            before = np.where(self._taken >= 0, own[np.maximum(self._taken, 0)], IMPOSSIBLE)
            own = np.maximum(IMPOSSIBLE, (before + row[None, :]).max(axis=1))
        return int(own[all_ranks]) >= self._job.tables

    def _tables_at_most(self, computing: float, traffic: float) -> Counts:
        """Most tables that each host can own beside each number of ranks; IMPOSSIBLE where it cannot carry them."""
        in_time = self._in_time(computing, traffic)
        most: Counts = np.where(in_time, np.arange(self._job.tables + 1), IMPOSSIBLE).max(axis=2)
        return most

    def _in_time(self, computing: float, traffic: float) -> npt.NDArray[np.bool_]:
        quick: npt.NDArray[np.bool_] = (self._computing <= computing * (1 + ROUNDING))[:, :, None] & (
            self._traffic <= traffic * (1 + ROUNDING)
        )
        return quick

    def nearest(self, computing: float, traffic: float, now: Division) -> Division:
        """The division within these bounds that moves the fewest ranks and tables; of equals one with less traffic."""
        in_time = self._in_time(computing, traffic)
        ranks, tables = self._job.ranks, self._job.tables
        scale = 0.5 / (len(self._paces) * (float(self._traffic.max()) or 1.0))
        costs = np.full((ranks + 1, tables + 1), np.inf)
        costs[0, 0] = 0.0
        choices: list[npt.NDArray[np.int64]] = []
        for at, pace in enumerate(self._paces):
            has = now.get(pace.host, HostPart(0, 0))
            moved = np.abs(np.arange(ranks + 1) - has.ranks)[:, None] + np.abs(np.arange(tables + 1) - has.tables)
            own = np.where(in_time[at], moved + scale * self._traffic[at], np.inf)
            after, chosen = np.full_like(costs, np.inf), np.zeros(costs.shape, dtype=np.int64)
            for n, t in zip(*np.nonzero(np.isfinite(own)), strict=True):
                offered = costs[: ranks + 1 - n, : tables + 1 - t] + own[n, t]
                better = offered < after[n:, t:]
                after[n:, t:][better] = offered[better]
                chosen[n:, t:][better] = n * (tables + 1) + t
            costs = after
            choices.append(chosen)
        found: dict[HostId, HostPart] = {}
        left_ranks, left_tables = ranks, tables
        for pace, chosen in zip(reversed(self._paces), reversed(choices), strict=True):
            n, t = divmod(int(chosen[left_ranks, left_tables]), tables + 1)
            found[pace.host] = HostPart(n, t)
            left_ranks, left_tables = left_ranks - n, left_tables - t
        return dict(sorted(found.items()))


def _thinned(limits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """At most `BOUNDS_MAX` of these, evenly spread."""
    if len(limits) <= BOUNDS_MAX:
        return limits
    spread: npt.NDArray[np.float64] = limits[np.linspace(0, len(limits) - 1, BOUNDS_MAX).astype(int)]
    return spread


# ---- whole tables, and what is asked for -----------------------------------------------------------------------------


def owners_of(division: Division, owners: Sequence[HostId], used: Sequence[int]) -> tuple[HostId, ...]:
    """The owner of each table: those of `used` tables by the division, each staying where it is if its host keeps as
    many; other tables stay."""
    found, left = list(owners), {host: part.tables for host, part in division.items()}
    homeless = []
    for table in used:
        if left.get(found[table], 0) > 0:
            left[found[table]] -= 1
        else:
            homeless.append(table)
    free = [host for host, count in sorted(left.items()) for _ in range(count)]
    for table, host in zip(homeless, free, strict=True):
        found[table] = host
    return tuple(found)
