"""Work on large arrays a piece at a time, so that what several operations need stays in a cache."""

import math
from collections.abc import Iterator

import numpy as np

from covey.tensors.numbers.types import Wide

PIECE = 128 << 10
"""Most elements of a piece."""


def pieces(start: int, end: int) -> Iterator[slice]:
    """Slices that cover the elements from `start` up to, and without, `end`."""
    return (slice(at, min(at + PIECE, end)) for at in range(start, end, PIECE))


def not_finite(numbers: Wide) -> int:
    """How many numbers are NaN or infinite. They are first added as numpy does: a finite sum has none in it, and takes
    two thirds of the time of a look at each."""
    if math.isfinite(np.einsum("i->", numbers)):
        return 0
    return len(numbers) - int(np.count_nonzero(np.isfinite(numbers)))
