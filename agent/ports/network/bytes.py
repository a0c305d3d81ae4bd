"""Listeners and connections for bulk bytes: `covey.ports.streams.Bytes` over TCP and unix sockets (`stream`)."""

import asyncio
import contextlib
import os
import socket

from agent.ports.network.datagrams import ip_port_text
from agent.ports.network.stream import SocketStream, Turn
from agent.ports.network.unix_sockets import bind_unix, unix_path
from covey.ports.addresses import Address, ip_port
from covey.ports.log import Logger
from covey.ports.pages import Handed
from covey.ports.streams import Accept, ByteStream, HeldPort, Listener
from covey.wire.bulk import widen

CONNECTIONS_MAX = 2048
"""The most connections accepted per listener; further ones are closed at once."""
FOUND_CHECK_S = 2.0
"""Seconds between two looks for a unix socket at its path."""


class SocketListener:
    """The `covey.ports.streams.Listener` of one socket: a task per connection."""

    def __init__(self, accept: Accept, log: Logger, turn: Turn, widens: bool = False) -> None:
        self._accept, self._log, self._turn, self._widens = accept, log, turn, widens
        self._server: asyncio.Server | None = None
        self._tasks: dict[asyncio.Task[None], SocketStream] = {}
        self._unix_path: str | None = None
        self._inode = 0
        self._found: asyncio.Task[None] | None = None
        self.address: Address = ""

    def stream(self) -> SocketStream:
        return SocketStream(self._turn, self._connected)

    def _connected(self, stream: SocketStream) -> None:
        if len(self._tasks) >= CONNECTIONS_MAX or self._server is None:
            stream.close()
            return
        if self._widens:
            stream.widen()
        task = asyncio.get_running_loop().create_task(self._serve(stream), name=f"accept {self.address}")
        self._tasks[task] = stream
        task.add_done_callback(self._served)

    async def _serve(self, stream: SocketStream) -> None:
        try:
            await self._accept(stream)
        except ConnectionError:
            pass  # the peer went away: the usual end
        finally:
            stream.close()

    def _served(self, task: asyncio.Task[None]) -> None:
        peer = self._tasks.pop(task).peer
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("connection failed", address=self.address, peer=peer, why=repr(error), exc_info=error)

    def serve(self, server: asyncio.Server, address: Address) -> None:
        self._server, self.address = server, address

    async def serve_unix(self, path: str, uid: int) -> None:
        """Serve a unix socket. Where its file is removed it comes back. OSError."""
        await self._bind(path, uid)
        self._unix_path, self.address = path, f"unix:{path}"
        self._found = asyncio.get_running_loop().create_task(self._keep(path, uid), name=f"keep {self.address}")

    async def _bind(self, path: str, uid: int) -> None:
        bound = bind_unix(path, uid=uid)
        lost = self._server
        # No await between binding and listening: no other task runs before the server listens.
        self._server = await asyncio.get_running_loop().create_unix_server(self.stream, sock=bound)
        self._inode = os.stat(path).st_ino
        if lost is not None:
            lost.close()

    async def _keep(self, path: str, uid: int) -> None:
        """Bind the socket again where its folder was removed and made again, as systemd does when a service stops and
        starts: clients look for it there."""
        told = False
        while True:
            await asyncio.sleep(FOUND_CHECK_S)
            if not self._is_lost(path):
                continue
            try:
                await self._bind(path, uid)
            except OSError as error:
                if not told:
                    self._log.warning("no process can reach this socket", address=self.address, why=str(error))
                told = True
            else:
                self._log.info("socket was removed, and is there again", address=self.address)
                told = False

    def _is_lost(self, path: str) -> bool:
        """Whether the socket's file is gone and can be made again; a folder that is gone is somebody else's to make."""
        try:
            return os.stat(path).st_ino != self._inode
        except OSError:
            return os.path.isdir(os.path.dirname(path) or ".")

    async def close(self) -> None:
        """Close the listener. Idempotent. The socket file goes first, if it is still this listener's."""
        if self._found is not None:
            self._found.cancel()
            self._found = None
        if self._unix_path is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self._unix_path).st_ino == self._inode:
                    os.unlink(self._unix_path)
            self._unix_path = None
        if self._server is not None:
            self._server.close()
            self._server = None
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task, stream in list(self._tasks.items()):
            stream.close()
            if task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class SocketBytes:
    """The `covey.ports.streams.Bytes` of this machine."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._turn = Turn()

    def _stream(self) -> SocketStream:
        return SocketStream(self._turn)

    async def listen(self, bind: Address, accept: Accept, uid: int = -1, bulk: bool = False) -> Listener:
        """Listen. OSError when the address is taken: for a unix socket, when a process accepts there. A socket file
        without a listener is replaced; a lock on the directory serialises two processes that try at the same moment. A
        unix socket that somebody removed is at its path again within 2 s."""
        listener = SocketListener(accept, self._log, self._turn, bulk and bind.startswith("unix:"))
        loop = asyncio.get_running_loop()
        if bind.startswith("unix:"):
            await listener.serve_unix(bind.removeprefix("unix:"), uid)
            return listener
        ip, port = ip_port(bind)
        bound = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.setblocking(False)
            bound.bind((ip, port))
            server = await loop.create_server(listener.stream, sock=bound, backlog=512)
        except OSError:
            bound.close()
            raise
        listener.serve(server, ip_port_text(bound.getsockname()))
        return listener

    async def connect(self, to: Address, timeout_s: float = 2.0) -> ByteStream:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                if to.startswith("unix:"):
                    path = unix_path(to.removeprefix("unix:"))
                    _, stream = await loop.create_unix_connection(self._stream, path)
                else:
                    ip, port = ip_port(to)
                    _, stream = await loop.create_connection(self._stream, ip, port)
        except TimeoutError as error:
            raise ConnectionError(f"{to} did not answer within {timeout_s:g} s") from error
        except ConnectionError:
            raise
        except OSError as error:
            raise ConnectionError(f"cannot connect to {to}: {error}") from error
        return stream

    def hold(self, ip: str, port: int = 0) -> HeldPort:
        """Keep a TCP port from others without listening on it. OSError when it is taken."""
        return BoundPort(ip, port)

    async def pair(self) -> tuple[ByteStream, Handed]:
        ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            ours.setblocking(False)
            widen(other)
            _, stream = await asyncio.get_running_loop().create_unix_connection(self._stream, sock=ours)
        except OSError:
            ours.close()
            other.close()
            raise
        stream.widen()
        return stream, OtherEnd(other)


class OtherEnd:
    """The `Handed` end of a pair of sockets, which another process gets."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @property
    def descriptor(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self._end.close()


class BoundPort:
    """The `HeldPort`. It has SO_REUSEADDR, so that a job that sets it too may bind right after (or even before) the
    release."""

    def __init__(self, ip: str, port: int) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.bind((ip, port))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]

    def release(self) -> None:
        self._socket.close()
