"""Clocks that decisions rest on."""

import time

from agent.ports.clock import RealClock


def test_the_clock_for_decisions_is_finer_than_a_millisecond_and_never_goes_back() -> None:
    clock = RealClock()
    seen = [clock.now_s() for _ in range(2000)]
    assert seen == sorted(seen)
    assert len(set(seen)) > 1000


def test_the_clock_for_people_counts_from_1970() -> None:
    assert abs(RealClock().wall_s() - time.time()) < 5
