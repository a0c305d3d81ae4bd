"""A simulated stream driven by a machine: two tasks that do with `read_into` and `write` what sockets do by callbacks.

So all that happens to a simulated connection happens to a driven one too: delays, windows, cuts, mischief.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from chaos.world.pipe import Outgoing
from covey.ports.streams import ByteStream
from covey.wire.driven import Driven, Part


class UnreadStream(ByteStream, Protocol):
    @property
    def unread(self) -> int:
        """Bytes that have arrived and are not read yet."""

    async def send_out(self, out: Outgoing) -> None:
        """Send a unit, as `write` does."""


class DrivenEnd:
    """One end of a connection that is driven, from `drive` on."""

    def __init__(
        self, spawn: Callable[[str, Coroutine[Any, Any, None]], object], stream: UnreadStream, by: Driven, polite: bool
    ) -> None:
        self._stream, self._by, self._polite = stream, by, polite
        self._out: deque[Outgoing] = deque()
        self._more, self._sent = asyncio.Event(), asyncio.Event()
        self._sent.set()
        self._over = False
        self._free = asyncio.Event()
        self._free.set()
        spawn("driven reads", self._reads())
        spawn("driven writes", self._writes())

    def send(self, parts: Sequence[Part]) -> None:
        if not self._over:
            self._out.append(Outgoing(parts))
            self._sent.clear()
            self._more.set()

    def hold(self) -> None:
        self._free.clear()

    def go_on(self) -> None:
        self._free.set()

    async def _reads(self) -> None:
        stream, by = self._stream, self._by
        try:
            while not self._over:
                await stream.read_into(by.wanted())
                if self._over:
                    return
                by.filled()
                if not stream.unread:
                    by.turn()
                if self._polite:
                    await self._sent.wait()
                await self._free.wait()
        except ConnectionError as error:
            self.end(error)

    async def _writes(self) -> None:
        try:
            while not self._over:
                await self._more.wait()
                self._more.clear()
                while self._out and not self._over:
                    await self._stream.send_out(self._out[0])
                    if self._out:
                        self._out.popleft()
                self._sent.set()
        except ConnectionError as error:
            self.end(error)

    def abandon(self) -> None:
        """Give the end up, since the process is dead: its machine hears nothing any more."""
        self._over = True

    def unsent(self) -> list[Outgoing]:
        """Take the writes that the kernel has not taken, which this end will not give it any more."""
        rest, self._out = list(self._out), deque()
        return rest

    def end(self, error: ConnectionError) -> None:
        """End the connection, and tell its machine."""
        if not self._over:
            self._over = True
            for event in (self._more, self._sent, self._free):
                event.set()
            self._by.ended(error)
