"""The TCP address of the agent's HTTP: it takes TLS and plain HTTP, and tells them apart by the first byte.

TLS begins with a record of type 22, and no method of HTTP does. A connection that says nothing for `FIRST_S`, or does
not finish its handshake in that time, is closed, and counted as `silent`. Certificates that TLS does not believe are
counted here, and so is a host that cannot make its own (`no_context`): such a connection never gets to a request.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import cast

from covey.ports.env import Env

TLS_RECORD = b"\x16"
FIRST_S = 10.0
"""Seconds in which a connection must say something, and then finish its handshake (chosen)."""
ACCEPT_AGAIN_S = 0.5
"""Seconds until the next try, where no connection can be accepted."""
BACKLOG = 128
REASONS = {9: "certificate_out_of_date", 10: "certificate_out_of_date"} | dict.fromkeys(
    (2, 18, 19, 20, 21), "certificate_of_others"
)
"""X509_V_ERR_* of OpenSSL (x509_vfy.h) -> a label of `covey_http_refused_total`."""
_told: ContextVar[list[str]] = ContextVar("told")
"""The reasons that were counted of a connection: event loops run what they call for it in the context in which it was
handed to them."""


def reason_of(error: ssl.SSLError) -> str:
    """Why a handshake ended, as a label of `covey_http_refused_total`."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return REASONS.get(error.verify_code, "certificate")
    return "not_tls"


def told_to_clients(refused: Callable[[str], None]) -> type[ssl.SSLObject]:
    """The server's end of TLS, which counts why a handshake failed, and says so to the client (a TLS alert) before the
    connection ends: event loops by themselves drop what the library has written for it."""

    class ToldToClients(ssl.SSLObject):
        failed: ssl.SSLError | None = None

        def do_handshake(self) -> None:
            if self.failed is not None:
                raise self.failed
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                self.failed = error
                _told.get([]).append(reason_of(error))
                refused(reason_of(error))
                raise ssl.SSLWantReadError(ssl.SSL_ERROR_WANT_READ, "the alert goes out first") from None

    return ToldToClients


class TcpDoor:
    """Accepts connections. `may_come`: whether one of this address may, given the addresses of those that have said
    nothing yet; `plain`, `over_tls`: make the protocol object of a connection; `context`: TLS for connections to this
    address of the host; `refused`: counts."""

    def __init__(
        self,
        env: Env,
        listener: socket.socket,
        may_come: Callable[[str, Sequence[str]], bool],
        plain: Callable[[], asyncio.Protocol],
        over_tls: Callable[[], asyncio.Protocol],
        context: Callable[[str], ssl.SSLContext],
        refused: Callable[[str], None],
    ) -> None:
        self._log, self._listener, self._may_come, self._refused = env.log, listener, may_come, refused
        self._plain, self._over_tls, self._context = plain, over_tls, context
        self._tls = told_to_clients(refused)
        self._begun: dict[asyncio.Task[None], str] = {}
        listener.listen(BACKLOG)
        self._accepting = cast("asyncio.Task[None]", env.spawn("http: accept", self._accept()))

    def close(self) -> None:
        """Accept nothing more, and close what has said nothing yet."""
        self._accepting.cancel()
        for task in self._begun:
            task.cancel()
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(self._listener)
            except OSError:  # it was reset already, or this process has no descriptor left
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            if not self._may_come(peer[0], tuple(self._begun.values())):
                connection.close()
                continue
            connection.setblocking(False)
            task = loop.create_task(self._begin(connection), name="http: begin")
            self._begun[task] = peer[0]
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A defect that one connection brings to light ends that connection, and is logged."""
        del self._begun[task]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._log.error("a connection failed", error=repr(error), exc_info=error)

    async def _begin(self, connection: socket.socket) -> None:
        handed = False
        try:
            first = await _first_byte(connection)
            context = self._context_of(connection) if first == TLS_RECORD else None
            if first and not (first == TLS_RECORD and context is None):
                handed = True
                await self._hand(connection, context)
        except TimeoutError:
            self._refused("silent")
        except OSError:  # it has ended; SSLError is one, which is counted already
            pass
        finally:
            if not handed:
                connection.close()

    def _context_of(self, connection: socket.socket) -> ssl.SSLContext | None:
        """TLS for this connection; None where this host cannot make a certificate now."""
        address = connection.getsockname()[0]
        try:
            return self._context(address)
        except (OSError, ValueError) as error:  # SSLError is one: no descriptor, a name that no certificate can have
            self._refused("no_context")
            self._log.error("no TLS: this host has no certificate", address=address, why=repr(error))
            return None

    async def _hand(self, connection: socket.socket, context: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        if context is None:
            await loop.connect_accepted_socket(self._plain, connection)
            return
        context.sslobject_class = self._tls
        told: list[str] = []
        _told.set(told)
        try:
            await loop.connect_accepted_socket(
                self._over_tls, connection, ssl=context, ssl_handshake_timeout=FIRST_S, ssl_shutdown_timeout=1.0
            )
        except ConnectionAbortedError:  # event loops end a handshake so that takes too long
            if told:
                return  # it failed, which is counted, and the other side did not hang up
            raise TimeoutError from None


async def _first_byte(connection: socket.socket) -> bytes:
    """The first byte, which stays to be read; empty: the other side has closed the connection. TimeoutError."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def look() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(connection, look)
    try:
        async with asyncio.timeout(FIRST_S):
            await readable
    finally:
        loop.remove_reader(connection)
    with contextlib.suppress(BlockingIOError):
        return connection.recv(1, socket.MSG_PEEK)
    return b""
