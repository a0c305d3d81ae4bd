"""The lease of one supervisor's ranks (`plugins.base.RankLease`): how long they run without news, and when they stop.

Ranks that may all be lost stand still long before their lease is over, so that others may take their place; a renewal
lets them run again.
"""

import msgspec

from plugins.base import RankLease

LOOK_S = 1.0
"""Seconds of the longest sleep until the lease is looked at again: timers stand still while a machine sleeps, its lease
does not."""
STILL_LOOK_S = 0.2
"""Seconds of the longest sleep while ranks stand still: another host's ranks may end, and these may run again."""
LEAST_S = 0.001


class HeldLease:
    """The newest lease of the ranks. Times are `Clock.boot_s`."""

    def __init__(self, lease: RankLease | None) -> None:
        self.lease = lease

    def renewed(self, lease: RankLease, now_s: float) -> None:
        """Take a newer lease. One dated in the future counts from now."""
        asked_s = min(lease.asked_s, now_s)
        if self.lease is None or asked_s >= self.lease.asked_s:
            self.lease = msgspec.structs.replace(lease, asked_s=asked_s)

    def is_over(self, now_s: float) -> bool:
        return self.lease is not None and now_s >= self.lease.until_s

    def silent_s(self, now_s: float) -> float:
        """Seconds since the lease was last confirmed."""
        return 0.0 if self.lease is None else now_s - self.lease.asked_s

    def stands_still(self, now_s: float) -> bool:
        """Whether ranks that may be lost are suspended by now."""
        pause_s = None if self.lease is None else self.lease.pause_s
        return pause_s is not None and self.silent_s(now_s) >= pause_s

    def look_in_s(self, now_s: float, may_stand_still: bool) -> float:
        """Seconds until something may have to be done. `may_stand_still`: the ranks are suspended when no leader
        confirms them."""
        if self.lease is None:
            return LOOK_S
        left_s = min(LOOK_S, self.lease.until_s - now_s)
        if may_stand_still and self.lease.pause_s is not None:
            still = self.stands_still(now_s)
            left_s = min(left_s, STILL_LOOK_S if still else self.lease.asked_s + self.lease.pause_s - now_s)
        return max(LEAST_S, left_s)
