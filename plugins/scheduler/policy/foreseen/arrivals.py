"""Jobs that will come after now, as they came before: a stretch of the past, from a random moment on, is taken for what
comes next. So what comes has the rate, the bursts and the mixture of the past, whatever they are."""

import random
from collections.abc import Iterator, Sequence

from plugins.scheduler.policy.foreseen.lengths import PastJob

WINDOW_S = 7 * 86400.0
"""Seconds of the past that are looked at (chosen: a week has each hour and each day of the week)."""
ARRIVALS_MIN = 20
"""The fewest submissions that are taken for what comes (chosen)."""
SPAN_MIN_S = 60.0
"""The shortest past that is: below, one moment's burst would be taken for a rate."""


def recent(jobs: Sequence[PastJob], now_s: float) -> list[PastJob]:
    """The submissions of the last week, in order; empty: there are too few to say what comes."""
    found = sorted(
        (job for job in jobs if now_s - WINDOW_S <= job.submitted_s <= now_s), key=lambda job: job.submitted_s
    )
    enough = len(found) >= ARRIVALS_MIN and now_s - found[0].submitted_s >= SPAN_MIN_S
    return found if enough else []


def coming(jobs: Sequence[PastJob], now_s: float, rng: random.Random) -> Iterator[tuple[float, PastJob]]:
    """Jobs that come, each with the seconds from now until then, without end. `jobs`: as `recent` found them."""
    if not jobs:
        return
    span_s = now_s - jobs[0].submitted_s
    begin_s = jobs[0].submitted_s + span_s * rng.random()
    at = next((at for at, job in enumerate(jobs) if job.submitted_s >= begin_s), 0)
    passed_s = 0.0 if jobs[at].submitted_s >= begin_s else span_s
    while True:
        yield passed_s + jobs[at].submitted_s - begin_s, jobs[at]
        at += 1
        if at == len(jobs):
            at, passed_s = 0, passed_s + span_s
