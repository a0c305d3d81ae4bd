"""Formulas of SWIM and Lifeguard, by example and by property."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.ids import HostId
from gossip.membership import policy
from gossip.membership.messages import MemberRecord
from gossip.types import State


def test_a_rumour_is_sent_more_often_on_larger_racks() -> None:
    """Reference: memberlist retransmitLimit, factor 4."""
    assert [policy.retransmits(4, hosts) for hosts in (1, 9, 10, 99, 100)] == [4, 4, 8, 8, 12]


def test_the_shortest_suspicion_grows_with_the_logarithm_of_hosts() -> None:
    """By an eighth each ten times. Reference: memberlist suspicionTimeout, where 100 take twice as many."""
    assert [policy.suspicion_shortest_s(4, hosts, 1.0) for hosts in (0, 1, 4, 10, 100)] == [4, 4, 4, 4, 4.5]


def test_a_suspicion_shrinks_from_six_times_the_shortest_to_the_shortest() -> None:
    """Reference: Lifeguard IV-B, with three confirmations expected."""
    found = [round(policy.suspicion_s(heard, 3, 4.0), 1) for heard in range(4)]
    assert found == [24.0, 14.0, 8.2, 4.0]


@given(st.integers(0, 20), st.integers(0, 10), st.floats(0.1, 100))
def test_a_confirmation_never_makes_a_suspicion_longer(heard: int, expected: int, shortest_s: float) -> None:
    now, more = (policy.suspicion_s(count, expected, shortest_s) for count in (heard, heard + 1))
    assert shortest_s <= more <= now <= policy.SUSPICION_LONGEST * shortest_s * 1.000001


def test_with_too_few_hosts_to_confirm_a_suspicion_is_short_from_the_start() -> None:
    assert [policy.confirmations_expected(4, possible) for possible in (0, 1, 2, 3)] == [0, 0, 2, 2]
    assert policy.suspicion_s(0, 0, 4.0) == 4.0


def test_the_health_score_stays_between_well_and_very_ill() -> None:
    assert policy.health(0, -1) == 0 and policy.health(6, 5) == policy.HEALTH_MAX and policy.health(3, -1) == 2


def test_missing_nacks_count_against_ourselves() -> None:
    assert policy.change_after_failed_probe(3, 3) == 0
    assert policy.change_after_failed_probe(3, 1) == 2
    assert policy.change_after_failed_probe(0, 0) == 1


orders = st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from(policy.STATES))


@given(orders, orders, orders)
def test_what_is_said_of_a_host_is_totally_ordered(
    a: tuple[int, int, State], b: tuple[int, int, State], c: tuple[int, int, State]
) -> None:
    assert not policy.supersedes(a, a)
    assert (a == b) or (policy.supersedes(a, b) != policy.supersedes(b, a))
    if policy.supersedes(a, b) and policy.supersedes(b, c):
        assert policy.supersedes(a, c)


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ((1, 0, "suspect"), (1, 0, "alive")),
        ((1, 1, "alive"), (1, 0, "suspect")),
        ((1, 0, "gone"), (1, 0, "suspect")),
        ((1, 0, "left"), (1, 0, "gone")),
        ((2, 0, "alive"), (1, 9, "left")),
    ],
)
def test_the_orders_of_swim_hold(new: tuple[int, int, State], old: tuple[int, int, State]) -> None:
    """Reference: SWIM 4.2, and ours: a new boot beats everything of the last one."""
    assert policy.supersedes(new, old) and not policy.supersedes(old, new)


def test_missing_hosts_are_called_ever_more_slowly_but_forever() -> None:
    pauses = [1.0]
    while len(pauses) < 10:
        pauses.append(policy.call_after_s(pauses[-1], alone=False, longest_s=60.0))
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert policy.call_after_s(8.0, alone=True, longest_s=60.0) == policy.ALONE_INTERVAL_S_MAX


def test_tables_are_compared_less_often_on_large_racks() -> None:
    """Reference: memberlist pushPullScale: doubles at 33, triples at 65."""
    assert [policy.sync_interval_s(30, hosts) for hosts in (2, 32, 33, 64, 65, 128, 129)] == [
        30,
        30,
        60,
        60,
        90,
        90,
        120,
    ]


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), max_size=5), st.floats(0, 100), st.floats(0, 100))
def test_an_overlap_is_never_negative_nor_longer_than_all_intervals(
    pairs: list[tuple[float, float]], start_s: float, end_s: float
) -> None:
    intervals = [(min(pair), max(pair)) for pair in pairs]
    found = policy.overlap_s(intervals, start_s, end_s)
    assert 0 <= found <= sum(end - start for start, end in intervals) + 1e-9


@given(st.integers(0, 20), st.integers(0, 20), st.integers())
def test_some_hosts_are_distinct_and_as_many_as_there_are(count: int, wanted: int, seed: int) -> None:
    found = policy.some(list(range(count)), wanted, random.Random(seed))
    assert len(set(found)) == len(found) == min(count, wanted)


def record(host: str, state: int = 0, incarnation: int = 0) -> MemberRecord:
    return MemberRecord(HostId(host), bytes(16), 1, incarnation, f"{host}:1", state, HostId(""))


def test_a_checksum_is_of_who_lives_not_of_suspicions_or_the_dead() -> None:
    ours = [record("a"), record("b"), record("c", state=2)]
    assert policy.checksum(ours) == policy.checksum([record("b", state=1), record("a"), record("d", state=3)])
    assert policy.checksum(ours) != policy.checksum([record("a")])
    assert policy.checksum(ours) != policy.checksum([record("a"), record("b", incarnation=1)])


def test_the_first_machine_keeps_a_name_until_it_is_gone() -> None:
    assert policy.change(True, "elsewhere", news=True) == "conflict"
    assert policy.change(False, "elsewhere", news=False) == "reclaim"
    assert policy.change(False, "earlier", news=False) == "reclaim"
    assert policy.change(False, "same", news=False) == "none"


def test_a_machine_that_lost_its_identity_takes_its_name_back_at_its_own_address() -> None:
    known = policy.Claimant(1, 7, "a:1")
    assert policy.claim(known, policy.Claimant(1, 9, "z:1")) == "same"
    assert policy.claim(known, policy.Claimant(2, 9, "z:1")) == "elsewhere"
    later, late = policy.Claimant(2, 8, "a:1"), policy.Claimant(2, 7, "a:1")
    assert (policy.claim(known, later), policy.claim(known, late)) == ("later", "earlier")
    assert policy.change(True, "later", news=False) == "reclaim"
    assert policy.change(True, "earlier", news=True) == "none", "what is said late of who was there before"
