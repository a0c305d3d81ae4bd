"""The curve of one job as this host's ranks report it: how long its steps took, and its metrics, over its steps.

One point for a step, of the lowest rank that reported it, and at most `POINTS_MAX` of them: when there are more, steps
are divided into equal parts of a power of two, and the first point of each part stays. So a curve thinned again and
again is the one that would have been made of all steps at once.
"""

import bisect
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from plugins.scheduler.messages.wire import CURVE_METRICS_MAX, CURVE_POINTS_MAX, CurvePoint


def thinned(points: Sequence[CurvePoint], most: int) -> list[CurvePoint]:
    """At most `most` (2 or more) of these points, which are in order of their steps: evenly apart, with the first and
    the last."""
    if len(points) <= most:
        return list(points)
    bits = 0
    while True:
        kept = [
            point
            for before, point in zip([None, *points[:-1]], points, strict=True)
            if before is None or point.step >> bits != before.step >> bits
        ]
        if kept[-1] is not points[-1]:
            kept.append(points[-1])
        if len(kept) <= most:
            return kept
        bits += 1


def joined(older: Sequence[CurvePoint], newer: Sequence[CurvePoint]) -> list[CurvePoint]:
    """The curve of a job that ran on: what it did before, up to the step with which it began again."""
    if not newer:
        return list(older)
    kept = [point for point in older if point.step < newer[0].step]
    return thinned([*kept, *newer], CURVE_POINTS_MAX)


def of_all(curves: Iterable[Sequence[CurvePoint]]) -> list[CurvePoint]:
    """One curve of what several hosts say of the same job: under each epoch that of the lowest rank."""
    lowest: dict[int, list[CurvePoint]] = {}
    for points in curves:
        epochs: dict[int, list[CurvePoint]] = {}
        for point in points:
            epochs.setdefault(point.epoch, []).append(point)
        for epoch, found in epochs.items():
            known = lowest.get(epoch)
            if known is None or min(each.rank for each in found) < min(each.rank for each in known):
                lowest[epoch] = found
    curve: list[CurvePoint] = []
    for _, found in sorted(lowest.items()):
        curve = joined(curve, found)
    return curve


class JobCurve:
    """The points of one job whose ranks run here."""

    def __init__(self) -> None:
        self.points: list[CurvePoint] = []

    def add(self, point: CurvePoint) -> None:
        """A rank reported a step. A step of an earlier grant, or one that was left out before, changes nothing."""
        known = self.points
        if known and point.epoch < known[-1].epoch:
            return
        if known and point.epoch > known[-1].epoch:
            self.points = joined(known, [point])
            return
        at = bisect.bisect_left(known, point.step, key=lambda each: each.step)
        if at == len(known):
            known.append(_bounded(point, point.metrics))
        elif known[at].step == point.step:
            known[at] = _merged(known[at], point)
        if len(known) > CURVE_POINTS_MAX:
            self.points = thinned(known, CURVE_POINTS_MAX // 2)


def _merged(one: CurvePoint, other: CurvePoint) -> CurvePoint:
    """One point of two reports of a step, in order: the lower rank's counts, with metrics that only the other has."""
    more, counts = (other, one) if one.rank < other.rank else (one, other)
    return _bounded(counts, {**more.metrics, **counts.metrics})


def _bounded(point: CurvePoint, metrics: Mapping[str, float]) -> CurvePoint:
    kept = dict(list(metrics.items())[-CURVE_METRICS_MAX:])
    return msgspec.structs.replace(point, metrics=kept)
