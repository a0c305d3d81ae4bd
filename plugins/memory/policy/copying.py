"""How fast a volume with a disk copies a slab to its lender in the background: requests come first. Pure.

Nobody waits for a copy but a lender that wants its memory back, and for that there is a grace. The volume's process has
one thread, so whatever it copies its requests wait for.
"""

SHARE = 4
"""While requests arrive, copies take one part in this many of the time."""
DUE_S = 2.0
"""Seconds within which all waiting copies are to be under way, if possible: a grace is ten seconds, and the more has to
move, the less copies make way."""


def pause_s(took_s: float, copied_bytes: int, waiting_bytes: int, busy: bool) -> float:
    """Seconds to pause before the next piece, after one of `copied_bytes` that took `took_s`. `waiting_bytes`: bytes
    still to be copied, of all slabs of the volume; `busy`: requests arrived meanwhile."""
    if not busy:
        return 0.0
    due_s = DUE_S * copied_bytes / max(copied_bytes, waiting_bytes)
    return max(0.0, min((SHARE - 1) * took_s, due_s - took_s))
