"""What a job's class lets it do: quotas, demotion, upgrade, and one gang that waits for GPUs (AntMan §3.2, §3.3).

A *guaranteed* job uses its tenant's quota and no other tenant's job may be in its way. An *opportunistic* one uses
none, takes what guaranteed jobs leave, and yields to them. An *auto* job is guaranteed until it waited too long; then
it is opportunistic, until a quota that got free makes it guaranteed where it runs.

These functions decide that for the replicated queue of a rack (`machine/leader/leader.py`), whether its GPUs are shared
(`machine/leader/shared_capacity.py`) or not.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from covey.core.ids import JobId
from plugins.scheduler.messages.spec import Pack
from plugins.scheduler.policy.fair import FairTurns, Shares, are_overbooked
from plugins.scheduler.policy.order import Row, Selection
from plugins.scheduler.policy.place import slots

Host = TypeVar("Host", bound=Any)
Guest = TypeVar("Guest")


def is_late(job_class: str, waited_s: float, demote_after_s: float | None) -> bool:
    """Whether a waiting job becomes opportunistic now (AntMan §3.3: "jobs that suffer long queuing delay")."""
    return demote_after_s is not None and job_class == "auto" and waited_s >= demote_after_s


def may_upgrade(gpus: int, free_quota: int | None, closed: bool) -> bool:
    """Whether a demoted job that runs becomes guaranteed where it is (AntMan §3.3, job upgrade). `free_quota` None: its
    tenant has no limit. `closed`: one of its GPUs holds a guaranteed job, or is kept for another gang."""
    return not closed and (free_quota is None or gpus <= free_quota)


def may_keep(job: str, keeper: str | None) -> bool:
    """Whether this gang may keep GPUs that do not suffice for it. Only one does at a time: two half gangs could wait
    for each other for ever."""
    return keeper is None or keeper == job


def gpus_to_keep(
    mine: Mapping[Host, int],
    there: Mapping[Host, int],
    totals: Mapping[Host, int],
    workers: int,
    each: int,
    pack: Pack = "few",
) -> dict[Host, int]:
    """GPUs per host that a gang of `workers` times `each` GPUs keeps while it does not fit: what it has, then more on
    those hosts, then where most is. `there`: GPUs it might take, `mine` among them; `totals`: GPUs of each host, so
    that nothing is kept where no worker will ever fit. It never shrinks while `there` does not."""
    kept = {host: min(gpus, there.get(host, 0)) for host, gpus in sorted(mine.items())}
    kept = {host: gpus for host, gpus in kept.items() if gpus}
    left = workers - sum(-(-gpus // each) for gpus in kept.values())
    for host, gpus in kept.items():
        kept[host] = min(there[host], -(-gpus // each) * each)
    for host in sorted(there, key=lambda host: (host not in kept, -there[host], host)):
        if pack == "host" and kept and host not in kept:
            break
        has = kept.get(host, 0)
        more = min(left, slots(totals[host], workers, each, pack) - -(-has // each))
        take = min(there[host] - has, more * each)
        if take > 0:
            kept[host] = has + take
            left -= -(-take // each)
    return dict(sorted(kept.items()))


def victims(
    free: Mapping[Host, int],
    opportunistic: Sequence[tuple[Guest, Mapping[Host, int]]],
    most: Mapping[Host, int],
    workers: int,
    each: int,
    pack: Pack = "few",
) -> list[Guest] | None:
    """The opportunistic jobs that stop so that a gang of `workers` times `each` GPUs fits: none of the older ones that
    need not, and None when all of them would not be enough. `opportunistic`: newest first, with the GPUs that each
    holds by host; `most`: GPUs per host that the gang may take at all. Every GPU is looked at twice at most."""
    have = dict(free)

    def room(host: Host) -> int:
        return slots(max(0, min(have.get(host, 0), most.get(host, 0))), workers, each, pack)

    fits = sum(room(host) for host in have)

    def change(guest: tuple[Guest, Mapping[Host, int]], sign: int) -> None:
        nonlocal fits
        for host, gpus in guest[1].items():
            fits -= room(host)
            have[host] = have.get(host, 0) + sign * gpus
            fits += room(host)

    stopped = 0
    while fits < workers:
        if stopped == len(opportunistic):
            return None
        change(opportunistic[stopped], 1)
        stopped += 1
    needed = []
    for guest in reversed(opportunistic[:stopped]):
        change(guest, -1)
        if fits < workers:
            change(guest, 1)
            needed.append(guest[0])
    return needed[::-1]


class QuotaWalk:
    """A walk down the order of jobs of tenants with quotas: which of them are chosen. A chosen job uses up a part of
    its tenant's quota. Its GPUs come from those that no such tenant holds, or from jobs of its own tenant later in the
    order."""

    def __init__(
        self, capacity: int, held: Mapping[str, int], quotas: Mapping[str, int], shares: Shares | None = None
    ) -> None:
        """`held`: GPUs of each tenant's running jobs; `quotas` names the same tenants. `shares`: by what they take
        turns; None: they do not."""
        self.shares = shares
        self.own = dict(held)
        """GPUs of each tenant's running jobs that the walk has not reached yet."""
        self.pool = max(0, capacity - sum(self.own.values()))
        """GPUs that no tenant with a quota holds."""
        self.left = dict(quotas)
        """What is left of each tenant's quota, in GPUs."""
        self.debt = dict.fromkeys(self.own, 0)
        """GPUs that a tenant's chosen jobs take from its own running jobs later in the order."""

    def keep(self, tenant: str, gpus: int) -> None:
        """Count running jobs that stay whatever the order says; they come before all others."""
        self.left[tenant] -= gpus
        self.own[tenant] -= gpus

    def gpus_max(self, tenant: str) -> int:
        """GPUs that this tenant's next job may have."""
        return min(self.left[tenant], self.pool + self.own[tenant] - self.debt[tenant])

    def tight(self, held: Mapping[str, int]) -> list[str]:
        """Tenants whose running jobs of one queue cannot all stay; those of the others are counted. `held`: the GPUs of
        these jobs, by tenant."""
        return [tenant for tenant, gpus in held.items() if not self.admit_all(tenant, gpus)]

    def share(self, tenant: str) -> float:
        """What comes before the order among jobs that wait: nothing, unless tenants with quotas take turns."""
        return 0.0 if self.shares is None else self.shares.of(tenant)

    def admit_all(self, tenant: str, gpus: int) -> bool:
        """Whether the tenant's running jobs of one queue, of `gpus` GPUs together, all stay; if so they are counted."""
        if self.debt[tenant] or gpus > self.left[tenant]:
            return False
        self.left[tenant] -= gpus
        self.own[tenant] -= gpus
        return True

    def admit(self, tenant: str, gpus: int, running: bool) -> bool:
        """Whether the next job of the order is chosen; the walk has counted it afterwards, chosen or not."""
        if gpus > self.gpus_max(tenant):
            if running:
                self._stop(tenant, gpus)
            return False
        self.left[tenant] -= gpus
        if running:
            self.own[tenant] -= gpus
            self._pay(tenant, max(0, self.debt[tenant] - self.own[tenant]))
        else:
            self.debt[tenant] += gpus
            self._pay(tenant, min(self.pool, gpus))
            if self.shares is not None:
                self.shares.take(tenant, gpus)
        return True

    def _stop(self, tenant: str, gpus: int) -> None:
        """Pass a running job over: its GPUs pay its tenant's debt, and the rest goes to the pool."""
        self.own[tenant] -= gpus
        self.pool += max(0, gpus - self.debt[tenant])
        self.debt[tenant] = max(0, self.debt[tenant] - gpus)

    def _pay(self, tenant: str, gpus: int) -> None:
        """Pay `gpus` of the tenant's debt from the pool."""
        self.pool -= gpus
        self.debt[tenant] -= gpus


class SharedWalk:
    """A walk down the order of jobs of tenants without a quota, who take turns (`policy/fair.py`)."""

    def __init__(self, gpus: int, shares: Shares) -> None:
        """`gpus`: those that no job of a tenant with a quota, and no firm one, has."""
        self.free, self.shares = gpus, shares

    def gpus_max(self, tenant: str) -> int:
        """GPUs that the next job may have."""
        return self.free

    def tight(self, held: Mapping[str, int]) -> list[str]:
        """All of these tenants, where their running jobs of one queue cannot all stay; otherwise they are counted, and
        there is none."""
        gpus = sum(held.values())
        if gpus > self.free:
            return list(held)
        self.free -= gpus
        return []

    def share(self, tenant: str) -> float:
        """What comes before the order among jobs that wait: the smaller comes first."""
        return self.shares.of(tenant)

    def admit(self, tenant: str, gpus: int, running: bool) -> bool:
        """Whether the next job of the order is chosen; the walk has counted it afterwards, chosen or not."""
        if gpus > self.free:
            return False
        self.free -= gpus
        if not running:
            self.shares.take(tenant, gpus)
        return True


def choose(
    rows: Sequence[Row],
    capacity: int,
    quotas: Mapping[str, int | None],
    default: int | None = None,
    turns: FairTurns | None = None,
) -> Selection:
    """2DAS for jobs of several tenants. `rows`: guaranteed jobs, in the order of `order.ordered`; `turns`: by what
    tenants without a quota take turns; None: they do not, and all their jobs are in that one order.

    Each tenant's jobs are walked with its quota as the capacity, so a job is preempted only by one of its own tenant.
    GPUs that other tenants' jobs run on are out of reach, also when the quotas add up to more GPUs than there are, and
    so are those of firm jobs. Then these tenants take turns for what gets free.
    Tenants without a quota share what is left, and their jobs stop for those of tenants with one.
    `machine/leader/run_queues.py` decides the same without looking at everybody.
    """
    with_quota = [row for row in rows if quotas.get(row.tenant, default) is not None]
    firm = [row for row in rows if row.firm]
    without_quota = [row for row in rows if quotas.get(row.tenant, default) is None]
    own: dict[str, int] = {}
    for row in with_quota:
        own[row.tenant] = own.get(row.tenant, 0) + (row.gpus if row.running else 0)
    booked = {tenant: quotas.get(tenant, default) or 0 for tenant in own}
    size = capacity
    capacity -= sum(row.gpus for row in firm if row.tenant not in own)
    walk = QuotaWalk(capacity, own, booked)
    for row in firm:
        if row.tenant in own:
            walk.keep(row.tenant, row.gpus)
    run: list[JobId] = []
    preempt: list[JobId] = []
    over_quota: list[JobId] = []
    in_order: Iterable[Row] = with_quota
    if turns is not None and are_overbooked(booked, size):
        in_order = turns.of_quotas(booked).walk(with_quota, lambda row: row.gpus <= walk.gpus_max(row.tenant))
    for row in in_order:
        if row.firm:
            continue
        left = walk.left[row.tenant]
        if walk.admit(row.tenant, row.gpus, row.running):
            run.append(row.id)
        elif row.running:
            preempt.append(row.id)
        elif row.gpus > left:
            over_quota.append(row.id)
    pool = walk.pool
    in_turn = without_quota if turns is None else turns.walk(without_quota, lambda row: row.gpus <= pool)
    for row in in_turn:
        if row.firm:
            continue
        if row.gpus <= pool:
            pool -= row.gpus
            run.append(row.id)
        elif row.running:
            preempt.append(row.id)
    return Selection(tuple(run), tuple(preempt), tuple(over_quota))
