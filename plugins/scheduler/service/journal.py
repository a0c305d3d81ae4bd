"""What this host must remember across a restart of its agent: one small file, replaced whole."""

import asyncio

import msgspec

from covey.core import JobId
from covey.ports import Env
from plugins.scheduler.machine.reservations import Kept

FILE = "scheduler/state"


class Remembered(msgspec.Struct, frozen=True):
    """The file's content."""

    kept: Kept = Kept()
    fences: dict[JobId, int] = {}
    """Highest epoch started here per job that is not over: nothing older starts."""
    told: dict[JobId, int] = {}
    """Jobs that the other rooms were told are placed, and under which epoch."""
    asked: list[tuple[JobId, int]] = []
    """Grants whose ranks this host told to stop."""


_decoder = msgspec.msgpack.Decoder(Remembered)


class Journal:
    """Writes are one after the other; those that wait share the next one."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self._lock = asyncio.Lock()
        self._written = b""

    async def load(self) -> Remembered:
        """ValueError when the file is damaged: forgetting who holds which GPU in silence would be worse."""
        data = await self._env.disk.read(FILE)
        if data is None:
            return Remembered()
        try:
            found = _decoder.decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ValueError(f"{self._env.disk.path(FILE)} is damaged: {error}; restore or delete it") from error
        self._written = data
        return found

    async def save(self, remembered: Remembered) -> None:
        """Durable on return. OSError on a sick disk."""
        data = msgspec.msgpack.encode(remembered)
        async with self._lock:
            if data != self._written:
                await self._env.disk.replace(FILE, data)
                self._written = data
