"""Files of other users' jobs, read by an agent that does not trust who wrote them.

A job's folder (`agent.starter.folders`) is in one of root's, so its path is what it seems; whatever is in it is its
user's to choose. What is read is a plain file with one name that belongs to the folder's owner: no link out of the
folder, neither symbolic nor hard, no pipe or device that would keep the reader waiting, no file of the agent. Nothing
is ever written there.
"""

import asyncio
import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")
NAME = re.compile(r"^jobs/([a-z0-9][a-z0-9.-]{0,62})/([A-Za-z0-9_][A-Za-z0-9._-]{0,199})\Z")
READ_BYTES_MAX = 8 << 20
"""Most bytes of a file that is read whole."""
THE_HOSTS = (errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that say nothing of the file."""
NAMES_MAX = 10_000
"""Most entries of one folder that are looked at."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
JOBS = "jobs"


class Untrusted(OSError):
    """A file that is not what it should be: its folder's user put something else there."""


class FolderFiles:
    """The `covey.ports.starter.TheirFiles` under `root`."""

    def __init__(self, root: str) -> None:
        self._root = root

    async def read(self, name: str, uid: int) -> bytes | None:
        return await asyncio.to_thread(self._read, name, uid)

    async def names(self, prefix: str) -> list[str]:
        return await asyncio.to_thread(self._names, prefix)

    async def jobs(self) -> list[str]:
        return await asyncio.to_thread(self._jobs)

    async def size(self, name: str) -> int:
        return await asyncio.to_thread(self._with, name, lambda file: os.fstat(file).st_size)

    async def peek(self, name: str, offset: int, size: int) -> bytes:
        return await asyncio.to_thread(self._with, name, lambda file: os.pread(file, size, offset))

    async def delete(self, name: str) -> None:
        await asyncio.to_thread(self._delete, name)

    # ---- in a thread ----

    def _read(self, name: str, uid: int) -> bytes | None:
        try:
            return self._with(name, _whole, uid)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno in THE_HOSTS:
                raise
            return b""  # its user's doing: as good as damaged

    def _with(self, name: str, work: Callable[[int], R], uid: int | None = None) -> R:
        """Do `work` with the open file. OSError when there is none that may be read. `uid`: whose it has to be."""
        job, base = _parts(name)
        folder = self._folder(job)
        try:
            owner = os.fstat(folder).st_uid
            if uid is not None and owner != uid:
                raise Untrusted(f"the folder of {job} belongs to uid {owner}, not {uid}")
            file = os.open(base, _FILE, dir_fd=folder)
        finally:
            os.close(folder)
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != owner or found.st_nlink != 1:
                raise Untrusted(f"{name} is no plain file of uid {owner}")
            return work(file)
        finally:
            os.close(file)

    def _folder(self, job: str) -> int:
        """The open folder of a job. OSError when it is not one that the starter gave to another user."""
        path = os.path.join(self._root, JOBS)
        jobs = os.open(path, _DIRECTORY)
        try:
            if os.fstat(jobs).st_uid != 0:
                raise Untrusted(f"{path} is not root's")
            folder = os.open(job, _DIRECTORY, dir_fd=jobs)
        finally:
            os.close(jobs)
        if os.fstat(folder).st_uid == 0:  # the starter has not given it away yet
            os.close(folder)
            raise FileNotFoundError(os.path.join(path, job))
        return folder

    def _jobs(self) -> list[str]:
        try:
            return sorted(os.listdir(os.path.join(self._root, JOBS)))
        except OSError:
            return []

    def _names(self, prefix: str) -> list[str]:
        head, _, rest = prefix.partition("/")
        if head != JOBS:
            return []
        job, found = rest.partition("/")[0], list[str]()
        with contextlib.suppress(OSError):
            for each in [job] if "/" in rest else self._jobs():
                found += self._in_folder(each)
        return sorted(name for name in found if name.startswith(prefix) and NAME.match(name))

    def _in_folder(self, job: str) -> list[str]:
        found: list[str] = []
        with contextlib.suppress(OSError):
            folder = self._folder(job)
            try:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        found.append(f"{JOBS}/{job}/{entry.name}")
                        if len(found) >= NAMES_MAX:
                            break
            finally:
                os.close(folder)
        return found

    def _delete(self, name: str) -> None:
        """Remove a name; what it leads to stays, and so does what is no file."""
        try:
            job, base = _parts(name)
            folder = self._folder(job)
            try:
                os.unlink(base, dir_fd=folder)
            finally:
                os.close(folder)
        except OSError as error:
            if error.errno in THE_HOSTS:
                raise


def _parts(name: str) -> tuple[str, str]:
    found = NAME.match(name)
    if found is None:
        raise FileNotFoundError(name)
    return found[1], found[2]


def _whole(file: int) -> bytes:
    if os.fstat(file).st_size > READ_BYTES_MAX:
        raise Untrusted(f"a file of more than {READ_BYTES_MAX} bytes")
    return os.pread(file, READ_BYTES_MAX, 0)
