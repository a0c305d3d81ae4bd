"""Budgets at the lender: which loans it refuses, and what it takes back from accounts that are over their budgets.

It counts exactly what it lends itself, and what the others told that they lend. Borrowers are not asked about their
tenants' budgets.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from covey.core.units import format_size
from plugins.memory.machine.loan import Key, Lent
from plugins.memory.machine.rack_accounts import RackAccounts, held_here
from plugins.memory.messages import Map
from plugins.memory.policy import budgets
from plugins.memory.policy.budgets import FRESH_S, SETTLED_S, BudgetAccount, BudgetHeld


def why_refused(accounts: RackAccounts, lent: Collection[Lent], message: Map, now_s: float) -> str:
    """Why a slab is not lent because of its tenant's or job's budget; empty: the budgets allow it."""
    tenant = accounts.payer(message.tenant, message.job)
    if why := accounts.wrong_payer(tenant, message.job):
        return why
    more = budgets.plain_bytes(message.slab_bytes, message.page_bytes)
    for account, budget in accounts.limited(tenant, message.job):
        if not accounts.knows(now_s):
            return (
                f"{account.words} has a budget, and what other hosts lend is known "
                f"here only {FRESH_S:g} s after the start"
            )
        held = held_here(accounts, lent, account, budget, now_s)
        counts = budgets.widened(held, more, message.replaces, message.members)
        if why := budgets.refused(counts, more, accounts.me, accounts.lenders, message.members):
            return why
    return ""


@dataclass
class Excess:
    """An account that is over its budget: since when, and how many rounds have not brought it back."""

    since_s: float
    rounds: int = 0


@dataclass(frozen=True)
class TakeBack:
    """Order to take back `needed_bytes` of these slabs, the least active first."""

    needed_bytes: int
    sizes: Mapping[Key, int]
    why: str


@dataclass
class Excesses:
    """Accounts that are over their budgets, as one lender sees it."""

    accounts: RackAccounts
    over: dict[BudgetAccount, Excess] = field(default_factory=dict)

    def due(self, lent: Mapping[Key, Lent], now_s: float) -> TakeBack | None:
        """Slabs to take back now, from one account. Slabs without a disk stay: each has pages that may be nowhere else,
        and its borrower keeps their number whole."""
        found: TakeBack | None = None
        for account in sorted(self.accounts.here):
            budget = self.accounts.budget(account)
            held = None if budget is None else held_here(self.accounts, lent.values(), account, budget, now_s)
            if held is None or held.total <= held.budget:
                self.over.pop(account, None)
                continue
            excess = self.over.setdefault(account, Excess(now_s))
            if found is None and now_s >= excess.since_s + SETTLED_S:
                found = self._of(held, excess, lent)
                excess.since_s, excess.rounds = now_s, excess.rounds + 1
        for account in [account for account in self.over if account not in self.accounts.here]:
            del self.over[account]
        return found

    def _of(self, held: BudgetHeld, excess: Excess, lent: Mapping[Key, Lent]) -> TakeBack | None:
        account = held.account
        mine = {
            key: slab
            for key, slab in sorted(lent.items())
            if slab.state == "lent"
            and slab.members == 1
            and account.name == (slab.tenant if account.kind == "tenant" else slab.job)
        }
        if not mine:
            return None
        unit = min(slab.counted_bytes for slab in mine.values())
        needed = budgets.to_take_back(held, self.accounts.me, unit, excess.rounds)
        if not needed:
            return None
        hosts = len([size for size in held.others.values() if size]) + 1
        has = f"{account.words} has {format_size(held.total)} of {format_size(held.budget)} on {hosts} hosts"
        why = f"{has}, and has had more than that for {SETTLED_S:g} s; {format_size(needed)} of it is freed here"
        return TakeBack(needed, {key: slab.counted_bytes for key, slab in mine.items()}, why)
