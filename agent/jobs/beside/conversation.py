"""One end of a stream that goes in turns: it answers turns with what was written, and hands on what was typed."""

import asyncio
import contextlib
from typing import Protocol

from agent.jobs.beside.messages import OUTPUT_BYTES_MAX, SessionTurn, Turned
from agent.jobs.beside.streams import SessionInput, SessionOutput
from covey.ports.clock import Clock

ROOM_S = 2.0
"""Seconds that a turn waits at most until its command reads earlier input."""
ATTENDED_S = 1.0
"""Seconds between two turns of somebody who is there: nothing but two ways across the network."""


class Conversing(Protocol):
    """What stands behind a stream: a command, or a connection."""

    def has_input(self) -> None:
        """Input was taken, or has ended."""

    def has_room(self) -> None:
        """There is room for more output."""

    def resize(self, rows: int, columns: int) -> None: ...
    def interrupt(self) -> None: ...
    def leave(self) -> None:
        """Whoever typed the command is gone: it is to end."""


class Conversation:
    """The stream of one session. `ends(code)` says that no more output comes."""

    def __init__(self, clock: Clock, behind: Conversing) -> None:
        self._clock, self._behind = clock, behind
        self.output, self.input = SessionOutput(), SessionInput()
        self.code: int | None = None
        """How it ended; None: more output may come."""
        self.told = False
        """Whether an answer said so."""
        self.last_s = clock.now_s()
        """When the last turn was taken or ended."""
        self.busy_s = self.last_s
        """When there was last any input or output."""
        self.turns = 0
        self._signals = self._waiting = 0
        self._changed = asyncio.Event()

    @property
    def away_s(self) -> float:
        """Seconds since somebody last took a turn; 0 while one waits."""
        return 0.0 if self._waiting else self._clock.now_s() - self.last_s

    @property
    def is_attended(self) -> bool:
        return self.away_s < ATTENDED_S

    def add(self, where: int, data: bytes) -> None:
        self.output.add(where, data)
        self.busy_s = self._clock.now_s()
        self.wake()

    def ends(self, code: int) -> None:
        if self.code is None:
            self.code = code
        self.wake()

    def wake(self) -> None:
        """Look again in turns that wait."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def turn(self, turn: SessionTurn) -> Turned:
        if turn.looks:
            attended = self.is_attended
            return Turned(at=self.output.start, taken=self.input.taken, attended=attended, turns=self.turns)
        self.turns += 1
        self._waiting += 1
        try:
            return await self._turn(turn)
        finally:
            self._waiting -= 1
            self.last_s = self._clock.now_s()

    async def _turn(self, turn: SessionTurn) -> Turned:
        if turn.rows and turn.columns:
            self._behind.resize(turn.rows, turn.columns)
        if turn.signals > self._signals:
            self._signals = turn.signals
            self._behind.interrupt()
        await self._take(turn)
        if turn.leaves:
            self._behind.leave()
        if turn.seen < 0:
            return Turned(at=self.output.start, taken=self.input.taken)
        self.output.seen(turn.seen)
        self._behind.has_room()
        end_s = self._clock.now_s() + turn.wait_s
        while self.output.start == self.output.end and self.code is None and self._clock.now_s() < end_s:
            await self._wait(end_s)
        parts = self.output.held(OUTPUT_BYTES_MAX)
        whole = sum(len(data) for _, data in parts) == self.output.end - self.output.start
        code = self.code if whole else None
        self.told = self.told or code is not None
        return Turned(at=self.output.start, parts=parts, taken=self.input.taken, code=code)

    async def _take(self, turn: SessionTurn) -> None:
        """Take the input that a turn brings; wait a moment where there is no room for any of it."""
        end_s = self._clock.now_s() + min(turn.wait_s, ROOM_S)
        while turn.data and not self.input.room and self.code is None and self._clock.now_s() < end_s:
            await self._wait(end_s)
        before = self.input.taken, self.input.ended
        self.input.take(turn.at, turn.data, turn.ended)
        if (self.input.taken, self.input.ended) != before:
            self.busy_s = self._clock.now_s()
            self._behind.has_input()

    async def _wait(self, end_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, end_s - self._clock.now_s())):
                await self._changed.wait()
