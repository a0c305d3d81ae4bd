"""Decisions of sharing, as functions: slowdown and its error, the ladder, leases, memory by trial, messages."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.ids import JobId
from covey.core.units import GIB, MIB
from plugins.sharing.messages import Limits
from plugins.sharing.policy import interference, ladder, lease, memory
from plugins.sharing.policy.interference import Slowdown, StepSamples
from plugins.sharing.policy.ladder import FREE, STOPPED, Rates
from plugins.sharing.policy.rivals import Aimd, Pi, StepUp, Tgs


def steps(*durations_s: float) -> StepSamples:
    total = StepSamples()
    for each in durations_s:
        total = total.plus(each)
    return total


# ---- interference ----


def test_mean_and_error_are_those_of_the_textbook() -> None:
    found = steps(0.01, 0.02, 0.03, 0.04)
    assert found.mean_s == pytest.approx(0.025)
    assert found.error_s == pytest.approx(math.sqrt(sum((x - 0.025) ** 2 for x in (0.01, 0.02, 0.03, 0.04)) / 3 / 4))
    assert steps(0.01).error_s == math.inf and StepSamples().variation == math.inf


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=30), st.lists(st.floats(0.001, 10), max_size=30))
def test_two_collections_joined_are_one(first: list[float], second: list[float]) -> None:
    joined, at_once = steps(*first).joined(steps(*second)), steps(*first, *second)
    assert joined.count == at_once.count
    assert joined.mean_s == pytest.approx(at_once.mean_s)
    assert joined.squares == pytest.approx(at_once.squares, abs=1e-6)


def test_an_old_baseline_weighs_no_more_than_its_limit_and_keeps_its_spread() -> None:
    old = StepSamples(500, 0.02, 500 * 1e-6)
    joined = old.joined(StepSamples(500, 0.02, 500 * 1e-6))
    assert joined.count == interference.STEPS_POOLED_MAX
    assert joined.squares / joined.count == pytest.approx(1e-6)
    assert StepSamples().joined(StepSamples()) == StepSamples()


def test_a_slowdown_counts_the_errors_of_both_sides() -> None:
    """Mini-batches repeat the same work, so their duration measures interference. Reference: §2.3."""
    found = interference.slowdown(StepSamples(100, 0.1, 99 * 0.01**2), StepSamples(100, 0.11, 99 * 0.01**2))
    assert found.excess == pytest.approx(0.1)
    assert found.error == pytest.approx(math.sqrt(2) * 0.001 / 0.1)
    assert found.least < found.excess < found.most
    assert str(found) == "+10.0 % ± 1.8"
    assert interference.slowdown(StepSamples(), steps(1, 1)).error == math.inf


def test_one_long_mini_batch_does_not_drown_the_rest() -> None:
    assert interference.clipped(StepSamples(10, 0.02, 0), 60.0) == pytest.approx(0.08)
    assert interference.clipped(StepSamples(), 60.0) == 60.0


def test_a_baseline_is_as_long_as_its_noise_needs_and_not_for_ever() -> None:
    assert not interference.is_precise(StepSamples(31, 0.02, 0.0))
    assert interference.is_precise(StepSamples(32, 0.02, 0.0))
    assert not interference.is_precise(StepSamples(32, 0.02, 31 * 0.005**2))
    assert interference.is_precise(StepSamples(64, 0.02, 63 * 0.02**2))


def test_a_baseline_is_known_at_a_20th_of_the_tolerance_and_busy_time_at_a_third() -> None:
    def known_to(share_of_tolerance: float, count: int = 40) -> StepSamples:
        error_s = share_of_tolerance * interference.TOLERANCE * 0.02
        return StepSamples(count, 0.02, error_s**2 * count * (count - 1))

    assert interference.is_precise(known_to(0.9 / 20)) and not interference.is_precise(known_to(1.1 / 20))
    assert interference.is_known(known_to(0.9 / 3)) and not interference.is_known(known_to(1.1 / 3))


def test_windows_are_looked_at_seldom() -> None:
    assert [count for count in range(100) if interference.is_look(count)] == [6, 9, 13, 19, 28, 42, 63, 94]


def test_ten_even_mini_batches_are_steady_and_uneven_ones_are_not() -> None:
    assert interference.is_stable(steps(*[0.02] * 10))
    assert not interference.is_stable(steps(*[0.02] * 9))
    assert not interference.is_stable(steps(*[0.02, 0.04] * 5))


# ---- the ladder ----


@given(st.floats(0, 2), st.floats(0, 2), st.floats(0, 1))
def test_every_rung_gives_at_least_what_those_below_give(u: float, v: float, idle_s: float) -> None:
    low, high = ladder.rates(min(u, v), idle_s), ladder.rates(max(u, v), idle_s)
    assert low.busy <= high.busy
    assert low.idle * min(low.head_s, idle_s) <= high.idle * min(high.head_s, idle_s)


def test_the_rungs_are_as_drawn() -> None:
    assert ladder.rates(0, 0.012) == STOPPED
    assert ladder.rates(0.5, 0.012) == Rates(1.0, 0.006, 0.0)
    assert ladder.rates(1, 0.012) == Rates(1.0, math.inf, 0.0)
    above = ladder.rates(1.1, 0.012)
    assert (above.idle, above.head_s) == (1.0, math.inf)
    assert above.busy == pytest.approx(0.1)
    assert ladder.rates(2, 0.012) == FREE


def test_without_an_idle_flag_there_is_one_rate_for_all_times() -> None:
    """Reference: §3.1.2."""
    both = ladder.rates(1.1, 0.012, flag=False)
    assert both.idle == both.busy == pytest.approx(0.1) and both.head_s == math.inf
    assert ladder.rates(0.9, 0.012, flag=False).busy == 0
    assert ladder.freed(1.1, flag=False) == FREE
    assert ladder.freed(1.1).busy == pytest.approx(0.1) and ladder.freed(0.5).busy == 0


def test_the_rung_after_one_that_was_too_much_is_as_far_down_as_the_page_says() -> None:
    assert ladder.descended(1.5) == pytest.approx(1.3), "60 % of the busy share"
    assert ladder.descended(1.02) == 1.0, "the first rung above the idle phases"
    assert ladder.descended(0.8) == pytest.approx(0.6), "three quarters of the idle phase"
    assert ladder.descended(0.001) == 0.0


@given(st.floats(0, 2))
def test_descending_gives_back_a_good_part_of_what_hurt_and_never_all_of_much(u: float) -> None:
    down = ladder.descended(u)
    assert down <= 0.75 * u or 0 <= down - 1 <= 0.6 * (u - 1) + 1e-9
    assert u < 2 * ladder.U_LEAST or down > 0


@given(st.floats(0, 2), st.floats(-0.5, 0.5), st.none() | st.floats(0, 2))
def test_climbing_never_goes_down_nor_past_what_was_too_much(u: float, excess: float, too_much: float | None) -> None:
    up = ladder.climbed(u, excess, 0.0375, too_much)
    assert 0 <= up <= 2
    assert up >= u - 1e-9
    if too_much is not None and too_much > u:
        assert up <= too_much


def test_above_one_the_measured_slowdown_says_how_far_to_go() -> None:
    assert ladder.climbed(1.02, 0.01, 0.0375, None) == pytest.approx(1.03)  # at most by half
    assert ladder.climbed(1.10, 0.03, 0.0375, None) == pytest.approx(1.125)  # in proportion
    assert ladder.climbed(1.0, 0.0, 0.0375, None) == pytest.approx(1.02)
    assert ladder.climbed(0.0, 0.0, 0.0375, None) == 0.25
    assert ladder.climbed(0.5, 0.0, 0.0375, 0.9) == pytest.approx(0.6)


@given(st.floats(0.01, 2))
def test_descending_goes_down(u: float) -> None:
    assert ladder.descended(u) < u


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=6), st.floats(0, 2))
def test_the_busy_share_of_a_rung_is_divided_and_not_multiplied(weights: list[float], u: float) -> None:
    whole = ladder.rates(u, 0.01)
    parts = [ladder.shared(whole, weight, sum(weights)) for weight in weights]
    assert sum(part.busy for part in parts) == pytest.approx(whole.busy)
    assert ladder.shared(whole, 1, 0) == STOPPED


def test_rates_are_said_in_words() -> None:
    assert str(STOPPED) == "stopped" and str(FREE) == "without limit"
    assert str(Rates(1.0, 0.006, 0.0)) == "the first 6.0 ms of idle phases"
    assert str(Rates(1.0, math.inf, 0.034)) == "idle phases and 3.4 % of busy ones"
    assert str(ladder.plain(0.1)) == "10.0 % of idle phases and 10.0 % of busy ones"


# ---- leases ----


def test_the_failsafe_is_a_tenth_beside_a_guaranteed_job_and_everything_without_one() -> None:
    assert lease.failsafe(beside_guaranteed=True) == 0.1
    assert lease.failsafe(beside_guaranteed=False) == 1.0


@given(st.floats(0, 2), st.floats(0, 1), st.booleans(), st.floats(2.001, 1e6))
def test_a_dead_coordinator_never_leaves_a_job_stopped(u: float, idle_s: float, beside: bool, age_s: float) -> None:
    """The published job side of AntMan waits at a limit of 0 for ever."""
    after = lease.effective(ladder.rates(u, idle_s), lease.failsafe(beside), age_s)
    assert after.busy > 0 and after.idle > 0 and after.head_s == math.inf


def test_within_its_lease_a_limit_holds() -> None:
    assert lease.effective(STOPPED, 0.1, 2.0) == STOPPED
    assert lease.effective(STOPPED, 0.1, 2.1) == ladder.plain(0.1)
    assert lease.effective(STOPPED, 1.0, 2.1) == FREE


# ---- memory ----

amounts = st.integers(0, 100 * GIB)


@given(amounts, st.lists(amounts, max_size=8))
def test_what_is_divided_is_never_more_than_there_is(room: int, wanted: list[int]) -> None:
    parts = memory.divided(room, wanted)
    assert sum(parts) <= room
    assert all(0 <= part <= want for part, want in zip(parts, wanted, strict=True))
    if sum(wanted) <= room:
        assert parts == tuple(wanted)


def test_small_demands_are_met_first_up_to_half_of_the_room() -> None:
    quantum = memory.QUANTUM
    assert memory.divided(8 * quantum, [4 * quantum, 96 * quantum]) == (4 * quantum, 4 * quantum)
    assert memory.divided(7 * quantum, [4 * quantum, 96 * quantum]) == (0, 6 * quantum), "more than half of it"
    assert memory.divided(200 * quantum, [4 * quantum, 96 * quantum]) == (4 * quantum, 96 * quantum)


HELD = st.lists(st.tuples(st.integers(0, 40 * GIB), st.integers(0, 40 * GIB)), max_size=6)


@given(HELD, st.integers(0, 100 * GIB), st.randoms(use_true_random=False))
def test_what_is_shrunk_fits_and_nobody_is_cut_below_a_smaller_one(
    jobs: list[tuple[int, int]], room: int, chance: random.Random
) -> None:
    """The order in which jobs give memory is Covey's own. Reference: §3.3, figure 7a."""
    held, stable = [one for one, _ in jobs], [low for _, low in jobs]
    found = memory.shrunk(room, held, stable)
    assert sum(found) <= max(room, 0) and all(0 <= after <= before for after, before in zip(found, held, strict=True))
    if sum(held) <= room:
        assert list(found) == held
    elif sum(min(pair) for pair in jobs) <= room:
        assert all(after >= min(pair) for after, pair in zip(found, jobs, strict=True)), "what cannot be given back"
        cut = [after for after, before in zip(found, held, strict=True) if after < before]
        assert all(after <= max(min(cut) + memory.QUANTUM, low) for after, low in zip(found, stable, strict=True))
        assert room - sum(found) <= max(1, len(jobs)) * memory.QUANTUM, "and no more was taken than must be"
    order = list(range(len(jobs)))
    chance.shuffle(order)
    other = memory.shrunk(room, [held[at] for at in order], [stable[at] for at in order])
    assert sorted(zip(held, stable, found, strict=True)) == sorted(
        (held[at], stable[at], after) for at, after in zip(order, other, strict=True)
    )


@given(amounts, st.lists(st.tuples(amounts, amounts), max_size=8), st.randoms())
def test_beside_a_guaranteed_job_equal_jobs_get_equal_parts_in_any_order(
    room: int, jobs: list[tuple[int, int]], rng: random.Random
) -> None:
    parts = memory.beside(room, [low for low, _ in jobs], [high for _, high in jobs])
    assert sum(parts) <= room
    shuffled = list(range(len(jobs)))
    rng.shuffle(shuffled)
    again = memory.beside(room, [jobs[i][0] for i in shuffled], [jobs[i][1] for i in shuffled])
    assert [parts[i] for i in shuffled] == list(again)


def test_who_wants_little_gets_it_before_the_rest_is_divided() -> None:
    assert memory.divided(8 * GIB, [16 * MIB, 8 * GIB, 8 * GIB]) == (16 * MIB, 4080 * MIB, 4080 * MIB)
    assert memory.divided(32 * MIB, [64 * MIB, 64 * MIB]) == (16 * MIB, 16 * MIB)


def test_what_a_job_cannot_give_back_comes_first() -> None:
    assert memory.beside(10 * GIB, [2 * GIB, 2 * GIB], [6 * GIB, 14 * GIB]) == (
        memory.down(2 * GIB + 6 * GIB * 4 / 16),
        memory.down(2 * GIB + 6 * GIB * 12 / 16),
    )
    assert memory.beside(2 * GIB, [2 * GIB, 2 * GIB], [6 * GIB, 14 * GIB]) == (GIB, GIB)


@given(
    st.integers(1, 60),
    st.lists(st.tuples(st.integers(1, 20), st.floats(0.05, 1)), min_size=2, max_size=4),
)
def test_every_trial_fits_and_the_best_is_no_worse_than_the_first(room: int, jobs: list[tuple[int, float]]) -> None:
    wanted = [min(gib, room) * GIB for gib, _ in jobs]

    def speeds(trial: tuple[int, ...]) -> list[float]:
        return [(1 - least) * held / want + least for held, want, (_, least) in zip(trial, wanted, jobs, strict=True)]

    search = memory.begin(room * GIB, wanted)
    first = sum(speeds(search.trial))
    while not search.over:
        assert sum(search.trial) <= room * GIB
        assert all(0 <= held <= want for held, want in zip(search.trial, wanted, strict=True))
        moved = [abs(now - best) for now, best in zip(search.trial, search.best, strict=False) if now != best]
        assert not moved or min(moved) >= memory.CHUNK_MIN, "less than a chunk proves nothing"
        search = memory.measured(search, speeds(search.trial))
        assert search.trials <= memory.TRIALS_MAX
    assert sum(search.trial) <= room * GIB
    assert sum(speeds(search.trial)) >= first - 1e-3 * len(jobs)
    assert memory.measured(search, [1.0] * len(jobs)) == search


def test_with_room_for_all_nothing_is_tried() -> None:
    search = memory.begin(32 * GIB, [8 * GIB, 16 * GIB])
    assert search.over and search.trial == (8 * GIB, 16 * GIB)
    assert memory.down(-1) == 0 and memory.down(17 * MIB) == 16 * MIB


# ---- the laws of others ----


def test_step_up_goes_up_by_a_percent_and_is_pessimistic_when_it_hurts() -> None:
    """Reference: §3.3: in a step-like fashion, under the condition that the guaranteed job is not affected."""
    law = StepUp()
    for _ in range(10):
        law = law.after(0.0, 0.05)
    assert law.rate == pytest.approx(0.10)
    law = law.after(0.06, 0.05)
    assert law.rate == pytest.approx(0.05)
    assert law.after(0.0, 0.05).rate == pytest.approx(0.05)


def test_the_other_laws_go_up_when_there_is_room_and_down_when_there_is_none() -> None:
    """Reference: §3.3, and the published code of the others."""
    assert Aimd(0.2).after(0.0, 0.05).rate == pytest.approx(0.21)
    assert Aimd(0.2).after(0.06, 0.05).rate == pytest.approx(0.15)
    assert Pi(0.2, 0.0).after(0.0, 0.05).rate > 0.2 > Pi(0.2, 0.0).after(0.2, 0.05).rate
    assert Tgs(0.2).after(0.0, 0.05).rate == pytest.approx(0.3)
    assert Tgs(0.2, False).after(0.0, 0.05).rate == pytest.approx(0.20025)
    over, far_over = Tgs(0.2).after(0.06, 0.05), Tgs(0.2, False).after(0.2, 0.05)
    assert over.rate == pytest.approx(0.184) and not over.slow_start
    assert far_over.rate == pytest.approx(0.02) and far_over.slow_start


# ---- messages ----


def test_a_head_of_none_is_all_of_each_idle_phase() -> None:
    assert Limits(JobId("j1"), 4, 1.0, None, 0.0, 1, 0.1).head == math.inf
    assert Limits(JobId("j1"), 4, 1.0, 0.5, 0.0, 1, 0.1).head == 0.5
    assert Slowdown(0.01, 0.01).most == pytest.approx(0.023)
