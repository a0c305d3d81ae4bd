"""A slab process's end of one-sided access: slabs registered once, a queue pair for each volume that asked for one.

Registered memory is in RAM, whole, so a slab counts as touched from then on. Who may reach it, and until when:

    a slab is freed         its borrower is told (GONE); once nothing of its is under way, or after `DRAIN_S`, the
                            memory is deregistered, and given back after that. A WRITE that comes later fails, and its
                            queue pair with it.
    another session has it  the queue pair of the earlier session is destroyed before the new one gets an answer: what a
                            dead process left on its way cannot land after its successor asked what is there
    the connection ends     the queue pair is destroyed

Every volume has a protection domain of its own, so that no key opens another's slab.
"""

import asyncio
from collections.abc import Callable

from covey.ports.env import Env
from covey.ports.verbs import NoVerbs, Pair, PairPlace, Region, VerbsDevice
from plugins.memory.datapath.lending import slab_maps
from plugins.memory.datapath.lending.slab_store import HostedSlab
from plugins.memory.datapath.wire.slabwire import LentRegion, SlabHello

DRAIN_S = 0.25
"""Seconds that a borrower has to say that nothing is under way in a slab that is taken back."""


class LenderDomain:
    """The protection domain of one volume: a device reaches its slabs here, and no other's. It is closed with the last
    thing in it."""

    def __init__(self, device: VerbsDevice, gone: Callable[[], None]) -> None:
        self.device, self._gone = device, gone
        self._uses = 0

    def use(self) -> None:
        self._uses += 1

    def leave(self) -> None:
        self._uses -= 1
        if not self._uses:
            self._gone()
            self.device.close()


class RegisteredSlab:
    """Registration of one slab (`slab_store.Registered`)."""

    def __init__(self, domain: LenderDomain, slab: HostedSlab) -> None:
        """Register pages and versions. NoVerbs when the device or a limit refuses."""
        self.left = asyncio.Event()
        self._late: asyncio.TimerHandle | None = None
        pages = domain.device.register(memoryview(slab.memory), remote=True)
        try:
            versions = domain.device.register(memoryview(slab.versions).cast("B"), remote=True)
        except NoVerbs:
            pages.close()
            raise
        self.where = LentRegion(pages.key, versions.key, pages.address, versions.address)
        self._regions: tuple[Region, ...] = (pages, versions)
        self._domain = domain
        domain.use()

    def let_go(self) -> None:
        if not self.left.is_set():
            self._late = asyncio.get_running_loop().call_later(DRAIN_S, self.close)

    def close(self) -> None:
        """Idempotent."""
        if self._late is not None:
            self._late.cancel()
        if not self.left.is_set():
            for region in self._regions:
                region.close()
            self.left.set()
            self._domain.leave()


class LenderVerbs:
    """One-sided access to this process's slabs. The device is opened when the first volume asks. `why`: why a volume
    got no access; empty: all that asked did."""

    def __init__(self, env: Env) -> None:
        self.why = self.name = ""
        self.pairs = 0
        """Number of living queue pairs."""
        self._env = env
        self._domains: dict[tuple[str, str], LenderDomain] = {}
        """Borrower and volume -> protection domain."""

    def pair(self, borrower: str, volume: str, peer: PairPlace) -> "LenderPairEnd":
        """Make a queue pair and connect it to `peer`. NoVerbs says why not."""
        try:
            domain = self._domain(borrower, volume)
            domain.use()
            try:
                end = LenderPairEnd(domain, peer)
            except NoVerbs:
                domain.leave()
                raise
        except NoVerbs as why:
            self._say(str(why))
            raise
        self.pairs += 1
        self.why = ""
        return end

    def close(self, end: "LenderPairEnd") -> None:
        end.pair.close()
        end.domain.leave()
        self.pairs -= 1

    async def register(self, slab: HostedSlab) -> LentRegion:
        """Register a slab, once. NoVerbs says why not; ValueError: it was freed meanwhile."""
        await slab_maps.populate(slab)
        if not slab.live:
            raise ValueError("freed meanwhile")
        if slab.registered is None:
            try:
                slab.registered = RegisteredSlab(self._domain(slab.borrower, slab.volume), slab)
            except NoVerbs as why:
                self._say(str(why))
                raise
            slab.touch_all()
            slab.kept.reached_by_a_device()
        return slab.registered.where

    def _domain(self, borrower: str, volume: str) -> LenderDomain:
        key = (borrower, volume)
        if key not in self._domains:
            device = self._env.verbs.open()
            self._domains[key] = LenderDomain(device, lambda: self._domains.__delitem__(key))
            self.name = device.name
        return self._domains[key]

    def _say(self, why: str) -> None:
        if why != self.why:
            self.why = why
            self._env.log.info("no one-sided access", why=why)


class LenderPairEnd:
    """A lender's queue pair. NoVerbs when the device refuses it."""

    def __init__(self, domain: LenderDomain, peer: PairPlace) -> None:
        self.domain = domain
        self.pair: Pair = domain.device.pair(_nothing)
        try:
            self.pair.connect(peer)
        except NoVerbs:
            self.pair.close()
            raise


class SessionVerbs:
    """The one-sided access of one connection."""

    def __init__(self, lender: LenderVerbs, said: SlabHello) -> None:
        self._lender, self._said = lender, said
        self._pair: LenderPairEnd | None = None
        self._freed: dict[tuple[int, int], RegisteredSlab] = {}
        """Slabs that were freed under their borrower, which has not said yet that nothing is under way."""

    @property
    def has_pair(self) -> bool:
        return self._pair is not None

    def connect(self, peer: PairPlace) -> PairPlace:
        """Connect a queue pair to `peer` and return its own address. NoVerbs says why not."""
        self._pair = self._lender.pair(self._said.borrower, self._said.volume, peer)
        return self._pair.pair.where

    def register(self, env: Env, slab: HostedSlab, answer: Callable[[LentRegion | None, str], None]) -> None:
        """Register a slab; `answer` is called with where it is, or why it is not registered."""

        async def work() -> None:
            try:
                where = await self._lender.register(slab)
            except (NoVerbs, ValueError) as why:
                answer(None, str(why))
            else:
                answer(where, "")

        env.spawn("register a slab with the device", work())

    def lose(self, slab: HostedSlab) -> None:
        """A slab is lost to this connection: cut one-sided access before anybody is told."""
        if slab.live:
            self.end()  # another session has it from now on
        elif self._pair is not None and slab.registered is not None:
            registered = slab.registered
            assert isinstance(registered, RegisteredSlab)
            self._freed[slab.index, slab.epoch] = registered

    def drained(self, index: int, epoch: int) -> None:
        registered = self._freed.pop((index, epoch), None)
        if registered is not None:
            registered.close()

    def end(self) -> None:
        """Close the queue pair and the registrations of freed slabs. Idempotent."""
        pair, self._pair = self._pair, None
        if pair is not None:
            self._lender.close(pair)
        freed, self._freed = self._freed, {}
        for registered in freed.values():
            registered.close()


def _nothing(why: str) -> None:
    """Handler of events that never come: a lender posts nothing."""
