"""Large arrays are worked on a piece at a time, so that what several operations need stays in a cache."""

import math
from collections.abc import Iterator

import numpy as np

from covey.tensors.numbers.types import Wide

PIECE = 128 << 10
"""Elements."""


def pieces(start: int, end: int) -> Iterator[slice]:
    """Of elements `start` up to, and without, `end`."""
    return (slice(at, min(at + PIECE, end)) for at in range(start, end, PIECE))


def not_finite(numbers: Wide) -> int:
    """How many of them are NaN or infinite; they are added as numpy does. A sum that is finite has none in it, and
    takes two thirds of the time of a look at each."""
    if math.isfinite(np.einsum("i->", numbers)):
        return 0
    return len(numbers) - int(np.count_nonzero(np.isfinite(numbers)))
