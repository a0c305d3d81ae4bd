"""Where an iteration of a job ends, as its aggregator sees it: the Block after which nothing is pushed for longest.

A job's ranks push their Blocks in about the same order in each iteration, and then compute. A moment without a round
under way may also be between two buckets of one backward pass, so the length of the pause after each Block is
remembered. After that with the longest one (AutoPS hides a reassignment under the computing of workers, §4.5.2.2) a new
owner has most time to get ready.

    rounds of a, b, c     | a |.| b |..| c |............| a |.| b |..| c |............
    pauses after them          1      2           12
"""

ALIKE = 0.5
"""Part of the longest pause from which a pause may be the end of an iteration too."""
PATIENCE = 2.0
"""Multiple of the longest pause without a round after which the job is doing something else."""
SHORT_S = 0.05
"""Seconds of quiet after which a job without known pauses is between two iterations."""


class IterationGaps:
    """The pauses of one job after each Block. Times are of any steady clock, seconds; keys are those of Blocks."""

    def __init__(self) -> None:
        self._after: dict[int, float] = {}
        self._last: int | None = None
        self.since_s = 0.0
        """Time at which the last round before a pause was over."""

    @property
    def longest_s(self) -> float:
        return max(self._after.values(), default=0.0)

    @property
    def patience_s(self) -> float:
        """Seconds without a round after which none is to be expected soon."""
        return max(SHORT_S, PATIENCE * self.longest_s)

    def quiet(self, key: int, now_s: float) -> None:
        """The round of this Block is over, and no other one is under way."""
        self._last, self.since_s = key, now_s

    def began(self, now_s: float) -> None:
        """The first round after a pause begins."""
        if self._last is not None:
            self._after[self._last] = now_s - self.since_s
            self._last = None

    @property
    def is_end(self) -> bool:
        """Is a pause that begins now probably that between two iterations?"""
        if self._last is None:
            return False
        return self._after.get(self._last, 0.0) >= ALIKE * self.longest_s
