"""How long a process has spent in turns."""

from typing import NamedTuple


class TurnsSpent(NamedTuple):
    """Seconds since the process began."""

    sending_s: float = 0.0
    """Seconds in which it sent under a turn."""
    waited_s: float = 0.0
    """Seconds that its script waited for turns."""


NO_TURNS = TurnsSpent()
"""`TurnsSpent` of a process that takes no turns: zero seconds."""
