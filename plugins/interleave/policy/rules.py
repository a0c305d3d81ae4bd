"""Rules by which groups are chosen: those of this project, and those that the paper prints."""

import msgspec

from plugins.interleave.policy.model import Weights

LOOK = 32
"""Jobs that a decision looks at, the first ones (`policy/order`); with many hosts one for every three of them. Ours: 20
leave hosts 2 % more idle, with 40 jobs end later in the mean."""
REVIEW_S = 1800.0
"""Seconds between two reviews of all groups. Ours: after 3,600 hosts are 1 % more idle, after 900 as busy, with more
moves."""
REVIEW_WORTH = 0.02
"""Relative gain in score for which a review arranges all anew. It is less than the gain for which a job that comes or
goes may change groups (`regroup.WORTH`), since it lasts until the next review."""
WEIGHTS = Weights(0.9, 0.1)
"""Weights of the live decisions. COMM takes as long on many hosts as on few, so a network that is busy on many hosts
carries no more bytes; only computing is progress. With 0.6 : 0.4, which compares groupings fairly, the last jobs end up
in one large group that keeps the network busy, one after another."""
LEAN = 1.04
"""Factor by which communication is planned to take longer than measured. Times change with the company, by 10 % and
more where memory is short; of two groups planned to keep both resources just busy, one then lacks computing and idles
processors. So plans have some to spare, and what they lack is rather the network."""


class GroupRules(msgspec.Struct, frozen=True):
    """Rules by which jobs are chosen."""

    weights: Weights = WEIGHTS
    look: int | None = LOOK
    """Jobs that a decision looks at; None: all of them."""
    by_left: bool = True
    """The job with the least left goes first, each has its bonus, and there are reviews (`policy/order`); else jobs go
    as they came."""
    lean: float = LEAN
    """Factor by which communication is planned to take longer than measured."""
    polish: bool = True
    """Is a grouping polished, or for few jobs the best of all searched for? (`policy/schedule`)"""


OURS = GroupRules()
PRINTED = GroupRules(Weights(2 / 3, 1 / 3), None, by_left=False, lean=1.0, polish=False)
"""Rules as the paper prints them, its two algorithms repaired (`policy/schedule`): all jobs in the order in which they
came, nothing known of lengths (Algorithm 1, lines 2 to 5). It says only that CPU counts more; twice is our reading."""
