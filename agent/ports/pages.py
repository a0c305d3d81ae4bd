"""Shared pages as sealed memory (`covey.ports.Pages`)."""

import contextlib
import ctypes
import fcntl
import mmap
import os
import re

from covey import memfd, tensor_layout

_NAME = re.compile(r"[1-9][0-9]{0,9}:[0-9]{1,7}:[0-9]{1,20}")


class MemfdPage:
    """`covey.ports.SharedPage`."""

    def __init__(self, kind: str, mine: bool) -> None:
        self.descriptor = memfd.make(kind)
        try:
            self.view: mmap.mmap = (
                memfd.writable(self.descriptor) if mine else memfd.readable(self.descriptor, sealed=False)
            )
            if mine:
                self.seal()
        except OSError:
            os.close(self.descriptor)
            raise

    def seal(self) -> None:
        memfd.close_for_writers(self.descriptor)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            self.view.close()


class MemfdMemory:
    """`covey.ports.SharedPage` that is only handed on."""

    view = None

    def __init__(self, ranks: int, first: int) -> None:
        self.descriptor = tensor_layout.make(ranks, first)

    def seal(self) -> None:
        """Its size is fixed from the beginning, and all its ranks write it."""

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class MemfdRing:
    """`covey.ports.SharedRing`. Its name is the process that made it, the descriptor there, and the inode: what has
    another inode by now is something else. Its size is sealed, so nobody can cut it off under the other."""

    def __init__(self, descriptor: int, name: str, size: int) -> None:
        self.name, self._descriptor = name, descriptor
        self._map = mmap.mmap(descriptor, size)
        self.view = memoryview(self._map)
        self.locked = _lock(self.view)

    @classmethod
    def make(cls, size: int) -> "MemfdRing":
        descriptor = os.memfd_create("covey-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, memfd.F_ADD_SEALS, memfd.SHRINK | memfd.GROW | memfd.SEAL)
            ring = cls(descriptor, f"{os.getpid()}:{descriptor}:{os.fstat(descriptor).st_ino}", size)
        except OSError:
            os.close(descriptor)
            raise
        ring._touch()
        return ring

    @classmethod
    def open(cls, name: str, size: int) -> "MemfdRing":
        if not _NAME.fullmatch(name):
            raise OSError(f"{name[:40]!r} is not the name of a ring")
        pid, descriptor, inode = name.split(":")
        file = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            seals = fcntl.fcntl(file, memfd.F_GET_SEALS)
            found = os.fstat(file)
            if found.st_ino != int(inode) or found.st_size != size or not seals & memfd.SHRINK:
                raise OSError(f"process {pid} has another ring there: it has begun anew")
            return cls(file, name, size)
        except OSError:
            os.close(file)
            raise

    def _touch(self) -> None:
        """Every page is there before the first one is needed."""
        for at in range(0, len(self.view), mmap.PAGESIZE):
            self.view[at] = 0

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            with contextlib.suppress(BufferError):  # a view of it is still about: the memory goes with the process
                self.view.release()
                self._map.close()


def _lock(view: memoryview) -> bool:
    """Whether it is locked: a user without the right, or beyond RLIMIT_MEMLOCK, may not."""
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return bool(libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(len(view))) == 0)


class MemfdPages:
    """`covey.ports.Pages`."""

    def make(self, kind: str, mine: bool) -> MemfdPage:
        return MemfdPage(kind, mine)

    def make_memory(self, ranks: int, first: int) -> MemfdMemory:
        return MemfdMemory(ranks, first)

    def make_ring(self, size: int) -> MemfdRing:
        return MemfdRing.make(size)

    def open_ring(self, name: str, size: int) -> MemfdRing:
        return MemfdRing.open(name, size)
