"""Long operations, written once for threads and for asyncio: generators that yield what they wait for.

A generator runs while it has its machine for itself (a thread holds the machine's lock), up to the next `Pause`; then
others may use the machine. Its runner (`covey.healing.healing` by threads, `covey.simulated.healing_streams` on ports)
sends the messages, does the work, waits, and continues the generator with the work's result.
"""

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

from covey.tensors.aggregator.rounds import Tell

Found = TypeVar("Found")


def _at_once() -> bool:
    return True


class Pause(NamedTuple):
    """What the runner does while the generator pauses, in this order."""

    says: tuple[Tell, ...] = ()
    """Messages to other ranks; any of them may be lost."""
    words: str = ""
    """A line for people."""
    work: Callable[[], Any] | None = None
    """A function that takes long, or belongs to the script; its result is sent back into the generator."""
    until: Callable[[], bool] = _at_once
    """The condition that ends the wait; checked whenever the machine received something."""
    most_s: float | None = None
    """Most seconds to wait; None: no limit."""


Stepwise = Generator[Pause, Any, Found]
"""A generator that yields pauses and returns its result."""
