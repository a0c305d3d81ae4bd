"""One connection for bulk bytes, over TCP or a unix socket, on asyncio's BufferedProtocol, for uvloop and stock asyncio
alike.

Reading: the kernel fills either the reader's own memory (a read of at least `DIRECT_BYTES` is waiting) or a spill
buffer of `SPILL_BYTES`, from which small reads are served; when the spill is full and no reader waits, the socket is
paused, and TCP tells the peer.

    kernel -> get_buffer() -> the reader's view, when one waits     no copy
                           -> spill, otherwise                      one copy, few system calls

Writing: the transport's high-water mark is 0, so whatever the kernel does not take at once pauses the stream. `write`
returns when the kernel has everything, so buffers may be reused and a slow peer holds up its writers, one write at a
time and in order. The kernel's send buffer is the only outbox.
"""

import asyncio
import contextlib
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from agent.ports.network.datagrams import ip_port_text
from agent.ports.network.page_lender import PageLender
from agent.ports.network.peers import peer_of
from covey.ports.addresses import Address
from covey.ports.pages import Handed
from covey.ports.streams import UNKNOWN_USER
from covey.wire.bulk import widen
from covey.wire.driven import Driven

SPILL_BYTES: Final = 64 << 10
"""The most bytes that one connection may hold received and unread."""
SPILL_BYTES_FIRST: Final = 4 << 10
"""Bytes that a connection of which little was read may hold received and unread: one that is not authenticated yet
costs little memory."""
DIRECT_BYTES: Final = 16 << 10
"""Bytes missing from which on the kernel fills a read itself."""
SILENCE_MS = 5000
"""TCP_USER_TIMEOUT: milliseconds after which bytes that a peer's kernel leaves unacknowledged, or refuses for want of
room, end the connection. The memory notes ask for 1-2 s per request; requests carry their own deadlines, and a healthy
host whose process is paused for a few seconds must keep its connections."""
HAND_S: Final = 2.0
"""Seconds for which a peer may leave the kernel no room for descriptors that are handed to it."""
FILLS_MAX: Final = 16
"""The most times that a driver is told in one turn that what it wanted is there. With many requests under way both ends
would take turns otherwise: one handles all of them while the other waits."""

_WRITELINES_NEVER_PAUSE: Final = (3, 12) <= sys.version_info < (3, 12, 9) or (3, 13) <= sys.version_info < (3, 13, 2)
"""CVE-2024-12254: the transports of that asyncio hold any number of bytes that were given to `writelines`."""


class Turn:
    """Calls of all streams of a process that wait until the bytes that came over one of them are handled. The loop
    would make them in its next turn, after another look at all sockets."""

    __slots__ = ("_after", "is_on")

    def __init__(self) -> None:
        self.is_on = False
        """Whether bytes are being handled."""
        self._after: deque[Callable[[], None]] = deque()

    def soon(self, call: Callable[[], None]) -> None:
        """Call later, as `covey.wire.driven.DrivenStream` says."""
        if self.is_on:
            self._after.append(call)
        else:
            asyncio.get_running_loop().call_soon(call)

    def end(self) -> None:
        """End the handling, and make the calls that waited. Where handling failed, what is left is for the loop."""
        try:
            while self._after:
                self._after.popleft()()
        finally:
            self.is_on = False
            while self._after:
                asyncio.get_running_loop().call_soon(self._after.popleft())


class SocketStream(asyncio.BufferedProtocol):
    """The `covey.ports.streams.ByteStream` over one asyncio transport."""

    def __init__(self, turn: Turn, connected: Callable[["SocketStream"], None] | None = None) -> None:
        self._turn, self._connected = turn, connected
        self._transport: asyncio.Transport | None = None
        self._ended: ConnectionError | None = None
        self._spill = memoryview(bytearray(SPILL_BYTES_FIRST))
        self._start = self._end = 0
        self._target: memoryview | None = None
        self._filled = 0
        self._reader: asyncio.Future[None] | None = None
        self._direct = self._reading_paused = self._writing_paused = False
        self._driver: Driven | None = None
        self._polite = self._held = self._driven_soon = False
        self._lender: PageLender | None = None
        self._lends = True
        self._joins = False
        self._writers: deque[asyncio.Future[None]] = deque()
        self.peer: Address = ""
        self.uid = UNKNOWN_USER
        self.same_host = False

    # ---- reading ----

    async def read_into(self, view: memoryview) -> None:
        """Read into memory, one reader at a time. A cancelled read leaves the stream in the middle of something: close
        it then."""
        target = view.cast("B") if view.format != "B" or view.ndim != 1 else view
        size = len(target)
        if self._reader is not None:
            raise RuntimeError(f"two readers on the stream from {self.peer}")
        at = self._take(target, 0)
        if at == size:
            return
        if self._ended is not None:
            raise self._ended
        self._target, self._filled = target, at
        self._reader = asyncio.get_running_loop().create_future()
        self._resume_reading()
        try:
            await self._reader
        finally:
            self._reader = self._target = None

    def _take(self, target: memoryview, at: int) -> int:
        """Move what the spill holds into `target` from that byte on, and return how many bytes."""
        start = self._start
        count = min(self._end - start, len(target) - at)
        target[at : at + count] = self._spill[start : start + count]
        self._start = start + count
        if self._start == self._end:
            if self._end == SPILL_BYTES_FIRST == len(self._spill):
                self._spill = memoryview(bytearray(SPILL_BYTES))  # it was full, and the reader took all of it
            self._start = self._end = 0
        return count

    def get_buffer(self, sizehint: int) -> memoryview:
        self._direct = self._target is not None and len(self._target) - self._filled >= DIRECT_BYTES
        if self._direct:
            assert self._target is not None
            return self._target[self._filled :]
        if self._end == len(self._spill):
            kept = self._end - self._start
            self._spill[:kept] = bytes(self._spill[self._start : self._end])
            self._start, self._end = 0, kept
        return self._spill[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._direct:
            self._filled += nbytes
        else:
            self._end += nbytes
            if self._target is not None:
                self._filled += self._take(self._target, self._filled)
        if self._driver is not None:
            self._drive_on()
            return
        if self._target is not None and self._filled == len(self._target):
            self._target = None
            if self._reader is not None and not self._reader.done():
                self._reader.set_result(None)
        if self._target is None and self._end - self._start == len(self._spill) and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    # ---- driven ----

    def drive(self, by: Driven, polite: bool) -> None:
        """Drive the stream, as `covey.wire.driven.DrivenStream` says. What was received already comes first, in the
        next turn."""
        self._driver, self._polite = by, polite
        self._target = by.wanted()
        self._filled = self._take(self._target, 0)
        if self._end == 0:
            self._spill = memoryview(bytearray(SPILL_BYTES))
        self._drive_soon()

    def send(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        if self._ended is None:
            self._give(parts)

    def _give(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        if self._transport is None:
            return
        if self._joins:
            self._transport.write(b"".join(parts))
        else:
            self._transport.writelines(parts)

    def _drive_soon(self) -> None:
        """Drive in the next turn, once."""
        if not self._driven_soon:
            self._driven_soon = True
            asyncio.get_running_loop().call_soon(self._driven_in_turn)

    def _driven_in_turn(self) -> None:
        if self._driven_soon:
            self._drive_on()

    def soon(self, call: Callable[[], None]) -> None:
        self._turn.soon(call)

    def _drive_on(self, most: int = FILLS_MAX) -> None:
        turn = self._turn
        if turn.is_on:
            self._hand_over(most)
            return
        turn.is_on = True
        try:
            self._hand_over(most)
        finally:
            turn.end()

    def _hand_over(self, most: int) -> None:
        """Hand over what is here, unless the peer has to take something first; the rest follows in the next turn."""
        self._driven_soon = False
        driver, fills = self._driver, 0
        while driver is not None and self._target is not None and not self._waits():
            if self._filled < len(self._target):
                self._filled += self._take(self._target, self._filled)
                if self._filled < len(self._target):
                    break
            if fills == most:
                self._drive_soon()
                break
            fills += 1
            driver.filled()
            if self._ended is not None:
                break
            self._target, self._filled = driver.wanted(), 0
        if driver is None or self._ended is not None:
            self._end_driver()
            return
        driver.turn()
        if self._waits():
            self._pause_reading()
        else:
            self._resume_reading()

    def _waits(self) -> bool:
        """Whether no request is to be read now."""
        return self._held or (self._polite and self._writing_paused)

    def hold(self) -> None:
        self._held = True

    def go_on(self) -> None:
        if self._held:
            self._held = False
            self._drive_soon()

    def _end_driver(self) -> None:
        driver, self._driver, self._target = self._driver, None, None
        if driver is not None and self._ended is not None:
            driver.ended(self._ended)

    def _pause_reading(self) -> None:
        if not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._reading_paused and self._transport is not None:
            self._reading_paused = False
            with contextlib.suppress(RuntimeError):  # asyncio: the transport is closing
                self._transport.resume_reading()

    # ---- writing ----

    async def write(self, *parts: bytes | bytearray | memoryview) -> None:
        """Write. When it is cancelled while the kernel has not taken everything, the connection ends: half a unit is of
        no use."""
        again = False
        while self._held_up():
            await self._wait_writable(first=again)
            again = True
        self._raise_if_ended()
        assert self._transport is not None
        self._give([_octets(part) for part in parts if len(part)])
        try:
            while self._held_up():
                await self._wait_writable(first=True)
        except asyncio.CancelledError:
            self._end_with(ConnectionAbortedError(f"a write to {self.peer} was cancelled half way"))
            self._transport.abort()
            raise
        self._raise_if_ended()

    def _raise_if_ended(self) -> None:
        """Raise the error of an ended connection. It is a method, since a check that is made again after a wait is
        taken for needless where types are compiled in."""
        if self._ended is not None:
            raise self._ended

    async def write_with(self, data: bytes, pages: Sequence[Handed]) -> None:
        """Write with descriptors. Transports send none, so this goes to the socket itself, at a moment when the
        transport holds nothing back; what the kernel does not take of `data` goes the usual way."""
        while self._held_up():
            await self._wait_writable(first=False)
        self._raise_if_ended()
        assert self._transport is not None
        descriptors = [page.descriptor for page in pages]
        if min(descriptors) < 0:
            return
        with socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno())) as plain:
            sent = await self._send_descriptors(plain, data, descriptors)
        if sent < len(data):
            await self.write(data[sent:])

    async def _send_descriptors(self, plain: socket.socket, data: bytes, descriptors: Sequence[int]) -> int:
        """Send descriptors and the beginning of `data` once the kernel has room for them. Returns how much of it."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + HAND_S
        while True:
            try:
                return socket.send_fds(plain, [data], descriptors)
            except BlockingIOError as error:
                writable = asyncio.Event()
                loop.add_writer(plain, writable.set)
                try:
                    async with asyncio.timeout_at(end_s):
                        await writable.wait()
                except TimeoutError:
                    raise ConnectionAbortedError(f"{self.peer} does not read") from error
                finally:
                    loop.remove_writer(plain)
                self._raise_if_ended()
            except OSError as error:
                raise ConnectionResetError(f"{self.peer} cannot be given descriptors: {error}") from error

    async def lend(self, head: bytes, pages: memoryview) -> None:
        """Lend pages, as `covey.wire.splicing.PageStream` says."""
        if self._lender is None and self._lends and self.uid >= 0 and self._transport is not None:
            try:
                self._lender = PageLender(self._transport.get_extra_info("socket").fileno())
            except OSError:
                self._lends = False
        if self._lender is None or self._ended is not None:
            await self.write(head, pages)
            return
        await self.write(head)
        done = False
        try:
            await self._lender.send(pages)
            done = True
        except ConnectionError:
            raise
        except OSError as error:
            raise ConnectionResetError(f"{self.peer} cannot be given pages: {error}") from error
        finally:
            if not done:
                self._end_with(ConnectionAbortedError(f"a write to {self.peer} was cancelled half way"))
                if self._transport is not None:
                    self._transport.abort()

    def _held_up(self) -> bool:
        return self._writing_paused and self._ended is None

    async def _wait_writable(self, first: bool) -> None:
        """Wait until the stream is writable. `first`: a writer that has bytes under way, or has waited before, precedes
        those that wait to begin."""
        writer = asyncio.get_running_loop().create_future()
        if first:
            self._writers.appendleft(writer)
        else:
            self._writers.append(writer)
        try:
            await writer
        finally:
            with contextlib.suppress(ValueError):
                self._writers.remove(writer)
            if not self._writing_paused:
                self._wake_writer()

    def _wake_writer(self) -> None:
        for writer in self._writers:
            if not writer.done():
                writer.set_result(None)
                return

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._wake_writer()
        if self._driver is not None and self._polite:
            self._drive_soon()

    # ---- life ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports are no subclasses
        assert self._transport is not None
        self._transport.set_write_buffer_limits(high=0)
        self._joins = _WRITELINES_NEVER_PAUSE and type(transport).__module__.startswith("asyncio.")
        connection = transport.get_extra_info("socket")
        if connection.family == socket.AF_UNIX:
            pid, self.uid = peer_of(connection)
            self.peer, self.same_host = f"unix:pid {pid}", True
        else:
            self.peer = ip_port_text(transport.get_extra_info("peername") or ("?", 0))
            self.same_host = is_same_host(connection)
            _configure_tcp(connection)
        if self._connected is not None:
            self._connected(self)

    def widen(self) -> None:
        """Widen the socket's buffers: it carries bulk bytes over a unix socket."""
        assert self._transport is not None
        widen(self._transport.get_extra_info("socket"))

    def _drive_to_the_end(self) -> None:
        """Hand over what came before the end, before the end is told."""
        if self._driven_soon and self._ended is None:
            self._drive_on(sys.maxsize)

    def eof_received(self) -> bool:
        self._drive_to_the_end()
        self._end_with(ConnectionResetError(f"{self.peer} closed the connection"))
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._drive_to_the_end()
        self._end_with(
            exc if isinstance(exc, ConnectionError) else ConnectionResetError(f"connection to {self.peer} lost: {exc}")
        )

    def _end_with(self, error: ConnectionError) -> None:
        if self._ended is None:
            self._ended = error
        if self._reader is not None and not self._reader.done():
            self._reader.set_exception(self._ended)
        if self._lender is not None:
            self._lender.close()
        for writer in self._writers:
            if not writer.done():
                writer.set_result(None)
        self._end_driver()

    def close(self) -> None:
        self._end_with(ConnectionAbortedError(f"connection to {self.peer} closed here"))
        if self._transport is not None:
            self._transport.close()


def _octets(part: bytes | bytearray | memoryview) -> bytes | bytearray | memoryview:
    return part.cast("B") if isinstance(part, memoryview) and (part.format != "B" or part.ndim != 1) else part


def is_same_host(connection: Any) -> bool:
    """Whether a TCP connection stays on this host, by its addresses."""
    try:
        near, far = connection.getsockname()[0], connection.getpeername()[0]
    except OSError:  # already gone
        return False
    return bool(near == far or (near.startswith("127.") and far.startswith("127.")))


def _configure_tcp(connection: Any) -> None:
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS),
    ):
        with contextlib.suppress(OSError):  # already gone, or a kernel without it
            connection.setsockopt(level, option, value)
