"""The ladder: what opportunistic jobs may do beside a guaranteed one, as one number u between 0 and 2.

         u = 0            u = 0.5                 u = 1                      u = 1.1              u = 2
    stopped       the first half of each     all of each phase in     and 10 % of the time     no limit
                  idle phase of the          which the guaranteed     in which it is
                  guaranteed job             job is idle on the GPU   busy

A throttle that knows nothing of the other job (AntMan, TGS, HAMi) hurts in proportion to what it gives: at 5 % it gives
some 5 %. But a training job does not use its GPU all the time (AntMan §2.2): while it reads input or waits for
gradients, whatever runs there delays no one. So the ladder gives these phases away first, and only then, carefully, a
share of the busy ones. Every rung gives more and hurts more than the one below, so one number and one rule suffice.

Below 1 the opportunistic job gets the *beginning* of each idle phase, not a fraction spread over it: operations cannot
be interrupted, so one that starts late in an idle phase reaches into the next busy one.
"""

import math

import msgspec

TARGET = 0.78
"""The share of the tolerance at which climbing ends."""
U_START = 0.25
U_STEP = 0.25
"""The step up below 1, before anything was ever too much."""
BUSY_START = 0.02
"""The first rung above 1: 2 % of the busy time."""
BUSY_GROWTH = 1.5
"""The factor by which the busy share grows at most when climbing above 1."""
GAP = 0.25
"""The share of the way towards a rung that was too much that is climbed afterwards."""
QUIET_WINDOWS = 40
"""The number of windows without trouble after which a rung that was too much is tried again."""
U_MAX = 2.0
U_LEAST = 1e-3
"""The share below which a share counts as nothing."""
HEAD_LEAST_S = 1e-6
"""Seconds of an idle phase below which they count as nothing: no operation is so short."""


class Rates(msgspec.Struct, frozen=True):
    """What an opportunistic job may do on the GPU; the job applies it before each operation."""

    idle: float
    """The share of the time while the guaranteed job is idle on the device, 0..1."""
    head_s: float
    """The first seconds of each such phase in which the job may run; infinite: all of it."""
    busy: float
    """The share of the time while the guaranteed job is busy, 0..1."""

    def __str__(self) -> str:
        if self.busy >= 1:
            return "without limit"
        if self.idle <= 0:
            return "stopped"
        idle = "idle phases" if math.isinf(self.head_s) else f"the first {1000 * self.head_s:.1f} ms of idle phases"
        part = idle if self.idle >= 1 else f"{100 * self.idle:.1f} % of {idle}"
        return part if self.busy <= 0 else f"{part} and {100 * self.busy:.1f} % of busy ones"


STOPPED = Rates(0.0, math.inf, 0.0)
FREE = Rates(1.0, math.inf, 1.0)


def plain(rate: float) -> Rates:
    """One rate at all times: what a throttle that knows nothing of the other job can give."""
    return Rates(rate, math.inf, rate)


def rates(u: float, idle_s: float, flag: bool = True) -> Rates:
    """What rung `u` means when idle phases of the guaranteed job last `idle_s` seconds.

    Without a `flag` (the job cannot say when it is idle on the device: CUDA graphs, no library in it) there is one rate
    for all times, u - 1, as in AntMan §3.1.2."""
    if not flag:
        return plain(max(0.0, u - 1))
    if u <= U_LEAST:
        return STOPPED
    if u < 1:
        head_s = u * idle_s
        return Rates(1.0, head_s if head_s > HEAD_LEAST_S else 0.0, 0.0)
    return Rates(1.0, math.inf, min(1.0, u - 1))


def freed(u: float, flag: bool = True) -> Rates:
    """The rates while the guaranteed job is silent and idle for long: everything, but the first moment it is busy again
    counts as busy: the agent hears of it only at its next mini-batch."""
    return Rates(1.0, math.inf, min(1.0, max(0.0, u - 1))) if flag else FREE


def shared(rates: Rates, weight: float, weights: float) -> Rates:
    """One job's part when several opportunistic jobs share a rung by weight. In idle phases they share by themselves
    (no job is to be protected); busy time is divided."""
    if weights <= 0:
        return STOPPED
    return msgspec.structs.replace(rates, busy=rates.busy * weight / weights)


def climbed(u: float, excess: float, target: float, too_much: float | None) -> float:
    """The next rung up from `u`, where the guaranteed job was measured `excess` slower and may be `target` slower.

    Above 1 the slowdown grows with the busy share in proportion, so it says how far to go; towards a rung that was
    `too_much` only part of the way."""
    if u < 1:
        up = U_START if u <= U_LEAST else min(1.0, u + U_STEP)
    else:
        busy = u - 1
        growth = BUSY_GROWTH if excess <= 0 else min(BUSY_GROWTH, target / excess)
        up = 1 + (BUSY_START if busy < BUSY_START else busy * max(1.0, growth))
    if too_much is not None:
        up = min(up, u + GAP * max(0.0, too_much - u))
    return min(U_MAX, up)


def descended(u: float) -> float:
    """The rung after one that was too much: 60 % of the busy share, or three quarters of the idle one."""
    if u > 1 + BUSY_START:
        return 1 + 0.6 * (u - 1)
    if u > 1:
        return 1.0
    return 0.75 * u if 0.75 * u > U_LEAST else 0.0
