"""The last room of a disk, and who gets it, so that a host whose disk fills up stays in the rack and comes back.

    BULK       volumes' logs, environments   refused while less than `kept_free` would stay free (not `LEFT`); what
                                             ranks print is held to the same by its shim
                                             (`agent/ports/processes/shim.py`), what agents and programs say of
                                             themselves to half of it (`LastingLog`)
    RESERVED   the replicated log, records   all that is free, then the file `reserve`, a piece at a time
    the rest   event logs (4 MiB at most)    all that is free

`kept_free` is more than the whole reserve: what a piece of it frees is below what bulk and ranks leave free, so none of
them takes it. Other users of the same disk may; therefore it is given up in pieces and each is used at once.
"""

import contextlib
import errno
import io
import os
from typing import TextIO

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a disk, or of a quota on it, that has no room."""
RESERVE = "reserve"
"""The file that holds disk space in reserve."""
RESERVED = (
    "consensus/",
    "acknowledged",
    "identity",
    "jobs/",
    "scheduler/state",
    "gossip/",
    "aggregator/",
    "memory/agent",
)
"""Beginnings of the names of files that may use the reserve: without its log and its records a host leaves the rack,
and with a full disk it could not come back. A record is small, and takes the place of the one before it."""
BULK = ("memory/volumes/", "scheduler/env/")
"""Beginnings of the names of files that leave the last room to others."""
LEFT = "/log/left"
"""End of the name of the bulk file that is written however little is free: pages that a volume acknowledged and that
nobody else may have, at most a ring of them (`spill_queue`), until the next process of the volume has them in its log.
A volume that writes over what it has needs no room for them while its processes live."""
RESERVE_SHARE = 8
"""The divisor of the file system's size that bounds the reserve."""
RESERVE_BYTES_MAX = 32 << 20
PIECE_BYTES = 1 << 20
"""The bytes that a piece of the reserve has beside what is to be written."""


def reserve_of(directory: str) -> int:
    """The bytes of this directory's file system that are worth setting aside."""
    return _reserve_in(os.statvfs(directory))


def kept_free(directory: str) -> int:
    """Bytes of this directory's file system that bulk and what ranks print leave free: one and a half reserves."""
    return reserve_of(directory) * 3 // 2


def _reserve_in(found: os.statvfs_result) -> int:
    return min(RESERVE_BYTES_MAX, found.f_blocks * found.f_frsize // RESERVE_SHARE)


def free_in(directory: str) -> int:
    """Bytes that any user may still write there."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


class DiskReserve:
    """The file `reserve` in `directory`, of `size` bytes; 0: this process sets nothing aside, and may give up what
    another one did."""

    def __init__(self, directory: str, size: int) -> None:
        self._directory, self._path = directory, os.path.join(directory, RESERVE)
        self._size = min(size, reserve_of(directory)) if size else 0

    def set_aside(self) -> None:
        """Set the reserve aside once four times its size is free. On a file system that cannot allocate ahead there is
        none."""
        if not self._size or free_in(self._directory) < 4 * self._size:
            return
        with contextlib.suppress(OSError):
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                before = os.fstat(file).st_size
                if before < self._size:
                    try:
                        os.posix_fallocate(file, 0, self._size)
                    except OSError:  # the room is gone again
                        os.ftruncate(file, before)
            finally:
                os.close(file)

    def give_up(self, needed: int) -> bool:
        """Free a piece of the reserve: False when nothing was left."""
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            size = os.fstat(file).st_size
            os.ftruncate(file, max(0, size - needed - PIECE_BYTES))
            return size > 0
        finally:
            os.close(file)


class LastingLog(io.StringIO):
    """The stream of one of Covey's logs. A disk that is full, or fails, loses lines of it and ends nobody who writes
    them; a line says how many were lost once there is room."""

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._out = out
        self._lost = 0

    def write(self, text: str) -> int:
        if self._is_short() or not (self._lost == 0 or self._put(self._line())) or not self._put(text):
            self._lost += text.count("\n")
        return len(text)

    def _line(self) -> str:
        lost, self._lost = self._lost, 0
        return f'{{"event": "lines of this log were lost on a full disk", "lines": {lost}}}\n'

    def _put(self, text: str) -> bool:
        try:
            self._out.write(text)
        except OSError:
            return False
        return True

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._out.flush()

    def isatty(self) -> bool:
        return self._out.isatty()

    def _is_short(self) -> bool:
        """Whether less is free than one of Covey's logs leaves to others; never for a pipe, or a terminal."""
        try:
            found = os.fstatvfs(self._out.fileno())
        except (OSError, ValueError):
            return False
        return found.f_bavail * found.f_frsize < _reserve_in(found) * 3 // 4
