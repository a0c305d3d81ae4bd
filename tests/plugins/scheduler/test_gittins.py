"""The Gittins index from history, against its definition."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.scheduler.policy.history import History, best_gittins_index, gittins_index
from sim.jobs.engine import falling

TOTALS = st.lists(st.integers(1, 60), max_size=15)


def defined(totals: list[int], attained: int, delta: int | None) -> Fraction:
    """The index by its definition: P(S - a <= Δ | S > a) / E[min(S - a, Δ) | S > a]."""
    beyond = [total - attained for total in totals if total > attained]
    hits = [more for more in beyond if delta is None or more <= delta]
    return (
        Fraction(len(hits), sum(more if delta is None else min(more, delta) for more in beyond))
        if hits
        else Fraction(0)
    )


@given(TOTALS, st.integers(0, 70), st.one_of(st.none(), st.integers(1, 70)))
def test_the_index_is_the_chance_to_end_over_what_it_costs(totals: list[int], attained: int, delta: int | None) -> None:
    """Reference: Tiresias, Pseudocode 1, line 12."""
    assert gittins_index(History(totals), attained, delta) == defined(totals, attained, delta)


@given(TOTALS, st.integers(0, 70))
def test_the_best_index_is_the_supremum_over_all_service_quanta(totals: list[int], attained: int) -> None:
    """Reference: Tiresias, Pseudocode 1, line 12: sup over Δ > 0."""
    every = [defined(totals, attained, delta) for delta in range(1, 75)]
    assert best_gittins_index(History(totals), attained) == max(every)


@pytest.mark.parametrize(("job", "index"), [(0, Fraction(1, 8)), (4, Fraction(1, 6)), (8, Fraction(1, 4)), (12, 0)])
def test_the_worked_example_of_the_paper(job: int, index: Fraction) -> None:
    """Three jobs of 4, 8 and 12 GPU·s: who has attained more is closer to an end. Reference: Tiresias, figure 7b."""
    assert best_gittins_index(History([4, 8, 12]), job) == index


@given(st.tuples(st.integers(0, 10**9), st.integers(1, 10**9)), st.tuples(st.integers(0, 10**9), st.integers(1, 10**9)))
def test_a_larger_index_comes_first_and_equal_ones_are_equal(one: tuple[int, int], two: tuple[int, int]) -> None:
    first, second = Fraction(*one), Fraction(*two)
    if abs(first - second) > Fraction(1, 10**14) * max(first, second):
        assert (falling(one) < falling(two)) == (first > second)
    assert falling((one[0] * 7, one[1] * 7)) == falling(one)


def test_without_a_history_every_job_is_alike() -> None:
    assert best_gittins_index(History(()), 5) == gittins_index(History(()), 5, 10) == 0
