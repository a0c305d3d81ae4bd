"""What ranks wrote, as it lies on this host's disk."""

from typing import Protocol, runtime_checkable

from covey.ports import Disk

LOG_BYTES_MAX = 1 << 20
"""Most that one `read_log` returns."""


@runtime_checkable
class Sized(Protocol):
    """A disk that tells a file's size without reading it: the real one."""

    async def size(self, name: str) -> int: ...


async def read_log(disk: Disk, name: str, offset: int, limit: int) -> tuple[bytes, int]:
    """Reads at most `LOG_BYTES_MAX`. A negative offset counts from the end."""
    try:
        size = await _size(disk, name)
    except OSError:
        return b"", 0
    start = max(0, size + offset) if offset < 0 else min(offset, size)
    length = max(0, min(limit, LOG_BYTES_MAX, size - start))
    return await disk.read_at(name, start, length) if length else b"", size


async def _size(disk: Disk, name: str) -> int:
    if isinstance(disk, Sized):
        return await disk.size(name)
    return len(await disk.read(name) or b"")
