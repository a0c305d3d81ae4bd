"""What this host must remember across a restart of its agent: one small file, which is replaced whole."""

import asyncio

import msgspec

from covey.core.ids import JobId
from covey.ports.env import Env
from covey.wire import checked
from plugins.scheduler.machine.host.reservations import HeldReservations

FILE = "scheduler/state"


class ReservationFile(msgspec.Struct, frozen=True):
    """The content of the journal's file."""

    kept: HeldReservations = HeldReservations()
    fences: dict[JobId, int] = {}
    """Highest epoch started here per job that is not over: nothing older starts."""
    told: dict[JobId, int] = {}
    """Jobs that the other plugins were told are placed -> under which epoch."""
    asked: list[tuple[JobId, int]] = []
    """Grants whose ranks this host told to stop."""
    numbers: int = 0
    """Job ids below this number were given out, as far as this host has seen: see `Submitted.numbers`."""


_decoder = msgspec.msgpack.Decoder(ReservationFile)


class ReservationJournal:
    """The journal's file. Writes are one after the other; those that wait share the next one."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self._lock = asyncio.Lock()
        self._written = b""

    async def load(self) -> ReservationFile:
        """Read the file; Damaged when it is: what it says of who holds which GPU is not believed then."""
        return await checked.load(self._env.disk, FILE, _decoder) or ReservationFile()

    async def save(self, remembered: ReservationFile) -> None:
        """Write the file, which is durable on return. OSError on a sick disk."""
        data = checked.seal(remembered)
        async with self._lock:
            if data != self._written:
                await self._env.disk.replace(FILE, data)
                self._written = data
