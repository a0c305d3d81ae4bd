"""The disk of a host, below its state directory."""

from typing import NamedTuple, Protocol


class UnsyncedWrite(NamedTuple):
    """What `Disk.write_at` takes."""

    name: str
    offset: int
    data: bytes


class Disk(Protocol):
    """Durable files in this host's state directory. Names are relative, of `a-z0-9._-` and `/`. OSError on failure."""

    async def read(self, name: str) -> bytes | None: ...
    async def replace(self, name: str, data: bytes) -> None:
        """Replace the file: after a crash it is the old one or the new one, whole; durable on return."""

    async def append(self, name: str, data: bytes) -> None:
        """Append, durable on return. A crash may leave a torn tail: records carry their own length and checksum."""

    async def append_noted(self, name: str, data: bytes, note: UnsyncedWrite) -> None:
        """Do `append`, and once that is durable `write_at` with the note, in one go: a note is there only of what is
        durable, and perhaps of nothing. OSError: both may be done, or a part."""

    async def truncate(self, name: str, size: int) -> None: ...
    async def write_at(self, name: str, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write at `offset`; not durable until `sync`."""

    async def read_at(self, name: str, offset: int, size: int) -> bytes:
        """Exactly `size` bytes; holes and what is beyond the end read as zeros."""

    async def sync(self, name: str) -> None: ...
    async def delete(self, name: str) -> None: ...
    async def names(self, prefix: str) -> list[str]:
        """All files whose name starts with `prefix`, sorted."""

    def path(self, name: str) -> str:
        """The absolute path, for another process on this host."""
