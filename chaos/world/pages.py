"""Shared pages in one world: plain memory that travels with the bytes of a simulated stream (`covey.ports.Pages`)."""

from covey.pages import PAGE_BYTES


class SimPage:
    """`covey.ports.SharedPage`. `view` is the same for all who hold it; only its writer writes it."""

    def __init__(self, mine: bool) -> None:
        self.view = bytearray(PAGE_BYTES)
        self.descriptor = 3
        self.sealed = mine

    def seal(self) -> None:
        self.sealed = True

    def close(self) -> None:
        self.descriptor = -1


class SimPages:
    """`covey.ports.Pages`."""

    def make(self, kind: str, mine: bool) -> SimPage:
        return SimPage(mine)

    def make_memory(self, ranks: int, first: int) -> SimPage:
        return SimPage(True)
