"""Whether a script may continue, by the rates of a page (`covey.hooks.reports.pace`; gate.cpp has the same rules)."""

import pytest

from covey.hooks.reports.pace import DEBT_NS, GatePace
from covey.kernel.pages import RankLimits

MS = 1_000_000
LEASE = 10**15


def worked_ms(rates: RankLimits, operator_ms: float, ms: int, busy_ms: int = 0, idle_ms: int = 0) -> tuple[float, int]:
    """How long of `ms` the script worked, and its longest stop, both in ms. The neighbour is always busy, or busy and
    idle by turns; a stopped script looks again after 0.4 ms."""
    pace = GatePace()
    pace.set(rates, 0, 0)
    now_ns = cpu_ns = stopped_ns = longest_ns = 0
    while now_ns < ms * MS:
        since_ns, busy = 0, True
        if busy_ms:
            period_ns, at_ns = (busy_ms + idle_ms) * MS, now_ns % ((busy_ms + idle_ms) * MS)
            busy = at_ns < busy_ms * MS
            since_ns = now_ns // period_ns * period_ns + (0 if busy else busy_ms * MS)
        pace.account(now_ns, cpu_ns, busy, since_ns)
        if pace.may(now_ns, busy, since_ns):
            now_ns, cpu_ns, stopped_ns = now_ns + int(operator_ms * MS), cpu_ns + int(operator_ms * MS), 0
        else:
            now_ns, stopped_ns = now_ns + MS * 2 // 5, stopped_ns + MS * 2 // 5
        longest_ns = max(longest_ns, stopped_ns)
    return cpu_ns / MS, longest_ns // MS


@pytest.mark.parametrize("operator_ms", [0.01, 0.5, 8])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.8])
def test_a_share_of_time_is_what_it_says_for_short_and_long_operators(operator_ms: float, share: float) -> None:
    """AntMan splits the idle time evenly over the operators of a session; here a long operator is paid for after it.
    Reference: §3.1.2."""
    worked, _ = worked_ms(RankLimits(1, 0, busy=share, lease_ns=LEASE), operator_ms, 4000)
    assert worked == pytest.approx(4000 * share, rel=0.1, abs=16)


@pytest.mark.parametrize("share", [1e-3, 1e-5, 1e-11])
def test_the_smallest_share_stops_the_script_for_nearly_all_of_the_time(share: float) -> None:
    """An agent that halves the rate again and again arrives at such a share."""
    assert worked_ms(RankLimits(1, 0, busy=share, lease_ns=LEASE), 0.1, 4000)[0] < 20


def test_idle_time_of_the_neighbour_is_used_and_its_busy_time_is_not() -> None:
    worked, longest_ms = worked_ms(RankLimits(1, 1, busy=0, lease_ns=LEASE), 0.1, 2200, busy_ms=10, idle_ms=12)
    assert 1100 < worked <= 1215 and longest_ms <= 11


def test_only_the_head_of_an_idle_phase_is_used() -> None:
    worked, _ = worked_ms(RankLimits(1, 1, 3 * MS, 0, lease_ns=LEASE), 0.1, 2200, busy_ms=10, idle_ms=12)
    assert worked == pytest.approx(300, rel=0.1)


def test_what_is_owed_in_busy_time_is_not_paid_in_idle_time() -> None:
    """Otherwise an operator that runs into a busy phase would cost the idle phase after it."""
    worked, _ = worked_ms(RankLimits(1, 0.5, busy=0.5, lease_ns=LEASE), 5, 2200, busy_ms=10, idle_ms=12)
    assert worked == pytest.approx(1100, rel=0.1)


def test_at_the_failsafe_a_long_operator_stops_nobody_for_longer_than_a_second() -> None:
    pace = GatePace()
    pace.set(RankLimits(1, 0.01, busy=0.01, lease_ns=LEASE), 0, 0)
    pace.account(10 * DEBT_NS, 10 * DEBT_NS, True, 0)
    assert not pace.may(10 * DEBT_NS, True, 0)
    pace.account(int(11.01 * DEBT_NS), 10 * DEBT_NS, True, 0)
    assert pace.may(int(11.01 * DEBT_NS), True, 0)


def test_a_new_rate_forgets_what_was_owed() -> None:
    pace = GatePace()
    pace.set(RankLimits(1, 0.1, busy=0.1, lease_ns=LEASE), 0, 0)
    pace.account(100 * MS, 100 * MS, True, 0)
    assert not pace.may(100 * MS, True, 0)
    pace.set(RankLimits(2, 0.1, busy=0.1, lease_ns=LEASE + 1), 100 * MS, 100 * MS)
    assert not pace.may(100 * MS, True, 0), "a lease that is longer is no new rate"
    pace.set(RankLimits(3, 0.5, busy=0.5, lease_ns=LEASE), 100 * MS, 100 * MS)
    assert pace.may(100 * MS, True, 0)
