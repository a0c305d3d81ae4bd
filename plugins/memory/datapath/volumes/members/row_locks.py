"""Locks on rows of a slab with parity: two writes to one row have an order, and no page is computed from a row that
changes meanwhile."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class RowLocks:
    """Locks on runs of rows; first come, first served among those that overlap."""

    def __init__(self) -> None:
        self._held: list[tuple[int, int]] = []
        """First row, and the one after the last, of each run that is locked."""
        self._waiting: deque[tuple[tuple[int, int], asyncio.Future[None]]] = deque()

    def is_held(self, first: int, count: int) -> bool:
        return _meets((first, first + count), self._held)

    @asynccontextmanager
    async def locked(self, first: int, count: int) -> AsyncIterator[None]:
        rows = (first, first + count)
        if _meets(rows, self._held) or _meets(rows, [each for each, _ in self._waiting]):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((rows, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._free(rows)
                else:
                    self._waiting.remove((rows, turn))
                    self._go_on()
                raise
        else:
            self._held.append(rows)
        try:
            yield
        finally:
            self._free(rows)

    def _free(self, rows: tuple[int, int]) -> None:
        self._held.remove(rows)
        self._go_on()

    def _go_on(self) -> None:
        """Let waiting runs that overlap no other have their turn."""
        waiting, self._waiting = self._waiting, deque()
        for rows, turn in waiting:
            if _meets(rows, self._held) or _meets(rows, [each for each, _ in self._waiting]):
                self._waiting.append((rows, turn))
            elif not turn.done():
                self._held.append(rows)
                turn.set_result(None)


def _meets(rows: tuple[int, int], others: list[tuple[int, int]]) -> bool:
    return any(rows[0] < end and first < rows[1] for first, end in others)
