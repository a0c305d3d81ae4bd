"""How much of a device's memory each job may hold: what was told, what is acknowledged, and what is free."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.ids import JobId
from plugins.sharing.machine.share_ledger import ShareLedger


def test_a_limit_on_its_way_is_charged_with_the_larger_of_old_and_new() -> None:
    ledger = ShareLedger(10, 1)
    assert ledger.open(JobId("a")) and ledger.open(JobId("b"))
    assert ledger.changes({JobId("a"): 8, JobId("b"): 8}) == {JobId("a"): 8, JobId("b"): 1}
    ledger.send(JobId("a"), 1, 8, 0.0)
    ledger.acked(JobId("a"), 1)
    ledger.send(JobId("a"), 2, 3, 1.0)
    assert ledger.free_bytes == 1, "the smaller limit is not applied yet"
    assert ledger.overdue(5.9, {}) == [] and ledger.overdue(6.1, {}) == [JobId("a")]
    assert ledger.overdue(6.1, {JobId("a"): 2.0}) == [], "three of its mini-batches"
    assert ledger.acked(JobId("a"), 2) and not ledger.acked(JobId("a"), 2) and not ledger.acked(JobId("x"), 2)
    assert ledger.free_bytes == 6
    assert not ledger.open(JobId("c"), 7)
    ledger.check()


def test_what_a_job_has_not_given_back_yet_may_be_given_back_to_it() -> None:
    ledger = ShareLedger(10, 1)
    ledger.open(JobId("a"), 8)
    ledger.open(JobId("b"))
    ledger.send(JobId("a"), 1, 3, 0.0)
    assert ledger.changes({JobId("a"): 10, JobId("b"): 10}) == {JobId("a"): 9}, "it is charged with 8, and 1 is free"
    assert ledger.changes({JobId("b"): 10, JobId("a"): 10}) == {JobId("b"): 1, JobId("a"): 8}
    assert ledger.changes({JobId("a"): 2, JobId("b"): 10}) == {JobId("a"): 2, JobId("b"): 1}


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=4),
    st.lists(st.integers(0, 60), min_size=4, max_size=4),
)
def test_as_much_is_granted_as_there_is_room_for_and_no_more(
    held_and_sent: list[tuple[int, int]], wanted: list[int]
) -> None:
    ledger = ShareLedger(100, 0)
    for at, (held, sent) in enumerate(held_and_sent):
        if ledger.open(JobId(f"j{at}"), held) and sent < held:
            ledger.send(JobId(f"j{at}"), 1, sent, 0.0)
    targets = dict(zip(ledger.accounts, wanted, strict=False))
    changes = ledger.changes(targets)
    lacking = [job for job, want in targets.items() if changes.get(job, ledger.accounts[job].told_bytes) < want]
    for job, bytes_ in changes.items():
        ledger.send(job, 2, bytes_, 1.0)
        ledger.check()
    assert not lacking or ledger.free_bytes == 0, "somebody got less than he may"
    assert all(ledger.accounts[job].told_bytes <= max(want, 0) for job, want in targets.items())


def test_more_than_there_is_cannot_be_sent() -> None:
    ledger = ShareLedger(10, 0)
    ledger.open(JobId("a"))
    with pytest.raises(AssertionError):
        ledger.send(JobId("a"), 1, 11, 0.0)


def test_an_acknowledgement_counts_for_its_own_limit_and_those_before_it_alone() -> None:
    """A newer, smaller limit may still be on its way: what it will free belongs to no job yet."""
    ledger = ShareLedger(10, 0)
    ledger.open(JobId("a"), 10)
    for epoch, bytes_ in ((1, 8), (2, 6), (3, 2)):
        ledger.send(JobId("a"), epoch, bytes_, 0.0)
    assert ledger.acked(JobId("a"), 2) and ledger.free_bytes == 4, "it goes by 6, and has not heard of 2"
    assert ledger.overdue(6.0, {}) == [JobId("a")], "it still owes what it was asked for"
    assert ledger.open(JobId("b"))
    assert ledger.changes({JobId("b"): 10}) == {JobId("b"): 4}
    assert ledger.acked(JobId("a"), 3) and ledger.free_bytes == 8


@given(
    st.lists(st.tuples(st.sampled_from(["send", "apply", "hear"]), st.integers(0, 2), st.integers(0, 100)), max_size=60)
)
def test_jobs_that_apply_limits_late_never_hold_more_than_there_is(steps: list[tuple[str, int, int]]) -> None:
    """A job follows one limit until it applies the next, and its message about that may come later still."""
    ledger = ShareLedger(100, 10)
    jobs = [JobId(f"j{number}") for number in range(3)]
    sent: dict[JobId, list[int]] = {job: [0] for job in jobs}
    applied = dict.fromkeys(jobs, 0)
    for job in jobs:
        ledger.open(job)
    for step, number, bytes_ in steps:
        job = jobs[number]
        if step == "send":
            for limit in ledger.changes({job: bytes_}).values():
                sent[job].append(limit)
                ledger.send(job, len(sent[job]) - 1, limit, 0.0)
        elif step == "apply":
            applied[job] = min(len(sent[job]) - 1, applied[job] + 1 + bytes_ % 2)
        else:
            ledger.acked(job, applied[job] - bytes_ % 2)
        ledger.check()
        held = sum(sent[job][applied[job]] for job in jobs)
        assert held <= ledger.room_bytes, "memory was given out twice"
        assert all(max(sent[job][applied[job] :]) <= ledger.accounts[job].charged_bytes for job in jobs)
