"""The tuner of one job, as a story."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from covey.core import HostId, JobId, Note
from plugins.tuner.machine import (
    Available,
    BatchTimed,
    HostsChanged,
    NicMeasured,
    Perform,
    StepDone,
    StepFailed,
    Tuner,
    TunerAction,
)
from plugins.tuner.policy.cost import Load
from plugins.tuner.policy.plan import Configuration

H = [HostId(f"h{n}") for n in range(8)]
FAST = Available("fast", 1.25e8)


def tuner(workers: int = 2, hosts: int = 6) -> Tuner:
    now = Configuration(
        {host: "worker" if n < workers else "server" for n, host in enumerate(H[:hosts])},
        {H[n]: tuple(range(n * 6, n * 6 + 6)) for n in range(workers)},
        {H[n]: (n,) for n in range(workers, hosts)},
    )
    return Tuner(JobId("j1"), Load(1e6, 1e7, 1e4), now, dict.fromkeys(H[:hosts], FAST), batches_min=3)


def timed(of: Tuner, times: int, sample_s: float = 2e-3) -> list[TunerAction]:
    actions: list[TunerAction] = []
    for _ in range(times):
        for host in sorted(host for host, role in of.roles.items() if role == "worker"):
            actions += of.handle(BatchTimed(host, 10_000, 10_000 * sample_s), 0.0)
    of.check()
    return actions


def finish(of: Tuner, actions: list[TunerAction], rng: random.Random) -> None:
    orders = [each for each in actions if isinstance(each, Perform)]
    while orders:
        order = orders.pop(rng.randrange(len(orders)))
        if rng.random() < 0.2:
            orders += [a for a in of.handle(StepFailed(order.plan, order.at, "busy"), 0.0) if isinstance(a, Perform)]
        else:
            orders += [a for a in of.handle(StepDone(order.plan, order.at), 0.0) if isinstance(a, Perform)]
        of.check()


def test_nothing_is_decided_before_every_worker_has_timed_enough() -> None:
    """Reference: §3.4.1, optimizer setup."""
    of = tuner()
    for _ in range(9):
        assert of.handle(BatchTimed(H[0], 10_000, 20.0), 0.0) == []
    assert of.handle(BatchTimed(H[1], 10_000, 20.0), 0.0) == []
    assert of.handle(BatchTimed(H[1], 10_000, 20.0), 0.0) == []
    assert of.handle(BatchTimed(H[1], 10_000, 20.0), 0.0)


def test_a_bad_split_is_left_and_the_next_measurements_keep_the_good_one() -> None:
    of = tuner()
    finish(of, timed(of, 3), random.Random(1))
    assert sum(role == "worker" for role in of.roles.values()) == 5
    kept = timed(of, 3)
    assert [each.event for each in kept if isinstance(each, Note)] == ["Kept"]
    assert of.plan is None


def test_more_hosts_are_used_and_hosts_that_leave_are_emptied_first() -> None:
    """Reference: §3.4.4, utilizing opportunistic resources."""
    of = tuner()
    finish(of, timed(of, 3), random.Random(2))
    of.handle(HostsChanged(dict.fromkeys(H, FAST)), 0.0)
    finish(of, timed(of, 3), random.Random(3))
    assert set(of.roles) == set(H)
    actions = list(of.handle(HostsChanged(dict.fromkeys(H[:5], FAST)), 0.0))
    finish(of, actions, random.Random(4))
    assert set(of.roles) == set(H[:5])


def test_answers_to_another_plan_or_twice_change_nothing() -> None:
    of = tuner()
    orders = [each for each in timed(of, 3) if isinstance(each, Perform)]
    assert of.handle(StepDone(orders[0].plan + 1, orders[0].at), 0.0) == []
    of.handle(StepDone(orders[0].plan, orders[0].at), 0.0)
    before = of.now
    assert of.handle(StepDone(orders[0].plan, orders[0].at), 0.0) == []
    assert of.now == before


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_whatever_happens_every_block_has_one_owner(seed: int) -> None:
    rng = random.Random(seed)
    of = tuner(rng.randrange(1, 5))
    orders: list[Perform] = []
    for _ in range(60):
        kind = rng.randrange(5)
        if kind == 0 and orders:
            order = orders.pop(rng.randrange(len(orders)))
            found = of.handle(StepDone(order.plan, order.at), 0.0)
        elif kind == 1:
            found = of.handle(HostsChanged(dict.fromkeys(rng.sample(H, rng.randrange(2, 9)), FAST)), 0.0)
        elif kind == 2:
            found = of.handle(NicMeasured(rng.choice(H), rng.uniform(1e7, 1e9)), 0.0)
        else:
            found = timed(of, 3, rng.uniform(1e-5, 1e-2))
        orders += [each for each in found if isinstance(each, Perform)]
        of.check()
