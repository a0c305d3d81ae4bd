"""A rack that borrows memory: the machines of live agents, `Borrower` and `Lender`, one of each on every modelled host.

Nothing is decided here. Each second the lenders measure their host, gossip says what they could lend (`view_age_s`
old), and the borrowers get how many pages of each of their slabs were requested. The actions of the machines are done
on the modelled rack (`memory_pages`): messages arrive at once and are never lost, a slab is registered, opened, closed
and freed at once, and copied in the time that it takes. Hosts have their turn in a random order each second.
"""

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, assert_never

import numpy as np

from covey.core.events import Heard, LogEvent, Send, SetTimer
from covey.core.ids import HostId
from covey.core.units import GIB, MIB
from covey.ports.probes import MemoryNow
from plugins.memory.machine.borrowing import events as borrower_events
from plugins.memory.machine.borrowing.borrower import Borrower
from plugins.memory.machine.borrowing.events import (
    BorrowerAction,
    BorrowerEvent,
    CloseSlab,
    OpenSlab,
    SlabClosed,
    SlabCopied,
    SlabOpened,
    VolumeFound,
)
from plugins.memory.machine.borrowing.published import PublishedBorrower
from plugins.memory.machine.lending.events import (
    AnswersOver,
    FreeSlab,
    LenderAction,
    LenderEvent,
    LenderTick,
    RegisterSlab,
    SlabFreed,
    SlabRegistered,
    StoreFound,
)
from plugins.memory.machine.lending.lender import Lender, react_s
from plugins.memory.messages import Evict, MrInfo, QueryMem, ToLender
from plugins.memory.policy import headroom, placement
from plugins.memory.policy.lending import Headroom
from plugins.memory.policy.placement import LenderPeer, LenderPeers
from plugins.memory.policy.settings import MemorySettings
from sim.kernel import Kernel
from sim.memory.pages import PAGE, Load, Pages

DEFAULTS = MemorySettings()
VOLUME = "swap"
"""Name of the one volume of each host."""


@dataclass(frozen=True)
class Strategy:
    """One way to run remote memory."""

    label: str
    slab_bytes: int = 64 * MIB
    choices: int = placement.CHOICES
    """Hosts asked for one slab; 0: none, there is no remote memory."""
    drawn: int = placement.CHOICES
    """Hosts drawn, of which the freest by gossip are asked; if it is no more than `choices`, random hosts are asked."""
    hot: float = 0.0
    """Page requests per second above which a slab is mapped."""
    cold_share: float = 0.0
    """Part of `hot` below which a slab is given back unasked (ColdSlab); 0: never."""
    published: bool = False
    """Whether an evicted slab is mapped again, empty, and a slab just mapped takes all of its memory and is not
    filled. If not, it moves with its content, is filled in the background, and costs its lender only pages that were
    touched."""
    auto_headroom: bool = False
    auto_lend: bool = False
    """Whether at most half of what is free at the start is lent (`lend = "auto"`); else all of a host."""


def published() -> Strategy:
    """The strategy of Infiniswap with the settings of §2.7."""
    return Strategy("as published", GIB, hot=placement.HOT_SLAB, published=True)


def ours(label: str = "covey", slab_bytes: int = 64 * MIB) -> Strategy:
    """The strategy of live agents by default: two of six drawn are asked, the threshold is in proportion to a slab's
    size."""
    return Strategy(label, slab_bytes, drawn=placement.DRAWN, hot=placement.hot_for(slab_bytes))


def by_lot(label: str, slab_bytes: int, choices: int) -> Strategy:
    """A strategy like `ours` in which the hosts asked are drawn at random: one, two (power of two choices), four,
    all."""
    return Strategy(label, slab_bytes, choices, choices, hot=placement.hot_for(slab_bytes))


@dataclass
class Outcome:
    """The result of one run."""

    used_share: np.ndarray
    """Memory in use over all memory, mean over the window, shape (hosts,)."""
    whole_share: np.ndarray
    """`used_share` with every slab counted whole, as the paper counts."""
    useful_share: np.ndarray
    """`used_share` with only those pages of slabs counted that their lender really has."""
    counts: Counter[str] = field(default_factory=Counter)
    """Counts by name: asked (QueryMem), refused (Map), nowhere (searches that found no lender), mapped, moved,
    evicted, busy_evicted, given_back, short_host_s."""
    disk_share: float = 0.0
    """Share of page requests that had to go to the disk."""

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
    """The modelled rack. `view_age_s` is the age of what gossip says. What was measured is in whole seconds; timers
    and copies end between them."""

    def __init__(
        self, way: Strategy, host_bytes: int, kept_free: Headroom, load: Load, rng: random.Random, view_age_s: int = 1
    ) -> None:
        self.way, self.host_bytes, self.rng, self.view_age_s = way, host_bytes, rng, view_age_s
        self.kept_free = None if way.auto_headroom else kept_free
        self.pages = Pages(way.slab_bytes, not way.published, load, rng)
        self.hosts = [HostId(f"h{n:04d}") for n in range(self.pages.hosts)]
        self.number = {host: n for n, host in enumerate(self.hosts)}
        self.kernel: Kernel[float, tuple[int, Any]] = Kernel(0.0)
        self.counts: Counter[str] = Counter()
        self.views: list[LenderPeers] = []
        self._now: deque[tuple[int, Any]] = deque()
        """Host and event of what happens next, at once."""
        self.lenders = [self._lender(n) for n in range(len(self.hosts))] if way.choices else []
        self.borrowers = [self._borrower(host) for host in self.hosts] if way.choices else []
        for n in range(len(self.borrowers)):
            self._lender_does(n, StoreFound(f"{self.hosts[n]}:7101", ()))
            self._borrower_does(n, VolumeFound(VOLUME, int(self.pages.slabs[n]), way.slab_bytes, PAGE, ()))

    def _lender(self, n: int) -> Lender:
        most = self.host_bytes
        if self.way.auto_lend:
            free = MemoryNow(self.host_bytes, self.host_bytes - int(self.pages.local[0, n]), 0.0)
            most = headroom.lent_at_most(free, self.kept_free, react_s(DEFAULTS.grace_s))
        return Lender(self.rng, self.rng.randbytes, self.kept_free, most, DEFAULTS.grace_s, DEFAULTS.lease_s)

    def _borrower(self, host: HostId) -> Borrower:
        way, kind = self.way, PublishedBorrower if self.way.published else Borrower
        return kind(
            host,
            self.rng,
            boot=1,
            hot=way.hot,
            lease_s=DEFAULTS.lease_s,
            cold_share=way.cold_share,
            hosts=placement.HostsDrawn(way.drawn, way.choices),
        )

    def run(self, from_s: int = 0) -> Outcome:
        """Run all seconds; what is measured begins at `from_s`."""
        pages = self.pages
        used, whole, useful = (np.zeros(pages.hosts) for _ in range(3))
        to_disk = asked = 0.0
        for second in range(pages.seconds):
            measured = self.second(second)
            if second >= from_s:
                local = pages.local[second]
                used += pages.taken_bytes() + local
                whole += pages.whole_bytes() + local
                useful += pages.useful_bytes() + local
                to_disk += float((measured * (1 - pages.valid)).sum())
                asked += float(measured.sum())
        over = (pages.seconds - from_s) * self.host_bytes
        return Outcome(used / over, whole / over, useful / over, self.counts, to_disk / asked if asked else 0.0)

    def check(self) -> None:
        """Assert that between messages the state of the machines is that of the rack."""
        pages = self.pages
        held: Counter[tuple[int, int]] = Counter()
        for slab in np.flatnonzero(pages.lender >= 0).tolist():
            held[int(pages.owner[slab]), int(pages.lender[slab])] += 1
        for slab, moving in pages.moving.items():
            held[int(pages.owner[slab]), moving.lender] += 1
        lent = Counter((self.number[key[0]], n) for n, one in enumerate(self.lenders) for key in one.lent)
        borrowed: Counter[tuple[int, int]] = Counter()
        for n, one in enumerate(self.borrowers):
            one.check()
            for host, slabs in one.volumes[VOLUME].by_host.chosen.items():
                borrowed[n, self.number[host]] += slabs
        assert held == lent == borrowed, "slabs by place, by lender and by borrower are the same slabs"
        assert all(owner != lends for owner, lends in held), "no host lends to itself"
        for each in self.lenders:
            each.check()

    # ---- time ----

    @property
    def now_s(self) -> float:
        return self.kernel.now

    def second(self, second: int) -> np.ndarray:
        """Run the next second; returns the pages requested of each slab."""
        self.kernel.run_until(second, self._happens)
        measured = self.pages.second(second)
        self._machines(second, measured)
        return measured

    def _machines(self, second: int, measured: np.ndarray) -> None:
        taken = self.pages.taken_bytes()
        used = (self.pages.local[second] + taken).round().astype(np.int64)
        self.counts["short_host_s"] += int((used > self.host_bytes).sum())
        if not self.borrowers:
            return
        for n, (used_bytes, touched) in enumerate(zip(used.tolist(), taken.astype(np.int64).tolist(), strict=True)):
            memory = MemoryNow(self.host_bytes, max(0, self.host_bytes - used_bytes), 0.0)
            self._lender_does(n, LenderTick(memory, touched))
        self._settle()
        peers = self._heard_by_gossip()
        counted = self.pages.counted(measured)
        for n in self.rng.sample(range(len(self.hosts)), len(self.hosts)):
            self._borrower_does(n, borrower_events.BorrowerTick({VOLUME: counted[n]}, peers))
            self._settle()

    def _heard_by_gossip(self) -> LenderPeers:
        size = self.way.slab_bytes
        free = (one.spare_bytes() // size for one in self.lenders)
        known = (LenderPeer(host, "alive", slabs) for host, slabs in zip(self.hosts, free, strict=True))
        self.views.append(LenderPeers(known))
        del self.views[: -self.view_age_s - 1]
        return self.views[0]

    def _happens(self, due: tuple[int, Any]) -> None:
        self._now.append(due)
        self._settle()

    def _settle(self) -> None:
        """Handle what follows at once, and what follows from that."""
        while self._now:
            n, event = self._now.popleft()
            if isinstance(event, _OF_LENDERS) or (isinstance(event, Heard) and isinstance(event.message, ToLender)):
                self._lender_does(n, event)
            else:
                self._borrower_does(n, event)

    def _later(self, after_s: float, n: int, event: object) -> None:
        self.kernel.post(self.now_s + after_s, (n, event))

    # ---- what the machines ask for ----

    def _lender_does(self, n: int, event: LenderEvent) -> None:
        for action in self.lenders[n].handle(event, self.now_s):
            self._perform_lender(n, action)

    def _perform_lender(self, n: int, action: LenderAction) -> None:
        match action:
            case Send():
                self._send(n, action)
            case SetTimer():
                self._later(action.after_s, n, action.event)
            case RegisterSlab():
                self._now.append((n, SlabRegistered(action.borrower, action.slab, self.lenders[n].address)))
            case FreeSlab():
                self._now.append((n, SlabFreed(action.borrower, action.slab)))
            case LogEvent():
                pass
            case _:
                assert_never(action)

    def _borrower_does(self, n: int, event: BorrowerEvent) -> None:
        for action in self.borrowers[n].handle(event, self.now_s):
            self._perform_borrower(n, action)

    def _perform_borrower(self, n: int, action: BorrowerAction) -> None:
        match action:
            case Send():
                self._send(n, action)
            case SetTimer():
                self._later(action.after_s, n, action.event)
            case OpenSlab():
                self._open(n, action)
            case CloseSlab():
                self.counts["moved"] += self.pages.close(n, action.index, action.epoch, self.now_s)
                self._now.append((n, SlabClosed(action.volume, action.index, action.epoch)))
            case LogEvent():
                self._count(action)
            case _:
                assert_never(action)

    def _open(self, n: int, action: OpenSlab) -> None:
        place = action.place
        filled_s = self.pages.open(n, action.index, place.epoch, self.number[place.lender], self.now_s)
        self.counts["mapped"] += 1
        self._now.append((n, SlabOpened(action.volume, action.index, place.epoch)))
        if filled_s is not None:
            self._later(filled_s - self.now_s, n, SlabCopied(action.volume, action.index, place.epoch))

    def _send(self, n: int, action: Send) -> None:
        to, message = self.number[action.to], action.message
        self._now.append((to, Heard(self.hosts[n], message)))
        match message:
            case QueryMem():
                self.counts["asked"] += 1
            case MrInfo() if message.refused:
                self.counts["refused"] += 1
            case Evict():
                rate = self.borrowers[to].volumes[VOLUME].rates[message.index]
                self.counts["evicted"] += 1
                self.counts["busy_evicted"] += placement.is_hot(rate, self.way.hot)
            case _:
                pass

    def _count(self, note: LogEvent) -> None:
        self.counts["given_back"] += note.event == "cold"
        self.counts["nowhere"] += note.event in ("no host asked", "no host has room")


_OF_LENDERS = (SlabRegistered, SlabFreed, AnswersOver)
