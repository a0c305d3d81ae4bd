"""Whose turn it is on a host that jobs share (Harmony §4.3.1): one decision for the ranks and for the simulator.

There are three *lanes*. One job computes at a time (COMP), since it uses all processors. Two jobs send (COMM): one is
primary, and a second one uses the gaps that it leaves. Among jobs that wait for a lane the order of the plan decides;
a job that `LAPS` turns of others went before is next, so none waits for ever.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

LAPS = 4
"""Turns of others after which a job is next. Ours: with 1, jobs take turns one by one as in the paper."""

Need = Literal["comp", "comm"]
"""What a turn is of: COMP, the processors, or COMM, the network."""
COMP, COMM, COMM_BESIDE = 0, 1, 2
"""The lanes. Of two jobs that send, the one that began first is the primary one, whichever lane it has."""
LANES: dict[Need, tuple[int, ...]] = {"comp": (COMP,), "comm": (COMM, COMM_BESIDE)}
FREE, WAITS, CLAIMS, HOLDS = range(4)
"""What a process does at a lane. `CLAIMS`: it is about to hold it, and looks whether another one is too."""


class Claim(NamedTuple):
    """What one process wants or has."""

    job: int
    """The job's key: processes of one job have their turns together."""
    place: int
    """Place of the job in the order of turns, least first."""
    passed: int
    """Turns of others since it asked."""
    state: int = WAITS
    lane: int = -1
    """The lane that it claims or holds; -1: none."""
    slot: int = 0
    """The place of the process on the page."""
    since_ns: int = 0
    """When it asked, or when its turn began: CLOCK_MONOTONIC, ns."""
    turn: int = 0
    """The turn of its job that it has or, while it waits, had last; 0: none yet."""


def urgency(place: int, passed: int, laps: int = LAPS) -> tuple[int, int]:
    """Sort key of jobs that wait, least first: jobs that were passed over too often, most often first; then the plan's
    order."""
    return -passed if passed >= laps else 0, place


def next_job(claims: Iterable[Claim], laps: int = LAPS) -> int | None:
    """The job whose turn is next; None when none waits."""
    waiting = [claim for claim in claims if claim.state in (WAITS, CLAIMS)]
    if not waiting:
        return None
    return min(waiting, key=lambda claim: (*urgency(claim.place, claim.passed, laps), claim.job)).job


def free_lane(need: Need, claims: Iterable[Claim], job: int) -> int | None:
    """The lane that this job may enter, since nobody else holds it; None: all are held. A job whose other processes
    hold one enters that one."""
    held = {claim.lane: claim.job for claim in claims if claim.state == HOLDS}
    ours = [lane for lane in LANES[need] if held.get(lane) == job]
    return next(iter(ours or [lane for lane in LANES[need] if lane not in held]), None)


def present_turn(claims: Iterable[Claim], job: int, lane: int) -> int:
    """The newest turn of this job that lasts in this lane; 0: none."""
    return max((each.turn for each in claims if (each.state, each.job, each.lane) == (HOLDS, job, lane)), default=0)


def may_enter(need: Need, claims: list[Claim], job: int, had: int = 0, laps: int = LAPS) -> int | None:
    """The lane that a process of this job, which waits, may enter now; None: it waits on. `had`: the turn of its job
    that it had last. All processes of a job have its turn together, each once: the second time begins the job's next
    turn, which goes by the order, so processes that overlap keep no other job out."""
    lane = free_lane(need, claims, job)
    if lane is None or present_turn(claims, job, lane) not in (0, had):
        return lane
    others_hold = {claim.job for claim in claims if claim.state == HOLDS and claim.job != job}
    rest = [claim for claim in claims if claim.job not in others_hold]
    return lane if next_job(rest, laps) == job else None


def keeps(claim: Claim, others: Iterable[Claim]) -> bool | None:
    """Whether a process that claims a lane may hold it: False when it must step back for another job's process, None
    when that one steps back, which takes a moment. Of two that claim a lane at once the one with the lower slot keeps
    it (L. Lamport, "A simple approach to ... mutual exclusion", the one-bit algorithm): a process writes only its own
    words, so no instruction that compares and swaps is needed, and nothing is left locked by one that dies."""
    rivals = [
        other
        for other in others
        if other.job != claim.job and other.lane == claim.lane and other.state in (CLAIMS, HOLDS)
    ]
    if any(other.state == HOLDS or other.slot < claim.slot for other in rivals):
        return False
    return None if rivals else True
