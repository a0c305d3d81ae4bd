"""What the device model (`sim/sharing/device.py`) predicts for a pair of scripts that `bench/sharing/sharing_live.py`
measured.

It is told what the guaranteed script does alone: how long a mini-batch works on the device and how long it does not,
how much that varies, and for how much of the time it was away. The opportunistic script always has an operation. Each
law is the one that ran, for the time that it ran.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sim.sharing.device import NEVER, Scenario, simulate
from sim.sharing.sharing import CONTROLLERS, WITHOUT

AWAY_NS = 1_000_000_000
"""Nanoseconds from which on a mini-batch is a phase without the device."""
TOLERANCE = 0.05
SEEDS = range(1, 9)
LAWS = {"packed": "naive", "step-up": "step-up", "step-up+flag": "step-up+flag", "flag": "flag", "ours": "ladder"} | {
    rule: rule for rule in WITHOUT
}
"""Laws by their names in the bench: those of `sim.sharing.sharing.CONTROLLERS`."""


@dataclass(frozen=True)
class Phases:
    """Phases of a script that runs alone; seconds, and shares."""

    compute_s: float
    wait_s: float
    variation: float
    """Coefficient of variation of its work from mini-batch to mini-batch."""
    away: float
    """Share of the time that the script is away."""


def phases(steps: Sequence[tuple[int, int, int, int]], seconds: float) -> Phases:
    """Phases of a script from what it recorded within `seconds`: ended, took, waited for the core, ran; ns."""
    with_device = [step for step in steps if step[1] < AWAY_NS]
    ran = [ran for _, _, _, ran in with_device]
    idle = [took - waited - ran for _, took, waited, ran in with_device]
    within = sum(took for _, took, _, _ in with_device) / 1e9
    return Phases(
        statistics.fmean(ran) / 1e9,
        max(0.0, statistics.fmean(idle)) / 1e9,
        statistics.pstdev(ran) / statistics.fmean(ran),
        min(1.0, max(0.0, 1 - within / seconds)),
    )


def predicted(
    kind: str,
    alone: Phases,
    law: str,
    op_s: float,
    idle_seen_s: float,
    wake_s: float,
    settle_s: float,
    measure_s: float,
) -> tuple[float, float]:
    """How much slower the guaranteed script is, and the share that the other one gets of what it would do alone, in
    `measure_s` after `settle_s`; `op_s`: its operations; `idle_seen_s`, `wake_s`: those of
    `sim.sharing.device.Scenario`."""
    away_s = measure_s * alone.away if alone.away > 0.1 else 0.0
    scenario = Scenario(
        kind,
        alone.compute_s,
        alone.wait_s if alone.wait_s > 0.02 * alone.compute_s else 0.0,
        op_s,
        variation=max(0.01, alone.variation),
        idle_seen_s=idle_seen_s,
        wake_s=wake_s,
        away_s=(settle_s + 0.5, settle_s + 0.5 + away_s) if away_s else (NEVER, NEVER),
    )
    slower, share = [], []
    for seed in SEEDS:
        outcome = simulate(scenario, lambda: CONTROLLERS[LAWS[law]](TOLERANCE), seed, settle_s + measure_s)
        rows = [row for row in outcome.timeline if row[0] > settle_s]
        slower += [slowdown for _, slowdown, _ in rows if not math.isnan(slowdown)]
        share += [got for _, _, got in rows]
    return statistics.fmean(slower), statistics.fmean(share)
