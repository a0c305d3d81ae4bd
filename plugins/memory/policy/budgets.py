"""How much remote memory a tenant, and a job, may have over the whole rack. Ours: the paper has one tenant.

No machine keeps the accounts. Every lender knows exactly what it lends to whom and gossips it (`gossiped.LentNow`); so
every host can count what the rack lends to a tenant as of some seconds ago. A borrower counts before it asks, and a
lender before it accepts, whatever the borrower says. Nobody agrees with anybody about a slab.

Since views are seconds old, lenders that see room could all give it away at once. So what is left is divided: within
`FRESH_S` a lender gives a tenant no more than its share of what is left, what is left over lenders with room. Near the
end a share is less than a slab; then only as many lenders as slabs are left give one each, and as many more as a slab
has members, since a borrower can use neither itself nor those that hold another member of it: those that come first in
an order that is the same everywhere (`in_turn`), so borrowers know whom to ask. With views that are at most `FRESH_S`
old a tenant is over by a quarter of its budget and `MEMBERS_MAX` slabs at most; as a rule by one slab. A rack that is
split counts in each part what that part lends, and forgets the others' after a lease: a budget for each part. What is
over for `SETTLED_S` is taken back (`to_take_back`).
"""

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

from covey.core.ids import HostId
from covey.core.units import format_size

FRESH_S = 5.0
"""Seconds within which other hosts may not know yet what was lent: a second until it is told, and gossip."""
MEMBERS_MAX = 8
"""Most members that a slab can have."""
SETTLED_S = 15.0
"""Seconds after which slabs are taken back from a tenant that is over its budget. By then moves are over (the grace),
and views agree."""
PATIENT_ROUNDS = 3
"""Rounds in which every lender takes back its share, after which each takes back at least one slab."""
REPLACES_SHARE = 8
"""A slab that replaces another may put a tenant over its budget by one part in this many: both exist for a moment."""
ACCOUNTS_TOLD = 16
"""Most accounts of which a lender tells: 10 bytes each, of the 960 that all of a host's values have."""
UNIT_BYTES = 1024
"""Unit, in bytes, in which accounts are told, rounded up."""
SEAL_BYTES = 32
"""Bytes that sealing adds to a page at its lender (`datapath.sealing`)."""


class BudgetAccount(NamedTuple):
    """The account against which a slab counts: its tenant, or its job."""

    kind: Literal["tenant", "job"]
    name: str

    @property
    def number(self) -> int:
        """Number under which hosts tell of the account. Two accounts that share a number are counted as one."""
        return zlib.crc32(f"{self.kind}/{self.name}".encode())

    @property
    def words(self) -> str:
        """The account's name for people."""
        return f"{self.kind} {self.name}" if self.name else "volumes without a tenant"


class BudgetHeld(NamedTuple):
    """The bytes that an account has of the rack's memory, as one host sees it."""

    account: BudgetAccount
    budget: int
    mine: int
    """Bytes at this host, which knows them exactly."""
    others: Mapping[HostId, int]
    """Bytes at each of the other hosts, as they told."""
    fresh: int = 0
    """Bytes of `mine` that are younger than `FRESH_S`."""
    asked: int = 0
    """Bytes not known to be lent yet: asked for just now, or what volumes here may take."""

    @property
    def total(self) -> int:
        return self.mine + self.asked + sum(self.others.values())


def budget_of(tenant: str, budgets: Mapping[str, int], default: int | None) -> int | None:
    """A tenant's budget in bytes; None: not limited. Volumes of no tenant are not limited unless the name "" has a
    budget."""
    return budgets.get(tenant, default if tenant else None)


def lent_bytes(size_bytes: int, page_bytes: int, sealed: bool) -> int:
    """Bytes that whole pages take at a lender, with their seals."""
    return size_bytes + size_bytes // page_bytes * SEAL_BYTES * sealed


def plain_bytes(slab_bytes: int, page_bytes: int) -> int:
    """Bytes that a slab counts at its lender: its pages, a power of two each, without their seals. The whole slab
    counts where the page size is not known (0) or of another form."""
    page = 1 << max(0, page_bytes.bit_length() - 1)
    return slab_bytes // page_bytes * page if page_bytes == page + SEAL_BYTES else slab_bytes


def over_budget(held: BudgetHeld, more: int) -> str:
    """Why an account cannot have `more` bytes more; empty: it can."""
    if held.total + more <= held.budget:
        return ""
    hosts = sum(size > 0 for size in held.others.values()) + (held.mine > 0)
    where = f" on {hosts} hosts" if hosts > 1 else ""
    has = f"{held.account.words} has {format_size(held.total)} of {format_size(held.budget)}{where}"
    return f"{has}, and this is {format_size(more)} more"


def widened(held: BudgetHeld, more: int, replaces: bool, members: int) -> BudgetHeld:
    """The memory of the account, under the budget for one more slab. A slab that replaces another may exceed
    the budget a little, or every slab of a tenant that has used all of it would lose its place instead of moving. Slabs
    with a disk may not while the tenant is over its budget: they are to become fewer."""
    if not replaces or (members == 1 and held.total > held.budget):
        return held
    return held._replace(budget=held.budget + max(more, held.budget // REPLACES_SHARE))


def refused(held: BudgetHeld, more: int, me: HostId, lenders: Collection[HostId], members: int = 1) -> str:
    """Why a lender does not lend `more` bytes, a slab of `members` members, on this account now; empty: it does.
    `lenders`: hosts with room."""
    if why := over_budget(held, more):
        return why
    hosts = {*lenders, me}
    left = held.budget - held.total + held.fresh
    if held.fresh + more <= left // len(hosts):
        return ""
    if not held.fresh and me in in_turn(held, more, hosts, members):
        return ""
    has = f"{held.account.words} has {format_size(held.total)} of {format_size(held.budget)}"
    return f"{has}: this near to its budget, each host lends only a part of what is left every {FRESH_S:g} s; try again"


def in_turn(held: BudgetHeld, more: int, hosts: Collection[HostId], members: int = 1) -> set[HostId]:
    """Hosts that may lend `more` bytes once more on this account: all of them while the share of each suffices, else
    the first ones in an order that is the same on every host and different for each account."""
    left = held.budget - held.total + held.fresh
    if not hosts or more <= 0 or left // len(hosts) >= more:
        return set(hosts)
    count = max(0, left // more) + members
    return set(ordered(held.account, hosts)[:count])


def ordered(account: BudgetAccount, hosts: Collection[HostId]) -> list[HostId]:
    """The hosts in an order that is the same on every host."""
    return sorted(hosts, key=lambda host: (zlib.crc32(f"{account.number}/{host}".encode()), host))


def to_take_back(held: BudgetHeld, me: HostId, unit: int, rounds: int) -> int:
    """Bytes that this lender takes back of an account that is over its budget. All lenders cut the same excess, in
    units (slabs), by what each holds: with equal views the parts add up to it. `rounds`: how often that was done and
    did not suffice; then each takes at least one unit, since some cannot take back what they should."""
    excess = held.total - held.budget
    if excess <= 0 or held.mine <= 0:
        return 0
    units, total, before = -(-excess // unit), held.total, 0
    shares = {**held.others, me: held.mine}
    for host in ordered(held.account, shares):
        if host == me:
            break
        before += shares[host]
    mine = units * (before + held.mine) // total - units * before // total
    return min(held.mine, max(mine, int(rounds >= PATIENT_ROUNDS)) * unit)


def told(held: Mapping[BudgetAccount, int], budgets: Mapping[BudgetAccount, int]) -> tuple[int, ...]:
    """The numbers that a lender gossips: number and units of each account, one after the other. If there are more than
    `ACCOUNTS_TOLD` accounts, those that have most of their budgets here."""

    def used(account: BudgetAccount) -> tuple[float, int, BudgetAccount]:
        budget = budgets.get(account)
        share = -1.0 if budget is None else held[account] / max(1, budget)
        return -share, -held[account], account

    chosen = sorted((account for account in held if held[account]), key=used)[:ACCOUNTS_TOLD]
    return tuple(each for account in chosen for each in (account.number, -(-held[account] // UNIT_BYTES)))


def as_told(said: Sequence[int]) -> dict[int, int]:
    """Account number -> bytes, from what a lender gossips."""
    return {number: units * UNIT_BYTES for number, units in zip(said[::2], said[1::2], strict=False)}
