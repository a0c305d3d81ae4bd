"""Shared pages as sealed memory (`covey.ports.Pages`)."""

import mmap
import os

from covey import memfd, tensor_layout


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


class MemfdPages:
    """`covey.ports.Pages`."""

    def make(self, kind: str, mine: bool) -> MemfdPage:
        return MemfdPage(kind, mine)

    def make_memory(self, ranks: int, first: int) -> MemfdMemory:
        return MemfdMemory(ranks, first)
