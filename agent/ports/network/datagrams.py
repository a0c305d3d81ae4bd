"""UDP on asyncio, and the names of hosts."""

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence
from typing import Any

from covey.ports.addresses import Address, ip_port, is_ip, joined
from covey.ports.datagrams import DatagramSocket

BACKLOG_BYTES_MAX = 1 << 20
"""The most bytes that may wait in user space for the kernel; further ones are dropped, as a network would."""


def ip_port_text(sockname: Any) -> Address:
    """The address that `getsockname` returned, as text."""
    return joined(sockname[0], sockname[1])


class UdpSocket(asyncio.DatagramProtocol):
    """One bound UDP socket."""

    def __init__(self, received: Callable[[bytes, Address], None]) -> None:
        self._received = received
        self._transport: asyncio.DatagramTransport | None = None
        self._refused = False
        """Whether the kernel refused the datagram that is being sent."""
        self.address: Address = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.DatagramTransport) or hasattr(transport, "sendto")
        self._transport = transport  # type: ignore[assignment]  # uvloop's transport is no subclass
        self.address = ip_port_text(transport.get_extra_info("sockname"))

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self._received(data, ip_port_text(addr))

    def error_received(self, exc: Exception) -> None:
        """Handle an error. From within `send`: the kernel refused it (no route, too long). Otherwise ICMP reported an
        unreachable host: that is ignored, since membership detects it itself."""
        self._refused = True

    def send(self, data: bytes, to: Address) -> bool:
        transport: Any = self._transport  # typeshed does not know get_write_buffer_size
        if transport is None or transport.is_closing() or transport.get_write_buffer_size() > BACKLOG_BYTES_MAX:
            return False
        self._refused = False
        try:
            ip, port = ip_port(to)
            if not is_ip(ip):  # asyncio would look the name up here, and everything would wait for it
                return False
            transport.sendto(data, (ip, port))
        except (OSError, ValueError):  # no address, or one of the other family
            return False
        return not self._refused

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class UdpDatagrams:
    """The `covey.ports.datagrams.Datagrams` of this machine."""

    async def open(self, bind: Address, received: Callable[[bytes, Address], None]) -> DatagramSocket:
        loop = asyncio.get_running_loop()
        _, socket = await loop.create_datagram_endpoint(lambda: UdpSocket(received), local_addr=ip_port(bind))
        return socket

    async def resolve(self, address: Address) -> Sequence[Address]:
        """The IPs of an address, in the order of the system's resolver (RFC 6724), without IPv6 addresses that name no
        interface."""
        host, port = ip_port(address)
        if is_ip(host):
            return (address,)
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        ips = dict.fromkeys(str(entry[4][0]) for entry in found)
        usable = [joined(ip, port) for ip in ips if is_ip(ip) and not _is_link_local_v6(ip)]
        if not usable:
            raise OSError(f"{host} has no usable address: {', '.join(ips)}")
        return usable


def _is_link_local_v6(ip: str) -> bool:
    known = ipaddress.ip_address(ip)
    return known.version == 6 and known.is_link_local
