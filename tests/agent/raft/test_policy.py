"""Raft's decisions, by example and by property."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.raft import policy
from agent.raft.machine.log_entries import LogEntries
from tests.agent.raft.stage import log_of

INDEX = st.integers(0, 50)


@pytest.mark.parametrize(("voters", "needed"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_two_majorities_always_share_a_voter(voters: int, needed: int) -> None:
    assert policy.quorum(voters) == needed
    for first in combinations(range(voters), needed):
        for second in combinations(range(voters), needed):
            assert set(first) & set(second)


@given(st.lists(INDEX, min_size=1, max_size=7))
def test_what_is_committed_is_held_by_a_majority_and_nothing_later_is(matches: list[int]) -> None:
    index = policy.commit_index(matches)
    needed = policy.quorum(len(matches))
    assert sum(match >= index for match in matches) >= needed
    assert sum(match > index for match in matches) < needed


@given(st.tuples(INDEX, INDEX), st.tuples(INDEX, INDEX))
def test_of_two_logs_at_least_one_is_as_complete_as_the_other(one: tuple[int, int], other: tuple[int, int]) -> None:
    forward, back = policy.up_to_date(*one, *other), policy.up_to_date(*other, *one)
    assert forward or back
    assert (forward and back) == (one == other)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=5))
def test_a_majority_stood_behind_the_leader_at_the_time_given(confirmed: list[float]) -> None:
    time = policy.quorum_time(confirmed)
    assert sum(each >= time for each in confirmed) >= policy.quorum(len(confirmed))


def test_a_lease_ends_before_a_voter_may_help_somebody_else_though_clocks_drift() -> None:
    timing = policy.Timing()
    assert timing.lease_s * 1.05 < timing.election_min_s * 0.95


@given(st.lists(st.integers(1, 6), max_size=12).map(sorted), st.lists(st.integers(1, 6), max_size=12).map(sorted))
def test_a_hint_never_skips_the_last_entry_on_which_two_logs_agree(one: list[int], other: list[int]) -> None:
    """Reference: Raft §5.3, end."""
    leader, follower = LogEntries(0, 0, log_of(*one)), LogEntries(0, 0, log_of(*other))
    agreed = max((i for i in range(min(len(one), len(other)) + 1) if one[:i] == other[:i]), default=0)
    prev = leader.last_index
    exchanges = 0
    while follower.term_at(prev) != leader.term_at(prev):
        hint = follower.hint(prev, leader.term_at(prev) or 0)
        lower = min(prev - 1, leader.hint(*hint)[0])
        assert lower >= agreed
        prev = lower
        exchanges += 1
    assert exchanges <= 7


def test_a_log_answers_for_what_it_holds_and_for_the_entry_before() -> None:
    log = LogEntries(5, 2, log_of(3, 3, 4))
    assert [log.term_at(index) for index in range(4, 10)] == [None, 2, 3, 3, 4, None]
    log.compact(7)
    assert (log.base_index, log.base_term, log.last_index, log.last_term) == (7, 3, 8, 4)
    log.cut(8)
    assert (log.last_index, log.last_term) == (7, 3)
    log.reset(20, 9)
    assert (log.base_index, log.last_index, log.last_term) == (20, 20, 9)
