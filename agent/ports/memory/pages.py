"""Shared pages as sealed memory (`covey.ports.pages.Pages`)."""

import contextlib
import fcntl
import mmap
import os
import re
import resource

from agent.ports.memory import lock as memory_lock
from covey.kernel import memfd
from covey.kernel.mapping import map_shared
from covey.tensors.same_host import layout as tensor_layout

_MADV_REMOVE = 9
_NAME = re.compile(r"[1-9][0-9]{0,9}:[0-9]{1,7}:[0-9]{1,20}")


class MemfdPage:
    """The `covey.ports.pages.SharedPage` in sealed memory."""

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
    """A `covey.ports.pages.SharedPage` that is only handed on."""

    view = None

    def __init__(self, ranks: int, first: int) -> None:
        self.descriptor = tensor_layout.make(ranks, first)

    def seal(self) -> None:
        """Do nothing: its size is fixed from the beginning, and all its ranks write it."""

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class MemfdHanded:
    """A `covey.ports.pages.SharedPage` of any size, which one other process maps too."""

    def __init__(self, size: int) -> None:
        self.descriptor = os.memfd_create("covey-pushes", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size)
            self.seal()
            self.view = map_shared(self.descriptor, size, 0, touch=False)
        except OSError:
            os.close(self.descriptor)
            raise

    def seal(self) -> None:
        """Seal its size: neither end can cut it off under the other."""
        fcntl.fcntl(self.descriptor, memfd.F_ADD_SEALS, memfd.SHRINK | memfd.GROW | memfd.SEAL)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class MemfdHeld:
    """The `covey.ports.pages.HeldMemory`: an open descriptor, mapped nowhere."""

    def __init__(self, descriptor: int) -> None:
        self.name = _named(descriptor)
        self._descriptor = descriptor

    @classmethod
    def open(cls, name: str, size: int) -> "MemfdHeld":
        if not _NAME.fullmatch(name):
            raise OSError(f"{name[:40]!r} is not the name of a ring")
        pid, descriptor, inode = name.split(":")
        file = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            seals = fcntl.fcntl(file, memfd.F_GET_SEALS)
            found = os.fstat(file)
            if found.st_ino != int(inode) or found.st_size != size or not seals & memfd.SHRINK:
                raise OSError(f"process {pid} has another ring there: it has begun anew")
            return cls(file)
        except OSError:
            os.close(file)
            raise

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _named(descriptor: int) -> str:
    """A name for held memory: the process that has it open, the descriptor there, and the inode: what has another inode
    by now is something else."""
    return f"{os.getpid()}:{descriptor}:{os.fstat(descriptor).st_ino}"


def _is_same(descriptor: int, other: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.fstat(other))
    except OSError:
        return False


class MemfdRing:
    """The `covey.ports.pages.SharedRing`. Its size is sealed, so neither end can cut it off under the other."""

    def __init__(self, descriptor: int, size: int, sparse: bool) -> None:
        """Map the ring. The descriptor is closed here, unless OSError says that there is no mapping."""
        next_free = os.dup(descriptor)
        os.close(next_free)
        self._map = mmap.mmap(descriptor, size)  # has a descriptor of its own, and keeps it
        self._spare = -1
        if _is_same(next_free, descriptor):
            self.name = _named(next_free)
            os.close(descriptor)
        else:  # another thread opened something meanwhile
            self.name, self._spare = _named(descriptor), descriptor
        self.view = memoryview(self._map)
        self.locked = memory_lock.lock(self.view, on_fault=sparse)

    @classmethod
    def make(cls, size: int, sparse: bool) -> "MemfdRing":
        descriptor = os.memfd_create("covey-slab" if sparse else "covey-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, memfd.F_ADD_SEALS, memfd.SHRINK | memfd.GROW | memfd.SEAL)
            ring = cls(descriptor, size, sparse)
        except OSError:
            os.close(descriptor)
            raise
        if not sparse:
            ring._touch()
        return ring

    @classmethod
    def open(cls, name: str, size: int, sparse: bool) -> "MemfdRing":
        held = MemfdHeld.open(name, size)
        try:
            return cls(held._descriptor, size, sparse)
        except OSError:
            held.close()
            raise

    def empty(self) -> None:
        memory_lock.unlock(self.view)  # the kernel takes no locked page from the process that asks
        self._map.madvise(_MADV_REMOVE)

    def _touch(self) -> None:
        """Touch every page, so that it is there before the first one is needed."""
        for at in range(0, len(self.view), mmap.PAGESIZE):
            self.view[at] = 0

    def close(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        with contextlib.suppress(BufferError):  # a view of it is still about: the memory goes with the process
            self.view.release()
            self._map.close()


FILES, FILES_A_HOST = 256, 4
"""Descriptors that an agent needs for itself, and for each host that it talks with: the link to it takes two, the one
from it one."""


def allow_many(most: int | None = None) -> int:
    """Allow this process as many descriptors as an administrator does, or `most`, which what it starts inherits; not as
    few as programs have by default that know `select(2)`: a lender has thousands of rings, two descriptors each.
    Returns how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if most is None else max(soft, min(hard, most))
    if soft != wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


class MemfdPages:
    """The `covey.ports.pages.Pages` of this machine."""

    def make(self, kind: str, mine: bool) -> MemfdPage:
        return MemfdPage(kind, mine)

    def make_memory(self, ranks: int, first: int) -> MemfdMemory:
        return MemfdMemory(ranks, first)

    def make_handed(self, size: int) -> MemfdHanded:
        return MemfdHanded(size)

    def make_ring(self, size: int, sparse: bool = False) -> MemfdRing:
        if sparse:
            allow_many()
        return MemfdRing.make(size, sparse)

    def open_ring(self, name: str, size: int, sparse: bool = False) -> MemfdRing:
        if sparse:
            allow_many()
        return MemfdRing.open(name, size, sparse)

    def hold(self, name: str, size: int) -> MemfdHeld:
        allow_many()
        return MemfdHeld.open(name, size)
