"""When a job that waits goes to the head of everything (NSDI'19 §3.3, STARVELIMIT and PROMOTEKNOB).

The simulator asks when that will be, the leader whether it is so by now; both ask these functions. A leader that
decides less often than once a second finds several such jobs at once, and promotes them in the order of the seconds in
which they became due.
"""

import math
from typing import TypeVar

Seconds = TypeVar("Seconds", int, float)
EARLY_S = 1e-6
"""How long before its time an event is already looked at, s: sums of seconds are rounded."""


def promoted_after(
    queue: int, ran_s: Seconds, waited_s: Seconds, knob: tuple[int, int] | None, starve_limit_s: Seconds | None
) -> Seconds | None:
    """Seconds of the present wait after which a job is promoted; None: never. `ran_s` and `waited_s` count since its
    last promotion, without the present wait. The limit holds in every queue; the knob, a fraction, below the highest:
    a job that waited `knob` times as long as it ran."""
    after = starve_limit_s
    if knob is not None and queue > 0 and ran_s > 0:
        lacks = max(0 * ran_s, -(-knob[0] * ran_s // knob[1]) - waited_s)
        after = lacks if after is None else min(after, lacks)
    return after


def due_second(since_s: Seconds, after_s: Seconds) -> int:
    """The whole second in which a job that waits since then became due: promotions of one decision come in this order,
    those of one second by admission."""
    return math.floor(since_s + after_s + EARLY_S)
