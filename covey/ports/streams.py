"""Connections for bulk bytes, over TCP and unix sockets."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from covey.ports.addresses import Address
from covey.ports.pages import Handed


class ByteStream(Protocol):
    """One connection for bulk bytes. Every method raises ConnectionError (or its subclass) once the peer is gone."""

    @property
    def peer(self) -> Address: ...
    @property
    def uid(self) -> int:
        """The user at the other end of a unix socket, as the kernel tells it (SO_PEERCRED). Over TCP, and where the
        kernel does not tell, `UNKNOWN_USER`, whom no rule lets in."""

    @property
    def same_host(self) -> bool:
        """Whether both ends are on this host, by their addresses."""

    async def read_into(self, view: memoryview) -> None:
        """Fill all of `view`, without an extra copy. ConnectionError when the stream ends before it is full."""

    async def write(self, *parts: bytes | bytearray | memoryview) -> None:
        """Queue all parts as one unit (never interleaved with another write); waits while the outbox is full. The
        buffers may be reused once this returns."""

    async def write_with(self, data: bytes, pages: Sequence[Handed]) -> None:
        """Write `data`, and with it the descriptors of `pages` (SCM_RIGHTS); unix sockets only. The receiver has them,
        in order, by the time it has read `data`. Nothing is sent when one of them was closed meanwhile."""

    def close(self) -> None: ...


class Listener(Protocol):
    @property
    def address(self) -> Address:
        """The address bound, with the real port."""

    async def close(self) -> None:
        """Stop accepting, and close every stream that was accepted here."""


class HeldPort(Protocol):
    """A TCP port that is bound but does not listen: no other process gets it, and connections are refused."""

    @property
    def port(self) -> int: ...
    def release(self) -> None: ...


Accept = Callable[[ByteStream], Coroutine[Any, Any, None]]
UNKNOWN_USER = -3
"""The uid of an unknown user. Two more negative numbers exist: -1 (a volume without an owner) and `ANYBODY`."""
ANYBODY = -2
"""The uid for `listen` when any user may connect: who connects is asked for a secret."""


class Bytes(Protocol):
    async def listen(self, bind: Address, accept: Accept, uid: int = -1, bulk: bool = False) -> Listener:
        """Run `accept(stream)` as a task per connection; the stream closes when it returns or raises. `uid`: user who
        gets access to a unix socket; -1: our own user alone. `bulk`: the connections carry bulk bytes
        (`covey.wire.bulk`)."""

    async def connect(self, to: Address, timeout_s: float = 2.0) -> ByteStream:
        """A connection to `to`. ConnectionRefusedError when that machine says that nothing listens there,
        ConnectionError otherwise."""

    def hold(self, ip: str, port: int = 0) -> HeldPort:
        """Reserve a TCP port for a process that binds it after the release. OSError when it is taken."""

    async def pair(self) -> tuple[ByteStream, Handed]:
        """A connection whose other end is handed to another process, or to the kernel. OSError."""
