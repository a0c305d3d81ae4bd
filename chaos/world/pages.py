"""Shared pages in one world: plain memory that travels with the bytes of a simulated stream
(`covey.ports.pages.Pages`), and rings that two processes of a host share by name."""

import errno
import mmap

from chaos.world.seen import ProcessSeen
from covey.kernel.pages import PAGE_BYTES


class SimPage:
    """A `covey.ports.pages.SharedPage`. `view` is the same for all who hold it; only its writer writes it."""

    def __init__(self, mine: bool, size: int = PAGE_BYTES) -> None:
        self.view = bytearray(size)
        self.descriptor = 3
        self.sealed = mine

    def seal(self) -> None:
        self.sealed = True

    def close(self) -> None:
        self.descriptor = -1


class SimRing:
    """A `covey.ports.pages.SharedRing`, and `HeldMemory`: it lives while a process holds it, as memory does."""

    locked = True

    def __init__(self, process: ProcessSeen, memory: mmap.mmap) -> None:
        self.name = f"{process.id.pid}:{process.ring_number}"
        process.ring_number += 1
        process.rings[self.name] = memory
        self.view = memoryview(memory)
        self._process = process

    def empty(self) -> None:
        self.view[:] = bytes(len(self.view))

    def close(self) -> None:
        self._process.rings.pop(self.name, None)


class SimPages:
    """The port `covey.ports.pages.Pages` of one process."""

    def __init__(self, process: ProcessSeen) -> None:
        self._process = process

    def make(self, kind: str, mine: bool) -> SimPage:
        return SimPage(mine)

    def make_memory(self, ranks: int, first: int) -> SimPage:
        return SimPage(True)

    def make_handed(self, size: int) -> SimPage:
        return SimPage(True, size)

    def make_ring(self, size: int, sparse: bool = False) -> SimRing:
        return SimRing(self._process, mmap.mmap(-1, size))

    def open_ring(self, name: str, size: int, sparse: bool = False) -> SimRing:
        """The ring of this name and size of a live process: after its end only those that have it already hold it."""
        for process in self._process.host.processes.values():
            memory = process.rings.get(name)
            if memory is not None and len(memory) == size:
                return SimRing(self._process, memory)
        raise FileNotFoundError(errno.ENOENT, "no such ring", name)

    def hold(self, name: str, size: int) -> SimRing:
        return self.open_ring(name, size)
