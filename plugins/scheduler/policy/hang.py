"""Which rank is stuck: the one for which the sums of a step have waited for longer than its job allows (`--hang`)."""

from collections.abc import Collection


def stuck(
    missing: Collection[int], workers: int, waits_s: float, hang_s: float | None, asked: Collection[int] = ()
) -> int | None:
    """The lowest rank of those that are awaited and that nobody has asked about yet; None: nobody is stuck. `waits_s`:
    for how long the ranks that are there have waited. Where all are awaited nobody waits for anybody."""
    if hang_s is None or waits_s < hang_s or len(missing) >= workers:
        return None
    return min((rank for rank in missing if rank not in asked), default=None)
