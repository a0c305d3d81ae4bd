"""What a GPU's condition is, from what its driver counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.ports.devices import health
from agent.ports.devices.health import ORDER, Counts
from covey.ports.devices import Condition

NUMBERS = st.integers(0, 200)
COUNTS = st.builds(
    Counts,
    xid=NUMBERS,
    uncorrected=st.integers(-5, 1 << 50),
    remap_pending=st.booleans(),
    remap_failed=st.booleans(),
    unrepairable=st.booleans(),
    recovery=st.integers(-1, 99),
)


@pytest.mark.parametrize(
    ("number", "condition"), [(13, "ok"), (31, "ok"), (43, "ok"), (48, "drain"), (79, "lost"), (94, "degraded")]
)
def test_errors_of_programs_say_nothing_of_the_device(number: int, condition: Condition) -> None:
    assert health.of_xid(number).condition == condition


@pytest.mark.parametrize(
    ("counts", "condition"),
    [
        (Counts(), "ok"),
        (Counts(uncorrected=1), "degraded"),
        (Counts(remap_pending=True), "degraded"),
        (Counts(remap_failed=True), "drain"),
        (Counts(unrepairable=True), "drain"),
        (Counts(recovery=2), "drain"),
        (Counts(recovery=3, xid=79), "lost"),
        (Counts(recovery=12), "ok"),
    ],
)
def test_the_worst_of_what_is_known_counts(counts: Counts, condition: Condition) -> None:
    assert health.of(counts).condition == condition


@given(COUNTS)
def test_whatever_is_counted_a_device_that_is_not_ok_says_why(counts: Counts) -> None:
    found = health.of(counts)
    assert found.condition in ORDER and bool(found.why) == (found.condition != "ok")


@given(NUMBERS, NUMBERS)
def test_a_worse_error_is_not_forgotten_for_a_lesser(one: int, other: int) -> None:
    kept = health.worse_xid(one, other)
    levels = [ORDER.index(health.of_xid(number).condition) for number in (one, other, kept)]
    assert levels[2] == max(levels)
