"""Budgets at the borrower: it counts before it asks, so that lenders refuse only what old views let through."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping

from covey.core.ids import HostId
from plugins.memory.machine.borrowing.slab import BorrowedSlab, BorrowedVolume
from plugins.memory.machine.rack_accounts import RackAccounts
from plugins.memory.policy import budgets
from plugins.memory.policy.budgets import FRESH_S, BudgetAccount, BudgetHeld


def places_of(volumes: Iterable[BorrowedVolume], account: BudgetAccount) -> Counter[HostId]:
    """Bytes that count at each lender, for places that these volumes have there or were granted."""
    found: Counter[HostId] = Counter()
    for volume in volumes:
        if account.name == (volume.tenant if account.kind == "tenant" else volume.job):
            for host, slabs in volume.by_host.chosen.items():
                found[host] += slabs * volume.counted_slab_bytes
    return found


def replaces(slab: BorrowedSlab) -> bool:
    """Does the slab's next place replace one that it has, or had and cannot do without?"""
    return slab.place is not None or (slab.members > 1 and slab.had_place)


class BudgetsAsked:
    """Bytes that the volumes of one host have, and are about to have, on limited accounts. Counted once for all slabs
    that look for a place in the same second: there may be thousands."""

    def __init__(self, accounts: RackAccounts, volumes: Mapping[str, BorrowedVolume]) -> None:
        self.accounts, self._volumes = accounts, volumes
        self._counted_s = float("-inf")
        self._places: dict[BudgetAccount, dict[HostId, int]] = {}
        self._asked: deque[tuple[float, BudgetAccount, int]] = deque()
        """Slabs asked for within `FRESH_S` (time, account, bytes): no lender tells of them yet."""
        self._fresh: Counter[BudgetAccount] = Counter()

    def learn_payers(self) -> None:
        """Once a second, look up the tenant of each volume. A rank may open a volume before the log's word of its job
        is here: its tenant counts from when that word comes."""
        for volume in self._volumes.values():
            volume.tenant = self.accounts.payer(volume.tenant, volume.job)

    def may_ask(
        self, slab: BorrowedSlab, free: Mapping[HostId, int], now_s: float
    ) -> tuple[Mapping[HostId, int], str, str]:
        """The hosts with room that may lend to the slab's tenant and job now, then an event and a reason for the slab's
        event log in case none is asked."""
        nobody = "no host asked", "no other host reports room"
        if not free:
            return {}, *nobody
        if now_s != self._counted_s:
            self._counted_s, self._places = now_s, {}
        while self._asked and now_s >= self._asked[0][0] + FRESH_S:
            _, account, size = self._asked.popleft()
            self._fresh[account] -= size
        volume, left = self._volumes[slab.volume], free
        more = volume.counted_slab_bytes
        limited = self.accounts.limited(volume.tenant, volume.job)
        for account, budget in limited:
            counts = budgets.widened(self._held(account, budget), more, replaces(slab), slab.members)
            if why := budgets.over_budget(counts, more):
                return {}, "over budget", why
            turn = budgets.in_turn(counts, more, self.accounts.lenders, slab.members)
            left = {host: slabs for host, slabs in left.items() if host in turn}
            if not left:
                others = "hosts that cannot be reached come first"
                return {}, "over budget", f"{account.words} is near its budget, and {others}"
        for account, _ in limited:
            self._asked.append((now_s, account, more))
            self._fresh[account] += more
        return left, *nobody

    def _held(self, account: BudgetAccount, budget: int) -> BudgetHeld:
        """The memory of the account: as lenders told it, and for lenders that do not tell as this host has it there;
        plus the slabs that this host asked for just now."""
        if account not in self._places:
            mine, told = places_of(self._volumes.values(), account), self.accounts.used(account)
            self._places[account] = {host: max(told.get(host, 0), mine[host]) for host in sorted({*told, *mine})}
        return BudgetHeld(account, budget, 0, self._places[account], asked=self._fresh[account])
