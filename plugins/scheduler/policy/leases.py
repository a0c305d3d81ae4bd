"""How long ranks may run without news from a leader, and when they are certainly gone.

    asked      answered                    lease over    SIGTERM .. SIGKILL         certainly over: the leader may
      |           |                            |          (grace)     |             take the job back and grant again
    --+-----------+----------------------------+----------------------+----- slack ------+--->
      '------------- lease_s, the host's clock ---------------'                          |
                  '------------------------ over_s, the leader's clock -----------------'

The host counts from when it asked, the leader from when it answered, which is later: whatever happened in between (a
slow link, a stopped agent) is on the safe side. Two clocks may differ in rate by `DRIFT` each.

Ranks that may be lost (`covey.job.job_state`) need not be gone before others take over: it is enough that they stand
still. They are suspended `pause_s` after the question that was answered last, and run again once one is answered in
time after all. So a host that falls silent is replaced within seconds, and a busy one, or one whose agent restarts,
loses nothing:

    asked      answered          suspended              they stand still: others may start in their place
    --+-----------+-----------------+------ slack ------+--->
      '---------- pause_s ----------'
                  '------------- paused_s --------------'
"""

import msgspec

LEASE_SHARE, GRACE_SHARE = 0.5, 0.25
"""The parts of `host_lost_after_s` for lease and grace (chosen: 30 s and 15 s of 60 s): with the defaults an agent may
be away for 30 s before ranks are asked to end, and they have 15 s for it; the rest is margin."""
RENEWALS = 6
"""How often a lease is renewed while it runs: every 5 s with the defaults; five renewals may be lost in a row."""
DRIFT = 0.02
"""The most that a clock runs too fast or too slow, as a fraction; crystals manage 0.0001."""
SLACK_S = 5.0
"""Seconds from the last SIGKILL until nothing runs, on a busy machine."""
HEAL_PAUSE_S = 4.0
"""The default of the setting `heal_pause_s` (chosen: longer than an agent's restart; with the slack it is over by the
time that gossip has found a host dead, 5 s)."""
PAUSE_RENEWALS = 4
"""How often a host asks before ranks are suspended that may be lost, or came and have no state yet: once a second with
the defaults."""
PAUSE_SLACK_S = 1.5
"""Seconds from the end of that time until the last of a host's ranks stands still, on a busy machine. Late ones harm no
sum: the host that sums hears only the newest process of a rank."""


class Terms(msgspec.Struct, frozen=True):
    """The times that a leader promises to every host."""

    lease_s: float
    grace_s: float
    over_s: float
    """Seconds after the leader's answer, on its own clock, when no rank of that lease is left anywhere."""
    pause_s: float
    paused_s: float
    """Seconds after the leader's answer, on its own clock, when every rank of that lease that may be lost stands still,
    or is gone."""


def terms(host_lost_after_s: float, heal_pause_s: float = HEAL_PAUSE_S) -> Terms:
    """The terms for these settings, however short; a leader waits for the longer of `over_s` and the setting."""
    lease_s, grace_s = LEASE_SHARE * host_lost_after_s, GRACE_SHARE * host_lost_after_s
    over_s = (lease_s + grace_s) * (1 + DRIFT) / (1 - DRIFT) + SLACK_S
    pause_s = min(heal_pause_s, lease_s)
    return Terms(lease_s, grace_s, over_s, pause_s, min(over_s, pause_s * (1 + DRIFT) / (1 - DRIFT) + PAUSE_SLACK_S))
