"""Thousands of hosts that choose lenders by views that gossip brought some seconds ago.

Slabs turn hot all over the rack within twenty seconds. A borrower that takes the freest host of an old view takes the
same host as all others (a herd); one that draws two hosts and *asks* them does not, however old the view is that it
draws from. Time passes in steps of 100 ms, about what asking and mapping take: choices made in one step do not depend
on one another, but a lender counts what it has lent and refuses what it does not have.

With thousands of hosts a `Borrower` for each would take hours. Which host `covey` asks, which it takes, and which is
next after a refusal is what `Borrower` decides, drawn for drawn: a test steps both through the same 10,000 choices.
"""

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from covey.core.ids import HostId
from plugins.memory.policy import placement
from plugins.memory.policy.placement import LenderPeer

STEP_S = 0.1
SECONDS = 20
SLABS_PER_HOST = 16
"""Slabs of one host: all its memory (64 GiB in slabs of 4 GiB)."""
HEADROOM_SHARE = 0.125
WANTED_SHARE = 0.6
"""Slabs that turn hot, as a share of all that could be lent."""
MEDIAN_USE, SIGMA = 0.35, 0.376
"""Share of memory in use before: log-normal, with the 99th percentile 2.4 times the median (Gu 2021, §2.2.3,
Facebook)."""
RETRY_S = 2.0

WAYS = {
    "covey": f"{placement.DRAWN} drawn, the two freest by the view asked live",
    "power of two": "two hosts drawn, both asked live",
    "power of two, unasked": "two hosts drawn, the freer one by the view is taken",
    "best of view": "the freest host of the whole view is taken",
    "random": "one host drawn",
    "full knowledge": "the freest host at this instant is taken",
}


@dataclass(frozen=True)
class HerdResult:
    """The result of one run."""

    way: str
    hosts: int
    age_s: float
    slabs: int
    refused_per_1000: float
    """`Map` messages refused, per 1,000 slabs placed."""
    unplaced: int
    burst_max: int
    """Most slabs that were mapped or refused on one host within one second."""
    burst_p99: float
    """Slabs mapped or refused within one second on the host that 99 % of hosts are below."""
    max_to_median: float
    spread: float
    """Standard deviation over mean of memory used, over hosts."""


class Seen(Mapping[HostId, int]):
    """Hosts with room by a view -> slabs that they could lend by it, looked up only for those that are drawn."""

    def __init__(self, hosts: Sequence[HostId], view: np.ndarray, number: Mapping[HostId, int]) -> None:
        self._hosts, self._view, self._number = hosts, view, number

    def __iter__(self) -> Iterator[HostId]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def __contains__(self, host: object) -> bool:
        at = bisect_left(self._hosts, str(host))
        return self._hosts[at : at + 1] == [host]

    def __getitem__(self, host: HostId) -> int:
        return int(self._view[self._number[host]])


class Crowd:
    """Hosts, what they can lend, and the views of them at each step."""

    def __init__(self, hosts: int, age_s: float, seed: int, drawn: int = placement.DRAWN) -> None:
        self.drawn = drawn
        self.rng = random.Random(seed)
        self.chance = chance = np.random.default_rng(seed)
        self.names = [HostId(f"h{n:05d}") for n in range(hosts)]
        self.number = {name: n for n, name in enumerate(self.names)}
        use = np.minimum(0.97, MEDIAN_USE * np.exp(chance.normal(0.0, SIGMA, hosts)))
        self.use = use
        self.free = np.floor(np.maximum(0.0, 1 - HEADROOM_SHARE - use) * SLABS_PER_HOST).astype(np.int64)
        self.all_free = self.free.copy()
        self.age_steps = chance.integers(0, round(age_s / STEP_S) + 1, hosts)
        """Age of each host's view, in steps."""
        self.history: list[np.ndarray] = []
        self.askable: list[list[HostId]] = []
        self.holding: list[Counter[HostId]] = [Counter() for _ in range(hosts)]
        self.refusals: list[dict[int, int]] = [{} for _ in range(hosts)]
        """Per borrower: lender -> step of its last refusal."""
        self.landed = np.zeros((SECONDS + 60, hosts), dtype=np.int64)
        self.refused = 0

    def remember(self) -> None:
        """Store the rack as it is now, for later views. If nothing changed, the last array is stored again."""
        if self.history and np.array_equal(self.history[-1], self.free):
            self.history.append(self.history[-1])
            self.askable.append(self.askable[-1])
            return
        self.history.append(self.free.copy())
        peers = [LenderPeer(name, "alive", free) for name, free in zip(self.names, self.free.tolist(), strict=True)]
        self.askable.append(placement.askable(peers))

    def seen_at(self, borrower: int, step: int) -> int:
        return max(0, step - int(self.age_steps[borrower]))

    def candidates(self, borrower: int, step: int) -> list[HostId]:
        """Hosts with room by the borrower's view, without itself."""
        found = self.askable[self.seen_at(borrower, step)].copy()
        at = bisect_left(found, self.names[borrower])
        if at < len(found) and found[at] == self.names[borrower]:
            del found[at]
        return found

    def two(self, borrower: int, step: int, count: int = placement.CHOICES) -> tuple[HostId, ...]:
        held = self.holding[borrower]
        return placement.hosts_to_ask(self.candidates(borrower, step), held, self.rng, count)

    def map(self, borrower: int, lender: int, step: int) -> bool:
        """Map a slab at a lender; returns whether it took it. The lender has the last word."""
        self.landed[int(step * STEP_S), lender] += 1
        if self.free[lender] <= 0:
            self.refused += 1
            return False
        self.free[lender] -= 1
        self.holding[borrower][self.names[lender]] += 1
        return True

    # ---- the ways ----

    def power_of_two(self, borrower: int, step: int) -> bool:
        return self._ask(borrower, self.two(borrower, step), step)

    def by_view(self, borrower: int, step: int) -> bool:
        """Place a slab by gossiped views, as `Borrower` does; a borrower here has no view of its own of thousands of
        hosts."""
        seen = Seen(self.candidates(borrower, step), self.history[self.seen_at(borrower, step)], self.number)
        held = self.holding[borrower]
        return self._ask(borrower, placement.hosts_to_ask_by_view(seen, held, self.rng, drawn=self.drawn), step)

    def _ask(self, borrower: int, asked: tuple[HostId, ...], step: int) -> bool:
        """Ask these hosts, each of which answers with what it has now; a refusal leads to the next, as in
        `Borrower`."""
        offers = {host: int(self.history[-1][self.number[host]]) for host in asked}
        return self._take(borrower, asked, offers, step)

    def unasked(self, borrower: int, step: int) -> bool:
        asked = self.two(borrower, step)
        view = self.history[self.seen_at(borrower, step)]
        return self._take(borrower, asked, {host: int(view[self.number[host]]) for host in asked}, step)

    def one_by_lot(self, borrower: int, step: int) -> bool:
        asked = self.two(borrower, step, 1)
        return self._take(borrower, asked, dict.fromkeys(asked, 1), step)

    def _take(self, borrower: int, asked: tuple[HostId, ...], offers: dict[HostId, int], step: int) -> bool:
        while (chosen := placement.freest(asked, offers, self.holding[borrower])) is not None:
            if self.map(borrower, self.number[chosen], step):
                return True
            offers[chosen] = 0
        return False

    def best_of_view(self, borrower: int, step: int) -> bool:
        return self._freest_of(self.history[self.seen_at(borrower, step)], borrower, step, tries=2)

    def knowing(self, borrower: int, step: int) -> bool:
        return self._freest_of(self.free, borrower, step, tries=1)

    def _freest_of(self, view: np.ndarray, borrower: int, step: int, tries: int) -> bool:
        """Take the freest host of a view: equals at random; the borrower's own lenders only for want of others; never
        one that refused after the view was taken."""
        room = view + self.chance.random(len(view)) / 2
        room[borrower] = 0
        for lender, refused_step in self.refusals[borrower].items():
            if refused_step >= self.seen_at(borrower, step):
                room[lender] = 0
        held = [self.number[host] for host in self.holding[borrower]]
        if held and (np.delete(room, held) > 1).any():
            room[held] = 0
        for _ in range(tries):
            lender = int(room.argmax())
            if room[lender] < 1:
                return False
            if self.map(borrower, lender, step):
                return True
            room[lender] = 0
            self.refusals[borrower][lender] = step
        return False


def herd(
    way: str,
    hosts: int,
    age_s: float,
    seed: int,
    told: Callable[[float], None] = lambda share: None,
    drawn: int = placement.DRAWN,
) -> HerdResult:
    """Run one way of choosing. `told` gets the share done; `drawn` is for the way that ranks by view."""
    crowd = Crowd(hosts, age_s, seed, drawn)
    choose = {
        "covey": crowd.by_view,
        "power of two": crowd.power_of_two,
        "power of two, unasked": crowd.unasked,
        "best of view": crowd.best_of_view,
        "random": crowd.one_by_lot,
        "full knowledge": crowd.knowing,
    }[way]
    slabs = int(WANTED_SHARE * crowd.all_free.sum())
    steps = round(SECONDS / STEP_S)
    due: list[list[int]] = [[] for _ in range(steps + round(40 / STEP_S))]
    for _ in range(slabs):
        due[crowd.rng.randrange(steps)].append(crowd.rng.randrange(hosts))
    unplaced = 0
    for step, borrowers in enumerate(due):
        crowd.remember()
        for borrower in borrowers:
            if not choose(borrower, step):
                again = step + round(RETRY_S / STEP_S)
                if again < len(due):
                    due[again].append(borrower)
                else:
                    unplaced += 1
        told((step + 1) / len(due))
    used = crowd.use + (crowd.all_free - crowd.free) / SLABS_PER_HOST
    bursts = crowd.landed.max(axis=0)
    return HerdResult(
        way,
        hosts,
        age_s,
        slabs,
        1000 * crowd.refused / max(1, slabs - unplaced),
        unplaced,
        int(bursts.max()),
        float(np.quantile(bursts, 0.99)),
        float(used.max() / np.median(used)),
        float(used.std() / used.mean()),
    )
