"""Datagrams, for gossip."""

from collections.abc import Callable, Sequence
from typing import Protocol

from covey.ports.addresses import Address


class DatagramSocket(Protocol):
    @property
    def address(self) -> Address: ...
    def send(self, data: bytes, to: Address) -> bool:
        """Send one datagram, best effort; never blocks, never raises for what the network does. False when it certainly
        did not leave this host (no IP address, no route, full buffers); True promises nothing."""

    def close(self) -> None: ...


class Datagrams(Protocol):
    async def open(self, bind: Address, received: Callable[[bytes, Address], None]) -> DatagramSocket:
        """A socket at `bind`, which calls `received` for each datagram. OSError when the address cannot be bound."""

    async def resolve(self, address: Address) -> Sequence[Address]:
        """All addresses of `NAME:PORT`, at least one; an IP address unchanged. May take many seconds. OSError when the
        name does not resolve now."""
