"""Gates that record what they are told and stop no script."""

import time
from collections.abc import Callable

from covey.hooks.gate.native import GateCounters


class Native:
    """A native gate that remembers."""

    def __init__(self) -> None:
        self.started: list[tuple[object, object]] = []
        self.neighbours: list[object] = []
        self.waits: list[bool] = []
        self.fetches: list[bool] = []

    def start(self, limits: object, flag: object, meter: bool) -> bool:
        self.started.append((limits, flag))
        return True

    def neighbour_is(self, page: object) -> None:
        self.neighbours.append(page)

    def wait(self, begins: bool) -> None:
        self.waits.append(begins)

    def fetch(self, begins: bool) -> None:
        self.fetches.append(begins)

    def look(self) -> None:
        """Does nothing: the real gate reads its page itself."""

    changes = (0,)

    def await_limits(self, seconds: float) -> None:
        time.sleep(seconds)

    def counters(self) -> GateCounters:
        return GateCounters()


class Modules:
    """The modules of a script: places where it can be stopped."""

    def __init__(self) -> None:
        self.before: Callable[[], None] | None = None

    def put_in(self, before: Callable[[], None]) -> None:
        self.before = before

    def take_out(self) -> None:
        self.before = None
