"""How long a process has spent in turns."""

from typing import NamedTuple


class TurnsSpent(NamedTuple):
    """Seconds since the process began."""

    sending_s: float = 0.0
    """Seconds in which it sent under a turn."""
    waited_s: float = 0.0
    """Seconds that its script waited for turns."""
    added_s: float = 0.0
    """Seconds of a processor that it used while its script waited for sums: it added, received and sent. 0 where the
    script computes meanwhile (`ProcessTurns.in_background`)."""


NO_TURNS = TurnsSpent()
"""`TurnsSpent` of a process that takes no turns: zero seconds."""
