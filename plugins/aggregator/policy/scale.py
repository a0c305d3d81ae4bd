"""Fewer aggregators: those without work are freed, and those with little are emptied into others (AutoPS §4.3.3.3)."""

from collections.abc import Mapping, Sequence

import msgspec

from covey.core.ids import HostId, JobId
from plugins.aggregator.policy.assign import AggregationProfile, Packing
from plugins.aggregator.policy.cycle import Cycle


class OrphanedTensor(msgspec.Struct, frozen=True):
    """One tensor that must find another aggregator."""

    job: JobId
    tensor: str
    work_us: int


class Emptied(msgspec.Struct, frozen=True):
    """How an aggregator is emptied."""

    host: HostId
    moves: tuple[tuple[OrphanedTensor, HostId], ...]
    """Tensors with the host to which each goes, in order."""
    cycles: dict[HostId, Cycle]
    """The other aggregators afterwards."""


def least_loaded(cycles: Mapping[HostId, Cycle], order: Mapping[HostId, int]) -> HostId | None:
    """The aggregator with the smallest W / C, the first of equals by `order`; None without any."""
    return min(cycles, key=lambda host: (cycles[host].load, order[host]), default=None)


def emptied(
    host: HostId,
    works: Sequence[OrphanedTensor],
    cycles: Mapping[HostId, Cycle],
    jobs: Mapping[JobId, AggregationProfile],
    barred: Mapping[JobId, frozenset[HostId]],
) -> Emptied | None:
    """How an aggregator's work, largest first, fits on the others without a new one; None when any of it does not."""
    others = [name for name in cycles if name != host]
    packing, moves = Packing([cycles[name] for name in others]), []
    for work in sorted(works, key=lambda work: (-work.work_us, work.job, work.tensor)):
        avoid = [at for at, name in enumerate(others) if name in barred.get(work.job, ())]
        at = packing.place(work.job, jobs[work.job].share(work.work_us), avoid)
        if at is None:
            return None
        moves.append((work, others[at]))
    return Emptied(host, tuple(moves), dict(zip(others, packing.cycles, strict=True)))
