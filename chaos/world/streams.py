"""Simulated bulk byte streams: TCP between hosts, unix sockets within one.

A connection is a pair of `SimStream`s with one `Pipe` per direction. A pipe keeps order, takes time (delay and
bandwidth), holds at most `WINDOW_BYTES` on its way (then writers wait: back-pressure), and is subject to the network's
conditions:

    lost packet      a retransmission: later, never missing
    cut              nothing arrives; what was written waits. Joined again in time: it all arrives. Cut for longer than
                     `USER_TIMEOUT_S` (TCP_USER_TIMEOUT, keep-alive): both ends get ConnectionError
    process killed   the kernel closes its sockets: the peer reads what was on its way, then ConnectionError
    power lost       silence: the peer finds out when its user timeout is over, or by a reset once the host is back
    stopped process  its kernel still accepts what fits into the window
    closed here      what was written before still leaves, as the peer makes room, from memory as it is then

What a process writes is not copied before its kernel takes it (`chaos.world.pipe`): transports do the same, which keep
views of the memory that they were given.

Unix addresses reach only within their host and tell the peer's uid; nothing else can go wrong with them.
"""

import asyncio
import zlib
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

from chaos.world.driven import DrivenEnd
from chaos.world.net import bind_address, split
from chaos.world.pipe import RETRANSMIT_S, Outgoing, Pipe
from chaos.world.seen import HostSeen, ProcessSeen, WorldSeen
from covey.ports.addresses import Address
from covey.ports.pages import Handed, SharedPage
from covey.ports.streams import UNKNOWN_USER
from covey.wire.driven import Driven, Part

WINDOW_BYTES = 1 << 20
"""Most bytes of one direction that may be on their way or unread; a writer waits while there are more."""
USER_TIMEOUT_S = 5.0
"""Seconds after which a connection across a cut breaks, or one whose reader takes nothing (TCP_USER_TIMEOUT)."""


class SimStream:
    """One end of a connection: the `ByteStream` port."""

    def __init__(self, process: ProcessSeen, peer: Address, uid: int) -> None:
        self.process, self.host, self.world = process, process.host, process.world
        self.peer, self.uid = peer, uid
        self.other: SimStream
        self.out: Pipe
        self.broken: ConnectionError | None = None
        self.closed = False
        self._end = False
        self._buffer = bytearray()
        self.pages: deque[SharedPage] = deque()
        """Shared pages that came with what was read, oldest first."""
        self._wake: asyncio.Future[None] | None = None
        self._room: deque[asyncio.Future[None]] = deque()
        self._writing: asyncio.Future[None] | None = None
        self._slow: Outgoing | None = None
        """The unit of which the kernel has not taken all."""
        self._flushing = False
        """Whether the end was closed here while the kernel had not taken all that was written before."""
        self._driven: DrivenEnd | None = None
        process.resources.append(self)

    @property
    def same_host(self) -> bool:
        return self.host is self.other.host

    @property
    def connected(self) -> bool:
        """Whether segments and their acknowledgements get through now."""
        if self.host is self.other.host:
            return True
        network = self.world.network
        return self.host.up and self.other.host.up and network.both_ways(self.host.name, self.other.host.name)

    # ---- the port ----------------------------------------------------------------------------------------------------

    async def read_into(self, view: memoryview) -> None:
        if self.world.mischief.on:
            await self._mischief("read")
        target = view.cast("B") if view.format != "B" or view.ndim != 1 else view
        at, wanted, buffer = 0, len(target), self._buffer
        while at < wanted:
            if buffer:
                step = min(len(buffer), wanted - at)
                target[at : at + step] = buffer[:step]
                del buffer[:step]
                at += step
                if self.other._room:
                    self.other.room()
                continue
            if self.broken is not None:
                raise self.broken
            if self.closed:
                raise ConnectionAbortedError("this stream was closed here")
            if self._end:
                raise ConnectionResetError(f"{self.peer} closed the connection")
            if self._wake is not None and not self._wake.done():
                raise RuntimeError("two readers on one stream")
            self._wake = self.process.loop.create_future()
            await self._wake

    async def write(self, *parts: bytes | bytearray | memoryview) -> None:
        await self.send_out(Outgoing(parts))

    async def send_out(self, out: Outgoing) -> None:
        """Send a unit; part of `chaos.world.driven.UnreadStream`."""
        if self.world.mischief.on:
            await self._mischief("write", out)
        while self._writing is not None:
            await asyncio.shield(self._writing)
        if self.closed or self._end or self.broken is not None:
            self._usable()
        if out.size <= self._free_bytes:
            if out.size:
                self.out.put(out.take(out.size))
            return
        turn: asyncio.Future[None] = self.process.loop.create_future()
        self._writing, self._slow = turn, out
        try:
            await self._write_slowly(out)
        finally:
            self._writing = self._slow = None
            if not turn.done():
                turn.set_result(None)

    @property
    def _free_bytes(self) -> int:
        window_bytes: int = self.world.wires.window_bytes
        return window_bytes - self.out.under_way - len(self.other._buffer)

    @property
    def unread(self) -> int:
        """Bytes that have arrived and are not read yet."""
        return len(self._buffer)

    def drive(self, by: Driven, polite: bool) -> None:
        self._driven = DrivenEnd(self.process.spawn, self, by, polite)

    def hold(self) -> None:
        if self._driven is not None:
            self._driven.hold()

    def go_on(self) -> None:
        if self._driven is not None:
            self._driven.go_on()

    def soon(self, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(call)

    def send(self, parts: Sequence[Part]) -> None:
        assert self._driven is not None, "it is not driven yet"
        self._driven.send(parts)

    async def write_with(self, data: bytes, pages: Sequence[Handed]) -> None:
        if min(page.descriptor for page in pages) >= 0:
            await self.write(data)
            self.other.pages.extend(cast(Sequence[SharedPage], pages))

    async def _write_slowly(self, out: Outgoing, flushing: bool = False) -> None:
        """Write a unit piece by piece, as the other end makes room."""
        try:
            while out.size:
                if (free := self._free_bytes) > 0:
                    self.out.put(out.take(free))
                else:
                    await self._wait_for_room()
                    self._usable(flushing)
        except asyncio.CancelledError:
            if out.size < out.whole:  # half a unit is of no use
                self.abort(ConnectionAbortedError(f"a write to {self.peer} was cancelled half way"))
            raise

    async def _flush(self, unsent: Sequence[Outgoing]) -> None:
        """Write the rest after `close`: no code waits for it, and none hears how it ends."""
        try:
            for out in unsent:
                await self._write_slowly(out, flushing=True)
        except ConnectionError:
            pass
        finally:
            self._flushed()

    def _flushed(self) -> None:
        self._flushing = False
        if self.broken is None:
            self.out.put(b"")

    async def _mischief(self, port: str, out: Outgoing | None = None) -> None:
        """Perhaps take long, or break the connection after some of the bytes."""
        mischief = self.world.mischief
        if not mischief.strikes(port) or self.broken is not None or self.closed:
            return
        for told in mischief.on_link:
            told(self.process.name, self.other.process.name)
        if mischief.rng.random() < 0.5:
            await asyncio.sleep(mischief.pause_s())
            return
        if out is not None and out.size:
            self.out.put(out.take(mischief.rng.randrange(out.size)))
        self.abort(ConnectionResetError(f"the connection with {self.peer} was reset"))

    async def _wait_for_room(self) -> None:
        waiter: asyncio.Future[None] = self.process.loop.create_future()
        self._room.append(waiter)
        if self.host is not self.other.host:
            silent = ConnectionResetError(f"{self.peer} took nothing for {USER_TIMEOUT_S:.0f} s")
            self.world.at(self.world.now + USER_TIMEOUT_S, lambda: None if waiter.done() else self.abort(silent))
        await waiter

    def abort(self, error: ConnectionError) -> None:
        """End the connection for both ends."""
        self.break_off(error)
        if self.connected:
            self.other.break_off(ConnectionResetError(f"{self.other.peer} gave the connection up"))

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            if self.broken is None:
                self._close_after(self._unsent())
                if self._buffer:  # unread data: the kernel resets the connection
                    self.other.room()
            self._buffer.clear()
            self._wake_all()
            if self._driven is not None:
                self._driven.end(ConnectionAbortedError("this stream was closed here"))

    def _unsent(self) -> list[Outgoing]:
        if self._driven is not None:
            return self._driven.unsent()
        return [] if self._slow is None else [self._slow]

    def _close_after(self, unsent: Sequence[Outgoing]) -> None:
        if any(out.size for out in unsent) and self.process.alive:
            self._flushing = True
            self.process.spawn("flush", self._flush(unsent))
        else:
            self.out.put(b"")

    # ---- what the kernel does ----------------------------------------------------------------------------------------

    def release(self) -> None:
        """Close the sockets of a killed process, as its kernel does; nothing of its own hears of it."""
        if self._driven is not None:
            self._driven.abandon()
        if self._flushing:
            self._flushed()
        self.close()

    def vanish(self) -> None:
        """Send nothing more, since the power failed."""
        self.closed, self._flushing = True, False
        self.out.way.clear()

    def _usable(self, flushing: bool = False) -> None:
        if self.broken is not None:
            raise self.broken
        if self.closed and not flushing:
            raise ConnectionAbortedError("this stream was closed here")
        if self._end:
            raise BrokenPipeError(f"{self.peer} closed the connection")

    def arrived(self, chunk: bytes) -> None:
        for hears in self.world.on_message:
            hears(self.other.process, self.process)
        if self.closed:
            return
        self.world.mark("bytes", self.process.name, "", zlib.crc32(chunk))
        self._buffer += chunk
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def ended(self) -> None:
        """Note that the peer's end of the stream arrived."""
        self._end = True
        self._wake_all()

    def break_off(self, error: ConnectionError) -> None:
        if self.broken is None and (not self.closed or self._flushing):
            self.broken = error
            self._wake_all()

    def room(self) -> None:
        while self._room and not self._room[0].done():
            self._room.popleft().set_result(None)
        self._room = deque(waiter for waiter in self._room if not waiter.done())

    def _wake_reader(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _wake_all(self) -> None:
        self._wake_reader()
        self.room()


class SimListener:
    """One listening address: the `Listener` port."""

    def __init__(
        self, process: ProcessSeen, address: Address, accept: Callable[[SimStream], Coroutine[Any, Any, None]]
    ) -> None:
        self.process, self.address, self._accept = process, address, accept
        self._accepted: dict[asyncio.Task[Any], SimStream] = {}
        self.closed = False

    def take(self, stream: SimStream) -> None:
        if self.closed:
            stream.close()
            return
        task = self.process.spawn(f"accept {self.address}", self._serve(stream))
        if isinstance(task, asyncio.Task):
            self._accepted[task] = stream
            task.add_done_callback(lambda done: self._accepted.pop(done, None))

    async def _serve(self, stream: SimStream) -> None:
        try:
            await self._accept(stream)
        except OSError as error:
            self.process.env.log.debug("connection ended", address=self.address, why=str(error))
        finally:
            stream.close()

    async def close(self) -> None:
        """Stop listening and end the accepted connections; idempotent."""
        self.release()
        tasks = [task for task in self._accepted if task is not asyncio.current_task()]
        for task, stream in list(self._accepted.items()):
            stream.close()
            if task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def release(self) -> None:
        self.vanish()

    def vanish(self) -> None:
        if not self.closed:
            self.closed = True
            self.process.world.wires.listeners.pop(self.process.world.wires.key(self.process.host, self.address), None)


class Wires:
    """Every listener and connection of the world."""

    def __init__(self, world: WorldSeen) -> None:
        self.world = world
        self.listeners: dict[tuple[str, str], SimListener] = {}
        self.window_bytes = WINDOW_BYTES
        """Window of every connection in bytes: a story may have kernels with less room."""
        self.streams: list[SimStream] = []
        """One end of every connection between two hosts."""
        world.network.on_change.append(self.watch)
        self._watched: dict[int, float] = {}

    def key(self, host: HostSeen, address: Address) -> tuple[str, str]:
        """Key of an address: unix addresses belong to a host, the others to all."""
        return (host.name, address) if address.startswith("unix:") else ("", address)

    def join(self, caller: ProcessSeen, listener: SimListener, here: Address) -> SimStream:
        unix = listener.address.startswith("unix:")
        near = SimStream(caller, listener.address, listener.process.uid if unix else UNKNOWN_USER)
        far = SimStream(listener.process, here, caller.uid if unix else UNKNOWN_USER)
        near.other, far.other = far, near
        near.out, far.out = Pipe(near, far), Pipe(far, near)
        if near.host is not far.host:
            self.streams = [s for s in self.streams if not (s.closed and s.other.closed) and not s.broken]
            self.streams.append(near)
            self.watch()
        listener.take(far)
        return near

    def reset(self, host: str, share: float) -> None:
        """End connections between this host and others now, each with chance `share`: both ends hear of it."""
        for stream in list(self.streams):
            if host in (stream.host.name, stream.other.host.name) and self.world.chance.random() < share:
                for end in (stream, stream.other):
                    end.break_off(ConnectionResetError(f"the connection with {end.peer} was reset"))

    def watch(self) -> None:
        """Watch connections after a cut or a crash: those that stay cut for the user timeout break."""
        for stream in self.streams:
            if not stream.connected and id(stream) not in self._watched and not (stream.broken and stream.other.broken):
                self._watched[id(stream)] = self.world.now
                self.world.at(self.world.now + 0.5, lambda stream=stream: self._look(stream))

    def _look(self, stream: SimStream) -> None:
        since = self._watched.get(id(stream), self.world.now)
        if stream.connected:
            del self._watched[id(stream)]
            for end in (stream, stream.other):
                if not end.process.alive:  # it came back from a power loss and does not know this connection
                    end.other.break_off(ConnectionResetError(f"{end.other.peer} does not know this connection"))
        elif self.world.now - since >= USER_TIMEOUT_S:
            del self._watched[id(stream)]
            for end in (stream, stream.other):
                end.break_off(ConnectionResetError(f"{end.peer} was silent for {USER_TIMEOUT_S:.0f} s"))
        else:
            self.world.at(self.world.now + 0.5, lambda: self._look(stream))


class SimBytes:
    """The `Bytes` port of one process."""

    def __init__(self, process: ProcessSeen) -> None:
        self._process = process

    async def listen(
        self, bind: Address, accept: Callable[[Any], Coroutine[Any, Any, None]], uid: int = -1, bulk: bool = False
    ) -> SimListener:
        process, wires = self._process, self._process.world.wires
        address = bind
        if process.world.mischief.strikes("listen"):
            raise OSError(98, f"another process listens on {bind}")
        if bind.startswith("unix:"):
            if wires.key(process.host, bind) in wires.listeners:
                raise OSError(98, f"another process listens on {bind}")
        else:
            address = bind_address(process.host, bind, lambda candidate: ("", candidate) in wires.listeners)
        listener = SimListener(process, address, accept)
        wires.listeners[wires.key(process.host, address)] = listener
        process.resources.append(listener)
        return listener

    async def connect(self, to: Address, timeout_s: float = 2.0) -> SimStream:
        process, world = self._process, self._process.world
        if world.mischief.strikes("connect"):
            await asyncio.sleep(world.mischief.rng.choice((0.0, timeout_s)))
            raise ConnectionError(f"no answer from {to} within {timeout_s:g} s")
        host, wires, network = process.host, world.wires, world.network
        here = f"{host.ip}:{host.ephemeral_port()}"
        if to.startswith("unix:"):
            target, address, here = host, to, f"unix:{process.name}"
        else:
            ip, port = split(to)
            loop = ip.startswith("127.") or ip in ("::1", "localhost")
            found = host if loop else network.hosts_by_ip.get(ip)
            if found is None:
                await asyncio.sleep(timeout_s)
                raise ConnectionError(f"no answer from {to} within {timeout_s:g} s")
            target, address = found, f"{found.ip}:{port}"
        deadline = world.now + timeout_s
        while True:
            trip = network.delay_s(host.name, target.name) + network.delay_s(target.name, host.name)
            reached = target is host or (target.up and network.both_ways(host.name, target.name))
            if reached and not network.lost(host.name, target.name) and world.now + trip <= deadline:
                break
            if world.now + RETRANSMIT_S * 5 > deadline:
                await asyncio.sleep(max(0.0, deadline - world.now))
                raise ConnectionError(f"no answer from {to} within {timeout_s:g} s")
            await asyncio.sleep(RETRANSMIT_S * 5)
        await asyncio.sleep(trip)
        listener = wires.listeners.get(wires.key(target, address))
        if listener is None or isinstance(listener, HeldPort) or not target.up:
            raise ConnectionRefusedError(f"no process listens on {to}")
        joined: SimStream = wires.join(process, listener, here)
        return joined

    async def pair(self) -> tuple[Any, Handed]:
        raise OSError(95, "there is no kernel here that could be given a socket")

    def hold(self, ip: str, port: int = 0) -> "HeldPort":
        """Keep a TCP port from others without listening on it. Raises OSError when it is taken."""
        wires, host = self._process.world.wires, self._process.host
        if port and self._process.world.mischief.strikes("hold"):
            raise OSError(98, f"another process listens on {ip}:{port}")
        address = bind_address(host, f"{ip}:{port}", lambda candidate: ("", candidate) in wires.listeners)
        held = HeldPort(self._process, address)
        wires.listeners[("", address)] = held
        self._process.resources.append(held)
        return held


class HeldPort(SimListener):
    """A TCP port that is bound but does not listen: no other process gets it, and connections are refused."""

    def __init__(self, process: ProcessSeen, address: Address) -> None:
        super().__init__(process, address, _nobody)
        self.port = split(address)[1]


async def _nobody(_: SimStream) -> None:
    """Handler that is never called: a held port refuses."""
