"""A volume's end of one-sided access to one slab process: pages written and read without its processor.

What is sent is copied to memory that is registered once, and what is read comes from there: buffers of clients need not
be registered, and none of them is touched after its request was answered. That memory is a ring, since a queue pair
finishes in the order of its posts.

    write   WRITE zeros over the versions of the pages, WRITE the pages, WRITE the versions
    read    READ the versions, READ the pages

A WRITE is not whole at once. A page whose version is 0 is one that nobody wrote, so nobody is
told after a crash of a page that is half there; what it held before is lost, and `one_sided` sees to it that this is
on disk.
"""

import asyncio
import mmap
from array import array
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from covey.ports.env import Env
from covey.ports.verbs import STEPS_MAX, NoVerbs, PairPlace, VerbsDevice, VerbStep
from plugins.memory.datapath.links.asked_in_order import NO_VERSIONS, Answered, AskedInOrder
from plugins.memory.datapath.wire.slabwire import VERSION_BYTES, LentRegion, Versions
from plugins.memory.policy.settings import REQUEST_PAGES_MAX

REQUESTS = 2
"""Number of longest requests that the ring holds at once."""
STEP_BYTES = 1 << 20
"""Bytes of one message: a device has a longest message, and every device takes this."""
ZEROS_BYTES = REQUEST_PAGES_MAX * VERSION_BYTES


class RingBytes:
    """Places in a ring of `size` bytes, given back in the order in which they were taken. Sans-io."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._begin = self._end = 0
        """Bytes ever given back, and bytes ever taken; what is between is in use."""

    def take(self, size: int) -> int | None:
        """Take `size` free bytes in a row and return where they are; None: there are none now."""
        if self._begin == self._end:
            self._begin = self._end = -(-self._end // self._size) * self._size  # all of it is free: in a row
        at = self._end % self._size
        skipped = self._size - at if at + size > self._size else 0
        if self._end + skipped + size - self._begin > self._size:
            return None
        self._end += skipped + size
        return (at + skipped) % self._size

    @property
    def taken(self) -> int:
        """Value for `give_back` that gives back everything taken so far."""
        return self._end

    def give_back(self, upto: int) -> None:
        self._begin = upto


class PairRequest:
    """A request for a run of pages of a slab. `versions`: those to be written; empty: this is a read."""

    __slots__ = ("answered", "count", "first", "pages", "there", "versions")

    def __init__(
        self, there: LentRegion, first: int, count: int, versions: bytes, pages: memoryview, answered: Answered
    ) -> None:
        self.there, self.first, self.count = there, first, count
        self.versions, self.pages, self.answered = versions, pages, answered


class PostedRequest(NamedTuple):
    request: PairRequest
    at: int
    steps: int
    upto: int
    sent_s: float


class LenderPair(AskedInOrder):
    """A queue pair to one slab process. `lost` is called once, with the reason, when it is of no use any more. NoVerbs
    when the device refuses it."""

    def __init__(
        self, env: Env, device: VerbsDevice, page_bytes: int, deadline_s: float, lost: Callable[[str], None]
    ) -> None:
        super().__init__(env, deadline_s, lost)
        self.written_bytes = self.read_bytes = 0
        self._device, self._page_bytes = device, page_bytes
        size = REQUESTS * REQUEST_PAGES_MAX * (page_bytes + VERSION_BYTES)
        self._memory = memoryview(mmap.mmap(-1, ZEROS_BYTES + size))
        self._ring = RingBytes(size)
        self._waiting: deque[PairRequest] = deque()
        """Requests that wait for room."""
        self._posted: deque[PostedRequest] = deque()
        self._steps = 0
        self._region = device.register(self._memory, remote=False)
        try:
            self._pair = device.pair(self._done)
        except NoVerbs:
            self._region.close()
            raise

    @property
    def where(self) -> PairPlace:
        return self._pair.where

    def connect(self, peer: PairPlace) -> None:
        """Connect to the lender's queue pair. NoVerbs when the device refuses it."""
        self._pair.connect(peer)

    def write(self, there: LentRegion, first: int, versions: Versions, pages: memoryview, answered: Answered) -> None:
        """Write pages. `pages` must stay as it is until the write is answered."""
        self._ask(PairRequest(there, first, len(versions), versions.tobytes(), pages, answered))

    def read(self, there: LentRegion, first: int, into: memoryview, answered: Answered) -> None:
        self._ask(PairRequest(there, first, len(into) // self._page_bytes, b"", into, answered))

    async def probe(self, there: LentRegion) -> None:
        """Read one page as a test. NoVerbs when the lender cannot be reached this way."""
        done: asyncio.Future[bool] = self._loop.create_future()

        def answered(did: bool, versions: Versions) -> None:
            if not done.done():
                done.set_result(did)

        page = bytearray(self._page_bytes)
        self.read(there, 0, memoryview(page), answered)
        if not await done:
            raise NoVerbs(self.why)

    def _ask(self, request: PairRequest) -> None:
        if self.why:
            request.answered(False, NO_VERSIONS)
            return
        self._waiting.append(request)
        self._go_on()

    def _go_on(self) -> None:
        """Post waiting requests in order, as far as there is room."""
        while self._waiting and not self.why:
            request = self._waiting[0]
            kept = request.count * VERSION_BYTES
            size = kept + len(request.pages)
            parts = -(-len(request.pages) // STEP_BYTES)
            steps = parts + (2 if request.versions else 1)
            if self._steps + steps > STEPS_MAX:
                return
            at = self._ring.take(size)
            if at is None:
                return
            self._waiting.popleft()
            at += ZEROS_BYTES
            if request.versions:
                self._memory[at : at + kept] = request.versions
                self._memory[at + kept : at + size] = request.pages
            self._steps += steps
            now_s = self._env.clock.now_s()
            self._posted.append(PostedRequest(request, at, steps, self._ring.taken, now_s))
            self._pair.post(self._steps_of(request, at))
            self._watch()

    def _steps_of(self, request: PairRequest, at: int) -> list[VerbStep]:
        here, key, there = self._region.address, self._region.key, request.there
        is_read, kept = not request.versions, request.count * VERSION_BYTES
        versions_at = there.versions_at + request.first * VERSION_BYTES
        pages_at = there.pages_at + request.first * self._page_bytes
        marks = VerbStep(is_read, here + at, key, versions_at, there.versions_key, kept)
        size = len(request.pages)
        pages = [
            VerbStep(
                is_read, here + at + kept + part, key, pages_at + part, there.pages_key, min(STEP_BYTES, size - part)
            )
            for part in range(0, size, STEP_BYTES)
        ]
        if is_read:
            return [marks, *pages]
        return [marks._replace(here=here), *pages, marks]

    def _done(self, why: str) -> None:
        """The oldest post is done, or no further one will be."""
        if self.why:
            return
        if why:
            self.end(why)
            return
        posted = self._posted.popleft()
        request = posted.request
        self._steps -= posted.steps
        versions = NO_VERSIONS
        kept, size = request.count * VERSION_BYTES, len(request.pages)
        if request.versions:
            self.written_bytes += size
        else:
            self.read_bytes += size
            versions = array("Q", bytes(self._memory[posted.at : posted.at + kept]))
            request.pages[:] = self._memory[posted.at + kept : posted.at + kept + size]
        self._ring.give_back(posted.upto)
        request.answered(True, versions)
        self._go_on()

    def _oldest_s(self) -> float | None:
        return self._posted[0].sent_s if self._posted else None

    def end(self, why: str) -> None:
        super().end(f"one-sided: {why}")

    def _close(self) -> None:
        self._pair.close()
        self._region.close()
        self._device.close()

    def _take_all(self) -> list[Answered]:
        posted, self._posted = self._posted, deque()
        waiting, self._waiting = self._waiting, deque()
        return [each.answered for each in [*(each.request for each in posted), *waiting]]


class PairedSlab:
    """`one_sided.PagesThere` for one slab that such a pair reaches."""

    def __init__(self, pair: LenderPair, there: LentRegion) -> None:
        self._pair, self._there = pair, there

    def write(self, first: int, versions: Versions, pages: memoryview, answered: Answered) -> None:
        self._pair.write(self._there, first, versions, pages, answered)

    def read(self, first: int, into: memoryview, answered: Answered) -> None:
        self._pair.read(self._there, first, into, answered)

    def close(self) -> None:
        """Nothing to close: the pair belongs to its link."""
