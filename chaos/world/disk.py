"""A simulated disk: what a reader sees, what would survive a power loss, and what lies between.

One `SimDisk` belongs to a host and outlives its processes; every process reaches it through a `ProcessDisk`, the port.
An operation takes virtual time and those of one process follow one another. When its process or host dies half way:

    a process dies    the kernel lives on: an operation under way happened, happened without its fsync, or did not
    the power fails   `replace` left the old file or the new one, whole; an `append` left any prefix of itself, its last
                      sector perhaps garbage; of what `write_at` wrote since the last `sync` every 512-byte sector was
                      kept with p = 0.5, and a few of the kept ones are garbage

Nothing that was durable on return is ever lost. Faults (`full`, `sick`) make operations raise OSError.
"""

import asyncio
import errno
import random
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, Protocol

from agent.ports.job_records import RecordFile
from chaos.world.seen import ProcessSeen
from covey.core.job_records import By, JobRecord, Range, RecordsAsked, RecordSum
from covey.ports.disk import UnsyncedWrite
from covey.ports.processes import ProcessId

SECTOR_BYTES = 512
UNSYNCED = 8
"""The most records of jobs that a power failure may take."""
GARBAGE = 0.05
"""Chance that a kept sector of a torn write holds something else (reliability notes: 5 %)."""
FSYNC_S = (0.0005, 0.006)
"""Least and most seconds of a write with fsync."""
CACHED_S = (0.00002, 0.0002)
"""Least and most seconds of an operation in the page cache."""
BYTES_PER_S = 500e6
NAME = re.compile(r"[a-zA-Z0-9._-]+(/[a-zA-Z0-9._-]+)*")

Death = Literal["process", "power"]


@dataclass
class SimFile:
    data: bytearray = field(default_factory=bytearray)
    """Content that a reader sees."""
    durable: bytearray | None = None
    """Content that survives a power loss; None: the file would not be there."""
    dirty: list[tuple[int, bytes]] = field(default_factory=list)
    """Writes since the last sync: offset, bytes."""

    def write(self, offset: int, data: bytes) -> None:
        _put(self.data, offset, data)
        self.dirty.append((offset, data))

    def sync(self) -> None:
        if self.durable is None:
            self.durable = bytearray()
        for offset, data in self.dirty:
            _put(self.durable, offset, data)
        self.dirty.clear()

    def tear(self, rng: random.Random) -> None:
        """Apply a power failure: every unsynced sector is kept with p = 0.5."""
        if self.dirty and self.durable is None:
            self.durable = bytearray()
        for offset, data in self.dirty:
            at = 0
            while at < len(data):
                step = min(SECTOR_BYTES - (offset + at) % SECTOR_BYTES, len(data) - at)
                if rng.random() < 0.5:
                    kept = data[at : at + step] if rng.random() >= GARBAGE else rng.randbytes(step)
                    assert self.durable is not None
                    _put(self.durable, offset + at, kept)
                at += step
        self.dirty.clear()
        self.data = bytearray(self.durable or b"")


def _put(target: bytearray, offset: int, data: bytes) -> None:
    if len(target) < offset:
        target.extend(bytes(offset - len(target)))
    target[offset : offset + len(data)] = data


@dataclass(eq=False)
class Trap:
    """A death that springs once, in the middle of the next write to a file whose name contains `name`."""

    name: str
    spring: Callable[[Any], None]


class Operation(Protocol):
    """One operation under way."""

    name: str

    def finish(self) -> None:
        """Complete the operation."""

    def interrupt(self, rng: random.Random, death: Death) -> None:
        """End the operation in the middle, since its process or its host died."""


@dataclass
class Replace:
    disk: "SimDisk"
    name: str
    content: bytes

    def finish(self) -> None:
        data = bytearray(self.content)
        self.disk.files[self.name] = SimFile(data=data, durable=bytearray(data))

    def interrupt(self, rng: random.Random, death: Death) -> None:
        if rng.random() < 0.5:
            self.finish()


@dataclass
class Append:
    disk: "SimDisk"
    name: str
    content: bytes

    def finish(self) -> None:
        file = self.disk.files.setdefault(self.name, SimFile())
        file.write(len(file.data), self.content)
        file.sync()

    def interrupt(self, rng: random.Random, death: Death) -> None:
        kept = self.content[: rng.randint(0, len(self.content))]
        file = self.disk.files.setdefault(self.name, SimFile())
        if death == "process":
            if rng.random() < 0.7:
                kept = self.content if rng.random() < 0.5 else b""
            if kept:
                file.write(len(file.data), kept)
            return
        if kept and rng.random() < 0.3:
            torn = min(len(kept), rng.randint(1, SECTOR_BYTES))
            kept = kept[:-torn] + rng.randbytes(torn)
        if kept:
            file.write(len(file.data), kept)
            file.sync()


@dataclass
class WriteAt:
    disk: "SimDisk"
    name: str
    offset: int
    content: bytes

    def finish(self) -> None:
        self.disk.files.setdefault(self.name, SimFile()).write(self.offset, self.content)

    def interrupt(self, rng: random.Random, death: Death) -> None:
        kept = self.content[: rng.randint(0, len(self.content))]
        if kept:
            self.disk.files.setdefault(self.name, SimFile()).write(self.offset, kept)


@dataclass
class Sync:
    disk: "SimDisk"
    name: str

    def finish(self) -> None:
        if self.name in self.disk.files:
            self.disk.files[self.name].sync()

    def interrupt(self, rng: random.Random, death: Death) -> None:
        if death == "process" and rng.random() < 0.5:
            self.finish()

    def drop(self, rng: random.Random) -> None:
        """Fail: the kernel dropped what it could not write, and some of it reads as it was before."""
        file = self.disk.files.get(self.name)
        if file is not None and file.dirty:
            kept = [write for write in file.dirty if rng.random() < 0.5]
            file.data, file.dirty = bytearray(file.durable or b""), []
            for offset, data in kept:  # these are in its cache still, and it will never write them
                _put(file.data, offset, data)


@dataclass
class Truncate:
    disk: "SimDisk"
    name: str
    size: int

    def finish(self) -> None:
        file = self.disk.files.setdefault(self.name, SimFile())
        file.sync()
        for image in (file.data, file.durable):
            assert image is not None
            if self.size <= len(image):
                del image[self.size :]
            else:
                image.extend(bytes(self.size - len(image)))

    def interrupt(self, rng: random.Random, death: Death) -> None:
        if self.name in self.disk.files and rng.random() < 0.5:
            self.finish()


@dataclass
class Delete:
    disk: "SimDisk"
    name: str

    def finish(self) -> None:
        self.disk.files.pop(self.name, None)

    def interrupt(self, rng: random.Random, death: Death) -> None:
        if rng.random() < 0.5:
            self.finish()


class SimDisk:
    """The files of one host."""

    def __init__(self, root: str, rng: random.Random, capacity_bytes: int = 1 << 40) -> None:
        self.root, self.rng, self.capacity_bytes = root, rng, capacity_bytes
        self.files: dict[str, SimFile] = {}
        self.filled_bytes = 0
        """Bytes taken by `faults.FillDisk`."""
        self.sick = 0.0
        """Chance that an operation ends with EIO."""
        self.drops = False
        """Whether a sync that ends with EIO takes writes with it, as kernels do."""
        self.read_only = False
        """Whether every operation that would change a file ends with EROFS."""
        self.slow = 1.0
        """Factor on the time of every operation."""
        self.under_way: list[tuple[ProcessSeen, Operation]] = []
        self.traps: list[Trap] = []

    @property
    def used_bytes(self) -> int:
        return sum(len(file.data) for file in self.files.values())

    @property
    def free_bytes(self) -> int:
        return max(0, self.capacity_bytes - self.filled_bytes - self.used_bytes)

    def process_died(self, process: ProcessSeen) -> None:
        self._interrupt([entry for entry in self.under_way if entry[0] is process], "process")

    def power_failed(self) -> None:
        self._interrupt(list(self.under_way), "power")
        for name in sorted(self.files):
            file = self.files[name]
            file.tear(self.rng)
            if file.durable is None:
                del self.files[name]

    def trapped(self, name: str, process: ProcessSeen, until: float) -> None:
        """Tell a waiting trap that a write begins, which is over at `until` in the world's time."""
        for trap in [trap for trap in self.traps if trap.name in name]:
            self.traps.remove(trap)
            process.world.at(self.rng.uniform(process.world.now, until), lambda trap=trap: trap.spring(process))

    # ---- faults of files that were synced ----------------------------------------------------------------------------

    def image(self, name: str) -> dict[str, bytes]:
        """What a loss of power would leave of the files whose name contains `name`."""
        return {
            file: bytes(of.durable)
            for file, of in sorted(self.files.items())
            if name in file and of.durable is not None
        }

    def restore(self, name: str, image: Mapping[str, bytes]) -> None:
        """Put back the files of that image; others of such names are deleted."""
        for file in [file for file in self.files if name in file]:
            del self.files[file]
        for file, data in image.items():
            self.files[file] = SimFile(data=bytearray(data), durable=bytearray(data))

    def damage(self, name: str, how: Literal["lost", "cut", "rotten"]) -> None:
        """Delete or change what was synced of the files whose name contains `name`."""
        image = self.image(name)
        for file, data in list(image.items()):
            if how == "lost" or not data:
                del image[file]
            elif how == "cut":
                image[file] = data[: self.rng.randrange(len(data))]
            else:
                at = self.rng.randrange(len(data))
                image[file] = data[:at] + bytes([data[at] ^ 1 << self.rng.randrange(8)]) + data[at + 1 :]
        self.restore(name, image)

    def _interrupt(self, entries: list[tuple[ProcessSeen, Operation]], death: Death) -> None:
        """Interrupt operations at a death. A process has one disk thread: its first operation was under way, those
        behind it had not begun."""
        begun: set[ProcessId] = set()
        for entry in entries:
            self.under_way.remove(entry)
            if entry[0].id not in begun:
                begun.add(entry[0].id)
                outcome = self.rng.random()
                if outcome < 0.3:
                    entry[1].finish()
                elif outcome < 0.7:
                    entry[1].interrupt(self.rng, death)


class ProcessDisk:
    """The `Disk` port of one process: its operations happen one after the other, in the order they were asked for."""

    kept_free_bytes = 0
    """Bytes kept free: none, as when others took those too; a full disk of this world has nothing left for any
    process."""

    def __init__(self, process: ProcessSeen, disk: SimDisk) -> None:
        self._process, self._disk = process, disk
        self._busy_until = 0.0

    def _done_at(self, span: tuple[float, float], size: int) -> float:
        disk, now = self._disk, self._process.world.now
        self._busy_until = max(now, self._busy_until) + (disk.rng.uniform(*span) + size / BYTES_PER_S) * disk.slow
        return self._busy_until

    async def _run(self, operation: Operation, name: str, size: int, span: tuple[float, float], grows: int) -> None:
        disk, process, world = self._disk, self._process, self._process.world
        _checked(name)
        if disk.read_only:
            await asyncio.sleep(CACHED_S[0])
            raise OSError(errno.EROFS, "the simulated disk is read-only", name)
        if grows > 0 and grows > disk.free_bytes:
            await asyncio.sleep(CACHED_S[0])
            raise OSError(errno.ENOSPC, "no space left on the simulated disk", name)
        future = process.loop.create_future()
        entry = (process, operation)
        struck = world.mischief.strikes("disk")
        if struck and world.mischief.rng.random() < 0.5:
            struck = False  # it only takes long
            self._busy_until = max(world.now, self._busy_until) + world.mischief.pause_s()
        disk.under_way.append(entry)

        def finish() -> None:
            if entry not in disk.under_way:
                return
            disk.under_way.remove(entry)
            if struck or (disk.sick and disk.rng.random() < disk.sick):
                if disk.drops and isinstance(operation, Sync):
                    operation.drop(disk.rng)
                elif disk.rng.random() < 0.5:
                    operation.interrupt(disk.rng, "process")
                error: OSError | None = OSError(errno.EIO, "the simulated disk is sick", name)
            else:
                error = None
                try:
                    operation.finish()
                except OSError as failed:
                    error = failed
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        done_at = self._done_at(span, size)
        world.at(done_at, finish)
        disk.trapped(name, process, done_at)
        await future

    async def _pause(self, name: str, size: int = 0) -> None:
        """Wait as a read does: it is short, and may fail."""
        disk, world = self._disk, self._process.world
        _checked(name)
        struck = world.mischief.strikes("disk")
        future = self._process.loop.create_future()
        world.at(self._done_at(CACHED_S, size), lambda: future.done() or future.set_result(None))  # type: ignore[func-returns-value]
        await future
        if struck or (disk.sick and disk.rng.random() < disk.sick):
            raise OSError(errno.EIO, "the simulated disk is sick", name)

    def _size(self, name: str) -> int:
        file = self._disk.files.get(name)
        return 0 if file is None else len(file.data)

    async def read(self, name: str) -> bytes | None:
        await self._pause(name, self._size(name))
        file = self._disk.files.get(name)
        return None if file is None else bytes(file.data)

    async def replace(self, name: str, data: bytes) -> None:
        """Replace a file. The old one is there until the new one is: a full disk has no room for it."""
        await self._run(Replace(self._disk, name, bytes(data)), name, len(data), FSYNC_S, len(data))

    async def append(self, name: str, data: bytes) -> None:
        await self._run(Append(self._disk, name, bytes(data)), name, len(data), FSYNC_S, len(data))

    async def append_noted(self, name: str, data: bytes, note: UnsyncedWrite) -> None:
        await self.append(name, data)
        await self.write_at(*note)

    async def truncate(self, name: str, size: int) -> None:
        await self._run(Truncate(self._disk, name, size), name, 0, FSYNC_S, size - self._size(name))

    async def write_at(self, name: str, offset: int, data: bytes | bytearray | memoryview) -> None:
        content = bytes(data)
        grows = offset + len(content) - self._size(name)
        await self._run(WriteAt(self._disk, name, offset, content), name, len(content), CACHED_S, grows)

    async def write_parts_at(self, name: str, offset: int, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        await self.write_at(name, offset, b"".join(parts))

    async def read_at(self, name: str, offset: int, size: int) -> bytes:
        await self._pause(name, size)
        file = self._disk.files.get(name)
        found = b"" if file is None else bytes(file.data[offset : offset + size])
        return found + bytes(size - len(found))

    async def read_into_at(self, name: str, offset: int, into: memoryview) -> None:
        into[:] = await self.read_at(name, offset, len(into))

    async def size(self, name: str) -> int:
        """Size of a file in bytes, for files that another process writes and may remove;
        `agent.ports.disk.DirectoryDisk.size` here."""
        await self._pause(name)
        return len(self._there(name).data)

    async def peek(self, name: str, offset: int, size: int) -> bytes:
        await self._pause(name, size)
        return bytes(self._there(name).data[offset : offset + size])

    def _there(self, name: str) -> SimFile:
        if name not in self._disk.files:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        return self._disk.files[name]

    async def sync(self, name: str) -> None:
        await self._run(Sync(self._disk, name), name, 0, FSYNC_S, 0)

    async def delete(self, name: str) -> None:
        await self._run(Delete(self._disk, name), name, 0, FSYNC_S, 0)

    async def names(self, prefix: str) -> list[str]:
        await self._pause("names")
        return sorted(name for name in self._disk.files if name.startswith(prefix))

    async def free_bytes(self) -> int:
        await self._pause("free")
        return self._disk.free_bytes

    def path(self, name: str) -> str:
        _checked(name)
        return f"{self._disk.root}/{name}"


@lru_cache(4096)
def _checked(name: str) -> None:
    if not NAME.fullmatch(name) or any(part in (".", "..") for part in name.split("/")):
        raise OSError(f"{name!r} is not the name of a file here: use a-z, 0-9, '.', '_', '-' and '/'")


class SimRecords:
    """The `covey.core.job_records.JobRecords` of a simulated host, which outlives its processes: the data base that
    agents use, in memory. A call takes no simulated time; while the disk is full, read-only or sick, it raises OSError
    as those of files do. A power failure takes some of the newest records: SQLite syncs its log now and then."""

    def __init__(self, disk: SimDisk) -> None:
        self._disk = disk
        self.file = RecordFile(":memory:")
        self._unsynced: deque[int] = deque(maxlen=UNSYNCED)

    @property
    def told(self) -> str:
        return self.file.told

    @property
    def trimmed(self) -> int:
        return self.file.trimmed

    async def put(self, records: Sequence[JobRecord]) -> None:
        self._try(writes=bool(records))
        self.file.put(records)
        self._unsynced += [record.number for record in records]

    async def find(self, asked: RecordsAsked) -> list[JobRecord]:
        self._try()
        return self.file.find(asked)

    async def sums(self, asked: RecordsAsked, by: By) -> list[RecordSum]:
        self._try()
        return self.file.sums(asked, by)

    async def ranges(self) -> tuple[Range, ...]:
        self._try()
        return self.file.ranges()

    def power_failed(self) -> None:
        self.file.drop([number for number in self._unsynced if self._disk.rng.random() < 0.5])
        self._unsynced.clear()

    def _try(self, writes: bool = False) -> None:
        """OSError, when the disk has one now."""
        if self._disk.sick and self._disk.rng.random() < self._disk.sick:
            raise OSError(errno.EIO, "the simulated disk is sick", "scheduler/jobs.db")
        if writes and self._disk.read_only:
            raise OSError(errno.EROFS, "the simulated disk is read-only", "scheduler/jobs.db")
        if writes and not self._disk.free_bytes:
            raise OSError(errno.ENOSPC, "the simulated disk is full", "scheduler/jobs.db")
