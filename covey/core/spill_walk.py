"""How much of a job's input data is on disk (Harmony §4.3.3).

Of several jobs in memory only one computes. Its spilled blocks are loaded while the others of its blocks are processed,
so spilling costs nothing as long as loading keeps up; beyond that the job waits. Too little spilled, and the hosts run
short of memory. Between the two there is a valley; the ratio walks down into it by trying.
"""

import math
from collections.abc import Callable

import msgspec

STEPS = (8, 4, 2, 1)
"""Blocks by which a walk changes the ratio, coarse first. Ours: the paper names no step."""


def spill_max(blocks: int, process_s: float, load_s: float) -> float:
    """alpha_max: the largest share of `blocks` on disk with which loading keeps up, 0..1: process_s (blocks - 1) >=
    load_s (spilled - 1) (§4.3.3)."""
    if blocks <= 0:
        return 0.0
    if load_s <= 0:
        return 1.0
    return min(1.0, math.floor(1 + process_s / load_s * (blocks - 1) + 1e-9) / blocks)


def spill_first(input_bytes: float, model_bytes: float, memory_bytes: float) -> float:
    """Where to begin, 0..1: the fraction on disk with which input and model fit into the memory the job may use, by
    estimate (§4.3.3)."""
    if input_bytes <= 0:
        return 0.0
    return min(1.0, max(0.0, 1 - (memory_bytes - model_bytes) / input_bytes))


class Climb(msgspec.Struct, frozen=True):
    """A walk towards the shortest iteration: where it is, what was measured there, where it looks next."""

    blocks: int
    """Blocks of the job in all."""
    spilled_max: int
    at: int
    best_s: float | None = None
    """Iteration time measured at `at`; None before the first."""
    step: int = 0
    """Index in `STEPS`."""
    towards: int = 1
    tried: int = 0
    """Number of directions in which this step did not help."""

    @property
    def is_over(self) -> bool:
        """Is no ratio nearby better?"""
        return self.step >= len(STEPS)

    @property
    def next(self) -> int:
        """Number of blocks to spill for the next measurement."""
        if self.best_s is None or self.is_over:
            return self.at
        return min(self.spilled_max, max(0, self.at + self.towards * STEPS[self.step]))


def measured(climb: Climb, took_s: float) -> Climb:
    """The walk after an iteration of `took_s` seconds with `climb.next` blocks spilled: on in the same direction while
    it helps, else the other direction, else a smaller step (§4.3.3, hill climbing). Every walk ends, since each step
    that is taken improves on the best."""
    if climb.is_over:
        return climb
    if climb.best_s is None:
        return _past_edges(msgspec.structs.replace(climb, best_s=took_s))
    if took_s < climb.best_s:
        return _past_edges(msgspec.structs.replace(climb, at=climb.next, best_s=took_s, tried=0))
    return _past_edges(_turned(climb))


def climbed(climb: Climb, measure: Callable[[int], float]) -> Climb:
    """Do the whole walk: `measure(spilled)` gives the seconds of an iteration."""
    while not climb.is_over:
        climb = measured(climb, measure(climb.next))
    return climb


def _turned(climb: Climb) -> Climb:
    if climb.tried == 0:
        return msgspec.structs.replace(climb, towards=-climb.towards, tried=1)
    return msgspec.structs.replace(climb, step=climb.step + 1, towards=-climb.towards, tried=0)


def _past_edges(climb: Climb) -> Climb:
    """Skip directions that lead nowhere, at either end: they are not measured."""
    while not climb.is_over and climb.next == climb.at:
        climb = _turned(climb)
    return climb
