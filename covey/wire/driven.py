"""How the byte path reads and writes: a machine says where bytes go, without a task, future or timeout per request.

`ByteStream` is for the handshake. After it both ends of a connection hand it over to a `Driven`, which is asked where
the next bytes belong and told when they have arrived; what it sends is queued and never waited for. The same machines
are driven by sockets (`agent.ports.network.stream`) and by the simulator (`chaos.world.driven`).
"""

from collections.abc import Callable, Sequence
from typing import Protocol, cast

from covey.ports.streams import ByteStream

Part = bytes | bytearray | memoryview


class Driven(Protocol):
    """The machine at one end of a connection. No method is called after `ended`."""

    def wanted(self) -> memoryview:
        """The memory for the next bytes, at least one. Asked once after each `filled`."""

    def filled(self) -> None:
        """The last `wanted` memory is full."""

    def turn(self) -> None:
        """All that arrived is handled: time to send what was gathered."""

    def ended(self, error: ConnectionError) -> None:
        """The connection has ended, whoever ended it. Called once."""


class DrivenStream(ByteStream, Protocol):
    def drive(self, by: Driven, polite: bool) -> None:
        """From now on bytes go where `by` says. `polite`: no request is read while the peer does not take what was
        sent, so memory does not grow with what it asks for. The end that asks must not be polite: both ends would wait
        for one another."""

    def hold(self) -> None:
        """Read nothing more for now, since too much is under way. Bytes that were read already may still arrive."""

    def go_on(self) -> None:
        """Read again after `hold`."""

    def soon(self, call: Callable[[], None]) -> None:
        """Call `call` when all that arrived on any connection of this process is handled, so that all answers leave
        together; in the next turn when nothing is being handled."""

    def send(self, parts: Sequence[Part]) -> None:
        """Queue all parts as one unit. Buffers must not change until the peer has answered. Does nothing once the
        connection has ended."""


def driven(stream: ByteStream) -> DrivenStream:
    """The stream as a DrivenStream: every stream of `env.bytes` is one."""
    return cast(DrivenStream, stream)
