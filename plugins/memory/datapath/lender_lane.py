"""A volume's end of one connection to a slab process: requests of many slabs under way, answered in their order.

Nothing is awaited: a request is queued with a function that is called with its answer, requests of one turn leave
together, and the deadline is one timer, over the oldest. An answer's bytes go straight to where they were wanted.
"""

import asyncio
from array import array
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from covey.driven import DrivenStream, Part
from covey.headers import WireError
from covey.ports import Env
from plugins.memory.datapath import slabwire
from plugins.memory.datapath.control import OpenPlace
from plugins.memory.datapath.slabwire import (
    ATTACHED_BYTES,
    LENT_REGION_BYTES,
    PAIRED_BYTES,
    REPLY_BYTES,
    VERSION_BYTES,
    SlabOp,
    SlabReply,
    SlabRequest,
    SlabStatus,
    Versions,
)

Answered = Callable[[bool, Versions], None]
"""Whether the lender did it, and for what was read the version of each page."""
ANSWERS = {SlabOp.ATTACH: ATTACHED_BYTES, SlabOp.PAIR: PAIRED_BYTES, SlabOp.REGION: LENT_REGION_BYTES}
"""Bytes of an answer that has always as many."""
NO_VERSIONS: Versions = array("Q")


class LaneRequest(NamedTuple):
    request: SlabRequest
    into: memoryview | None
    answered: Answered
    sent_s: float


class LenderLane:
    """`Driven`. `lost` is called once when the connection ends, with the reason, before what is under way is answered.
    `gone` is called with the index and epoch of a slab that the lender says is not ours any more."""

    def __init__(
        self,
        env: Env,
        stream: DrivenStream,
        deadline_s: float,
        lost: Callable[[str], None],
        gone: Callable[[int, int], None],
    ) -> None:
        self.why = ""
        self._env, self._stream, self._deadline_s = env, stream, deadline_s
        self._lost, self._gone = lost, gone
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[LaneRequest] = deque()
        self._tag = 0
        self._out: list[Part] = []
        self._timed = False
        self._answers = self._answers_seen = 0
        self._header = memoryview(bytearray(REPLY_BYTES))
        self._target: memoryview | None = None
        """Where the rest of an answer goes; None: a header comes next."""
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
        """Buffers must stay as they are until it is answered. Called before it returns when the connection is over."""
        if self.why:
            answered(False, NO_VERSIONS)
            return
        self._tag += 1
        size = sum([len(part) for part in parts])
        request = SlabRequest(op, pages, place.index, page, size, place.epoch, self._tag, version)
        now_s = self._env.clock.now_s()
        self._waiting.append(LaneRequest(request, into, answered, now_s))
        self._send(slabwire.pack_request(request), *parts)
        if not self._timed:
            self._timed = True
            self._loop.call_later(self._deadline_s, self._look)

    def detach(self, place: OpenPlace) -> None:
        if not self.why:
            self._send(slabwire.pack_request(SlabRequest(SlabOp.DETACH, 0, place.index, 0, 0, place.epoch, 0, 0)))

    def _send(self, *parts: Part) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out += parts

    def _flush(self) -> None:
        if self._out and not self.why:
            out, self._out = self._out, []
            self._stream.send(out)

    def _look(self) -> None:
        """The oldest request is too old, or has some time left. While others are answered, a lender with much to do is
        not silent."""
        self._timed = False
        if self.why or not self._waiting:
            return
        left_s = self._waiting[0].sent_s + self._deadline_s - self._env.clock.now_s()
        if left_s <= 0 and self._answers != self._answers_seen:
            left_s = self._deadline_s
        self._answers_seen = self._answers
        if left_s <= 0:
            self.end(f"did not answer within {self._deadline_s:g} s")
        else:
            self._timed = True
            self._loop.call_later(left_s, self._look)

    def end(self, why: str) -> None:
        """Idempotent. What is under way is answered with no."""
        if self.why:
            return
        self.why = why
        self._stream.close()
        self._lost(why)
        waiting, self._waiting = self._waiting, deque()
        for each in waiting:
            each.answered(False, NO_VERSIONS)

    # ---- driven ----

    def wanted(self) -> memoryview:
        return self._header if self._target is None else self._target

    def filled(self) -> None:
        try:
            if self._target is None:
                self._begin(slabwire.reply(bytes(self._header)))
            else:
                self._go_on()
        except WireError as error:
            self.end(f"sent something else: {error}")

    def turn(self) -> None:
        self._flush()

    def ended(self, error: ConnectionError) -> None:
        self.end(f"connection: {error}")

    def _begin(self, reply: SlabReply) -> None:
        self._answers += 1
        if reply.tag == 0 and reply.status is SlabStatus.GONE:
            self._gone(reply.slab, reply.epoch)
            return
        oldest = self._waiting[0] if self._waiting else None
        if oldest is None or reply.tag != oldest.request.tag or reply.status is SlabStatus.BAD:
            raise WireError(f"{reply} to {oldest and oldest.request}")
        if reply.status is SlabStatus.GONE:
            self._waiting.popleft()
            self._gone(reply.slab, reply.epoch)
            oldest.answered(False, NO_VERSIONS)
            return
        if reply.pages != oldest.request.pages:
            raise WireError(f"{reply} to {oldest.request}")
        op = oldest.request.op
        if op is SlabOp.READ or op is SlabOp.VERSIONS:
            self._versions = array("Q", bytes(reply.pages * VERSION_BYTES))
            self._target = memoryview(self._versions).cast("B")
        elif op in ANSWERS:
            assert oldest.into is not None and len(oldest.into) == ANSWERS[op]
            self._target = oldest.into
        else:
            self._waiting.popleft()
            oldest.answered(True, NO_VERSIONS)

    def _go_on(self) -> None:
        """The versions are here, or all of the answer."""
        oldest = self._waiting[0]
        if oldest.request.op is SlabOp.READ and self._target is not oldest.into:
            self._target = oldest.into
            return
        self._waiting.popleft()
        self._target = None
        versions, self._versions = self._versions, NO_VERSIONS
        oldest.answered(True, versions)
