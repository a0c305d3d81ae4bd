"""Which GPU and which job the pool takes first, each where another choice would also be sound."""

from typing import Any

from plugins.scheduler.policy.rules import COVEY
from tests.plugins.scheduler.little import Little
from tests.plugins.scheduler.plain_pool import Ended, Looked, Measured, PoolJob, Start, Submitted
from tests.plugins.scheduler.shared_pool import Shared


def job(id: str, gpus: int, tenant: str = "a", kind: Any = "guaranteed", **more: Any) -> Submitted:
    return Submitted(PoolJob(id=id, tenant=tenant, gpus=gpus, job_class=kind, **more))


def starts(pool: Shared, event: Any, now_s: float = 0.0) -> list[tuple[str, tuple[int, ...]]]:
    said = [(each.job, each.gpus) for each in pool.handle(event, now_s) if isinstance(each, Start)]
    pool.check()
    return said


def idle(*shares: float) -> Measured:
    return Measured(dict(enumerate(shares)))


def test_an_opportunistic_job_takes_the_least_busy_gpus() -> None:
    """The least busy GPU is taken also when a busier one has fewer guests. Reference: AntMan §3.3."""
    pool = Shared(3, 3, {"a": 3}, opportunistic_max=3)
    starts(pool, idle(0.5, 0.1, 0.7))
    assert starts(pool, job("j1", 1, kind="opportunistic")) == [("j1", (1,))]
    assert starts(pool, job("j2", 1, kind="opportunistic")) == [("j2", (1,))], "still the least busy, guest or not"
    assert starts(pool, job("j3", 2, kind="opportunistic")) == [("j3", (0, 1))]


def test_a_guaranteed_job_takes_the_gpus_with_the_fewest_guests() -> None:
    """Reference: AntMan §3.3."""
    pool = Shared(3, 3, {"a": 3})
    starts(pool, idle(0.0, 0.5, 0.6))
    starts(pool, job("j1", 1, kind="opportunistic"))
    assert starts(pool, job("j2", 1)) == [("j2", (1,))]


def test_guaranteed_jobs_start_by_queue_before_age() -> None:
    pool = Shared(1, 1, {"a": 1})
    starts(pool, job("j0", 1))
    starts(pool, job("j1", 1, queue=1), 1.0)
    starts(pool, job("j2", 1, queue=0), 2.0)
    assert starts(pool, Ended("j0"), 3.0) == [("j2", (0,))]


def test_nobody_is_upgraded_on_gpus_that_are_reserved() -> None:
    """Reference: AntMan §3.3."""
    pool = Shared(6, 2, {"a": 2, "b": 2, "c": 2}, demote_after_s=10.0)
    starts(pool, idle(*[1.0] * 6))
    for number, tenant in enumerate("abcabc"):
        starts(pool, job(f"x{number}", 1, tenant))
    starts(pool, job("late", 1, kind="auto"))
    starts(pool, Looked(), 11.0)
    pool.handle(Ended("x2"), 12.0)
    pool.handle(Ended("x5"), 12.0)
    starts(pool, job("gang", 2, "c", same_host=True), 13.0)
    assert (pool.reserving, pool.reserved) == ("gang", (2,))
    assert starts(pool, Measured({2: 0.0}), 14.0) == [("late", (2,))], "the reserved GPU is open to it"
    pool.handle(Ended("x0"), 15.0)
    assert pool.free_quota("a") == 1
    assert not pool.job("late").counts, "its tenant's quota is free, its GPU is not"


def test_a_reservation_for_one_host_lies_on_one_host() -> None:
    pool = Shared(4, 2, {"a": 2, "b": 2})
    for number, tenant in enumerate("abab"):
        starts(pool, job(f"x{number}", 1, tenant))
    pool.handle(Ended("x0"), 1.0)
    starts(pool, job("gang", 2, "a", same_host=True), 2.0)
    assert pool.gpus("gang") == ()
    pool.handle(Ended("x2"), 3.0)
    assert pool.reserving == "gang" and len({gpu // 2 for gpu in pool.reserved}) == 1
    assert pool.reserved == (0,), "one of host 0; the free one of host 1 is left to others"


def test_nobody_is_passed_for_longer_than_a_week() -> None:
    assert COVEY.starve_limit_s == 604_800


def test_a_snapshot_remembers_the_reservation() -> None:
    rack = Little([2, 2], {"red": 2, "blue": 2})
    for tenant in ("blue", "blue"):
        rack.submit(1, tenant)
    rack.look()
    for waiting, host in zip(rack.jobs("placing"), rack.totals, strict=True):
        rack.place(waiting, {host: [f"{host}.0"]})
    gang = rack.submit(1, "red", each=2)
    rack.settle()
    rack.restore()
    assert rack.copy.keeper == gang and rack.copy.kept == rack.queue.kept != {}
