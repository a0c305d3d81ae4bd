"""A volume's end of one slab on another host.

The paper shares one connection between all slabs of a device and a daemon (Infiniswap §2.6.2), and so do we
(`lender_link`). `held` is the page bitmap. It belongs to this object and goes with it (a hole in Infiniswap's released
code: its bitmap outlives the mapping and is cleared by hand): a slab whose link ended has another one when it is opened
again.
"""

import asyncio
from array import array
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from covey.wire.driven import Part
from plugins.memory.datapath.links.asked_in_order import NO_VERSIONS, Answered
from plugins.memory.datapath.links.lender_lane import LenderLane
from plugins.memory.datapath.links.mapped_slab import MappedSlab
from plugins.memory.datapath.links.one_sided import OneSided, SlabAsk
from plugins.memory.datapath.links.sealing import PageSeal
from plugins.memory.datapath.wire import slabwire
from plugins.memory.datapath.wire.control import OpenPlace
from plugins.memory.datapath.wire.slabwire import COPY, DISCARD, READ, VERSIONS, WRITE, SlabOp, Versions

T = TypeVar("T")
Opened = Callable[[bool, Versions, list[int]], None]

SHORT_BYTES: Final = 32 << 10
"""Most bytes of a request that goes over the connection for short ones."""


class SlabGone(Exception):
    """This place cannot be used any more; nothing is known about requests under way."""


class SlabStale(SlabGone):
    """The lender says that it has no such slab under this epoch."""


class PagesAtLender:
    """A set of pages of one slab that knows its size; one byte for each page of the slab."""

    __slots__ = ("count", "flags")

    def __init__(self, pages: int) -> None:
        self.flags = bytearray(pages)
        self.count = 0

    def add(self, page: int) -> None:
        if not self.flags[page]:
            self.flags[page] = 1
            self.count += 1

    def add_run(self, first: int, count: int) -> None:
        self.count += count - self.flags.count(1, first, first + count)
        self.flags[first : first + count] = b"\1" * count

    def has_all(self, first: int, count: int) -> bool:
        return self.flags[first] != 0 if count == 1 else self.flags.find(0, first, first + count) < 0

    def drop(self, first: int, count: int) -> None:
        if count == 1:
            self.count -= self.flags[first]
            self.flags[first] = 0
        else:
            self.count -= self.flags.count(1, first, first + count)
            self.flags[first : first + count] = bytes(count)

    def set_all(self, flags: bytes) -> None:
        self.flags[:] = flags
        self.count = flags.count(1)


class SlabAsked:
    """Passes on what a lender answered. Here and in callers it is an object with a method instead of a nested function:
    compiled, such a function and its variables refer to each other, and only a search for cycles frees them."""

    __slots__ = ("_answered", "_remote")

    def __init__(self, remote: "RemoteSlab", answered: Answered) -> None:
        self._remote, self._answered = remote, answered

    def over(self, did: bool, versions: Versions) -> None:
        self._remote.answered(did, versions, self._answered)


class AwaitedAnswer:
    """An answer that a coroutine waits for: the versions, or None when the request was not done."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done: asyncio.Future[Versions | None] = asyncio.get_running_loop().create_future()

    def answered(self, did: bool, versions: Versions) -> None:
        if not self.done.done():
            self.done.set_result(versions if did else None)


class SealedWrite:
    """A sealed write under way; its memory is used again once it is done."""

    __slots__ = ("_answered", "_seal", "_sealed")

    def __init__(self, seal: PageSeal, sealed: memoryview, answered: Answered) -> None:
        self._seal, self._sealed, self._answered = seal, sealed, answered

    def over(self, did: bool, versions: Versions) -> None:
        if did:
            self._seal.buffers.give(self._sealed)
        self._answered(did, versions)


class SealedRead:
    """A sealed read under way; pages are opened when they arrive. `opened` also gets the positions of pages that are
    not what was sealed."""

    __slots__ = ("_first", "_into", "_opened", "_seal", "sealed")

    def __init__(
        self,
        seal: PageSeal,
        first: int,
        into: memoryview,
        pages: int,
        opened: Opened,
    ) -> None:
        self._seal, self._first, self._into, self._opened = seal, first, into, opened
        self.sealed = seal.buffers.take(pages * seal.sealed_bytes)

    def over(self, did: bool, versions: Versions) -> None:
        wrong = self._seal.open(self._first, versions, self.sealed, self._into) if did else []
        if did:
            self._seal.buffers.give(self.sealed)
        self._opened(did, versions, wrong)


class OpenedRead:
    """A read whose pages were opened. A lender that gives back something else is not asked again."""

    __slots__ = ("_answered", "_remote")

    def __init__(self, remote: "RemoteSlab", answered: Answered) -> None:
        self._remote, self._answered = remote, answered

    def opened(self, did: bool, versions: Versions, wrong: list[int]) -> None:
        if wrong:
            self._remote.forged(len(wrong))
        self._answered(did and not wrong, versions)


class RemoteSlab:
    """A volume's end of one slab. Every coroutine raises SlabGone once the place failed; `why` says how. `ended` is
    called at once, also when no request is under way. `broken` ends the link, of which the slab is one of several;
    `unused` tells it that the slab does not use it any more."""

    ended: Callable[["RemoteSlab"], None] | None = None

    def __init__(
        self,
        place: OpenPlace,
        pages: int,
        page_bytes: int,
        lanes: tuple[LenderLane, LenderLane],
        broken: Callable[[str], None],
        unused: Callable[["RemoteSlab"], None],
        seal: PageSeal | None = None,
    ) -> None:
        self.place, self.pages, self.page_bytes = place, pages, page_bytes
        self.held = PagesAtLender(pages)
        """Pages whose newest content the lender is known to hold. The volume sets it, which knows what is newest."""
        self.why = ""
        self.lied = False
        """The lender does not hold what it acknowledged: it is not asked again."""
        self.retiring = False
        """No new requests are taken; those under way may finish."""
        self.is_paired = False
        """The slab is attached over the connection of the queue pair, too."""
        self.mapped: MappedSlab | None = None
        """The slab's mapped memory, if it is of this host; None: it is not mapped."""
        self._seal, self._first = seal, place.index * pages
        """The latter is the number of the slab's first page in the volume."""
        self._short, self._long = lanes
        self._broken, self._unused = broken, unused
        self._under_way = 0
        self._over_lanes = 0
        """Requests under way that were asked over the lanes before the slab went one-sided; 0 from then on."""
        self._one_sided: OneSided | None = None
        self._joining: OneSided | None = None
        """One-sided access that is used once everything under way over the lanes is answered."""
        self._then: Callable[[OpenPlace], None] | None = None
        self._gate: list[SlabAsk] = []
        """Requests that wait for `_joining`."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def usable(self) -> bool:
        return not self.why and not self.retiring

    # ---- requests ----

    def send_write(self, first: int, count: int, version: int, pages: memoryview | None, answered: Answered) -> None:
        """Send pages under one version; None: zeros. `answered` is called once, with whether the lender has them, and
        no versions. The buffer must stay as it is until then."""
        if self._seal is not None:
            self._send_sealed(self._seal, WRITE, first, array("Q", (version,)) * count, pages, answered)
            return
        if count == 1 and pages is not None and self._is_at_hand() and self._may_write(first):
            answered(self._write_one(first, version, pages), NO_VERSIONS)
            return
        if pages is None:
            self._ask(DISCARD, first, count, version, (), None, answered)
        else:
            self._ask(WRITE, first, count, version, (pages,), None, answered)

    def _send_sealed(
        self,
        seal: PageSeal,
        op: SlabOp,
        first: int,
        versions: Versions,
        pages: memoryview | None,
        answered: Answered,
    ) -> None:
        """Seal pages and send them. Zeros are sealed as well: otherwise a lender could claim zeros for any page."""
        sealed = seal.seal(self._first + first, versions, pages)
        parts: tuple[Part, ...] = (sealed,) if op is WRITE else (versions.tobytes(), sealed)
        over = SealedWrite(seal, sealed, answered).over
        self._ask(op, first, len(versions), versions[0] if op is WRITE else 0, parts, None, over)

    def send_read(self, first: int, into: memoryview, answered: Answered) -> None:
        """Fill `into`. `answered` is called once, with whether it is full, and the versions of what is in it."""
        seal, count = self._seal, len(into) // self.page_bytes
        if seal is None and self._is_at_hand() and self._is_free(first, count):
            self._read_now(first, into, answered)
        elif seal is None:
            self._ask(READ, first, count, 0, (), into, answered)
        else:
            self._read_sealed(seal, first, into, OpenedRead(self, answered).opened)

    def is_at_hand(self, page: int) -> bool:
        """Does `read_one` find this page as it was written last?"""
        return self._seal is None and self._is_at_hand() and self._is_free(page, 1)

    def read_one(self, page: int, into: memoryview) -> int:
        """Copy one page as `MappedSlab.read_one` does."""
        assert self.mapped is not None
        return self.mapped.read_one(page, into)

    def _read_sealed(self, seal: PageSeal, first: int, into: memoryview, opened: Opened) -> None:
        count = len(into) // self.page_bytes
        read = SealedRead(seal, self._first + first, into, count, opened)
        self._ask(READ, first, count, 0, (), read.sealed, read.over)

    def forged(self, count: int) -> None:
        self.lied = True
        what = "a page that was" if count == 1 else f"{count} pages that were"
        self.fail(f"{self.place.lender} returned {what} not sealed for it")

    async def write(self, first: int, versions: Versions, pages: memoryview | None) -> None:
        """Write pages; returns when the lender has them. `pages` None: zeros, under one version."""
        if self._seal is not None:
            answer = AwaitedAnswer()
            op = WRITE if pages is None else COPY
            self._send_sealed(self._seal, op, first, versions, pages, answer.answered)
            await self._awaited(answer.done)
        elif pages is None:
            await self._wait(DISCARD, first, len(versions), versions[0], ())
        else:
            await self._wait(COPY, first, len(versions), 0, (versions.tobytes(), pages))

    async def read(self, first: int, into: memoryview) -> Versions:
        """Fill `into` and return its versions."""
        versions, wrong = await self.read_what_is_ours(first, into)
        if wrong:
            self.forged(len(wrong))
            raise SlabGone(self.why)
        return versions

    async def read_what_is_ours(self, first: int, into: memoryview) -> tuple[Versions, list[int]]:
        """Read as `read` does, and return positions of pages that are not what was sealed for this lender; the others
        are good."""
        if self._seal is None:
            return await self._wait(READ, first, len(into) // self.page_bytes, 0, (), into), []
        done: asyncio.Future[tuple[Versions, list[int]] | None] = asyncio.get_running_loop().create_future()

        def opened(did: bool, versions: Versions, wrong: list[int]) -> None:
            if not done.done():
                done.set_result((versions, wrong) if did else None)

        self._read_sealed(self._seal, first, into, opened)
        return await self._awaited(done)

    async def versions(self) -> Versions:
        """Versions of all pages that the lender holds."""
        found = array("Q")
        while len(found) < self.pages:
            count = min(slabwire.VERSIONS_MAX, self.pages - len(found))
            found.extend(await self._wait(VERSIONS, len(found), count, 0, ()))
        return found

    async def _wait(
        self, op: SlabOp, first: int, count: int, version: int, parts: tuple[Part, ...], into: memoryview | None = None
    ) -> Versions:
        if not self.usable:
            raise SlabGone(self.why or "being closed")
        answer = AwaitedAnswer()
        self._ask(op, first, count, version, parts, into, answer.answered)
        return await self._awaited(answer.done)

    async def _awaited(self, done: "asyncio.Future[T | None]") -> T:
        try:
            found = await done
        except asyncio.CancelledError:
            self.fail("a request was cancelled half way")
            raise
        if found is None or self.why:
            raise SlabGone(self.why or "given up")
        return found

    def _ask(
        self,
        op: SlabOp,
        first: int,
        count: int,
        version: int,
        parts: tuple[Part, ...],
        into: memoryview | None,
        answered: Answered,
    ) -> None:
        if not self.usable:
            answered(False, array("Q"))
            return
        over = SlabAsked(self, answered).over
        short = op is not COPY and count * self.page_bytes <= SHORT_BYTES
        lane = self._short if short else self._long
        if not self._under_way:
            self._idle.clear()
        self._under_way += 1
        if op is VERSIONS or (self._one_sided is None and self._joining is None):
            self._over_lanes += self._one_sided is None
            lane.ask(self.place, op, first, count, version, parts, into, over)
            return
        by_lane = partial(lane.ask, self.place, op, first, count, version, parts, into)
        asked = SlabAsk(op, first, count, version, parts, into, over, by_lane)
        if self._one_sided is not None:
            self._one_sided.ask(asked)
        else:
            self._gate.append(asked)

    def answered(self, did: bool, versions: Versions, then: Answered) -> None:
        """A request was answered (called by `SlabAsked`); `then` is told."""
        self._under_way -= 1
        if not self._under_way:
            self._idle.set()
            idle, self._then = self._then, None
            if idle is not None:
                idle(self.place)
        then(did and not self.why, versions)
        if self._over_lanes:
            self._over_lanes -= 1
            self._join()

    # ---- mapped: what takes no time needs nobody who waits for it ----

    def _is_at_hand(self) -> bool:
        return self.mapped is not None and self._one_sided is not None and self.usable

    def _is_free(self, first: int, count: int) -> bool:
        assert self._one_sided is not None
        return self._one_sided.is_free(first, count)

    def _may_write(self, page: int) -> bool:
        assert self._one_sided is not None
        return self._one_sided.may_write(page)

    def _write_one(self, page: int, version: int, content: memoryview) -> bool:
        assert self.mapped is not None
        return self.mapped.write_one(page, version, content)

    def _read_now(self, first: int, into: memoryview, answered: Answered) -> None:
        assert self.mapped is not None
        versions = self.mapped.read_now(first, into)
        answered(versions is not None, NO_VERSIONS if versions is None else versions)

    # ---- one-sided ----

    @property
    def one_sided(self) -> bool:
        return self._one_sided is not None

    def go_one_sided(self, one_sided: OneSided) -> None:
        """Go one-sided as soon as nothing is under way over the lanes: the two ways have no order between them."""
        self._joining = one_sided
        self._join()

    def when_idle(self, then: Callable[[OpenPlace], None]) -> None:
        """Call `then` when no request is under way."""
        if self._under_way:
            self._then = then
        else:
            then(self.place)

    def adopted(self) -> None:
        """The volume uses the slab from now on."""
        if self._one_sided is not None:
            self._one_sided.starts(self.held.flags)

    def _join(self) -> None:
        if self._joining is None or self._over_lanes or self.why:
            return
        self._one_sided, self._joining = self._joining, None
        self._one_sided.starts(self.held.flags)
        gate, self._gate = self._gate, []
        for asked in gate:
            self._one_sided.ask(asked)

    # ---- the end ----

    async def retire(self) -> None:
        """Let requests under way finish (the lender has a deadline), then close."""
        self.retiring = True
        await self._idle.wait()
        self.fail("closed")

    def fail(self, why: str) -> None:
        """Close the place. Idempotent. With requests under way the whole link ends: bytes of theirs may be half way in
        either direction, and their buffers may be used for something else in a moment."""
        if self.why:
            return
        self.why = why
        if self._under_way:
            self._broken(f"slab {self.place.index}: {why}")
        else:
            self._unused(self)
        self._over()

    def lost(self, why: str) -> None:
        """The link ended, or the lender no longer has the slab. The link answers what is under way."""
        if not self.why:
            self.why = why
            self._over()

    def _over(self) -> None:
        gate, self._gate = self._gate, []
        for asked in gate:
            asked.answered(False, array("Q"))
        for one_sided in (self._one_sided, self._joining):
            if one_sided is not None:
                one_sided.end()
        if self.ended is not None:
            self.ended(self)
