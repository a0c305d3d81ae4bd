"""Counts what the whole rack lends to each tenant and job, as one host hears it, for its borrower and its lender.

Each lender gossips what it lends (`policy.budgets`). What a host told last counts while it is there, and for a lease
after it was gone, cut off, or began anew and has not told yet: for that time slabs there may be in use. Later they are
not, or their borrowers are on the other side of a split, where they are counted.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from covey.core.ids import HostId
from plugins.memory.machine.loan import Lent
from plugins.memory.policy import budgets
from plugins.memory.policy.budgets import FRESH_S, BudgetAccount, BudgetHeld
from plugins.memory.policy.placement import LenderPeer, askable


@dataclass(slots=True)
class JobMemory:
    """The entry of the replicated log about a job's memory."""

    tenant: str
    limit_bytes: int
    """Most bytes that it may have; 0: not limited."""
    ended: bool = False


def no_budgets(tenant: str) -> int | None:
    """Budgets of a rack in which no tenant is limited."""
    return None


class RackAccounts:
    """Accounts of the rack. `budget_of`: bytes that a tenant may have on the rack; None: not limited."""

    def __init__(self, me: HostId, lease_s: float, budget_of: Callable[[str], int | None] = no_budgets) -> None:
        self.me, self.lease_s, self.budget_of = me, lease_s, budget_of
        self.jobs: dict[str, JobMemory] = {}
        self.lenders: list[HostId] = []
        """Other hosts that have room by their own word."""
        self.here: dict[BudgetAccount, int] = {}
        """Bytes lent by this host on each account, as they count."""
        self._began_s = float("inf")
        self._told: dict[HostId, Mapping[int, int]] = {}
        self._silent_s: dict[HostId, float] = {}
        """Host that does not tell any more -> since when."""

    # ---- what happens ----

    def heard(self, peers: Sequence[LenderPeer], now_s: float) -> None:
        """Once a second, take in what all hosts said last."""
        self._began_s = min(self._began_s, now_s)
        self.lenders = [host for host in askable(peers) if host != self.me]
        telling = {
            peer.host: peer.lent for peer in peers if peer.lent is not None and peer.state not in ("gone", "left")
        }
        for host, lent in telling.items():
            self._told[host] = lent
            self._silent_s.pop(host, None)
        for host in [host for host in self._told if host not in telling]:
            if now_s >= self._silent_s.setdefault(host, now_s) + self.lease_s:
                del self._told[host], self._silent_s[host]

    def placed(self, job: str, tenant: str, limit_bytes: int) -> None:
        """The log says that this job was placed, for this tenant and with this limit."""
        self.jobs[job] = JobMemory(tenant, limit_bytes)

    def over(self, job: str) -> None:
        """The job does not run again; its volumes may stay."""
        if job in self.jobs:
            self.jobs[job].ended = True

    def lends(self, lent: Iterable[Lent]) -> None:
        """Once a second, take in all that this host lends. Jobs that ended and have nothing here are forgotten. Slabs
        lent before the log's word of their job was here count from now on."""
        found: Counter[BudgetAccount] = Counter()
        nobodys = self.budget_of("") is not None
        for slab in lent:
            if slab.job:
                slab.tenant = self.payer(slab.tenant, slab.job)
            if slab.tenant or (nobodys and slab.payer_known):
                found[BudgetAccount("tenant", slab.tenant)] += slab.counted_bytes
            if slab.job:
                found[BudgetAccount("job", slab.job)] += slab.counted_bytes
        self.here = dict(found)
        for job in [job for job, known in self.jobs.items() if known.ended and not found[BudgetAccount("job", job)]]:
            del self.jobs[job]

    # ---- what is asked ----

    def limited(self, tenant: str, job: str) -> list[tuple[BudgetAccount, int]]:
        """The accounts of a volume that are limited, with their limits in bytes."""
        found: list[tuple[BudgetAccount, int]] = []
        budget = self.budget_of(tenant)
        if budget is not None:
            found.append((BudgetAccount("tenant", tenant), budget))
        known = self.jobs.get(job)
        if known is not None and known.limit_bytes:
            found.append((BudgetAccount("job", job), known.limit_bytes))
        return found

    def budget(self, account: BudgetAccount) -> int | None:
        """Budget in bytes of an account that something is lent on; None: no limit, or it is not known."""
        if account.kind == "tenant":
            return self.budget_of(account.name)
        known = self.jobs.get(account.name)
        return known.limit_bytes or None if known is not None else None

    def others(self, account: BudgetAccount) -> dict[HostId, int]:
        """Bytes that each of the other hosts lends on this account, as it told."""
        number = account.number
        return {host: lent[number] for host, lent in sorted(self._told.items()) if number in lent}

    def told(self) -> tuple[int, ...]:
        """Numbers that this host gossips."""
        limits = {account: budget for account in self.here if (budget := self.budget(account)) is not None}
        return budgets.told(self.here, limits)

    def payer(self, tenant: str, job: str) -> str:
        """The tenant of a volume. For a borrower that named none the log's word of its job fills in."""
        known = self.jobs.get(job)
        return tenant if tenant or known is None else known.tenant

    def wrong_payer(self, tenant: str, job: str) -> str:
        """Why the tenant that a borrower named cannot be right; empty: it can."""
        known = self.jobs.get(job)
        if known is None or known.tenant == tenant:
            return ""
        return f"job {job} is of tenant {known.tenant}, not of {tenant}"

    def unnamed(self, named: Collection[int]) -> dict[int, dict[HostId, int]]:
        """Number -> lender -> bytes, of accounts whose names this host does not know, since it has nothing to do with
        them."""
        found: dict[int, dict[HostId, int]] = {}
        for host, lent in sorted(self._told.items()):
            for number in sorted(lent.keys() - set(named)):
                found.setdefault(number, {})[host] = lent[number]
        return found

    def knows(self, now_s: float) -> bool:
        """Has this host listened for long enough to know what the others lend?"""
        return now_s >= self._began_s + FRESH_S

    def used(self, account: BudgetAccount) -> dict[HostId, int]:
        """Bytes lent on the account, by lender, this host included."""
        mine = self.here.get(account, 0)
        return {**self.others(account), **({self.me: mine} if mine else {})}


def held_here(
    accounts: RackAccounts, lent: Iterable[Lent], account: BudgetAccount, budget: int, now_s: float
) -> BudgetHeld:
    """The memory of an account at its lender. Slabs whose tenant is not known count against every account: for a moment
    after a restart of the agent, until borrowers renew."""
    mine = fresh = 0
    for slab in lent:
        name = slab.tenant if account.kind == "tenant" else slab.job
        if name == account.name or not slab.payer_known:
            mine += slab.counted_bytes
            fresh += slab.counted_bytes if now_s < slab.since_s + FRESH_S else 0
    return BudgetHeld(account, budget, mine, accounts.others(account), fresh)
