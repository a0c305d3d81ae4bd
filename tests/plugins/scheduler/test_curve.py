"""The curve of a job: bounded, evenly thinned, and the same whichever ranks and hosts reported it."""

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from plugins.scheduler.machine.host.curve import JobCurve, joined, of_all, thinned
from plugins.scheduler.messages.wire import CURVE_POINTS_MAX, CurvePoint


def point(step: int, epoch: int = 1, rank: int = 0, **metrics: float) -> CurvePoint:
    return CurvePoint(step, 0.1, epoch, rank, metrics)


gaps = st.integers(1, 9) | st.integers(1, 1 << 50)
steps = st.lists(gaps, max_size=60).map(lambda each: list(itertools.accumulate(each)))


@given(steps, st.integers(2, 20))
def test_thinned_points_are_few_in_order_and_have_both_ends(each: Sequence[int], most: int) -> None:
    given_points = [point(step) for step in each]
    kept = thinned(given_points, most)
    assert len(kept) <= most and (len(each) <= most) == (len(kept) == len(each))
    assert kept == [found for found in given_points if found in kept]
    if each:
        assert kept[0] is given_points[0] and kept[-1] is given_points[-1]


def test_a_long_curve_is_as_even_as_one_made_of_all_its_steps() -> None:
    curve = JobCurve()
    for step in range(100_000):
        curve.add(point(step, loss=float(step)))
        assert len(curve.points) <= CURVE_POINTS_MAX
    found = [each.step for each in curve.points]
    assert len(found) > CURVE_POINTS_MAX // 4 and found[0] == 0 and found[-1] == 99_999
    assert max(later - earlier for earlier, later in itertools.pairwise(found)) <= 1024
    assert all(each.metrics == {"loss": float(each.step)} for each in curve.points)


def test_the_lowest_rank_speaks_for_a_step_and_others_add_what_it_does_not_say() -> None:
    curve = JobCurve()
    for rank, metrics in ((2, {"loss": 2.0, "lr": 0.1}), (0, {"loss": 0.5}), (1, {"loss": 1.0, "gpu": 7.0})):
        curve.add(CurvePoint(5, 0.1, 1, rank, metrics))
    curve.add(point(3, rank=1, loss=9.0))
    assert curve.points == [point(5, loss=0.5, lr=0.1, gpu=7.0)]
    curve.add(point(5, loss=0.4))
    assert curve.points[0].metrics["loss"] == 0.4


def test_a_job_that_begins_again_replaces_the_steps_that_it_repeats() -> None:
    curve = JobCurve()
    for step in range(10):
        curve.add(point(step, loss=1.0))
    curve.add(point(7, epoch=2, loss=0.0))
    curve.add(point(8, epoch=1, loss=1.0))
    assert [(each.step, each.epoch) for each in curve.points] == [*((step, 1) for step in range(7)), (7, 2)]
    assert joined(curve.points, []) == curve.points and joined([], curve.points) == curve.points


def test_of_several_hosts_that_with_the_lowest_rank_speaks_under_each_epoch() -> None:
    one = [point(step, rank=0) for step in range(4)]
    other = [point(step, rank=2) for step in range(4)] + [point(step, epoch=2, rank=0) for step in range(2, 6)]
    third = [point(9, epoch=2, rank=1)]
    found = of_all([other, third, [], one])
    assert [(each.step, each.epoch, each.rank) for each in found] == [
        *((step, 1, 0) for step in range(2)),
        *((step, 2, 0) for step in range(2, 6)),
    ]
