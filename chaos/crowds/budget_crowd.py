"""A tenant on many hosts that tries to exceed its budget of remote memory, while views are old, hosts die and come
back, and the rack is split. Only the machines (`Borrower`, `Lender`, `RackAccounts`), as in
`chaos/crowds/memory_crowd.py`.

What the tenant has is counted at all lenders at once, which none of them can; what a lender told reaches each of the
others after a while of its own, and not at all across a split. Some borrowers lie: they count nothing before they ask.
"""

import random
from collections.abc import Callable, Mapping

import msgspec

from chaos.crowds.memory_crowd import GRACE_S, LEASE_S, SLAB, MemoryCrowd, MemoryHost
from chaos.world.world import World
from covey.core.events import Message, Send, Undelivered
from covey.core.ids import HostId
from covey.core.units import GIB
from plugins.memory.machine.borrowing import events as b
from plugins.memory.machine.borrowing.borrower import Borrower
from plugins.memory.machine.lending import events as le
from plugins.memory.machine.lending.lender import Lender
from plugins.memory.machine.loan import LoanedSlab
from plugins.memory.machine.rack_accounts import RackAccounts
from plugins.memory.policy.budgets import MEMBERS_MAX, as_told
from plugins.memory.policy.lending import Headroom
from plugins.memory.policy.placement import HOT_SLAB, LenderPeer

TENANT = "ann"
PAGE = 4096
VIEW_S = 3.0
"""Most seconds that gossip takes. It is told once a second, and looked at once a second: `FRESH_S` in all."""
GONE_S = 8.0
"""Seconds until gossip calls a host gone."""


class BudgetHost(MemoryHost):
    """A host whose borrower and lender count."""

    def __init__(self, name: HostId, rng: random.Random, slabs: int, spare: int, budget_bytes: int, lies: bool) -> None:
        super().__init__(name, rng, slabs, spare)
        self.budget_bytes, self.lies, self.boot = budget_bytes, lies, 0
        self.side, self.age_s = 0, rng.uniform(0.5, VIEW_S)
        self.died_s = float("inf")
        self.tells: list[tuple[float, int | None, Mapping[int, int] | None]] = []
        """What the host told: when, free slabs, and bytes lent on each account."""
        self.begin()

    def begin(self) -> None:
        """Start the host's agent, which knows nothing."""
        self.boot += 1
        self.accounts = RackAccounts(self.name, LEASE_S, lambda tenant: self.budget_bytes if tenant == TENANT else None)
        asked = RackAccounts(self.name, LEASE_S) if self.lies else self.accounts
        self.borrower = Borrower(self.name, self.rng, self.boot, HOT_SLAB, LEASE_S, accounts=asked)
        kept = Headroom(fraction=0.125)
        self.lender = Lender(self.rng, self.rng.randbytes, kept, 64 * GIB, GRACE_S, LEASE_S, self.accounts)
        self.tells.clear()

    def said(self, then_s: float) -> tuple[int | None, Mapping[int, int] | None]:
        """Free slabs and accounts that the host had told by then."""
        for told_s, free, lent in reversed(self.tells):
            if told_s <= then_s:
                return free, lent
        return None, None


class BudgetCrowd(MemoryCrowd):
    """Hosts with a tenant's volumes. `slabs`: of the tenant's volume on each host; `budget`: slabs that it may have in
    all."""

    def __init__(self, world: World, count: int, slabs: int, budget: int, liars: int = 0, loss: float = 0.01) -> None:
        super().__init__(world, count, slabs, loss=loss)
        self.budget_bytes = budget * SLAB
        dice = random.Random(f"{world.seed}/budgets")
        lying = set(dice.sample(sorted(self.hosts), liars))
        self.hosts: dict[HostId, BudgetHost] = {  # type: ignore[assignment]
            name: BudgetHost(name, random.Random(dice.random()), slabs, 4 * slabs, self.budget_bytes, name in lying)
            for name in self.hosts
        }
        self.most_bytes = 0
        for host in self.hosts.values():
            self._soon(self.rng.uniform(0, 1), self._begin, host)

    # ---- what differs from the crowd without budgets ----

    def _begin(self, host: MemoryHost) -> None:
        current = self.hosts[host.name]
        if host is not current:
            return  # of the crowd below
        self._found(current)
        self._second(current)

    def _found(self, host: BudgetHost) -> None:
        """Tell the agent's machines what the slab process holds, and which places the volume's process has open."""
        held = tuple(
            LoanedSlab(borrower, slab, SLAB, secret) for (borrower, slab), secret in sorted(host.store.items(), key=str)
        )
        self.lender(host, le.StoreFound(f"{self.world.hosts[host.name].ip}:7000", held))
        places = tuple((index, place) for (_, index, _), place in sorted(host.open.items()))
        self.borrower(host, b.VolumeFound(host.volume, host.slabs, SLAB, PAGE, places, tenant=TENANT))

    def _gossip(self) -> None:
        """Let every host hear each of the others by itself."""

    def _second(self, host: MemoryHost) -> None:
        assert isinstance(host, BudgetHost)
        if host.up:
            peers = self.peers(host)
            host.accounts.heard(peers, self.world.now)
            self.lender(host, le.LenderTick(host.memory(), 0))
            self.borrower(host, b.BorrowerTick(host.requests, peers))
            told = host.lender.told_accounts()
            lent = as_told(told) if told is not None else host.tells[-1][2] if host.tells else None
            host.tells = [*host.tells[-8:], (self.world.now, host.lender.spare_bytes() // SLAB or None, lent)]
        self.world.at(self.world.now + 1.0, lambda: self._second(host))

    def peers(self, me: BudgetHost) -> tuple[LenderPeer, ...]:
        """The other hosts as `me` sees them: as old as its gossip is."""
        found: list[LenderPeer] = []
        for host in self.hosts.values():
            if host.name == me.name:
                continue
            away = not host.up or host.side != me.side
            gone = away and self.world.now > host.died_s + GONE_S
            free, lent = host.said(min(self.world.now, host.died_s if away else self.world.now) - me.age_s)
            found.append(LenderPeer(host.name, "gone" if gone else "alive", free, lent=lent))
        return tuple(found)

    def _send(self, host: MemoryHost, send: Send, feed: Callable[[object], None]) -> None:
        assert isinstance(host, BudgetHost)
        if self.hosts[send.to].side != host.side:
            self._soon(send.deadline_s, feed, Undelivered(send.to, send.message))
            return
        super()._send(host, send, feed)

    def _hear(self, host: MemoryHost, sender: HostId, message: Message) -> None:
        if host.up:
            super()._hear(host, sender, message)

    # ---- what happens to it ----

    def split(self, apart: int) -> None:
        """Cut `apart` hosts off from the others. What volumes' processes have open across the cut breaks."""
        self.world.mark("split", f"{apart} hosts")
        for name in self.rng.sample(sorted(self.hosts), apart):
            self.hosts[name].side = 1
        for host in self.hosts.values():
            host.died_s = self.world.now if host.up else host.died_s
            for (volume, index, epoch), place in list(host.open.items()):
                if self.hosts[place.lender].side != host.side:
                    del host.open[volume, index, epoch]
                    failed = b.SlabFailed(volume, index, epoch, "no route")
                    self._soon(self.rng.uniform(0.1, 5), self._feeder(host), failed)

    def heal(self) -> None:
        """Join the rack again."""
        self.world.mark("healed", "all")
        for host in self.hosts.values():
            host.side, host.died_s = 0, float("inf") if host.up else host.died_s

    def kill(self, name: HostId) -> None:
        """Let the host die: what it lent is gone."""
        super().kill(name)
        host = self.hosts[name]
        host.died_s = self.world.now
        host.store.clear()
        host.open.clear()

    def revive(self, name: HostId) -> None:
        """Start the host again, empty."""
        host = self.hosts[name]
        host.up, host.died_s = True, float("inf")
        host.begin()
        self._found(host)

    def restart(self, name: HostId) -> None:
        """Restart the host's agent alone: its slabs stay, and it does not know yet whose they are."""
        host = self.hosts[name]
        host.begin()
        self._found(host)

    # ---- what is looked at ----

    def has_bytes(self, side: int | None = None) -> int:
        """Bytes that all lenders together hold for the tenant at this instant."""
        return sum(len(host.store) * SLAB for host in self.hosts.values() if host.up and side in (None, host.side))

    def watch(self, seconds: float) -> None:
        """Run for `seconds`; the invariants of the crowd must hold, and the most that the tenant had is kept."""
        end = self.world.now + seconds
        while self.world.now < end:
            self.world.run(min(end, self.world.now + 0.25))
            self.most_bytes = max(self.most_bytes, self.has_bytes())
        self.check()

    @property
    def bound_bytes(self) -> int:
        """Most bytes of the tenant while the rack is one (`plugins/memory/policy/budgets.py`)."""
        return self.budget_bytes * 5 // 4 + MEMBERS_MAX * SLAB


class BudgetResult(msgspec.Struct, frozen=True):
    """Slabs that a tenant had at several moments of a story."""

    budget: int
    wanted: int
    filled: int
    """Slabs once all had been wanted for a while."""
    most_calm: int
    most_faults: int
    """Most slabs while hosts died and came back, and agents began anew."""
    after_faults: int
    most_split: int
    after_split: int
    """Slabs a minute and a half after the rack was one again."""
    refused: int
    story_hash: int


def budget_story(
    seed: int, count: int = 24, slabs: int = 8, budget: int = 64, liars: int = 0,
    log: Callable[[str], None] | None = None,
) -> BudgetResult:  # fmt: skip
    """Play one seed: all slabs on all hosts are wanted in the same second; then faults, a split, and peace."""
    with World(seed, log=log) as world:
        crowd = BudgetCrowd(world, count, slabs, budget, liars)
        crowd.heat(500)
        crowd.watch(60.0)
        filled, most_calm = crowd.has_bytes(), crowd.most_bytes
        crowd.most_bytes = 0
        names = crowd.rng.sample(sorted(crowd.hosts), max(2, count // 6))
        dead, anew = names[::2], names[1::2]
        for name in dead:
            crowd.kill(name)
            crowd.watch(1.0)
        for name in anew:
            crowd.restart(name)
            crowd.watch(1.0)
        crowd.watch(1.5 * LEASE_S)
        for name in dead:
            crowd.revive(name)
        crowd.watch(LEASE_S)
        after_faults, most_faults = crowd.has_bytes(), crowd.most_bytes
        crowd.most_bytes = 0
        crowd.split(count // 2)
        crowd.watch(3 * LEASE_S)
        crowd.heal()
        crowd.watch(1.5 * LEASE_S)
        hosts = crowd.hosts.values()
        return BudgetResult(
            budget=budget,
            wanted=count * slabs,
            filled=filled // SLAB,
            most_calm=most_calm // SLAB,
            most_faults=most_faults // SLAB,
            after_faults=after_faults // SLAB,
            most_split=crowd.most_bytes // SLAB,
            after_split=crowd.has_bytes() // SLAB,
            refused=sum(host.lender.refused_for_budget for host in hosts),
            story_hash=world.story_hash,
        )
