"""A read of pages that several lenders hold: from the one that answers soonest as a rule, and from the next when that
one is late, fails, or answers with something older than it acknowledged.

Each answers into memory of its own: one that is late answers after all, and must not write into what was answered."""

import asyncio
from array import array
from collections.abc import Callable
from operator import ge

from covey.ports.clock import Clock
from plugins.memory.datapath.links.remote_slab import RemoteSlab
from plugins.memory.datapath.wire.slabwire import Versions
from plugins.memory.policy import mirroring

Found = Callable[[bytearray | None, Versions], None]
"""Called once: with the content and its versions, or with None when no member has answered as it should."""


class LenderPaces:
    """Seconds within which lenders answer, smoothed."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.reads = clock, 0
        self._of: dict[str, float] = {}

    def of(self, link: RemoteSlab) -> float | None:
        return self._of.get(link.place.lender)

    def answered(self, link: RemoteSlab, took_s: float) -> None:
        self._of[link.place.lender] = mirroring.next_pace(self.of(link), took_s)

    def order(self, links: list[RemoteSlab]) -> list[RemoteSlab]:
        """The links in the order in which they are to be asked."""
        self.reads += 1
        by_epoch = {link.place.epoch: link for link in links}
        paces = [(epoch, self.of(link)) for epoch, link in by_epoch.items()]
        return [by_epoch[epoch] for epoch in mirroring.nearest(paces, self.reads)]


class MirrorRead:
    """A read of pages of the slab from `at` on; `wanted` are their versions. `over` may be called before `begin`
    returns."""

    def __init__(self, paces: LenderPaces, page_bytes: int, at: int, wanted: Versions, over: Found) -> None:
        self._paces, self._at, self._wanted, self._over = paces, at, wanted, over
        self._bytes = len(wanted) * page_bytes
        self._left: list[RemoteSlab] = []
        self._waiting = 0
        self._is_over = False
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, holders: list[RemoteSlab]) -> None:
        self._left = self._paces.order(holders)
        self._next()

    def _next(self) -> None:
        if self._is_over or not self._left:
            return
        link = self._left.pop(0)
        self._waiting += 1
        data, sent_s = bytearray(self._bytes), self._paces.clock.now_s()
        if self._left:
            late_s = mirroring.hedge_after_s(self._paces.of(link))
            self._timer = asyncio.get_running_loop().call_later(late_s, self._next)
        link.send_read(self._at, memoryview(data), lambda did, found: self._answered(link, data, sent_s, did, found))

    def _answered(self, link: RemoteSlab, data: bytearray, sent_s: float, did: bool, versions: Versions) -> None:
        self._waiting -= 1
        if did:
            self._paces.answered(link, self._paces.clock.now_s() - sent_s)
            if not all(map(ge, versions, self._wanted)):
                did, link.lied = False, True
                link.fail(f"{link.place.lender} returned older content than it acknowledged")
        if self._is_over:
            return
        if did:
            self._end(data, versions)
        elif self._left:
            self._next()
        elif not self._waiting:
            self._end(None, array("Q"))

    def _end(self, data: bytearray | None, versions: Versions) -> None:
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self._over(data, versions)
