"""Facts on one host: every plugin receives each fact once, in the order of publication."""

from collections import deque
from collections.abc import Callable

from covey.core.events import Fact

Listener = Callable[[Fact], None]


class Bus:
    """A fact published while another is being delivered waits, so every listener receives the same order."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._waiting: deque[Fact] = deque()
        self._telling = False

    def listen(self, listener: Listener) -> None:
        """Listeners are called in the order of registration; they handle their own errors."""
        self._listeners.append(listener)

    def publish(self, fact: Fact) -> None:
        self._waiting.append(fact)
        if self._telling:
            return
        self._telling = True
        try:
            while self._waiting:
                fact = self._waiting.popleft()
                for listener in self._listeners:
                    listener(fact)
        finally:
            self._telling = False
