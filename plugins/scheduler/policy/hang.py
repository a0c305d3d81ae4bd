"""Which rank is stuck: the one for which the sums of a step have waited for longer than its job allows (`--hang`); and
which host is late again and again."""

from collections.abc import Collection

LATE_SHARE = 0.1
"""Part of a job's time from which on it is said that others wait for a host."""
LATE_BEYOND = 3.0
"""So many times as long as for any other host: where all are waited for in turn none is to blame."""


def stuck(
    missing: Collection[int], workers: int, waits_s: float, hang_s: float | None, asked: Collection[int] = ()
) -> int | None:
    """The lowest rank of those that are awaited and that nobody has asked about yet; None: nobody is stuck. `waits_s`:
    for how long the ranks that are there have waited. Where all are awaited nobody waits for anybody."""
    if hang_s is None or waits_s < hang_s or len(missing) >= workers:
        return None
    return min((rank for rank in missing if rank not in asked), default=None)


def is_late(share: float, next_share: float) -> bool:
    """Whether one host is to blame: others wait for it so much of a job's time, and for the next host `next_share`."""
    return share >= LATE_SHARE and share >= LATE_BEYOND * next_share
