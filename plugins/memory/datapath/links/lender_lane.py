"""A volume's end of one connection to a slab process: requests of many slabs under way, answered in their order.

Nothing is awaited: a request is queued with a function that is called with its answer, requests of one turn leave
together, and the deadline is one timer, over the oldest. An answer's bytes go straight to where they were wanted.
"""

from array import array
from collections import deque
from collections.abc import Callable
from typing import Final

from covey.ports.env import Env
from covey.wire.driven import DrivenStream, Part
from covey.wire.headers import WireError
from plugins.memory.datapath.links.asked_in_order import NO_VERSIONS, Answered, AskedInOrder
from plugins.memory.datapath.wire import slabwire
from plugins.memory.datapath.wire.control import OpenPlace
from plugins.memory.datapath.wire.slabwire import (
    ATTACHED_BYTES,
    BAD,
    DETACH,
    GONE,
    LENT_MEMORY_BYTES,
    LENT_REGION_BYTES,
    PAIRED_BYTES,
    READ,
    REPLY_BYTES,
    VERSION_BYTES,
    VERSIONS,
    SlabOp,
    SlabReply,
    SlabRequest,
    SlabStatus,
)

ANSWERS: Final = {
    SlabOp.ATTACH: ATTACHED_BYTES,
    SlabOp.PAIR: PAIRED_BYTES,
    SlabOp.REGION: LENT_REGION_BYTES,
    SlabOp.MAP: LENT_MEMORY_BYTES,
}
"""Operation -> bytes of its answer, where the length is fixed."""


class LaneRequest:
    """A request that waits for its answer."""

    __slots__ = ("answered", "into", "op", "pages", "sent_s", "tag")

    def __init__(
        self, op: SlabOp, pages: int, tag: int, into: memoryview | None, answered: Answered, sent_s: float
    ) -> None:
        self.op, self.pages, self.tag = op, pages, tag
        self.into, self.answered, self.sent_s = into, answered, sent_s

    def __repr__(self) -> str:
        return f"{self.op.name} of {self.pages} pages, tag {self.tag}"


class LenderLane(AskedInOrder):
    """One connection to a slab process (`Driven`). `lost` is called once when the connection ends, with the reason,
    before requests under way are answered. `gone` is called with the index and epoch of a slab that the lender says is
    not ours any more."""

    def __init__(
        self,
        env: Env,
        stream: DrivenStream,
        deadline_s: float,
        lost: Callable[[str], None],
        gone: Callable[[int, int], None],
    ) -> None:
        super().__init__(env, deadline_s, lost)
        self._stream, self._gone = stream, gone
        self._now_s = env.clock.now_s
        self._waiting: deque[LaneRequest] = deque()
        self._tag = 0
        self._out: list[Part] = []
        self._answers = self._answers_seen = 0
        self._header = memoryview(bytearray(REPLY_BYTES))
        self._target: memoryview | None = None
        """Buffer for the rest of an answer; None: a header comes next."""
        self._versions = NO_VERSIONS

    def ask(
        self,
        place: OpenPlace,
        op: SlabOp,
        page: int,
        pages: int,
        version: int,
        parts: tuple[Part, ...],
        into: memoryview | None,
        answered: Answered,
    ) -> None:
        """Send a request. Buffers must stay as they are until it is answered; if the connection is over, that happens
        before this returns."""
        if self.why:
            answered(False, NO_VERSIONS)
            return
        self._tag += 1
        size = 0
        for part in parts:
            size += len(part)
        request = SlabRequest(op, pages, place.index, page, size, place.epoch, self._tag, version)
        self._waiting.append(LaneRequest(op, pages, self._tag, into, answered, self._now_s()))
        self._send(slabwire.pack_request(request), *parts)
        self._watch()

    def detach(self, place: OpenPlace) -> None:
        if not self.why:
            self._send(slabwire.pack_request(SlabRequest(DETACH, 0, place.index, 0, 0, place.epoch, 0, 0)))

    def _send(self, *parts: Part) -> None:
        if not self._out:
            self._stream.soon(self._flush)
        self._out += parts

    def _flush(self) -> None:
        if self._out and not self.why:
            out, self._out = self._out, []
            self._stream.send(out)

    def _oldest_s(self) -> float | None:
        return self._waiting[0].sent_s if self._waiting else None

    def _late(self, left_s: float) -> float:
        """Seconds left for the oldest request: while others are answered, a lender with much to do is not silent."""
        if left_s <= 0 and self._answers != self._answers_seen:
            left_s = self._deadline_s
        self._answers_seen = self._answers
        return left_s

    def _close(self) -> None:
        self._stream.close()

    def _take_all(self) -> list[Answered]:
        waiting, self._waiting = self._waiting, deque()
        return [each.answered for each in waiting]

    # ---- driven ----

    def wanted(self) -> memoryview:
        return self._header if self._target is None else self._target

    def filled(self) -> None:
        try:
            if self._target is None:
                self._begin(*slabwire.reply_fields(self._header))
            else:
                self._go_on()
        except WireError as error:
            self.end(f"sent something else: {error}")

    def turn(self) -> None:
        self._flush()

    def ended(self, error: ConnectionError) -> None:
        self.end(f"connection: {error}")

    def _begin(self, status: SlabStatus, pages: int, slab: int, epoch: int, tag: int) -> None:
        self._answers += 1
        if tag == 0 and status is GONE:
            self._gone(slab, epoch)
            return
        oldest = self._waiting[0] if self._waiting else None
        if oldest is None or tag != oldest.tag or status is BAD:
            raise WireError(f"{SlabReply(status, pages, slab, epoch, tag)} to {oldest}")
        if status is GONE:
            self._waiting.popleft()
            self._gone(slab, epoch)
            oldest.answered(False, NO_VERSIONS)
            return
        if pages != oldest.pages:
            raise WireError(f"{SlabReply(status, pages, slab, epoch, tag)} to {oldest}")
        op = oldest.op
        if op is READ or op is VERSIONS:
            self._versions = array("Q", bytes(pages * VERSION_BYTES))
            self._target = memoryview(self._versions).cast("B")
        elif oldest.into is None:
            self._waiting.popleft()
            oldest.answered(True, NO_VERSIONS)
        else:
            assert len(oldest.into) == ANSWERS[op]
            self._target = oldest.into

    def _go_on(self) -> None:
        """The versions of an answer are here, or all of it."""
        oldest = self._waiting[0]
        if oldest.op is READ and self._target is not oldest.into:
            self._target = oldest.into
            return
        self._waiting.popleft()
        self._target = None
        versions, self._versions = self._versions, NO_VERSIONS
        oldest.answered(True, versions)
