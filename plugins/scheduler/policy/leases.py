"""How long ranks may run without news from a leader, and when they are certainly gone.

    asked      answered                    lease over    SIGTERM .. SIGKILL         certainly over: the leader may
      |           |                            |          (grace)     |             take the job back and grant again
    --+-----------+----------------------------+----------------------+----- slack ------+--->
      '------------- lease_s, the host's clock ---------------'                          |
                  '------------------------ over_s, the leader's clock -----------------'

The host counts from when it asked, the leader from when it answered, which is later: whatever happened in between (a
slow link, a stopped agent) is on the safe side. Two clocks may differ in rate by `DRIFT` each.
"""

import msgspec

LEASE_SHARE, GRACE_SHARE = 0.5, 0.25
"""Parts of `host_lost_after_s` (chosen: 30 s of 60 s): with the defaults an agent may be away for 30 s
before ranks are asked to end, and they have 15 s for it; the rest is margin."""
RENEWALS = 6
"""Times that a lease is renewed while it runs: 5 s with the defaults; five may be lost in a row."""
DRIFT = 0.02
"""Clocks run this much too fast or too slow at most, in parts of one; crystals manage 0.0001."""
SLACK_S = 5.0
"""From the last SIGKILL until nothing runs, on a busy machine."""


class Terms(msgspec.Struct, frozen=True):
    """What a leader promises to every host."""

    lease_s: float
    grace_s: float
    over_s: float
    """After its answer, on its own clock: no rank of that lease is left anywhere."""


def terms(host_lost_after_s: float) -> Terms:
    """With every setting, however short; a leader waits for the longer of `over_s` and the setting."""
    lease_s, grace_s = LEASE_SHARE * host_lost_after_s, GRACE_SHARE * host_lost_after_s
    return Terms(lease_s, grace_s, (lease_s + grace_s) * (1 + DRIFT) / (1 - DRIFT) + SLACK_S)
