"""What takes a while, written once for threads and for asyncio: a generator that says for what it waits.

It runs while its machine is its alone (a thread holds the machine's lock), up to the next `Pause`: then others may use
the machine. Whoever runs it (`covey.healing.healing` by threads, `covey.simulated.healing_streams` on ports) says what
is to be said, does the work, waits, and goes on with what the work gave.
"""

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

from covey.tensors.aggregator.rounds import Tell

Found = TypeVar("Found")


def _at_once() -> bool:
    return True


class Pause(NamedTuple):
    """What is to be done meanwhile, in this order."""

    says: tuple[Tell, ...] = ()
    """To other ranks; whatever is said may be lost."""
    words: str = ""
    """To people."""
    work: Callable[[], Any] | None = None
    """What takes long, or is the script's own."""
    until: Callable[[], bool] = _at_once
    """Looked at whenever the machine heard something."""
    most_s: float | None = None
    """The wait ends after so long in any case; None: it does not."""


Stepwise = Generator[Pause, Any, Found]
"""With what it found in the end."""
