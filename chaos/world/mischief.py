"""Mischief at the ports: what a call of a port may do by its contract, done at single places of the code.

Faults of `chaos.faults` hit whole hosts; most `except` handlers of an agent guard one line each, and a rack that is
merely cut and killed enters few of them. So every call site of a port (function and line of our code) is *armed* in a
quarter of the stories, by the seed, and an armed one *fires* a quarter of the time (buggification, as FoundationDB
calls it). A site that is armed lets its neighbours work, so that what comes after a failure is played too.

What may happen is what the port's own words allow: a disk refuses, does half of it, or does it and says that it did
not; a connection breaks after some bytes; a link is full; a program cannot be started; anything takes long. A refused
connection is not among them: it says that nothing listens there, which would be untrue.
"""

import random
import sys
from collections.abc import Callable

from chaos import PRODUCT

ARMED, FIRES = 0.25, 0.25
"""Chance that a call site is armed, in each story others; and chance that a call of an armed one is struck."""
PAUSE_S = (0.01, 3.0)


class Mischief:
    """The mischief of one world. Off until `on`; `healed` ends it for good."""

    def __init__(self, seed: int) -> None:
        self.on = False
        self.fired: dict[str, int] = {}
        """Call site -> how often it fired."""
        self.on_link: list[Callable[[str, str], None]] = []
        """Functions told of both processes of a connection that is struck: it breaks, or is slow for a while."""
        self.rng = random.Random(f"{seed}/mischief")
        self._seed = seed
        self._armed: dict[str, bool] = {}

    def strikes(self, port: str) -> bool:
        """Whether this call of a port is one that fails. Asked by the port itself, which looks up its caller."""
        if not self.on:
            return False
        site = _caller()
        if not site:
            return False
        site = f"{port} at {site}"
        if site not in self._armed:
            self._armed[site] = random.Random(f"{self._seed} {site}").random() < ARMED
        if not self._armed[site] or self.rng.random() >= FIRES:
            return False
        self.fired[site] = self.fired.get(site, 0) + 1
        return True

    def end(self) -> None:
        """End the mischief: a story may wait for what needs calls that work."""
        self.on = False

    def pause_s(self) -> float:
        return self.rng.uniform(*PAUSE_S)


def _caller() -> str:
    """The nearest place in the product's code; empty when the simulator or a user's stand-in called. Lines count from
    the beginning of their function, so that a seed means the same after changes elsewhere in the file."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] in PRODUCT:
            code = frame.f_code
            return f"{module}:{code.co_qualname}+{frame.f_lineno - code.co_firstlineno}"
        if module.partition(".")[0] not in ("chaos", "asyncio", "contextlib"):
            return ""
        frame = frame.f_back  # type: ignore[assignment]
    return ""
