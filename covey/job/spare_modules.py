"""What a spare of this process would import ahead, as `covey/hooks/warm.py` says, which the rank's Python has run by
its path before anything else."""

import sys


def imported() -> tuple[str, ...]:
    """Names of modules; none where a spare of this process would not wait."""
    found = getattr(sys, "_covey_imported", None)
    return tuple(found()) if callable(found) else ()
