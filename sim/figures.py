"""How figures of a run are computed and written."""

import math
from collections.abc import Sequence


def quantile(ascending: Sequence[int], share: float) -> int:
    """Nearest rank: the smallest value that at least this share does not exceed."""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)]


def duration(seconds: float) -> str:
    """Seconds in words: `45 s`, `12.3 min`, `4.5 h`, `3.2 days`."""
    for size, word in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= size * (1 if word != "days" else 2):
            return f"{seconds / size:.1f} {word}"
    return f"{seconds:.0f} s"
