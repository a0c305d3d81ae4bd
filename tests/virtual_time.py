"""Stories of asyncio in virtual time: waiting costs nothing, the clock jumps to the next timer."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualSelector(selectors.DefaultSelector):
    """A selector that moves the clock instead of waiting."""

    now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits for ever")
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s


def play(story: Coroutine[Any, Any, T]) -> T:
    """Run a story and return its result. What a task or callback did not catch fails it."""
    uncaught: list[Any] = []
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.get_loop().set_exception_handler(lambda _, context: uncaught.append(context))
        result = runner.run(story)
    assert not uncaught, uncaught
    return result
