"""One GPU as a story: jobs arrive, report, grow, end; the output is limits, starts and reasons."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.core.events import LogEvent
from covey.core.ids import JobId
from covey.core.units import GIB
from plugins.sharing.machine.events import (
    DeviceDraining,
    DeviceLost,
    Found,
    Freed,
    GpuEvent,
    HardLimited,
    RankArrived,
    RankEnded,
    Refuse,
    Reported,
    Retagged,
    SetLimits,
    StartRank,
    Suspended,
    Terminate,
    TimePassed,
)
from plugins.sharing.messages import Report
from plugins.sharing.policy import lease
from plugins.sharing.policy.ladder import Rates
from tests.families import examples
from tests.plugins.sharing.gpu_rack import Rack, kinds, state


def test_a_lone_opportunistic_job_has_the_gpu_without_any_constraint() -> None:
    """Reference: §3.3, Local coordinator."""
    rack = Rack()
    assert state(rack) == "empty"
    assert kinds(rack.arrive("o", "opportunistic", 8)) == [StartRank]
    assert state(rack) == "alone"
    assert rack.gib("o") == 32 and rack.limits["o"].busy == 1 and rack.limits["o"].failsafe == 1


def test_a_guaranteed_job_starts_only_when_the_others_have_stopped_and_given_room() -> None:
    """The others give memory back at the end of a mini-batch, so they run until then. Reference: §3.3: the local
    coordinator first limits the opportunistic jobs."""
    rack = Rack()
    rack.hold("o", 30)
    assert kinds(rack.arrive("g", "guaranteed", 8)) == []
    assert state(rack) == "arrival"
    assert not rack.stopped("o") and rack.gib("o") == 24
    assert StartRank not in kinds(rack.tell(TimePassed(True), 0.1)), "it has not said yet that it goes by that"
    told = rack.step("o")
    stops = [n for n, a in enumerate(told) if isinstance(a, SetLimits) and a.limits.job == "o" and a.limits.idle == 0]
    assert stops[0] < next(n for n, a in enumerate(told) if isinstance(a, StartRank)), "they stop before it starts"
    assert state(rack) == "init" and rack.gib("g") == 8 and rack.stopped("o")


def test_after_the_baseline_others_get_idle_phases_and_the_guaranteed_job_no_limit() -> None:
    """Reference: §3.3: what is left, step by step."""
    rack = Rack()
    rack.steady()
    assert rack.limits["g"].busy == 1 and rack.limits["g"].head_s is None
    for _ in range(600):
        rack.step("g", 0.02 * (1 + 0.5 * rack.limits["o"].busy), peak=8 * GIB)
    assert state(rack) in ("run", "verify")
    assert state(rack) == "verify" or (rack.limits["o"].idle == 1 and 0.03 < rack.limits["o"].busy < 0.1)
    assert rack.limits["o"].failsafe == lease.FAILSAFE_BESIDE
    assert any(isinstance(note, LogEvent) and "slower, room for more" in note.reason for note in rack.out)


def test_several_opportunistic_jobs_share_the_busy_time_by_weight() -> None:
    rack = Rack()
    rack.steady()
    rack.arrive("p", "opportunistic", 4, 3.0)
    rack.steps(20, "o", "p")
    rack.steps(200, "g", peak=8 * GIB)
    assert rack.limits["o"].busy > 0
    assert rack.limits["p"].busy == pytest.approx(3 * rack.limits["o"].busy)


def test_limits_are_renewed_before_their_lease_is_over() -> None:
    rack = Rack()
    rack.steady()
    renewed = 0
    for _ in range(40):
        renewed += sum(isinstance(a, SetLimits) and a.limits.job == "o" for a in rack.tell(TimePassed(True), 0.25))
        assert rack.limits["o"].lease_s >= 2
    assert renewed >= 9


def test_an_upgrade_makes_a_job_guaranteed_in_place_and_others_await_its_baseline() -> None:
    """Reference: §3.3, Job upgrade."""
    rack = Rack()
    rack.arrive("o", "opportunistic", 8)
    rack.arrive("p", "opportunistic", 8)
    rack.steps(5, "o", "p", peak=8 * GIB)
    assert state(rack) == "together"
    rack.tell(Retagged(JobId("o"), "guaranteed", 3))
    assert state(rack) == "init" and rack.stopped("p") and rack.limits["o"].busy == 1
    rack.tell(Retagged(JobId("o"), "opportunistic", 4))
    assert state(rack) == "together" and not rack.stopped("p")


def test_a_device_to_be_emptied_lets_its_guaranteed_job_end_and_takes_nobody() -> None:
    rack = Rack()
    rack.steady()
    told = rack.tell(DeviceDraining("rows to remap"))
    assert [a.job for a in told if isinstance(a, Terminate)] == ["o"]
    assert state(rack) == "drain" and rack.stopped("o") and rack.limits["g"].busy == 1
    assert kinds(rack.arrive("x", "opportunistic", 1)) == [Refuse]
    rack.step("g", peak=8 * GIB)
    assert kinds(rack.tell(DeviceLost("XID 79")))[0] is Terminate and state(rack) == "lost"


def test_nobody_starts_on_a_device_that_is_to_be_emptied_and_who_waited_is_sent_away() -> None:
    """No job is admitted any more, not even those that were let in and wait for memory."""
    rack = Rack()
    rack.hold("o", 30)
    rack.arrive("p", "opportunistic", 8)
    rack.arrive("g", "guaranteed", 20)
    assert state(rack) == "arrival"
    told = rack.tell(DeviceDraining("rows to remap"))
    assert [a.job for a in told if isinstance(a, Terminate)] == ["o", "p", "g"]
    rack.tell(RankEnded(JobId("o")))
    assert StartRank not in kinds(rack.tell(Freed(JobId("o")))), "its memory is free, and nobody may have it"
    found = rack.tell(Found(JobId("q"), "opportunistic", GIB, GIB, 3))
    assert kinds(found) == [Terminate], "one that ran before the agent started goes as well"
    assert state(rack) == "drain"


def test_a_guaranteed_job_that_is_found_on_a_device_to_be_emptied_may_end_in_peace() -> None:
    rack = Rack()
    rack.tell(DeviceDraining("rows to remap"))
    assert kinds(rack.tell(Found(JobId("g"), "guaranteed", 8 * GIB, 8 * GIB, 41))) == []
    assert rack.gib("g") == 8 and rack.limits["g"].busy == 1
    assert kinds(rack.tell(DeviceDraining("again"))) == []


def test_opportunistic_jobs_that_want_more_than_there_is_are_split_by_trial() -> None:
    """Reference: §3.3 and figure 10: one keeps its speed with half its memory, the other does not."""
    rack = Rack(gib=24)
    rack.arrive("cliff", "opportunistic", 16)
    rack.arrive("flat", "opportunistic", 16)
    for _ in range(2000):
        for job in ("cliff", "flat"):
            held = rack.gib(job) / 16
            speed = (1.0 if held >= 1 else 0.4 * held + 0.05) if job == "cliff" else 0.8 + 0.2 * held
            rack.step(job, 0.02 / speed, peak=int(min(16, rack.gib(job)) * GIB), stable=0)
        if rack.gpu.trial.search is not None and rack.gpu.trial.search.over:
            break
    assert rack.gib("cliff") == 16 and rack.gib("flat") == 8
    assert any(isinstance(note, LogEvent) and "best split after" in note.reason for note in rack.out)


def test_a_job_that_says_nothing_of_its_memory_starts_beside_large_ones() -> None:
    rack = Rack()
    rack.hold("o", 32)
    assert kinds(rack.arrive("unknown", "opportunistic", 0)) == []
    assert StartRank in kinds(rack.step("o"))
    assert rack.limits["unknown"].memory_bytes > 0 and state(rack) == "together"


def test_a_lost_device_ends_its_jobs_and_takes_no_more() -> None:
    rack = Rack()
    rack.steady()
    assert kinds(rack.tell(DeviceLost("XID 79"))) == [Terminate, Terminate]
    assert state(rack) == "lost"
    assert kinds(rack.arrive("x", "guaranteed", 1)) == [Refuse]
    assert kinds(rack.tell(DeviceLost("again"))) == []


def test_what_cannot_be_is_refused_with_a_reason() -> None:
    rack = Rack()
    assert kinds(rack.arrive("big", "guaranteed", 33)) == [Refuse]
    rack.arrive("g", "guaranteed", 8)
    assert kinds(rack.arrive("h", "guaranteed", 8)) == [Refuse]
    assert kinds(rack.arrive("g", "guaranteed", 8)) == [Refuse]


def test_an_agent_that_starts_again_takes_jobs_as_they_are() -> None:
    rack = Rack()
    rack.tell(Found(JobId("g"), "guaranteed", 8 * GIB, 8 * GIB, 41))
    rack.tell(Found(JobId("o"), "opportunistic", 20 * GIB, 20 * GIB, 17))
    assert rack.limits["o"].epoch >= 17 and rack.gib("o") == 20 and rack.gib("g") == 8
    assert kinds(rack.tell(Found(JobId("liar"), "opportunistic", GIB, 30 * GIB, 3))) == [Terminate]


def test_unknown_jobs_and_late_reports_change_nothing() -> None:
    rack = Rack()
    before = rack.gpu.state
    for event in (
        Reported(Report(JobId("x"), 1, 1, 0.1, 0.0, 1, 1)),
        RankEnded(JobId("x")),
        Freed(JobId("x")),
        Retagged(JobId("x"), "opportunistic", 1),
        HardLimited(JobId("x"), 1, True),
        Suspended(JobId("x"), True),
    ):
        assert rack.tell(event) == []
    assert rack.gpu.state == before


jobs = st.sampled_from(["a", "b", "c", "d"]).map(JobId)
sizes = st.integers(0, 40).map(lambda gib: gib * GIB)
classes = st.sampled_from(["guaranteed", "opportunistic"])
events = st.one_of(
    st.builds(RankArrived, jobs, classes, sizes),
    st.builds(Found, jobs, classes, sizes, sizes, st.integers(0, 50)),
    st.builds(
        Reported,
        st.builds(
            Report,
            jobs,
            st.integers(0, 60),
            st.just(1),
            st.floats(1e-4, 5),
            st.just(0.001),
            sizes,
            sizes,
            st.one_of(st.just(0), sizes),
            st.integers(0, 2),
        ),
    ),
    st.builds(TimePassed, st.booleans()),
    st.builds(RankEnded, jobs),
    st.builds(Freed, jobs),
    st.builds(Retagged, jobs, classes, st.integers(0, 3)),
    st.builds(DeviceDraining, st.just("rows to remap")),
    st.builds(HardLimited, jobs, sizes, st.booleans()),
    st.builds(Suspended, jobs, st.booleans()),
)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.tuples(events, st.sampled_from([0.0, 0.05, 1.0, 6.0, 40.0])), max_size=60))
def test_acknowledged_limits_never_exceed_the_device_and_no_job_can_stop_for_ever(
    told: list[tuple[GpuEvent, float]],
) -> None:
    """Any events in any order: invariants hold after each (`Rack.tell`), every change of state has a reason, and every
    limit that is sent ends in something other than a stop."""
    rack = Rack()
    for event, after_s in told:
        for action in rack.tell(event, after_s):
            if isinstance(action, SetLimits):
                limits = action.limits
                last = lease.effective(Rates(limits.idle, limits.head, limits.busy), limits.failsafe, 1e9)
                assert last.busy > 0 and last.idle > 0 and math.isinf(last.head_s)
        accounts = rack.gpu.ledger.accounts.values()
        assert sum(account.acked_bytes for account in accounts) <= 32 * GIB


def test_each_trial_of_a_job_that_finishes_nothing_lasts_a_minute() -> None:
    rack = Rack()
    for job in ("a", "b"):
        rack.arrive(job, "opportunistic", 24)
        rack.step(job, peak=0, stable=0)
    ended = []
    rack.steps(3, "a", "b", peak=0, stable=0)
    for _ in range(250):
        rack.step("a", 0.9, peak=0, stable=0)
        rack.acked["b"] = rack.limits["b"].epoch
        rack.gpu.ledger.acked(JobId("b"), rack.acked["b"])
        if any(isinstance(note, LogEvent) and note.event == "trial" for note in rack.out):
            ended.append(rack.now_s)
            rack.out.clear()
    assert len(ended) >= 2
    assert all(59 < later - before < 63 for before, later in pairwise(ended)), ended


@settings(max_examples=examples(30), deadline=None)
@given(st.permutations(["a", "b", "c"]), st.integers(1, 20), st.integers(0, 2))
def test_equal_jobs_in_another_order_get_the_same_limits(order: list[str], gib: int, guaranteed_first: int) -> None:
    def limits(names: list[str]) -> list[tuple[float, float, float, float | None]]:
        rack = Rack()
        if guaranteed_first:
            rack.arrive("g", "guaranteed", 8)
        for name in names:
            rack.arrive(name, "opportunistic", gib)
        for _ in range(4):
            for name in names:
                if rack.gpu.members[JobId(name)].stage == "running":
                    rack.step(name, peak=0, stable=0)
        return sorted((rack.gib(n), rack.limits[n].idle, rack.limits[n].busy, rack.limits[n].head_s) for n in names)

    assert limits(order) == limits(sorted(order))
