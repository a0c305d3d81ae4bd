"""What the past says about a job that has attained some service: the Gittins index (Tiresias, Pseudocode 1).

The index is the chance to end within the next Δ GPU·s over what those GPU·s are expected to cost. Service is counted in
whole GPU·s, so it is an exact fraction. With the totals of ended jobs s_1 <= ... <= s_n, their prefix sums P_i and
C_j = P_j + s_j (n - j), a job whose attained service a lies behind s_1 ... s_i has

    G(a, Δ)          = (j - i) / (P_j - P_i - a (j - i) + Δ (n - j)),   j = how many totals are <= a + Δ
    G(a, s_j - a)    = (j - i) / (C_j - (P_i + a (n - i)))

The second form is the slope from the point (P_i + a (n - i), i) to the point (C_j, j). The largest index over all Δ is
reached where a job of the past ended, so it is the steepest such slope: a tangent to the upper hull of the points that
are left. The hulls of all suffixes share their edges (`_next`), so one pass finds all of them.
"""

import bisect
import itertools
from collections.abc import Iterable
from fractions import Fraction

NOTHING = (0, 1)


class History:
    """Total service of ended jobs, GPU·s, whole numbers. Immutable; O(log n) for a question, O(n log n) to make."""

    def __init__(self, totals: Iterable[int]) -> None:
        self.totals = sorted(totals)
        self._prefix = [0, *itertools.accumulate(self.totals)]
        count = len(self.totals)
        self._cost = [self._prefix[j] + (self.totals[j - 1] if j else 0) * (count - j) for j in range(count + 1)]
        self._next = self._hulls()

    def _hulls(self) -> list[int]:
        """The vertex after j, for each j, on the upper hull of the points j ... n; n's own is n."""
        count, cost = len(self.totals), self._cost
        following = [count] * (count + 1)
        for j in range(count - 1, 0, -1):
            k = j + 1
            while following[k] != k:
                beyond = following[k]
                if (k - j) * (cost[beyond] - cost[j]) > (beyond - j) * (cost[k] - cost[j]):
                    break
                k = beyond
            following[j] = k
        return following

    def index(self, attained: int, delta: int | None) -> tuple[int, int]:
        """The index as (numerator, denominator); `delta` None is no limit. (0, 1) when no job of the past got so
        far, or none of those ended within `delta`."""
        totals, prefix = self.totals, self._prefix
        count = len(totals)
        begin = bisect.bisect_right(totals, attained)
        end = count if delta is None else bisect.bisect_right(totals, attained + delta)
        ended = end - begin
        if ended <= 0:
            return NOTHING
        beyond = 0 if delta is None else delta * (count - end)
        return ended, prefix[end] - prefix[begin] - attained * ended + beyond

    def best(self, attained: int) -> tuple[int, int]:
        """The largest index over all deltas, as (numerator, denominator)."""
        count, cost, following = len(self.totals), self._cost, self._next
        begin = bisect.bisect_right(self.totals, attained)
        if begin >= count:
            return NOTHING
        across = self._prefix[begin] + attained * (count - begin)
        at = begin + 1
        while following[at] != at:
            beyond = following[at]
            if (beyond - begin) * (cost[at] - across) < (at - begin) * (cost[beyond] - across):
                break
            at = beyond
        return at - begin, cost[at] - across


def gittins_index(history: History, attained: int, delta: int | None) -> Fraction:
    """Gittins index, 1/(GPU·s), exact (Tiresias, Pseudocode 1)."""
    return Fraction(*history.index(attained, delta))


def best_gittins_index(history: History, attained: int) -> Fraction:
    """Gittins index over the best service quantum, 1/(GPU·s), exact (Tiresias, Pseudocode 1, line 12)."""
    return Fraction(*history.best(attained))
