"""One agent per state directory: a lock that the kernel gives back when its holder dies, however it dies."""

import contextlib
import fcntl
import os


class StateDirectoryTaken(Exception):
    """Another agent lives in this state directory."""

    def __init__(self, directory: str, pid: int | None) -> None:
        self.directory, self.pid = directory, pid
        self.what = f"cannot start an agent in {directory}"
        self.why = "another agent uses this state directory" + (f" (pid {pid})" if pid else "")
        self.next = f"kill {pid}, or give this agent its own state_dir" if pid else "give this agent its own state_dir"
        super().__init__(f"{self.what}: {self.why}")


class StateLock:
    """Held from construction to `release`. StateDirectoryTaken when another one holds it, OSError of a failing disk.

    The file names its holder's pid. It is removed on release; after `kill -9` the file stays, but the lock is free.
    """

    def __init__(self, directory: str, name: str = "agent.lock") -> None:
        self.path = os.path.join(directory, name)
        os.makedirs(directory, mode=0o700, exist_ok=True)
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(file, 32).strip()
                os.close(file)
                raise StateDirectoryTaken(directory, int(holder) if holder.isdigit() else None) from None
            if self._is_current(file):
                break
            os.close(file)  # its holder removed it between our open and our lock: take the new one
        with contextlib.suppress(OSError):  # a full disk: the lock holds, and another one is not told by whom
            os.ftruncate(file, 0)
            os.pwrite(file, b"%d\n" % os.getpid(), 0)
        self._file: int | None = file

    def _is_current(self, file: int) -> bool:
        try:
            return os.fstat(file).st_ino == os.stat(self.path).st_ino
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._file is not None:
            os.unlink(self.path)
            os.close(self._file)
            self._file = None
