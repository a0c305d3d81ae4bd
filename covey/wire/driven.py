"""How the byte path reads and writes: no task, future or timeout for a request, but a machine that says where bytes go.

`ByteStream` suits a handshake. After it both ends of a connection hand it over to a `Driven`, which is asked where the
next bytes belong and told when they are there; what it sends is queued and never waited for. The same machines are
driven by sockets (`agent.ports.network.stream`) and by the simulator (`chaos.world.driven`).
"""

from collections.abc import Callable, Sequence
from typing import Protocol, cast

from covey.ports import ByteStream

Part = bytes | bytearray | memoryview


class Driven(Protocol):
    """One end of a connection. Nothing is called after `ended`."""

    def wanted(self) -> memoryview:
        """What the next bytes fill, at least one. Asked once after each `filled`."""

    def filled(self) -> None:
        """The last `wanted` is full."""

    def turn(self) -> None:
        """What arrived is handled: time to send what was gathered."""

    def ended(self, error: ConnectionError) -> None:
        """Once, whoever ended it."""


class DrivenStream(ByteStream, Protocol):
    def drive(self, by: Driven, polite: bool) -> None:
        """From now on bytes go where `by` says. `polite`: no request is read while the peer does not take what was
        sent, so memory does not grow with what it asks for. Who asks must not be: both ends would wait for one
        another."""

    def hold(self) -> None:
        """Read nothing more for now: too much is under way. What is read already may still come."""

    def go_on(self) -> None:
        """Read again."""

    def soon(self, call: Callable[[], None]) -> None:
        """Call it when all that arrived is handled, over whichever connection of this process it came, so that what
        is said on the way leaves together; in the next turn where nothing is being handled."""

    def send(self, parts: Sequence[Part]) -> None:
        """Queue all parts as one unit. Buffers must stay as they are until the peer has answered. Nothing happens once
        the connection has ended."""


def driven(stream: ByteStream) -> DrivenStream:
    """Every stream of `env.bytes` can be driven."""
    return cast(DrivenStream, stream)
