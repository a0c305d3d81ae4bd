"""The TCP address of the agent's HTTP: it takes TLS and plain HTTP, and tells them apart by the first byte.

TLS begins with a record of type 22, and no method of HTTP does. A connection that says nothing for `FIRST_S`, or does
not finish its handshake, is closed. Certificates that TLS does not believe are counted here: such a connection never
gets to a request.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

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
                refused(reason_of(error))
                raise ssl.SSLWantReadError(ssl.SSL_ERROR_WANT_READ, "the alert goes out first") from None

    return ToldToClients


class TcpDoor:
    """Accepts connections. `may_come`: whether a further one may, given the number of those that have said nothing yet;
    `plain`, `over_tls`: make the protocol object of a connection; `context`: TLS for connections to this address of the
    host; `refused`: counts."""

    def __init__(
        self,
        listener: socket.socket,
        may_come: Callable[[int], bool],
        plain: Callable[[], asyncio.Protocol],
        over_tls: Callable[[], asyncio.Protocol],
        context: Callable[[str], ssl.SSLContext],
        refused: Callable[[str], None],
    ) -> None:
        self._listener, self._may_come, self._refused = listener, may_come, refused
        self._plain, self._over_tls, self._context = plain, over_tls, context
        self._tls = told_to_clients(refused)
        self._begun: set[asyncio.Task[None]] = set()
        listener.listen(BACKLOG)
        self._accepting = asyncio.get_running_loop().create_task(self._accept(), name="http: accept")

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
                connection, _ = await loop.sock_accept(self._listener)
            except OSError:  # it was reset already, or this process has no descriptor left
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            if not self._may_come(len(self._begun)):
                connection.close()
                continue
            connection.setblocking(False)
            task = loop.create_task(self._begin(connection), name="http: begin")
            self._begun.add(task)
            task.add_done_callback(self._begun.discard)

    async def _begin(self, connection: socket.socket) -> None:
        handed = False
        try:
            first = await _first_byte(connection)
            context = self._context(connection.getsockname()[0]) if first == TLS_RECORD else None
            if first:
                handed = True
                await self._hand(connection, context)
        except TimeoutError:
            self._refused("silent")
        except (OSError, ValueError):  # it has ended; SSLError is one, which is counted already
            pass
        finally:
            if not handed:
                connection.close()

    async def _hand(self, connection: socket.socket, context: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        if context is None:
            await loop.connect_accepted_socket(self._plain, connection)
            return
        context.sslobject_class = self._tls
        await loop.connect_accepted_socket(
            self._over_tls, connection, ssl=context, ssl_handshake_timeout=FIRST_S, ssl_shutdown_timeout=1.0
        )


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
