"""UDP on asyncio, and how an address is written."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from covey.ports import Address, DatagramSocket

BACKLOG_BYTES_MAX = 1 << 20
"""Bytes that may wait in user space for the kernel; what comes after is dropped, as a network would."""


def ip_port(address: Address) -> tuple[str, int]:
    """`127.0.0.1:7946` and `[::1]:7946` in parts. OSError when it is neither."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not port.isascii() or int(port) > 65535:
        raise OSError(f"{address!r} is not an address; expected IP:PORT or [IPV6]:PORT")
    return host, int(port)


def ip_port_text(sockname: Any) -> Address:
    """What `getsockname` returned, as an address."""
    host, port = sockname[0], sockname[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class UdpSocket(asyncio.DatagramProtocol):
    """One bound UDP socket."""

    def __init__(self, received: Callable[[bytes, Address], None]) -> None:
        self._received = received
        self._transport: asyncio.DatagramTransport | None = None
        self.address: Address = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.DatagramTransport) or hasattr(transport, "sendto")
        self._transport = transport  # type: ignore[assignment]  # uvloop's transport is no subclass
        self.address = ip_port_text(transport.get_extra_info("sockname"))

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self._received(data, ip_port_text(addr))

    def error_received(self, exc: Exception) -> None:
        """ICMP said that nobody is there: the network's business, membership finds out by itself."""

    def send(self, data: bytes, to: Address) -> None:
        transport: Any = self._transport  # typeshed does not know get_write_buffer_size
        if transport is None or transport.is_closing() or transport.get_write_buffer_size() > BACKLOG_BYTES_MAX:
            return
        with contextlib.suppress(OSError, ValueError):
            transport.sendto(data, ip_port(to))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class UdpDatagrams:
    """`covey.ports.Datagrams`."""

    async def open(self, bind: Address, received: Callable[[bytes, Address], None]) -> DatagramSocket:
        loop = asyncio.get_running_loop()
        _, socket = await loop.create_datagram_endpoint(lambda: UdpSocket(received), local_addr=ip_port(bind))
        return socket
