"""Connections to the control link that have shown no key: counted as they are, never more than a limit."""

import errno
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from agent.ports.network.handshake_limit import GRACE_S, HANDSHAKE_S, UNPROVEN_MAX, HandshakeLimit


def test_the_three_ways_a_connection_ends_are_told_apart() -> None:
    counters: Counter[str] = Counter()
    visitors = HandshakeLimit(counters)
    for file, how in ((7, "silent"), (8, "broken_off"), (9, "good")):
        assert not visitors.heard("accepted", file, 1.0)
        if how == "good":
            visitors.heard("proven", 0, 1.1)
        else:
            visitors.heard("failed", errno.EAGAIN if how == "silent" else errno.ECONNRESET, 2.0)
            visitors.heard("ended", file, 2.0)
    assert counters == {"accepted": 3, "silent": 1, "broken_off": 1, "handshakes": 1}
    assert (visitors.open, visitors.unproven(2.0)) == (1, 0)
    visitors.heard("ended", 9, 3.0)
    assert visitors.open == 0


def test_one_too_many_without_a_key_is_turned_away_and_proven_ones_do_not_count() -> None:
    counters: Counter[str] = Counter()
    visitors = HandshakeLimit(counters)
    for file in range(3 * UNPROVEN_MAX):
        assert not visitors.heard("accepted", file, 0.1)
        visitors.heard("proven", 0, 0.1)
    for file in range(1000, 1000 + UNPROVEN_MAX):
        assert not visitors.heard("accepted", file, 0.2)
    assert visitors.heard("accepted", 5000, 0.3) and counters["turned_away"] == 1
    visitors.heard("ended", 5000, 0.3)
    late_s = 0.3 + HANDSHAKE_S + GRACE_S
    assert not visitors.heard("accepted", 5001, late_s), "those of before were given up by now, or have shown a key"


@given(
    st.lists(st.tuples(st.sampled_from(["accepted", "proven", "failed", "ended"]), st.integers(0, 200)), max_size=500)
)
def test_whatever_the_monitor_tells_numbers_stay_in_their_bounds(story: list[tuple[str, int]]) -> None:
    visitors = HandshakeLimit(Counter())
    for kind, value in story:
        visitors.heard(kind, value, 1.0)  # type: ignore[arg-type]
        assert visitors.open >= 0
        assert 0 <= visitors.unproven(1.0) <= visitors.open
