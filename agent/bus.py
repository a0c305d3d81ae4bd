"""Facts on one host: told in order, heard in order, by every plugin, once."""

from collections import deque
from collections.abc import Callable

from covey.core import Fact

Listener = Callable[[Fact], None]


class Bus:
    """A fact told while another is being heard waits its turn, so every listener hears the same order."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._waiting: deque[Fact] = deque()
        self._telling = False

    def listen(self, listener: Listener) -> None:
        """Listeners hear in the order in which they came; they handle their own errors."""
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
