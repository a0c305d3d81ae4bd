"""A disk in memory for machines that run without an event loop; its power may fail in the middle of a write."""

import random
from collections.abc import Coroutine
from typing import Any, TypeVar

from covey.ports.disk import UnsyncedWrite

R = TypeVar("R")
SECTOR = 64
"""Bytes of a sector: fewer than real ones, so that short writes are torn too."""


class PowerLost(Exception):
    """The host lost its power in the middle of a disk operation."""


def run(work: Coroutine[Any, Any, R]) -> R:
    """The result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("it waits for something")


class MemoryDisk:
    """The part of `covey.ports.disk.Disk` that the log needs. With `fail_after` set, the power fails during that
    operation."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.files: dict[str, bytes] = {}
        self.fail_after: int | None = None
        self.appends = 0
        self.unsynced: dict[str, bytes] = {}
        """What the disk itself holds of files that were written since their last sync."""

    def _fails(self) -> bool:
        if self.fail_after is None:
            return False
        self.fail_after -= 1
        return self.fail_after < 0

    async def read(self, name: str) -> bytes | None:
        return self.files.get(name)

    async def replace(self, name: str, data: bytes) -> None:
        fails = self._fails()
        if not fails or self.rng.random() < 0.5:
            self.files[name] = data
            self.unsynced.pop(name, None)
        if fails:
            raise PowerLost

    async def append(self, name: str, data: bytes) -> None:
        fails = self._fails()
        self.files[name] = self.files.get(name, b"") + (self._torn(data) if fails else data)
        self.appends += 1
        if fails:
            raise PowerLost

    def _torn(self, data: bytes) -> bytes:
        """What a torn write leaves: any prefix, in which each sector was kept or not, and some hold garbage."""
        rng = self.rng
        kept = bytearray(data[: rng.randrange(len(data) + 1)])
        for at in range(0, len(kept), SECTOR):
            fate = rng.random()
            end = min(at + SECTOR, len(kept))
            if fate < 0.2:
                kept[at:end] = bytes(end - at)
            elif fate < 0.25:
                kept[at:end] = rng.randbytes(end - at)
        return bytes(kept)

    async def append_noted(self, name: str, data: bytes, note: UnsyncedWrite) -> None:
        await self.append(name, data)
        await self.write_at(*note)

    async def truncate(self, name: str, size: int) -> None:
        if self._fails():
            raise PowerLost
        self.files[name] = self.files[name][:size]

    async def delete(self, name: str) -> None:
        if self._fails():
            raise PowerLost
        self.files.pop(name, None)

    async def names(self, prefix: str) -> list[str]:
        return sorted(name for name in self.files if name.startswith(prefix))

    async def write_at(self, name: str, offset: int, data: bytes | bytearray | memoryview) -> None:
        whole = self.files.get(name, b"").ljust(offset + len(data), b"\0")
        self.unsynced.setdefault(name, whole)
        self.files[name] = whole[:offset] + bytes(data) + whole[offset + len(data) :]

    async def read_at(self, name: str, offset: int, size: int) -> bytes:
        return self.files[name][offset : offset + size]

    async def sync(self, name: str) -> None:
        self.unsynced.pop(name, None)

    def lose_power(self) -> None:
        """Lose power: each file that was written and not synced keeps all of the write or nothing."""
        for name in sorted(self.unsynced):
            if self.rng.random() < 0.5:
                self.files[name] = self.unsynced[name]
        self.unsynced.clear()

    def path(self, name: str) -> str:
        return f"/state/{name}"
