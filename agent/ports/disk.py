"""Durable files under one directory.

    append     write + fdatasync; when the disk fills up half way, the written part is cut off again
    replace    write NAME~PID, fsync, rename over NAME, fsync the directory: the old file or the new one, never a mix
    write_at   into the page cache; `sync` makes it durable

All work happens in one thread, in the order it was asked for: the event loop never waits for a disk, and two operations
never overtake one another. A name is checked before it becomes a path; links are not followed out of the directory.
Who may use the last room of the disk: `agent/ports/last_room.py`.
"""

import asyncio
import contextlib
import errno
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from agent.ports.last_room import BULK, FULL, LEFT, RESERVED, DiskReserve, free_in, kept_free
from covey.core.units import format_size
from covey.ports.disk import UnsyncedWrite

R = TypeVar("R")
DIRECT_BYTES = 4096
"""The unit of writes past the page cache: they begin and end at multiples of this; no disk has longer sectors."""
PARTS_MAX = 64
"""The most parts of one `pwritev`."""
NAME = re.compile(r"^(?!\.{1,2}(/|$))[A-Za-z0-9._-]+(/(?!\.{1,2}(/|$))[A-Za-z0-9._-]+)*$")
"""A file's name: relative, no `.` or `..`; `~` marks this disk's own unfinished files and is no part of a name."""
OPEN_FILES_MAX = 32
"""The most descriptors kept open between operations."""


class DirectoryDisk:
    """The `covey.ports.disk.Disk` rooted at `directory`, which is made with mode 0700."""

    def __init__(self, directory: str, reserve_bytes: int = 0, mode: int = 0o600) -> None:
        """`mode`: of new files. `reserve_bytes`: bytes set aside now, as far as the disk is large enough, and given up
        when files in `RESERVED` find it full."""
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self._root, self._mode = os.path.realpath(directory), mode
        self.kept_free_bytes = kept_free(self._root)
        """Bytes that bulk leaves free here."""
        self._reserve = DiskReserve(self._root, reserve_bytes)
        self._reserve.set_aside()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self._open: OrderedDict[str, int] = OrderedDict()

    async def _do(self, work: Callable[..., R], *arguments: object) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def path(self, name: str) -> str:
        """The path of a file. OSError when `name` is not a name."""
        if len(name) > 200 or not NAME.match(name) or name.endswith("\n"):
            raise OSError(f"{name!r} is not a valid file name here; expected a-z, 0-9, '.', '_', '-' and '/'")
        return os.path.join(self._root, name)

    async def read(self, name: str) -> bytes | None:
        return await self._do(self._read, self.path(name))

    async def replace(self, name: str, data: bytes) -> None:
        path = self.path(name)
        await self._do(self._in_room, name, len(data), lambda: self._replace(path, data))

    async def append(self, name: str, data: bytes) -> None:
        path = self.path(name)
        await self._do(self._in_room, name, len(data), lambda: self._append(path, data))

    async def append_noted(self, name: str, data: bytes, note: UnsyncedWrite) -> None:
        await self._do(self._append_noted, name, self.path(name), data, note, self.path(note.name))

    async def truncate(self, name: str, size: int) -> None:
        await self._do(self._truncate, self.path(name), size)

    async def write_at(self, name: str, offset: int, data: bytes | bytearray | memoryview) -> None:
        path, end = self.path(name), offset + len(data)
        await self._do(self._in_room, name, len(data), lambda: self._write_at(path, offset, data), end)

    async def write_parts_at(self, name: str, offset: int, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """Do `write_at` for parts that follow one another, past the page cache where all is aligned for it and the file
        system permits: then it costs neither copying nor memory. OSError: any of it may be written."""
        path, size = self.path(name), sum([len(part) for part in parts])
        await self._do(self._in_room, name, size, lambda: self._write_parts_at(path, offset, parts), offset + size)

    async def read_at(self, name: str, offset: int, size: int) -> bytes:
        return await self._do(self._read_at, self.path(name), offset, size)

    async def read_into_at(self, name: str, offset: int, into: memoryview) -> None:
        """Do `read_at` into memory that is there, past the page cache where it is aligned for it and the file system
        permits: for what is read once."""
        await self._do(self._read_into_at, self.path(name), offset, into)

    async def free_bytes(self) -> int:
        """Bytes that this user may still write here."""
        return await self._do(self._free)

    async def peek(self, name: str, offset: int, size: int) -> bytes:
        """A part of a file that another process writes, and may remove: it is not kept open. FileNotFoundError."""
        return await self._do(_peek, self.path(name), offset, size)

    async def prune(self, folder: str) -> None:
        """Remove this folder if nothing is in it."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            try:
                await self._do(os.rmdir, self.path(folder))
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise

    async def size(self, name: str) -> int:
        """Bytes of a file; FileNotFoundError when there is none."""
        return (await self._do(os.stat, self.path(name))).st_size

    async def sync(self, name: str) -> None:
        await self._do(self._sync, self.path(name))

    async def delete(self, name: str) -> None:
        await self._do(self._delete, self.path(name))

    async def names(self, prefix: str) -> list[str]:
        return await self._do(self._names, prefix)

    def close(self) -> None:
        """Finish the operations asked for, then close every file."""
        self._thread.shutdown(wait=True)
        while self._open:
            os.close(self._open.popitem()[1])

    # ---- in the thread ----

    def _free(self) -> int:
        """Free bytes. This is called often: what was given up of the reserve is set aside again when there is room."""
        self._reserve.set_aside()
        return free_in(self._root)

    def _in_room(self, name: str, size: int, work: Callable[[], None], end: int = 0) -> None:
        """Do `work`, which writes `size` bytes, as far as the last room of the disk is for this file. `end`: where the
        write ends, if it goes into a file that may already reach that far."""
        if name.startswith(BULK) and not name.endswith(LEFT):
            self._leave_room(name, size, end)
        while True:
            try:
                work()
            except OSError as error:
                if error.errno in FULL and name.startswith(RESERVED) and self._reserve.give_up(size):
                    continue
                raise
            return

    def _append_noted(self, name: str, path: str, data: bytes, note: UnsyncedWrite, noted: str) -> None:
        self._in_room(name, len(data), lambda: self._append(path, data))
        size, end = len(note.data), note.offset + len(note.data)
        self._in_room(note.name, size, lambda: self._write_at(noted, note.offset, note.data), end)

    def _leave_room(self, name: str, size: int, end: int) -> None:
        """OSError when less would stay free than bulk leaves to others. What makes no file longer is written all the
        same."""
        path = os.path.join(self._root, name)
        with contextlib.suppress(OSError):
            if end and os.stat(path).st_size >= end:
                return
        if free_in(self._root) - size < self.kept_free_bytes:
            why = f"less than {format_size(self.kept_free_bytes)} is free, and the log of this host may need it"
            raise OSError(errno.ENOSPC, why, path)

    def _file(self, path: str, make: bool = True) -> int:
        """An open descriptor; a file that is new has its directory entry made durable first."""
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            file = os.open(path, flags)
        except FileNotFoundError:
            if not make:
                raise
            self._make_directory(os.path.dirname(path))
            file = os.open(path, flags | os.O_CREAT, self._mode)
            try:
                _sync_directory(os.path.dirname(path))
            except OSError:
                os.close(file)
                with contextlib.suppress(OSError):
                    os.unlink(path)  # else the next one to open it finds it, and takes its entry for durable
                raise
        self._keep(path, file)
        return file

    def _keep(self, name: str, file: int) -> None:
        self._open[name] = file
        if len(self._open) > OPEN_FILES_MAX:
            os.close(self._open.popitem(last=False)[1])

    def _make_directory(self, directory: str) -> None:
        if not os.path.isdir(directory):
            self._make_directory(os.path.dirname(directory))
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory, 0o700)
            _sync_directory(os.path.dirname(directory))

    def _read(self, path: str) -> bytes | None:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            return None
        with open(file, "rb") as opened:
            return opened.read()

    def _replace(self, path: str, data: bytes) -> None:
        directory = os.path.dirname(path)
        self._make_directory(directory)
        unfinished = f"{path}~{os.getpid()}"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            file = os.open(unfinished, flags, self._mode)
            try:
                _write_all(file, data, None)
                os.fsync(file)
            finally:
                os.close(file)
            os.rename(unfinished, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise
        self._forget(path)
        _sync_directory(directory)

    def _append(self, path: str, data: bytes) -> None:
        file = self._file(path)
        end = os.fstat(file).st_size
        try:
            _write_all(file, data, end)
            os.fdatasync(file)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file, end)
            raise

    def _truncate(self, path: str, size: int) -> None:
        file = self._file(path)
        os.ftruncate(file, size)
        os.fsync(file)

    def _write_at(self, path: str, offset: int, data: bytes | bytearray | memoryview) -> None:
        _write_all(self._file(path), data, offset)

    def _write_parts_at(self, path: str, offset: int, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        file = self._file(path)
        size = sum([len(part) for part in parts])
        done = 0
        if _aligned(offset, parts) and len(parts) <= PARTS_MAX:
            done = self._write_direct(path, offset, parts)
        if not done and len(parts) <= PARTS_MAX:
            done = os.pwritev(file, parts, offset)
        if done < size:
            _write_all(file, b"".join(parts)[done:], offset + done)

    def _write_direct(self, path: str, offset: int, parts: Sequence[bytes | bytearray | memoryview]) -> int:
        """Write past the page cache, and return the bytes written; 0 where that is not possible."""
        try:
            return os.pwritev(self._direct(path), parts, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:  # this file system has none, or wants a larger alignment
                raise
            return 0

    def _direct(self, path: str) -> int:
        """The descriptor of an existing file, past the page cache."""
        name = f"{path}\0direct"
        direct = self._open.get(name)
        if direct is None:
            direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT)
            self._keep(name, direct)
        else:
            self._open.move_to_end(name)
        return direct

    def _read_into_at(self, path: str, offset: int, into: memoryview) -> None:
        done = 0
        if _aligned(offset, [into]):
            try:
                done = os.preadv(self._direct(path), [into], offset)
            except OSError as error:
                if error.errno == errno.EIO:
                    raise
        if done < len(into):
            into[done:] = self._read_at(path, offset + done, len(into) - done)

    def _read_at(self, path: str, offset: int, size: int) -> bytes:
        try:
            file = self._file(path, make=False)
        except FileNotFoundError:
            return bytes(size)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES):
                raise
            return self._read_only(path, offset, size)
        return _read_from(file, offset, size)

    def _read_only(self, path: str, offset: int, size: int) -> bytes:
        """Read a file that may be read and not written; it is not kept open, since that may change."""
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return _read_from(file, offset, size)
        finally:
            os.close(file)

    def _sync(self, path: str) -> None:
        try:
            os.fsync(self._file(path, make=False))
        except FileNotFoundError:
            return

    def _delete(self, path: str) -> None:
        self._forget(path)
        try:
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        _sync_directory(os.path.dirname(path))

    def _forget(self, path: str) -> None:
        for name in (path, f"{path}\0direct"):
            file = self._open.pop(name, None)
            if file is not None:
                os.close(file)

    def _names(self, prefix: str) -> list[str]:
        found: list[str] = []
        start = os.path.join(self._root, os.path.dirname(prefix)) if "/" in prefix else self._root
        if os.path.commonpath([self._root, os.path.realpath(start)]) != self._root:
            raise OSError(f"{prefix!r} leads out of the state directory")
        for directory, _, files in os.walk(start):
            for file in files:
                name = os.path.relpath(os.path.join(directory, file), self._root)
                if name.startswith(prefix) and NAME.match(name):
                    found.append(name)
        return sorted(found)


def _aligned(offset: int, parts: Sequence[bytes | bytearray | memoryview]) -> bool:
    """Whether these may be written past the page cache. The kernel itself refuses memory that begins anywhere."""
    return offset % DIRECT_BYTES == 0 and all(len(part) % DIRECT_BYTES == 0 for part in parts)


def _peek(path: str, offset: int, size: int) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return os.pread(file, size, offset)
    finally:
        os.close(file)


def _write_all(file: int, data: bytes | bytearray | memoryview, offset: int | None) -> None:
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        done += os.write(file, view[done:]) if offset is None else os.pwrite(file, view[done:], offset + done)


def _sync_directory(directory: str) -> None:
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _read_from(file: int, offset: int, size: int) -> bytes:
    """Read exactly `size` bytes; holes and what lies beyond the end are zeros."""
    parts: list[bytes] = []
    missing = size
    while missing and (part := os.pread(file, missing, offset + size - missing)):
        parts.append(part)
        missing -= len(part)
    return b"".join([*parts, bytes(missing)]) if missing or len(parts) != 1 else parts[0]
