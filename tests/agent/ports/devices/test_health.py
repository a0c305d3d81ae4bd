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


PROGRAMS = (8, 11, 13, 31, 32, 43, 45, 68, 69, 147, 148, 154)
"""XIDs after which NVIDIA has the program started again, or nothing done; 154 only tells of others."""
RESETS = (46, 48, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 144, 150, 155, 156, 158)
"""XIDs after which NVIDIA has the GPU or its machine reset, or its links looked at."""
NAMED = (63, 92, 94, 171, 172)


def test_xids_that_ask_for_a_reset_take_a_gpu_out_of_use_those_of_programs_do_not() -> None:
    assert {number: health.of_xid(number).condition for number in PROGRAMS} == dict.fromkeys(PROGRAMS, "ok")
    assert not [number for number in RESETS if health.of_xid(number).takes_jobs]
    assert {number: health.of_xid(number).condition for number in NAMED} == dict.fromkeys(NAMED, "degraded")
    assert all(health.of_xid(number).why.startswith(f"XID {number}: ") for number in (*RESETS, *NAMED))


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
