"""Gives a volume's links one-sided access, and ends it.

    a link is made (TCP) --> a device here? --> third connection, PAIR --> two queue pairs that know one another
    a slab is attached   --> ATTACH, REGION over that connection, a READ that arrives --> its pages go one-sided

A slab is used over TCP until then, and where something refuses: no device on either side or none whose port is up,
another version, memory that may not be locked, a network that the device does not reach. That is tried again now and
then. When a queue pair fails later its link ends, all of it: a WRITE may still be on its way, and the session that
follows fences it at the lender. The next link pairs again, later each time it fails.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from covey.ports.env import Env
from covey.ports.verbs import NoVerbs
from covey.wire import handshake
from covey.wire.headers import WireError
from plugins.memory.datapath.lending.slab_session import Greeting
from plugins.memory.datapath.links.lender_lane import LenderLane
from plugins.memory.datapath.links.lender_pair import LenderPair, PairedSlab
from plugins.memory.datapath.links.one_sided import OneSided, OwnDisk
from plugins.memory.datapath.links.remote_slab import RemoteSlab, SlabGone
from plugins.memory.datapath.wire import slabwire
from plugins.memory.datapath.wire.control import OpenPlace
from plugins.memory.datapath.wire.slabwire import (
    ATTACHED_BYTES,
    LENT_REGION_BYTES,
    PAIRED_BYTES,
    LentRegion,
    SlabOp,
    Versions,
)

AGAIN_S, AGAIN_MAX_S = 2.0, 600.0
"""First and longest time in seconds until a link without a queue pair tries again; doubled each time."""
FAILED_S, FAILED_MAX_S = 1.0, 300.0
"""First and longest time in seconds until a link to a lender whose queue pair failed tries again, doubled each time; a
first failure costs nothing."""
WELL_S = 60.0
"""Seconds after which a queue pair that lived so long had nothing to do with the failures before it."""

Control = Callable[[OpenPlace, Callable[[str], None]], Awaitable[tuple[LenderLane, Greeting]]]
"""Makes the third connection; `lost` is called at its end. SlabGone."""


class PairableLink(Protocol):
    """The part of `lender_link.LenderLink` that is used here."""

    lender: str
    address: str
    why: str
    """Why it ended; empty: it did not."""
    slabs: dict[tuple[int, int], RemoteSlab]
    paired: "PairedLink | None"
    pairing: "PairTries"

    def end(self, why: str) -> None: ...

    def gone(self, index: int, epoch: int) -> None: ...


class PairTries:
    """Attempts to make a queue pair for one link that has none yet."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        """Held while a queue pair is made."""
        self.from_s: float | None = None
        """Time from which the next may be made; None: not decided yet."""
        self.pause_s = AGAIN_S
        """Seconds to pause after the next attempt that fails."""
        self.waits = False
        """A task waits until then."""

    def failed(self, now_s: float) -> None:
        """An attempt failed. Ignored while the next is not allowed yet: that is one failure, of which several slabs
        heard."""
        if (self.from_s or 0.0) > now_s:
            return
        self.from_s = now_s + self.pause_s
        self.pause_s = min(AGAIN_MAX_S, 2 * self.pause_s)


class PairedLink:
    """One link's queue pair, and the connection on which it depends."""

    def __init__(self, env: Env, lender: str) -> None:
        self.why = ""
        """Why there is no queue pair (any more); empty: there is one, or it is being made."""
        self.pair: LenderPair | None = None
        self.lane: LenderLane | None = None
        self.greeting: Greeting | None = None
        self.first: OpenPlace | None = None
        """The slab that the connection was made for, attached by its hello."""
        self.is_tried = False
        """A READ arrived over it, so pages may be under way."""
        self.turn = asyncio.Lock()
        """Held during a question over the connection: one at a time."""
        self.since_s = env.clock.now_s()
        self.lender = lender

    def end(self, why: str) -> None:
        """End the queue pair and its connection. Idempotent."""
        self.why = self.why or why
        if self.pair is not None:
            self.pair.end(why)
        if self.lane is not None:
            self.lane.end(why)

    def detach(self, place: OpenPlace) -> None:
        if self.lane is not None:
            self.lane.detach(place)

    async def ask(self, place: OpenPlace, op: SlabOp, part: bytes, size: int) -> bytes:
        """Ask over the connection and return the answer. NoVerbs when there is none."""
        assert self.lane is not None
        data = bytearray(size)
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def answered(did: bool, versions: Versions) -> None:
            if not done.done():
                done.set_result(did)

        self.lane.ask(place, op, 0, 0, 0, (part,) if part else (), memoryview(data), answered)
        if not await done:
            raise NoVerbs(f"{self.lender} {self.lane.why or 'no longer lends that slab'}")
        return bytes(data)


class VolumeVerbs:
    """One-sided access of one volume. `disk` None: nothing is known of its pages, so nothing goes one-sided."""

    def __init__(self, env: Env, pages: int, page_bytes: int, deadline_s: float, disk: OwnDisk | None) -> None:
        self.why = ""
        """Why the link that tried last is over TCP alone; empty: it is not, or none tried."""
        self.failed = 0
        """Count of links that ended because their queue pair did."""
        self.joined = 0
        """Count of slabs that went one-sided."""
        self._env, self._disk, self._deadline_s = env, disk, deadline_s
        self._pages, self.page_bytes = pages, page_bytes
        """The latter is the size in bytes of a page as it is stored at its lender, sealed or not."""
        self._failures: dict[str, tuple[int, float]] = {}
        """Address of a lender -> how often in a row a queue pair to it failed, and when the next may be made."""

    def begin(self, link: PairableLink, slab: RemoteSlab, control: Control) -> None:
        """A slab was attached: let it go one-sided, if possible."""
        tries = link.pairing
        if self._disk is None:
            return
        if tries.from_s is None:  # it is new
            tries.from_s = self._failures.get(link.address, (0, 0.0))[1]
        if tries.from_s <= self._env.clock.now_s():
            self._env.spawn(f"one-sided slab {slab.place.index}", self._try(link, slab, control))
        else:
            self._wait(link, control)

    async def _try(self, link: PairableLink, slab: RemoteSlab, control: Control) -> None:
        """Try to let the slab go one-sided; note why not."""
        try:
            await self._join(link, slab, control)
        except (NoVerbs, WireError, SlabGone) as why:
            if link.why or slab.why:
                return
            self._say(link, str(why))
            if link.paired is None or link.paired.why:
                link.pairing.failed(self._env.clock.now_s())
                self._wait(link, control)

    def _wait(self, link: PairableLink, control: Control) -> None:
        """Start one task for each link without a queue pair, which tries again."""
        if not link.pairing.waits:
            link.pairing.waits = True
            self._env.spawn("pair again", self._again(link, control))

    async def _again(self, link: PairableLink, control: Control) -> None:
        """Try every slab of the link once the next queue pair may be made."""
        tries = link.pairing
        while not link.why and tries.from_s is not None:
            left_s = tries.from_s - self._env.clock.now_s()
            if left_s > 0:
                await asyncio.sleep(left_s)
                continue
            for slab in list(link.slabs.values()):
                if not slab.one_sided and slab.usable:
                    await self._try(link, slab, control)
            if tries.from_s <= self._env.clock.now_s():  # none failed
                break
        tries.waits = False

    async def _join(self, link: PairableLink, slab: RemoteSlab, control: Control) -> None:
        async with link.pairing.lock:
            paired = link.paired
            if paired is None or paired.why:
                if (link.pairing.from_s or 0.0) > self._env.clock.now_s():
                    raise NoVerbs(self.why)  # others who waited found out
                paired = await self._paired(link, slab.place, control)
        assert paired.pair is not None and self._disk is not None
        async with paired.turn:
            slab.is_paired = True
            there = await self._region(paired, slab.place)
            await paired.pair.probe(there)
            paired.is_tried = True
        if slab.why or paired.why:
            raise NoVerbs(slab.why or paired.why)
        first = slab.place.index * self._pages
        slab.go_one_sided(OneSided(PairedSlab(paired.pair, there), first, self._pages, self._disk))
        self.joined += 1
        self.why = ""

    async def _paired(self, link: PairableLink, place: OpenPlace, control: Control) -> PairedLink:
        device = self._env.verbs.open()
        paired = PairedLink(self._env, link.lender)

        def lost(why: str) -> None:
            """The queue pair, or the connection on which it depends, has ended."""
            was_up = paired.is_tried and not paired.why
            paired.end(why)
            if was_up and not link.why:
                self._count(link, paired, why)
                link.end(why)

        try:
            paired.pair = LenderPair(self._env, device, self.page_bytes, self._deadline_s, lost)
        except NoVerbs:
            device.close()
            raise
        try:
            paired.lane, paired.greeting = await control(place, lost)
            paired.first = place
            told = slabwire.pack_paired(paired.pair.where)
            peer = slabwire.paired(await paired.ask(place, SlabOp.PAIR, told, PAIRED_BYTES))
            if isinstance(peer, str):
                raise NoVerbs(f"{link.lender}: {peer}")
            if link.why or paired.why:
                raise NoVerbs(link.why or paired.why)
            paired.pair.connect(peer)
        except (NoVerbs, WireError, SlabGone, asyncio.CancelledError):
            paired.end("not made")
            raise
        link.paired = paired
        return paired

    async def _region(self, paired: PairedLink, place: OpenPlace) -> LentRegion:
        assert paired.greeting is not None
        if paired.first is not place:
            known_by = (place.secret, paired.greeting.packed, paired.greeting.nonce, place.index, place.epoch)
            proof = slabwire.proof_of_volume(*known_by)
            found = slabwire.attached(await paired.ask(place, SlabOp.ATTACH, proof, ATTACHED_BYTES))
            if not handshake.is_proof(found.proof, slabwire.proof_of_lender(*known_by)):
                raise NoVerbs(f"{paired.lender} does not know the secret of slab {place.index}")
        where = slabwire.region(await paired.ask(place, SlabOp.REGION, b"", LENT_REGION_BYTES))
        if isinstance(where, str):
            raise NoVerbs(f"{paired.lender}: {where}")
        return where

    def _count(self, link: PairableLink, paired: PairedLink, why: str) -> None:
        self.failed += 1
        now_s = self._env.clock.now_s()
        before = 0 if now_s - paired.since_s > WELL_S else self._failures.get(link.address, (0, 0.0))[0]
        pause_s = min(FAILED_MAX_S, FAILED_S * 2 ** (before - 1)) if before else 0.0
        self._failures[link.address] = (before + 1, now_s + pause_s)
        self.why = f"{link.lender}: its queue pair failed, {why}"
        self._env.log.warning("a queue pair failed", lender=link.lender, why=why, next_try_s=pause_s)

    def _say(self, link: PairableLink, why: str) -> None:
        if why != self.why:
            self.why = why
            self._env.log.info("a lender is used over TCP", lender=link.lender, why=why)
