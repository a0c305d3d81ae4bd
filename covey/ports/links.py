"""Control links between agents."""

from collections.abc import Callable
from typing import Protocol

from covey.core.ids import HostId
from covey.ports.addresses import Address


class Links(Protocol):
    """Control messages between hosts: authenticated, encrypted, **at most once and lost silently** (ZeroMQ's way).
    Messages to a peer keep their order within one connection. `agent/rpc/rpc.py` puts ids, acknowledgements, retries
    and duplicates on top."""

    @property
    def address(self) -> Address: ...
    @property
    def public_key(self) -> bytes: ...
    async def open(self, bind: Address, heard: Callable[[HostId, bytes], None]) -> None: ...
    def know(self, host: HostId, address: Address, public_key: bytes) -> None:
        """Set the address of a host and the key it must prove; a changed address or key replaces the old one."""

    def forget(self, host: HostId) -> None: ...
    def send(self, to: HostId, data: bytes) -> bool:
        """Send one message. False when it was certainly not sent (unknown host, full outbox); True promises nothing."""

    async def close(self) -> None: ...
