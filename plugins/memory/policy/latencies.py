"""How long requests took, as counts of buckets that are a quarter of a power of two wide.

Bucket n holds what took from 2^(n/4) to 2^((n+1)/4) microseconds; the first what took less, the last what took longer.
So a quantile read from it is wrong by a tenth at most, and counts of two times subtract.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

PER_OCTAVE = 4
BUCKETS = 24 * PER_OCTAVE
"""Number of buckets; the last one ends at 16.8 s."""
TOLD_EVERY = 2 * PER_OCTAVE
"""Buckets that are merged into one for scraped metrics: powers of four."""


def counted(times_s: "NDArray[Any]") -> "NDArray[np.int64]":
    """Counts of these times (seconds) in each bucket; shape (BUCKETS,)."""
    at = np.log2(np.maximum(times_s, 1e-9) * 1e6) * PER_OCTAVE
    return np.bincount(np.clip(at.astype(np.int64), 0, BUCKETS - 1), minlength=BUCKETS)


def quantile_s(counts: Sequence[int], share: float) -> float:
    """Time in seconds below which this share of requests lies, in the middle of its bucket; 0.0 if there are none."""
    total, passed = sum(counts), 0
    for bucket, count in enumerate(counts):
        passed += count
        if count and passed >= share * total:
            return float(2 ** ((bucket + 0.5) / PER_OCTAVE)) / 1e6
    return 0.0


def since(newer: Sequence[int], older: Sequence[int]) -> list[int]:
    """Requests in each bucket between two counts. A volume process that starts anew counts from nothing."""
    padded = [*older, *[0] * (len(newer) - len(older))]
    if len(padded) > len(newer) or any(one < two for one, two in zip(newer, padded, strict=True)):
        return list(newer)
    return [one - two for one, two in zip(newer, padded, strict=True)]


def below(counts: Sequence[int]) -> list[tuple[float, int]]:
    """Pairs of an upper bound in seconds and how many requests took at most that long; the last bound is infinite."""
    found: list[tuple[float, int]] = []
    total = 0
    for end in range(TOLD_EVERY, BUCKETS + 1, TOLD_EVERY):
        total += sum(counts[end - TOLD_EVERY : end])
        found.append((2 ** (end / PER_OCTAVE) / 1e6, total))
    return [*found[:-1], (float("inf"), total)]
