"""Places outside of memory for data Blocks: a file that is mapped, or remote memory."""

import mmap
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from covey.core.errors import CoveyError
from covey.core.units import format_size
from covey.healing.state_pieces import Item
from covey.job.blocks.block_arrays import items_in_block, places_in_block, read_only
from covey.job.blocks.block_wire import BlockArrays, DeclaredBlocks
from covey.tensors.numbers.arrays import Array
from covey.wire.checksum import crc32

if TYPE_CHECKING:
    from covey.arrays.remote_array import RemoteArray

ALIGNED = 64
"""Each array of a Block begins at a multiple of this."""


class NoRoom(OSError):
    """There is no room for another Block; the text says where."""


class SpilledAt(NamedTuple):
    """A Block outside of memory."""

    slot: int
    items: tuple[Item, ...]
    sum: int
    """CRC-32 of its bytes."""


class SpillPlace(Protocol):
    """A place for Blocks. Only one thread at a time writes; any may read."""

    def write(self, block: int, arrays: BlockArrays) -> SpilledAt:
        """Keep a Block. NoRoom."""

    def read(self, at: SpilledAt) -> BlockArrays:
        """The Block. OSError when it cannot be read, or is not what was written."""

    def drop(self, at: SpilledAt) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...

    @property
    def where(self) -> str:
        """Name of the place, for people."""


def _slot_bytes(of: DeclaredBlocks, items: int = 16) -> int:
    """Bytes of a slot: a Block of any size, aligned."""
    return _pages(of.bytes_max + items * ALIGNED)


def _pages(size: int) -> int:
    """Bytes of the pages that so many bytes take, one page at least."""
    return max(1, -(-size // mmap.ALLOCATIONGRANULARITY)) * mmap.ALLOCATIONGRANULARITY


def _offsets(items: tuple[Item, ...]) -> tuple[list[int], int]:
    """Where each array begins in its slot, and where the last one ends."""
    at, found = 0, []
    for item in items:
        found.append(at)
        size = int(np.prod(item.shape, dtype=np.int64)) * np.dtype(item.type).itemsize
        at += -(-size // ALIGNED) * ALIGNED
    return found, at


def _arrays_in(memory: "memoryview | mmap.mmap | Array", items: tuple[Item, ...]) -> dict[str, Array]:
    offsets, _ = _offsets(items)
    found = {}
    for item, at in zip(items, offsets, strict=True):
        count = int(np.prod(item.shape, dtype=np.int64))
        if count:
            found[item.name] = np.frombuffer(memory, np.dtype(item.type), count, at).reshape(item.shape)
        else:
            found[item.name] = np.empty(item.shape, np.dtype(item.type))
    return found


def _sum_of(arrays: BlockArrays) -> int:
    found = 0
    for place in places_in_block(arrays):
        found = crc32(place, found)
    return found


class Slots:
    """Which Block lies in each slot of a place. Any thread may call."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._at: dict[int, SpilledAt] = {}
        self._free: list[int] = []
        self._count = 0

    def taken(self, is_read: Callable[[int], bool] = lambda slot: False) -> int:
        """A slot without a Block that nobody reads. It is the caller's until `kept` or `given_back`."""
        with self.lock:
            for slot in self._free:
                if not is_read(slot):
                    self._free.remove(slot)
                    return slot
            self._count += 1
            return self._count - 1

    def given_back(self, slot: int) -> None:
        with self.lock:
            self._free.append(slot)

    def kept(self, at: SpilledAt) -> SpilledAt:
        with self.lock:
            self._at[at.slot] = at
        return at

    def check(self, at: SpilledAt) -> None:
        """OSError when the Block was dropped."""
        if self._at.get(at.slot) is not at:
            raise OSError("the Block was dropped")

    def drop(self, at: SpilledAt) -> None:
        """The slot of a Block is free. A second call is harmless."""
        with self.lock:
            if self._at.get(at.slot) is at:
                del self._at[at.slot]
                self._free.append(at.slot)


class DiskSpill:
    """A file without a name, with a slot for each Block, which is mapped while the Block is in use: no room is taken
    in memory that the kernel could not take back."""

    def __init__(self, of: DeclaredBlocks, folder: str) -> None:
        """CoveyError when no file can be made there."""
        self._of, self._folder, self._slot = of, folder, _slot_bytes(of)
        try:
            self._file = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        except OSError as error:
            what = f"Blocks of {of.name!r} cannot be spilled"
            raise CoveyError(what, f"{folder}: {error.strerror}", "set TMPDIR to a folder on a disk") from error
        self._slots = Slots()
        self._mapped: dict[int, weakref.WeakSet[mmap.mmap]] = {}
        """Mappings that somebody may still read, by slot; guarded by the lock of `_slots`."""

    @property
    def where(self) -> str:
        return self._folder

    def write(self, block: int, arrays: BlockArrays) -> SpilledAt:
        items = items_in_block(arrays)
        offsets, end = _offsets(items)
        if end > self._slot:
            raise NoRoom(f"Block {block} has {len(items)} arrays, more than a slot of {self._folder} takes")
        slot = self._slots.taken(lambda slot: bool(self._mapped.get(slot)))
        try:
            os.posix_fallocate(self._file, slot * self._slot, max(1, end))  # else a full disk is a signal later
            for place, at in zip(places_in_block(arrays), offsets, strict=True):
                self._write(place, slot * self._slot + at)
        except OSError as error:
            self._slots.given_back(slot)
            why = f"{self._folder} has no room for {format_size(end)}: {error.strerror}"
            raise NoRoom(why) from error
        return self._slots.kept(SpilledAt(slot, items, _sum_of(arrays)))

    def _write(self, place: memoryview, at: int) -> None:
        while place:
            count = os.pwrite(self._file, place[: 16 << 20], at)
            place, at = place[count:], at + count

    def read(self, at: SpilledAt) -> BlockArrays:
        _, end = _offsets(at.items)
        with self._slots.lock:
            self._slots.check(at)
            mapped = mmap.mmap(self._file, max(1, end), access=mmap.ACCESS_READ, offset=at.slot * self._slot)
            self._mapped.setdefault(at.slot, weakref.WeakSet()).add(mapped)
        with suppress(OSError):
            mapped.madvise(mmap.MADV_WILLNEED)
        found = {name: read_only(array) for name, array in _arrays_in(mapped, at.items).items()}
        if _sum_of(found) != at.sum:
            raise OSError(f"a Block in {self._folder} is not what was written")
        return found

    def drop(self, at: SpilledAt) -> None:
        """Give the slot back. It is written to again once nobody can read the Block that was there."""
        self._slots.drop(at)

    def close(self) -> None:
        """Close the file; nobody writes. A second call is harmless."""
        with self._slots.lock:
            self.abandon()

    def abandon(self) -> None:
        """Close the file of this process, in a forked child, where a lock may be held for ever."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


class RemoteSpill:
    """A volume in the memory of other hosts, with a slot for each Block."""

    def __init__(self, of: DeclaredBlocks, volume: str) -> None:
        """The volume is made with the first Block: that takes a while."""
        self._of, self._volume, self._slot = of, volume, _slot_bytes(of)
        self._array: RemoteArray | None = None
        self._slots = Slots()
        self._closed = False

    @property
    def where(self) -> str:
        return f"remote memory (volume {self._volume})"

    def _opened(self) -> "RemoteArray":
        """The volume. OSError once it was closed: it is not made anew."""
        from covey.arrays.remote_array import RemoteArray
        from covey.arrays.remote_memory import RemoteMemory

        if self._closed:
            raise OSError(f"volume {self._volume} was closed")
        if self._array is None:
            size = self._of.blocks * self._slot
            memory = RemoteMemory.open(self._volume, size, scratch=True)  # killing is how processes of a job end
            self._array = RemoteArray(memory, size, "uint8", way="explicit")
        return self._array

    def write(self, block: int, arrays: BlockArrays) -> SpilledAt:
        from covey.arrays.volume_link import RemoteMemoryError

        items = items_in_block(arrays)
        offsets, end = _offsets(items)
        if end > self._slot:
            raise NoRoom(f"Block {block} has {len(items)} arrays, more than a slot takes")
        whole = np.zeros(_pages(end), np.uint8)
        for place, at in zip(places_in_block(arrays), offsets, strict=True):
            whole[at : at + len(place)] = place
        slot = self._slots.taken()
        if slot >= self._of.blocks:
            raise NoRoom(f"volume {self._volume} has no slot left")
        try:
            self._opened().write_from(whole, slot * self._slot)
        except (OSError, RemoteMemoryError) as error:
            self._slots.given_back(slot)
            raise NoRoom(f"{error.what}: {error.why}" if isinstance(error, RemoteMemoryError) else error) from error
        return self._slots.kept(SpilledAt(slot, items, _sum_of(arrays)))

    def read(self, at: SpilledAt) -> BlockArrays:
        from covey.arrays.volume_link import RemoteMemoryError

        self._slots.check(at)
        _, end = _offsets(at.items)
        whole = np.empty(_pages(end), np.uint8)
        try:
            self._opened().read_into(whole, at.slot * self._slot)
        except RemoteMemoryError as error:
            raise OSError(f"{error.what}: {error.why}") from error
        found = {name: read_only(array) for name, array in _arrays_in(whole.data, at.items).items()}
        if _sum_of(found) != at.sum:
            raise OSError(f"a Block in volume {self._volume} is not what was written")
        return found

    def drop(self, at: SpilledAt) -> None:
        self._slots.drop(at)

    def close(self) -> None:
        """Remove the volume with all that is in it; nobody writes. A second call is harmless."""
        from covey.arrays.volume_link import RemoteMemoryError

        array = self._array
        self.abandon()
        if array is not None:
            with suppress(RemoteMemoryError):
                array.memory.remove()

    def abandon(self) -> None:
        """Leave the volume to the process that made it."""
        self._closed, self._array = True, None


def spill_folder(environ: Mapping[str, str]) -> str:
    """The folder for spilled Blocks: $TMPDIR, or /var/tmp, which lies on a disk where /tmp may be memory."""
    return environ.get("TMPDIR") or "/var/tmp"
