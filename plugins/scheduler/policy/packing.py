"""How much a model wants its workers together: its skew, and the limit above which a gang is packed (Gu 2021 §3.3.3).

Models with one huge tensor lose most time to the network when their workers are spread; *skew* is that tensor's share
of all bytes. PACKLIMIT is the skew above which a gang is packed; it is fitted anew from what jobs really lost. The
paper runs each model on trial first; here a gang is packed until it has run both ways (`shown`).
"""

import itertools
from collections.abc import Iterable, Sequence

import msgspec

PACKLIMIT = 0.3
"""The default limit, between the published models that do not mind (0.04-0.15) and those that do (0.61-0.77) (Gu 2021,
table 3.3)."""
TOLERATED = 0.05
"""A gang that loses less than this to the network does not need packing (chosen: what sharing may cost a job too)."""


def skew(tensor_bytes: Iterable[int]) -> float:
    """A model's skew: bytes of the largest tensor over bytes of all, 0..1; 0 when there is none."""
    sizes = list(tensor_bytes)
    return share(max(sizes, default=0), sum(sizes))


def share(largest_bytes: int, total_bytes: int) -> float:
    """A model's skew, 0..1, from the bytes of its largest tensor and of all its tensors."""
    return min(1.0, largest_bytes / total_bytes) if total_bytes > 0 else 0.0


def shown(skew: float | None, slowdown: float | None, tolerated: float = TOLERATED) -> float | None:
    """The skew that placement may go by. None, so that the gang is packed, unless both were seen: its tensors, and that
    its steps took no longer on several hosts. `slowdown` as in `SpreadLoss`, None: it did not run both ways."""
    return skew if slowdown is not None and slowdown <= tolerated else None


def loss(skew: float | None, slowdown: float | None, packlimit: float, tolerated: float = TOLERATED) -> float:
    """What a gang loses when it is spread, as a share of its step on one host; 0: it does not mind, or that is not
    known. What was measured counts; for a gang that did not run both ways the skew does, and then only the least loss
    that counts."""
    if slowdown is not None:
        return slowdown if slowdown > tolerated else 0.0
    return tolerated if skew is not None and skew > packlimit else 0.0


class SpreadLoss(msgspec.Struct, frozen=True):
    """What one gang lost when it was not packed."""

    skew: float
    slowdown: float
    """Step time spread over step time packed, minus 1."""


def refit(seen: Sequence[SpreadLoss], now: float = PACKLIMIT, tolerated: float = TOLERATED) -> float:
    """PACKLIMIT from history: the one-dimensional linear classifier of least cost. A gang spread in spite of its
    slowdown costs what it lost beyond `tolerated`; one packed for nothing costs what it was short of it. `now` stays
    when nothing separates better than it does, or there is only one kind of gang."""
    wrong = [one.slowdown - tolerated for one in seen]
    if not any(over > 0 for over in wrong) or not any(over <= 0 for over in wrong):
        return now
    ascending = sorted({one.skew for one in seen})
    between = [(low + high) / 2 for low, high in itertools.pairwise(ascending)]
    return min([now, *between], key=lambda limit: (cost(seen, limit, tolerated), limit != now, abs(limit - now)))


def cost(seen: Sequence[SpreadLoss], limit: float, tolerated: float = TOLERATED) -> float:
    """What a limit would have cost on this history: the sum of how far each gang on the wrong side is from the
    right."""
    return sum(abs(one.slowdown - tolerated) for one in seen if (one.skew > limit) != (one.slowdown > tolerated))
