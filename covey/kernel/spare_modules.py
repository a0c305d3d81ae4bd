"""The modules that a spare of this process would import ahead. `covey/hooks/warm.py` finds them; the rank's Python has
run that file by its path before anything else."""

import sys


def imported() -> tuple[str, ...]:
    """Names of modules; none where no spare of this process would wait."""
    found = getattr(sys, "_covey_imported", None)
    return tuple(found()) if callable(found) else ()
