"""Where an iteration of a job ends, seen by who sums its tensors: the Block after which nothing is pushed for longest.

A job's ranks push their Blocks in about the same order in each iteration, and then compute. A moment without a round
under way may also lie between two buckets of one backward pass, so the length of the pause after each Block is
remembered. After that with the longest one (AutoPS hides a reassignment under the computing of workers, §4.5.2.2) a new
owner has most time to get ready.

    rounds of a, b, c     | a |.| b |..| c |............| a |.| b |..| c |............
    pauses after them          1      2           12
"""

ALIKE = 0.5
"""A pause of this part of the longest one may be the end of an iteration too."""
PATIENCE = 2.0
"""No round for this many times the longest pause: the job does something else now."""
SHORT_S = 0.05
"""A job without known pauses that is quiet for so long is between two iterations."""


class IterationGaps:
    """Times are of any steady clock, seconds; keys are those of Blocks."""

    def __init__(self) -> None:
        self._after: dict[int, float] = {}
        self._last: int | None = None
        self.since_s = 0.0
        """When the last round before a pause was over."""

    @property
    def longest_s(self) -> float:
        return max(self._after.values(), default=0.0)

    @property
    def patience_s(self) -> float:
        """After so long without a round none is to be expected soon."""
        return max(SHORT_S, PATIENCE * self.longest_s)

    def quiet(self, key: int, now_s: float) -> None:
        """The round of this Block is over, and no other one is under way."""
        self._last, self.since_s = key, now_s

    def began(self, now_s: float) -> None:
        """The first round after that begins."""
        if self._last is not None:
            self._after[self._last] = now_s - self.since_s
            self._last = None

    @property
    def is_end(self) -> bool:
        """Whether a pause that begins now is probably that between two iterations."""
        if self._last is None:
            return False
        return self._after.get(self._last, 0.0) >= ALIKE * self.longest_s
