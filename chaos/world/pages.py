"""Shared pages in one world: plain memory that travels with the bytes of a simulated stream
(`covey.ports.pages.Pages`), and rings that two processes of a host share by name."""

import errno
import mmap

from chaos.world.seen import ProcessSeen
from covey.kernel.pages import PAGE_BYTES


class SimPage:
    """`covey.ports.pages.SharedPage`. `view` is the same for all who hold it; only its writer writes it."""

    def __init__(self, mine: bool) -> None:
        self.view = bytearray(PAGE_BYTES)
        self.descriptor = 3
        self.sealed = mine

    def seal(self) -> None:
        self.sealed = True

    def close(self) -> None:
        self.descriptor = -1


class SimRing:
    """`covey.ports.pages.SharedRing`, and `HeldMemory`: it lives as long as somebody holds it, as memory does."""

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
    """`covey.ports.pages.Pages` of one process."""

    def __init__(self, process: ProcessSeen) -> None:
        self._process = process

    def make(self, kind: str, mine: bool) -> SimPage:
        return SimPage(mine)

    def make_memory(self, ranks: int, first: int) -> SimPage:
        return SimPage(True)

    def make_ring(self, size: int, sparse: bool = False) -> SimRing:
        return SimRing(self._process, mmap.mmap(-1, size))

    def open_ring(self, name: str, size: int, sparse: bool = False) -> SimRing:
        """Of a process that lives: afterwards only who has it already holds it."""
        for process in self._process.host.processes.values():
            memory = process.rings.get(name)
            if memory is not None and len(memory) == size:
                return SimRing(self._process, memory)
        raise FileNotFoundError(errno.ENOENT, "no such ring", name)

    def hold(self, name: str, size: int) -> SimRing:
        return self.open_ring(name, size)
