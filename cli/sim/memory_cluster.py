"""A rack that borrows memory, second by second: every decision is a function of `plugins.memory.policy`.

What is modelled: containers that grow and page (`memory_workload`), slabs of each host's one volume and how busy each
is, the second-old view that gossip gives, hosts asked for room live, lenders that measure, smooth, and take slabs back,
how long that takes, and where an evicted slab goes. What is not: the time of a single page request, and messages lost.

How busy the slabs of one volume are differs much and drifts slowly: log-normal weights (sigma 1.5) that forget
themselves over ten minutes. Requests go to slabs in proportion to weight and to the part of the slab in use.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from covey.core import HostId
from covey.ports import MemoryNow
from covey.units import GIB, MIB
from plugins.memory.machine.borrower import CLOSE_AT
from plugins.memory.machine.lender import react_s
from plugins.memory.policy import eviction, headroom, lending, placement
from plugins.memory.policy.headroom import Growth
from plugins.memory.policy.lending import Budget, Headroom
from plugins.memory.policy.placement import Peer

SIGMA, DRIFT_S, DRIFT_EVERY_S = 1.5, 600.0, 10
WRITES = 0.5
"""Share of page requests that are page-outs: without filling in the background only these bring a page to a lender."""
FILL_BYTES_PER_S = 200e6
"""Speed of the background filling of a slab just mapped, and of moving one."""
GRACE_S = 10.0
ASK_S = 1.0
"""Until the borrowers have said how busy their slabs are."""
PAGE = 4096
RETRY_S, RETRY_MAX_S = 2.0, 60.0


@dataclass(frozen=True)
class Way:
    """One way to run remote memory."""

    label: str
    slab_bytes: int = 64 * MIB
    choices: int = placement.CHOICES
    """Hosts asked for one slab; 0: nobody, there is no remote memory."""
    drawn: int = placement.CHOICES
    """Hosts drawn, of which the freest by gossip are asked; no more than `choices`: drawn by lot alone."""
    hot: float = 0.0
    """Page requests per second above which a slab is mapped."""
    cold: float | None = None
    """Page requests per second below which a slab is given back unasked (ColdSlab); None: never."""
    moves: bool = True
    """An evicted hot slab moves with its content; else it is mapped anew, empty."""
    fills: bool = True
    """A slab just mapped is filled in the background, and costs the lender only pages that were touched."""
    extra: int | None = None
    """E'; None: as many as E."""
    auto_headroom: bool = False


def published() -> Way:
    """Infiniswap with the settings of §2.7."""
    return Way("as published", GIB, hot=placement.HOT_SLAB, moves=False, fills=False)


def ours(label: str = "covey", slab_bytes: int = 64 * MIB) -> Way:
    """What live agents do by default: two of six drawn are asked, the threshold is in proportion to a slab's size."""
    return Way(label, slab_bytes, drawn=placement.DRAWN, hot=placement.hot_for(slab_bytes))


def by_lot(label: str, slab_bytes: int, choices: int) -> Way:
    """The same, but those asked are drawn by lot alone: one, two (power of two choices), four, all."""
    return Way(label, slab_bytes, choices, choices, hot=placement.hot_for(slab_bytes))


@dataclass
class Outcome:
    """What one run came to."""

    used_share: np.ndarray
    """Memory in use over all memory, mean over the window, shape (hosts,)."""
    whole_share: np.ndarray
    """The same with every slab counted whole, as the paper counts."""
    useful_share: np.ndarray
    """The same with only those pages of slabs counted that their lender really has."""
    counts: Counter[str] = field(default_factory=Counter)
    """mapped, evicted, busy_evicted, moved, given_back, refused, nowhere, asked, short_host_s."""
    disk_share: float = 0.0
    """Page requests that had to go to the disk."""

    @property
    def utilization(self) -> float:
        return float(self.used_share.mean())

    @property
    def whole(self) -> float:
        return float(self.whole_share.mean())

    @property
    def useful(self) -> float:
        return float(self.useful_share.mean())

    @property
    def max_to_median(self) -> float:
        return float(self.used_share.max() / np.median(self.used_share))

    @property
    def max_to_min(self) -> float:
        return float(self.used_share.max() / self.used_share.min())


class Rack:
    """`local`, `swapped` (bytes) and `requests` (pages/s) have the shape (seconds, hosts); `view_age_s` is how old
    what gossip says is."""

    def __init__(
        self,
        way: Way,
        host_bytes: int,
        kept_free: Headroom,
        load: tuple[np.ndarray, np.ndarray, np.ndarray],
        rng: random.Random,
        view_age_s: int = 1,
    ) -> None:
        self.way, self.host_bytes, self.kept_free, self.rng = way, host_bytes, kept_free, rng
        self.local, self.swapped, self.requests = load
        self.seconds, self.count = self.local.shape
        self.hosts = [HostId(f"h{n:04d}") for n in range(self.count)]
        self.number = {host: n for n, host in enumerate(self.hosts)}
        self.chance = np.random.default_rng(rng.getrandbits(63))
        slabs = -(-self.swapped.max(axis=0).astype(np.int64) // way.slab_bytes)
        self.owner = np.repeat(np.arange(self.count), slabs)
        self.first = np.concatenate(([0], np.cumsum(slabs)))[:-1]
        self.index = np.arange(len(self.owner)) - self.first[self.owner]
        self.lender = np.full(len(self.owner), -1)
        self.valid = np.zeros(len(self.owner))
        """Share of the slab's pages in use that its lender has."""
        self.activity = np.zeros(len(self.owner))
        self.retry_at_s = np.zeros(len(self.owner))
        self.retries = np.zeros(len(self.owner), dtype=int)
        self.weights = self.chance.normal(0.0, SIGMA, len(self.owner))
        self.slabs_at: list[Counter[HostId]] = [Counter() for _ in self.hosts]
        """Per borrower: lender -> slabs there."""
        self.smoothed: list[float | None] = [None] * self.count
        self.growth = [Growth() for _ in self.hosts]
        self.budgets: list[Budget] = []
        self.views: list[tuple[Peer, ...]] = []
        self.view_age_s = view_age_s
        self.counts: Counter[str] = Counter()
        self.leaving: list[tuple[float, int, int]] = []
        """(second at which it is free, lender, slabs): evicted, and memory of the lender's until their `Done`."""

    def run(self, from_s: int = 0) -> Outcome:
        """All seconds; what is measured begins at `from_s`."""
        used, whole, useful = (np.zeros(self.count) for _ in range(3))
        to_disk = asked = 0.0
        for second in range(self.seconds):
            measured, touched = self._page(second)
            self.leaving = [each for each in self.leaving if each[0] > second]
            self._measure(second, touched)
            if self.way.choices:
                self._take_back(second, touched)
                self._give_back()
                self._place(second, touched)
            if second >= from_s:
                used += self._lent_bytes(touched) + self.local[second]
                whole += self._taken_bytes(np.ones(len(touched))) + self.local[second]
                useful += self._taken_bytes(touched * self.valid) + self.local[second]
                to_disk += float((measured * (1 - self.valid)).sum())
                asked += float(measured.sum())
        over = (self.seconds - from_s) * self.host_bytes
        return Outcome(used / over, whole / over, useful / over, self.counts, to_disk / asked if asked else 0.0)

    # ---- paging ----

    def _page(self, second: int) -> tuple[np.ndarray, np.ndarray]:
        """(pages requested of each slab, share of each slab in use); what was paged out reaches its lender."""
        way = self.way
        if second % DRIFT_EVERY_S == 0 and second:
            keep = np.exp(-DRIFT_EVERY_S / DRIFT_S)
            fresh = self.chance.normal(0.0, SIGMA, len(self.weights))
            self.weights = keep * self.weights + np.sqrt(1 - keep**2) * fresh
            self._busy = np.exp(self.weights)
        elif second == 0:
            self._busy = np.exp(self.weights)
        inside = self.swapped[second][self.owner] / way.slab_bytes - self.index
        touched = np.clip(inside, 0.0, 1.0)
        parts = self._busy * touched
        whole = np.bincount(self.owner, parts, self.count)
        each = np.divide(self.requests[second], whole, out=np.zeros(self.count), where=whole > 0)
        measured = parts * each[self.owner]
        self.activity = np.asarray(placement.activity(self.activity, measured))  # type: ignore[arg-type]
        mapped = self.lender >= 0
        pages = np.maximum(1.0, touched * way.slab_bytes / PAGE)
        brought = WRITES * measured / pages
        if way.fills:
            brought = brought + FILL_BYTES_PER_S / np.maximum(PAGE, touched * way.slab_bytes)
        self.valid = np.where(mapped, 1 - (1 - self.valid) * np.exp(-brought), 0.0)
        return measured, touched

    def _lent_bytes(self, touched: np.ndarray) -> np.ndarray:
        """Memory that slabs take on each host: the paper registers whole slabs, ours grow as pages come."""
        return self._taken_bytes(touched if self.way.fills else np.ones(len(touched)))

    def _taken_bytes(self, share: np.ndarray) -> np.ndarray:
        """Bytes on each host, if a mapped slab takes so much of its size; one that is leaving counts whole."""
        mapped = self.lender >= 0
        whole = np.bincount(self.lender[mapped], share[mapped], self.count) + self._leaving()
        return np.asarray(whole * self.way.slab_bytes)

    def _leaving(self) -> np.ndarray:
        """Slabs evicted of each lender that are not free yet."""
        found = np.zeros(self.count)
        for _, lender, slabs in self.leaving:
            found[lender] += slabs
        return found

    # ---- lending ----

    def _measure(self, second: int, touched: np.ndarray) -> None:
        """Each lender's budget of this second, and what it says about itself."""
        mapped = np.bincount(self.lender[self.lender >= 0], minlength=self.count)
        lent = (mapped + self._leaving()) * self.way.slab_bytes
        taken = self._lent_bytes(touched)
        self.budgets = []
        for n in range(self.count):
            used = round(self.local[second, n] + taken[n])
            self.counts["short_host_s"] += used > self.host_bytes
            self.smoothed[n] = lending.memory_used(self.smoothed[n], used)
            self.budgets.append(
                Budget(
                    total_bytes=self.host_bytes,
                    used_bytes=self.smoothed[n] or 0.0,
                    used_now_bytes=used,
                    pressure=0.0,
                    headroom_bytes=self._headroom(n, used, int(taken[n])),
                    lend_bytes=self.host_bytes,
                    lent_bytes=int(lent[n]),
                    touched_bytes=int(taken[n]),
                )
            )
        free = [self._slabs_free(n) for n in range(self.count)]
        self.views.append(tuple(Peer(host, "alive", free[n]) for n, host in enumerate(self.hosts)))
        del self.views[: -self.view_age_s - 1]

    def _headroom(self, n: int, used_bytes: int, taken_bytes: int) -> int:
        if not self.way.auto_headroom:
            return self.kept_free.of(self.host_bytes)
        memory = MemoryNow(self.host_bytes, max(0, self.host_bytes - used_bytes), 0.0)
        self.growth[n] = headroom.grown(self.growth[n], headroom.own_memory(memory, taken_bytes))
        return headroom.headroom_auto(memory, self.growth[n], react_s(GRACE_S))

    def _slabs_free(self, n: int) -> int:
        return lending.spare_bytes(self.budgets[n]) // self.way.slab_bytes

    def _lend(self, n: int, slabs: int) -> None:
        old = self.budgets[n]
        size = slabs * self.way.slab_bytes
        self.budgets[n] = Budget(
            old.total_bytes,
            old.used_bytes,
            old.used_now_bytes,
            old.pressure,
            old.headroom_bytes,
            old.lend_bytes,
            old.lent_bytes + size,
            old.touched_bytes,
        )

    def _take_back(self, second: int, touched: np.ndarray) -> None:
        """One batch at a time on each lender, as in `Lender`: the next measurement shows what it brought."""
        size, busy = self.way.slab_bytes, {lender for _, lender, _ in self.leaving}
        for n in range(self.count):
            needed_bytes = eviction.bytes_to_free(self.budgets[n]) if n not in busy else 0
            if needed_bytes == 0:
                continue
            sizes = dict.fromkeys(np.flatnonzero(self.lender == n).tolist(), size)
            asked = eviction.candidates_for(sizes, needed_bytes, self.rng, self.way.extra)
            taken = eviction.slabs_to_evict({slab: float(self.activity[slab]) for slab in asked}, sizes, needed_bytes)
            copied_s = len(taken) * size / FILL_BYTES_PER_S if self.way.moves else 0.0
            self.leaving.append((second + ASK_S + min(GRACE_S, copied_s), n, len(taken)))
            for slab in taken:
                self._evict(slab, n, second, float(touched[slab]), len(taken))

    def _give_back(self) -> None:
        """Slabs that have turned cold, if there is a threshold for that."""
        if self.way.cold is None:
            return
        for slab in np.flatnonzero((self.lender >= 0) & (self.activity < self.way.cold)).tolist():
            if placement.is_cold(float(self.activity[slab]), self.way.cold, self.way.hot):
                self.counts["given_back"] += 1
                self._lend(self._unmap(slab), -1)

    def _unmap(self, slab: int) -> int:
        """Its lender's number."""
        lender = int(self.lender[slab])
        self.slabs_at[self.owner[slab]][self.hosts[lender]] -= 1
        self.lender[slab], self.valid[slab] = -1, 0.0
        return lender

    def _evict(self, slab: int, lender: int, second: int, touched: float, leaving: int) -> None:
        """A hot one moves with what can be copied before it is closed; the disk has the rest."""
        hot = placement.is_hot(float(self.activity[slab]), self.way.hot)
        self.counts["evicted"] += 1
        self.counts["busy_evicted"] += hot
        had = float(self.valid[slab])
        self._unmap(slab)
        if self.way.moves and hot and self._find(slab, self.hosts[lender], leaving):
            self.counts["moved"] += 1
            copied = CLOSE_AT * GRACE_S * FILL_BYTES_PER_S / max(1.0, touched * self.way.slab_bytes)
            self.valid[slab] = had * min(1.0, copied)

    # ---- borrowing ----

    def _place(self, second: int, touched: np.ndarray) -> None:
        wants = (self.lender < 0) & (touched > 0) & (self.retry_at_s <= second) & (self.activity > self.way.hot)
        for slab in np.flatnonzero(wants).tolist():
            if placement.is_hot(float(self.activity[slab]), self.way.hot) and not self._find(slab):
                self.counts["nowhere"] += 1
                self.retry_at_s[slab] = second + min(RETRY_MAX_S, RETRY_S * 2 ** int(self.retries[slab]))
                self.retries[slab] = min(10, self.retries[slab] + 1)

    def _find(self, slab: int, without: HostId | None = None, leaving: int = 1) -> bool:
        """Asks and takes, as `Borrower` does. `without`: the lender it has to leave, with `leaving` slabs in all."""
        borrower = int(self.owner[slab])
        me, held = self.hosts[borrower], self.slabs_at[borrower]
        view = self.views[0]
        room = placement.askable(view) if without is None else eviction.movable_to(view, without, me, leaving)
        free = {host: view[self.number[host]].slabs_free or 0 for host in room if host != me}
        holding = [host for host in held if held[host] > 0]
        asked = placement.hosts_to_ask_by_view(free, holding, self.rng, self.way.choices, self.way.drawn)
        self.counts["asked"] += len(asked)
        chosen = placement.freest(asked, {host: self._slabs_free(self.number[host]) for host in asked}, held)
        if chosen is None:
            self.counts["refused"] += len(asked)
            return False
        lender = self.number[chosen]
        self.lender[slab], self.retries[slab] = lender, 0
        held[chosen] += 1
        self._lend(lender, 1)
        self.counts["mapped"] += 1
        return True
