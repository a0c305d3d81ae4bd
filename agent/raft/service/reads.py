"""A read that decides: this host's copy of the state, once it holds all that was decided anywhere before the read.

    read --> the leader, which has a majority confirm that it leads (`machine.reads`) --> index
    the copy here has applied that index --> the read is answered from it

The leader's host asks its own core; every other host asks the leader, with one question for all its reads that wait.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol

from agent.raft.machine.types import ReadAsked, ReadFrom
from agent.raft.messages import (
    MalformedMessage,
    ReadIndex,
    ReadIndexReply,
    another_rack,
    decode_asked,
    encode_asked,
)
from covey.core.errors import NoLeader, Refused
from covey.core.ids import HostId
from covey.ports.env import Env

ASK_S = 2.0
"""Seconds that a majority, or the leader, may take to answer before it is asked again."""
PAUSE_S = 0.05
"""Seconds to pause before a host is asked again that does not lead."""

Index = asyncio.Future[int | None]
"""The index that a copy must have applied; None: nobody that leads has said it."""


class ReadLog(Protocol):
    """The part of the log that reads need."""

    @property
    def leader(self) -> HostId | None: ...
    @property
    def open(self) -> bool:
        """Whether this host takes part."""

    @property
    def rack(self) -> bytes: ...
    @property
    def applied_index(self) -> int: ...
    def dispatch(self, event: ReadAsked) -> None: ...


class LogReads:
    def __init__(
        self,
        env: Env,
        me: HostId,
        desk: ReadLog,
        ask_leader: Callable[[HostId, bytes, float], Awaitable[bytes]],
        counters: Counter[str],
    ) -> None:
        self._env, self._me, self._desk, self._ask_leader, self._counters = env, me, desk, ask_leader, counters
        self._numbers = 0
        self._own: dict[int, Index] = {}
        """The reads that this host's core has not answered, by number."""
        self._next: Index | None = None
        """What the next question to the leader finds out; None: no read waits for one."""
        self._asking = False
        self._behind: dict[asyncio.Future[None], int] = {}
        """What waits until this host has applied an index."""

    # ---- from the log ----

    def confirmed(self, read: ReadFrom) -> None:
        """Take the core's answer."""
        waiting = self._own.pop(read.number, None)
        if waiting and not waiting.done():
            waiting.set_result(read.index)

    def applied(self) -> None:
        """Look who may read now: more was applied here, or this host's part in the log ended."""
        done = self._desk.applied_index
        for waiting, index in list(self._behind.items()):
            if (index <= done or not self._desk.open) and not waiting.done():
                waiting.set_result(None)

    # ---- from this host ----

    async def be_current(self, timeout_s: float) -> None:
        """Return once this copy is current, as `plugins.base.ReplicatedLog` says. NoLeader."""
        why = "no leader is known"
        try:
            async with asyncio.timeout(timeout_s):
                while self._desk.open:
                    index = await self._index()
                    if index is not None:
                        why = f"entry {index} has not come here"
                        await self._until_applied(index)
                        if self._desk.open:
                            return
                    else:
                        why = "no leader has confirmed that it leads"
                        await asyncio.sleep(PAUSE_S)
        except TimeoutError:
            raise NoLeader(f"{why} within {timeout_s:g} s") from None
        raise NoLeader("this host takes no part in the log now")

    async def _index(self) -> int | None:
        if self._desk.leader == self._me:
            return await self._of_own_core()
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
            if not self._asking:
                self._env.spawn("ask the leader for reads", self._ask_on())
                self._asking = True
        index: int | None = await asyncio.shield(self._next)
        return index

    async def _of_own_core(self) -> int | None:
        self._numbers += 1
        number = self._numbers
        waiting: Index = asyncio.get_running_loop().create_future()
        self._own[number] = waiting
        try:
            self._desk.dispatch(ReadAsked(number))
            async with asyncio.timeout(ASK_S):
                return await waiting
        except TimeoutError:
            return None
        finally:
            self._own.pop(number, None)

    async def _ask_on(self) -> None:
        """Ask the leader, one question after the other, as long as reads wait."""
        try:
            while (waiting := self._next) is not None:
                self._next = None
                index = await self._ask()
                if not waiting.done():
                    waiting.set_result(index)
        finally:
            self._asking = False

    async def _ask(self) -> int | None:
        leader = self._desk.leader
        if leader is None or leader == self._me:
            return None
        self._counters["reads_forwarded"] += 1
        try:
            reply = decode_asked(await self._ask_leader(leader, encode_asked(ReadIndex(self._desk.rack)), ASK_S))
        except (TimeoutError, Refused, MalformedMessage):
            self._counters["forwarding_failed"] += 1
            return None
        return reply.index if isinstance(reply, ReadIndexReply) and reply.leads else None

    async def _until_applied(self, index: int) -> None:
        if index <= self._desk.applied_index:
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._behind[waiting] = index
        try:
            await waiting
        finally:
            del self._behind[waiting]

    # ---- as the leader ----

    async def answer(self, sender: HostId, asked: ReadIndex) -> bytes:
        """Answer another host's question. Refused when that one belongs to another rack."""
        if another_rack(asked.rack, self._desk.rack):
            why = "its log has a different origin from the one here"
            next_step = "docs/guides/failures.md, 'A host of another rack'"
            raise Refused(2, f"{sender} belongs to another rack", why, next_step)
        leads = self._desk.open and self._desk.leader == self._me
        index = await self._of_own_core() if leads else None
        return encode_asked(ReadIndexReply(False) if index is None else ReadIndexReply(True, index))
