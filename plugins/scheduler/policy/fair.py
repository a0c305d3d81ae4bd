"""Which tenant's job comes next among those that wait in one queue: for tenants without a quota, and for tenants whose
quotas together are more GPUs than there are.

The one whose *share* is the smallest: GPUs that its guaranteed jobs hold, and those that they held of late, over its
weight. Each start is counted at once, so a tenant that submits a thousand jobs has one of them started, then another
tenant's first, as if each tenant were asked in turn; and one that used the whole rack yesterday waits until others have
caught up. Among a tenant's own jobs, and among tenants whose shares are equal, the order is what it is without shares
(`policy/order.py`); with one tenant nothing is different.

GPUs held of late are a mean that forgets: service counts half after `HALF_LIFE_S` (as fair-share priorities of batch
schedulers do; the half-life is ours). It is what a tenant that holds so many GPUs for ever would have.

Quotas that together fit into the rack are had by everybody, whoever came first, so their tenants take no turns. Where
they do not (`are_overbooked`), each tenant's weight is its quota: all come to the same part of their quotas.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

import msgspec

from plugins.scheduler.policy.order import Row, queue_of

HALF_LIFE_S = 86_400.0
"""Seconds after which service counts half (chosen: a day, so that yesterday's heavy use still counts and last week's
does not)."""


class RecentUse(msgspec.Struct, frozen=True):
    """What a tenant's guaranteed jobs attained, older service counting less."""

    gpu_s: float = 0.0
    at_s: float = 0.0
    """The rack's clock when it was so much."""

    def after(self, now_s: float, more_gpu_s: float = 0.0) -> "RecentUse":
        """What it is at `now_s`, with so much service more."""
        later_s = max(self.at_s, now_s)
        return RecentUse(self.gpu_s * 0.5 ** ((later_s - self.at_s) / HALF_LIFE_S) + more_gpu_s, later_s)

    def gpus(self, now_s: float) -> float:
        """The mean number of GPUs held of late."""
        return self.after(now_s).gpu_s * math.log(2) / HALF_LIFE_S


NO_USE = RecentUse()


class TenantUse(msgspec.Struct, frozen=True):
    """What shares go by, beside the GPUs that are held now."""

    recent: Mapping[str, float]
    """The GPUs that each tenant held of late; none: 0."""
    weights: Mapping[str, float]
    """The weight of each tenant; none: 1."""

    def by_quota(self, quotas: Mapping[str, int]) -> "TenantUse":
        """What shares of tenants with these quotas, GPUs, go by: the quotas are their weights."""
        return TenantUse(self.recent, {tenant: float(max(1, gpus)) for tenant, gpus in quotas.items()})


NOBODY = TenantUse({}, {})
"""No tenant held anything of late, and none weighs more than another."""


def are_overbooked(quotas: Mapping[str, int], capacity: int) -> bool:
    """Whether these tenants' quotas are together more than the GPUs that there are."""
    return len(quotas) > 1 and sum(quotas.values()) > capacity


class Shares:
    """The share of each tenant, counted on while a decision is made."""

    def __init__(self, use: TenantUse, held: Mapping[str, int]) -> None:
        """`held`: the GPUs that each tenant's guaranteed jobs hold."""
        self.use = use
        self._gpus = dict(held)

    def of(self, tenant: str) -> float:
        """GPUs over weight."""
        gpus = self._gpus.get(tenant, 0) + self.use.recent.get(tenant, 0.0)
        return gpus / self.use.weights.get(tenant, 1.0)

    def take(self, tenant: str, gpus: int) -> None:
        """Count a job of this tenant that starts."""
        self._gpus[tenant] = self._gpus.get(tenant, 0) + gpus

    def in_turn(self, rows: Sequence[Row], starts: Callable[[Row], bool]) -> Iterator[Row]:
        """Jobs that wait in one queue, whoever comes first at the front. `rows`: these jobs in the order that they have
        without shares; `starts`: whether the job starts now, and so counts."""
        mine: dict[str, list[int]] = {}
        for place in reversed(range(len(rows))):
            mine.setdefault(rows[place].tenant, []).append(place)
        heads = [(self.of(tenant), left.pop(), tenant) for tenant, left in mine.items()]
        heapq.heapify(heads)
        while heads:
            _, place, tenant = heapq.heappop(heads)
            if starts(rows[place]):
                self.take(tenant, rows[place].gpus)
            yield rows[place]
            if mine[tenant]:
                heapq.heappush(heads, (self.of(tenant), mine[tenant].pop(), tenant))


class FairTurns(msgspec.Struct, frozen=True):
    """By what tenants take turns."""

    thresholds: Sequence[float]
    """Attained service at which a job leaves a queue for the next lower one, GPU·s."""
    use: TenantUse = NOBODY

    def walk(self, rows: Sequence[Row], starts: Callable[[Row], bool]) -> Iterator[Row]:
        """Jobs of tenants that take turns, whoever comes first at the front. `rows`: these jobs, as `order.ordered` has
        them; `starts`: asked of each job that waits: whether it starts now."""
        held: dict[str, int] = {}
        for row in rows:
            if row.running:
                held[row.tenant] = held.get(row.tenant, 0) + row.gpus
        shares = Shares(self.use, held)
        for queue, group in groupby(rows, self._queue):
            if queue >= 0:
                yield from shares.in_turn(list(group), starts)
                continue
            for row in group:
                if not row.running and starts(row):
                    shares.take(row.tenant, row.gpus)
                yield row

    def _queue(self, row: Row) -> int:
        """The queue in which a job waits for its turn; -1: it does not."""
        return -1 if row.running or row.promoted is not None else queue_of(row.attained_gpu_s, self.thresholds)

    def of_quotas(self, quotas: Mapping[str, int]) -> "FairTurns":
        """By what tenants with these quotas, GPUs, take turns where they are overbooked."""
        return FairTurns(self.thresholds, self.use.by_quota(quotas))

    def ordered(
        self, rows: Sequence[Row], quotas: Mapping[str, int | None], default: int | None, capacity: int | None = None
    ) -> list[Row]:
        """All jobs in turn, as if all that wait started. `rows`: as `order.ordered` has them; `capacity`: GPUs that
        there are; None: enough for all quotas."""
        with_quota = [row for row in rows if quotas.get(row.tenant, default) is not None]
        booked = {row.tenant: quotas.get(row.tenant, default) or 0 for row in with_quota}
        if capacity is not None and are_overbooked(booked, capacity):
            with_quota = list(self.of_quotas(booked).walk(with_quota, lambda row: True))
        without = [row for row in rows if quotas.get(row.tenant, default) is None]
        return [*with_quota, *self.walk(without, lambda row: True)]
