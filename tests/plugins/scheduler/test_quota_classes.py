"""Classes, quotas, reservations on shared GPUs, by the agents' queue and leader: stories, and what always holds."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plugins.scheduler.plain_pool import (
    Demote,
    Ended,
    Event,
    Looked,
    Measured,
    PoolJob,
    Reserve,
    Start,
    Submitted,
    Upgrade,
)
from tests.plugins.scheduler.shared_pool import Shared


def job(id: str, gpus: int = 1, tenant: str = "a", job_class: Any = "guaranteed", **more: Any) -> Submitted:
    return Submitted(PoolJob(id=id, tenant=tenant, gpus=gpus, job_class=job_class, **more))


def test_a_guaranteed_job_starts_whole_within_its_quota_or_waits() -> None:
    """Reference: AntMan §3.3."""
    pool = Shared(4, 4, {"a": 3, "b": 1})
    assert pool.handle(job("a1", 2), 0) == [Start("a1", (0, 1), True)]
    assert pool.handle(job("a2", 2), 1) == [], "the quota of a is used up, although two GPUs are free"
    assert pool.handle(Ended("a1"), 2) == [Start("a2", (0, 1), True)]


def test_two_gangs_that_wait_for_the_same_gpus_never_hold_half_each() -> None:
    pool = Shared(4, 2, {"a": 2, "b": 2})
    pool.handle(job("s0"), 0)
    pool.handle(job("s1"), 0)
    pool.handle(job("s2", tenant="b"), 0)
    pool.handle(job("s3", tenant="b"), 0)
    pool.handle(Ended("s0"), 1)
    pool.handle(Ended("s2"), 1)
    pool.handle(job("ga", 1, same_host=False), 2)
    pool.handle(Ended("ga"), 3)
    pool.handle(Ended("s1"), 3)
    assert pool.handle(job("big", 2, same_host=True), 4) == [Start("big", (0, 1), True)]
    assert pool.handle(job("other", 1, tenant="b"), 5) == [Start("other", (2,), True)]
    pool.check()


def test_only_one_reservation_grows_at_a_time_and_an_opportunistic_job_may_use_it() -> None:
    """Reference: AntMan §3.3."""
    pool = Shared(4, 2, {"a": 2, "b": 2})
    for id, tenant in (("s0", "a"), ("s1", "b"), ("s2", "a"), ("s3", "b")):
        pool.handle(job(id, tenant=tenant), 0)
    pool.handle(Ended("s0"), 1)
    pool.handle(Ended("s2"), 1)
    assert pool.handle(job("ga", 2, "a", same_host=True), 2) == [Reserve("ga", (0,))]
    assert pool.handle(job("o", 1, "c", "opportunistic"), 3) == [Start("o", (0,), False)]
    assert pool.handle(Ended("s1"), 4) == [Start("ga", (0, 1), True)], "beside the guest"
    pool.check()


def test_an_auto_job_is_demoted_once_and_upgraded_in_place_when_its_quota_is_free() -> None:
    """Reference: AntMan §3.3, automatic class and upgrade."""
    pool = Shared(4, 4, {"a": 3}, demote_after_s=100)
    pool.handle(job("a1", 3), 0)
    pool.handle(job("x", 2, job_class="auto"), 5)
    assert pool.handle(Looked(), 104) == []
    assert pool.handle(Looked(), 105) == [Demote("x"), Start("x", (0, 1), False)]
    assert pool.handle(Ended("a1"), 200) == [Upgrade("x")]
    assert pool.handle(job("o", 1, job_class="opportunistic"), 201)[-1] == Start("o", (0,), False)
    pool.check()


def test_a_job_that_was_asked_to_be_opportunistic_stays_so() -> None:
    pool = Shared(4, 4, {"a": 4}, demote_after_s=10)
    assert pool.handle(job("o", 2, job_class="opportunistic"), 0) == [Start("o", (0, 1), False)]
    assert pool.handle(Looked(), 1000) == []


def test_busy_gpus_take_no_opportunistic_job() -> None:
    """Reference: AntMan §3.3: utilisation below M over the last 10 s."""
    pool = Shared(2, 2, {"a": 2})
    pool.handle(job("a1", 2), 0)
    pool.handle(Measured({0: 0.9, 1: 0.8}), 1)
    assert pool.handle(job("o", 1, "b", "opportunistic"), 2) == []
    assert pool.handle(Measured({1: 0.79}), 3) == [Start("o", (1,), False)]


def test_more_quota_than_gpus_and_jobs_that_come_twice_are_refused() -> None:
    with pytest.raises(ValueError):
        Shared(4, 4, {"a": 3, "b": 2})
    pool = Shared(4, 4, {"a": 3})
    pool.handle(job("x"), 0)
    with pytest.raises(ValueError):
        pool.handle(job("x"), 1)
    with pytest.raises(ValueError):
        pool.handle(Ended("y"), 1)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "end", "measure", "look"]),
        st.integers(0, 50),
        st.integers(1, 4),
        st.sampled_from(["guaranteed", "auto", "opportunistic"]),
        st.booleans(),
    ),
    max_size=40,
)


@given(STEPS, st.integers(1, 3), st.integers(1, 4))
def test_no_gang_is_half_there_and_no_quota_is_exceeded_whatever_happens(
    steps: list[tuple[str, int, int, Any, bool]], guests: int, per_host: int
) -> None:
    pool = Shared(6, per_host, {"a": 3, "b": 2}, demote_after_s=30, opportunistic_max=guests)
    for number, (kind, pick, gpus, job_class, same_host) in enumerate(steps):
        there = sorted(pool.pool.ids)
        event: Event = Looked()
        if kind == "submit":
            event = job(f"j{number:03}", gpus, "abc"[pick % 3], job_class, same_host=same_host)
        elif kind == "end" and there:
            event = Ended(there[pick % len(there)])
        elif kind == "measure":
            event = Measured({pick % 6: gpus / 4})
        actions = pool.handle(event, number * 10.0)
        pool.check()
        started = [action.job for action in actions if isinstance(action, Start)]
        assert len(started) == len(set(started))
        reserved = {action.job for action in actions if isinstance(action, Reserve)}
        assert len(reserved - set(started)) <= 1 or pool.reserving in reserved
