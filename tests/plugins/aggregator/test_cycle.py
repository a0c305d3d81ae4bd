"""The arithmetic of one aggregator's cycle."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from covey.core.ids import JobId
from plugins.aggregator.policy.cycle import (
    LOSS_LIMIT,
    Cycle,
    Share,
    cycle_for,
    cycle_of,
    grown,
    hurts,
    loss,
    runs_late,
    sound,
    stretched,
    used,
    without,
)

PERIODS = st.integers(1, 60)
SHARES = st.dictionaries(
    st.sampled_from([JobId(f"j{n}") for n in range(6)]),
    st.builds(Share, PERIODS, st.integers(0, 20), st.sampled_from([LOSS_LIMIT, Fraction(1, 20), Fraction(1, 3)])),
    min_size=1,
)


@given(period=PERIODS, times=st.integers(1, 12), rest=st.integers(0, 59))
def test_the_loss_is_what_the_stretched_iteration_says(period: int, times: int, rest: int) -> None:
    cycle_us = times * period + rest % period
    d = stretched(cycle_us, period)
    assert loss(cycle_us, period) == (d - period) / d
    assert d >= period and 0 <= loss(cycle_us, period) < Fraction(1, 2)
    share = Share(period, 0)
    assert hurts(cycle_us, share) == (loss(cycle_us, period) >= LOSS_LIMIT)


def test_a_loss_of_exactly_the_limit_is_too_much() -> None:
    assert loss(10, 9) == LOSS_LIMIT and hurts(10, Share(9, 1))
    assert not hurts(10**6, Share(900_001, 1))


@given(shares=SHARES, times=st.integers(1, 6), lanes=st.integers(1, 4))
def test_growing_share_by_share_comes_to_the_same_as_all_at_once(
    shares: dict[JobId, Share], times: int, lanes: int
) -> None:
    cycle = Cycle({}, lanes, times)
    for job, share in shares.items():
        half = share.work_us // 2
        cycle = grown(cycle, job, Share(share.period_us, half, share.limit))
        cycle = grown(cycle, job, Share(share.period_us, share.work_us - half, share.limit))
    assert cycle.shares == shares
    assert cycle.used_us == used(cycle.us, shares.values()) and cycle.free_us == lanes * cycle.us - cycle.used_us
    assert cycle.us >= max(share.period_us for share in shares.values())
    if times == 1:
        assert cycle == cycle_of(shares, lanes)


@given(shares=SHARES, times=st.integers(1, 6), now=st.integers(0, 200))
def test_a_cycle_that_is_found_hurts_nobody_and_is_at_most_so_many_iterations_long(
    shares: dict[JobId, Share], times: int, now: int
) -> None:
    """Each job is judged by its own limit. Reference: §4.6."""
    every, longest = list(shares.values()), max(share.period_us for share in shares.values())
    us = cycle_for(every, times, now)
    lengths = range(longest, times * longest + 1)
    if us is None:
        whole = [one for one in lengths if one == longest or any(one % share.period_us == 0 for share in every)]
        assert all(any(hurts(one, share) for share in every) for one in whole if times > 1 or one == longest)
    else:
        assert not any(hurts(us, share) for share in every) and us in {*lengths, now}


@given(shares=SHARES, data=st.data(), times=st.integers(1, 3))
def test_who_stays_is_never_worse_off_when_a_job_leaves(
    shares: dict[JobId, Share], data: st.DataObject, times: int
) -> None:
    cycle = cycle_of(shares, 1, times)
    leaving = data.draw(st.sampled_from(sorted(shares)))
    after = without(cycle, leaving)
    assert leaving not in after.shares and after.shares.items() <= cycle.shares.items()
    assert not sound(cycle) or sound(after)
    assert after.used_us == used(after.us, after.shares.values())


def test_a_cycle_is_held_only_where_a_shorter_one_would_hurt() -> None:
    jobs = {JobId("long"): Share(60, 1), JobId("twelve"): Share(12, 1), JobId("five"): Share(5, 1)}
    assert without(cycle_of(jobs), JobId("long")).us == 60, "5 in a cycle of 12 would lose 17 %"
    assert without(cycle_of(jobs), JobId("five")).us == 60
    assert without(without(cycle_of(jobs), JobId("five")), JobId("long")).us == 12
    assert without(cycle_of(jobs), JobId("long"), hold=False).us == 12


def test_a_longer_cycle_makes_room_for_iterations_that_do_not_divide_the_longest() -> None:
    five_and_twelve = [Share(5, 1), Share(12, 1)]
    assert cycle_for(five_and_twelve, 1) is None
    us = cycle_for(five_and_twelve, 3)
    assert us == 25 and loss(us, 5) == 0 and loss(us, 12) == Fraction(1, 25)


@given(cycle=st.integers(1, 100), now=st.integers(0, 100), due=st.lists(st.integers(0, 20)), work=st.integers(1, 20))
def test_a_late_sum_never_pushes_out_one_that_is_due(cycle: int, now: int, due: list[int], work: int) -> None:
    if runs_late(0, cycle, now, due, work):
        assert now + work + sum(due) <= cycle
    else:
        assert now + work + sum(due) > cycle
