"""What a backend offers the agent, beside what plugins see of it."""

from collections.abc import Sequence
from typing import Protocol

from covey.ports.devices import Devices, Gpu


class Backend(Devices, Protocol):
    """The devices of one host."""

    async def start_up(self, timeout_s: float = 5.0) -> None:
        """Wait for the first answer of the driver, so that a starting agent does not publish that it has no devices."""

    def gpus(self) -> Sequence[Gpu]:
        """All devices of this host, as the scheduler counts them, at once: also those of which nothing is known now."""

    def unlisted(self) -> str:
        """Why it is not known which devices this host has, in words; empty: `gpus` has them all."""

    def forget(self, uuid: str) -> str:
        """Forget what is remembered of that device. Returns what that was, in words; empty: nothing."""

    def close(self) -> None:
        """End the backend's own threads and processes."""
