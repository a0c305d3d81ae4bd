"""One GPU as a story: jobs arrive, report, grow, end; limits, starts and reasons come out."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.core import JobId, LogEvent
from covey.units import GIB
from plugins.sharing.machine.events import (
    DeviceDraining,
    DeviceLost,
    Found,
    Freed,
    GpuEvent,
    HardLimit,
    HardLimited,
    Kill,
    RankArrived,
    RankEnded,
    Refuse,
    Reported,
    Resume,
    Retagged,
    SetLimits,
    StartRank,
    Suspend,
    Suspended,
    Terminate,
    TimePassed,
)
from plugins.sharing.machine.share_ledger import ShareLedger
from plugins.sharing.messages import Report
from plugins.sharing.policy import lease
from plugins.sharing.policy.ladder import Rates
from tests.plugins.sharing.gpu_rack import Rack, kinds, state


def test_a_lone_opportunistic_job_has_the_gpu_without_any_constraint() -> None:
    """Reference: §3.3, Local coordinator."""
    rack = Rack()
    assert state(rack) == "empty"
    assert kinds(rack.arrive("o", "opportunistic", 8)) == [StartRank]
    assert state(rack) == "alone"
    assert rack.gib("o") == 32 and rack.limits["o"].busy == 1 and rack.limits["o"].failsafe == 1


def test_a_guaranteed_job_starts_only_when_the_others_have_stopped_and_given_room() -> None:
    """They give memory back at the end of a mini-batch, so they run until then. Reference: §3.3: the local coordinator
    first limits the opportunistic jobs."""
    rack = Rack()
    rack.arrive("o", "opportunistic", 30)
    rack.step("o", peak=30 * GIB)
    assert kinds(rack.arrive("g", "guaranteed", 8)) == []
    assert state(rack) == "arrival"
    assert not rack.stopped("o") and rack.gib("o") == 24
    assert StartRank not in kinds(rack.tell(TimePassed(True), 0.1)), "it has not said yet that it goes by that"
    told = rack.step("o")
    stops = [n for n, a in enumerate(told) if isinstance(a, SetLimits) and a.limits.job == "o" and a.limits.idle == 0]
    assert stops[0] < next(n for n, a in enumerate(told) if isinstance(a, StartRank)), "they stop before it starts"
    assert state(rack) == "init" and rack.gib("g") == 8 and rack.stopped("o")


def test_a_long_first_mini_batch_keeps_the_others_stopped_for_the_next_dozens_only() -> None:
    rack = Rack()
    rack.arrive("o", "opportunistic", 8)
    rack.step("o", peak=8 * GIB)
    rack.arrive("g", "guaranteed", 8)
    rack.step("o")
    rack.step("g", step_s=0.5)
    rack.steps(31, "g", step_s=0.001)
    assert state(rack) == "init" and rack.stopped("o")
    rack.steps(10, "g", step_s=0.001)
    assert state(rack) == "baseline"


def test_a_job_whose_mini_batches_are_uneven_for_good_is_taken_as_it_is() -> None:
    rack = Rack()
    rack.arrive("g", "guaranteed", 8)
    for _ in range(256):
        assert state(rack) == "init"
        rack.step("g", step_s=0.01)
        rack.step("g", step_s=0.03)
    assert state(rack) == "baseline"


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


def test_a_surge_of_memory_takes_from_the_others_and_gives_to_the_guaranteed_job() -> None:
    """Reference: §3.3 and figure 7a."""
    rack = Rack()
    rack.steady()
    rack.step("g", peak=8 * GIB, spill=4 * GIB)
    assert state(rack) == "surge" and rack.stopped("o")
    assert rack.gib("o") == 20 and rack.gib("g") == 12
    rack.step("g", peak=12 * GIB)
    assert state(rack) == "baseline"
    rack.step("g", peak=12 * GIB, spill=8 * GIB)
    assert rack.gib("o") == 12 and rack.gib("g") == 12, "not before the other has let go"
    rack.step("o", peak=12 * GIB)
    assert rack.gib("g") == 20


def test_a_surge_takes_from_the_largest_first_and_spares_what_cannot_be_given_back() -> None:
    """Introspective scaling makes the opportunistic jobs give way; that the largest does first is ours. Reference: §3.3
    and figure 7a."""
    rack = Rack()
    for job, gib in (("small", 4), ("large", 16), ("middle", 4)):
        rack.arrive(job, "opportunistic", gib)
        rack.step(job, peak=gib * GIB)
    rack.arrive("g", "guaranteed", 8)
    everybody = ("small", "middle", "large")
    for _ in range(200):
        for job in everybody:
            rack.step(job, peak=int(rack.gib(job) * GIB))
        if "g" in rack.limits:
            rack.step("g", peak=8 * GIB)
        if state(rack) == "run":
            break
    assert state(rack) == "run"
    assert [rack.gib(job) for job in everybody] == [4, 4, 16]
    rack.step("g", peak=8 * GIB, spill=6 * GIB)
    assert state(rack) == "surge" and rack.gib("g") == 8, "not before the other has let go"
    assert [rack.gib(job) for job in everybody] == [4, 4, 10], "one job is disturbed, not three"
    rack.step("large", peak=10 * GIB)
    assert rack.gib("g") == 14
    rack.step("g", peak=14 * GIB, spill=9 * GIB)
    assert [rack.gib(job) for job in everybody] == [3, 3, 3]


def test_a_job_that_wants_more_than_the_device_has_goes_on_with_what_there_is() -> None:
    rack = Rack()
    rack.steady()
    rack.step("g", peak=8 * GIB, spill=40 * GIB)
    rack.step("o", peak=0)
    assert rack.gib("g") == 32 and rack.gib("o") == 0
    rack.step("g", peak=32 * GIB, spill=16 * GIB)
    assert state(rack) != "surge"


def test_a_job_that_is_away_frees_the_others_and_its_return_is_noticed() -> None:
    """Reference: figure 12."""
    rack = Rack()
    rack.steady()
    rack.tell(TimePassed(busy=False), 5)
    assert state(rack) == "idle"
    assert rack.limits["o"].idle == 1 and rack.limits["o"].head_s is None
    rack.step("g", peak=8 * GIB)
    assert state(rack) == "run"


def test_a_stuck_guaranteed_job_leaves_the_failsafe_to_the_others() -> None:
    rack = Rack()
    rack.steady()
    rack.tell(TimePassed(busy=True), 31)
    assert state(rack) == "stuck"
    assert rack.limits["o"].busy == rack.limits["o"].idle == rack.limits["o"].failsafe == 0.1
    assert "g finishes mini-batches again" in str(rack.step("g", peak=8 * GIB))
    assert state(rack) == "baseline"


def test_a_job_of_long_mini_batches_is_stuck_after_twenty_of_them_and_not_before() -> None:
    rack = Rack()
    rack.arrive("o", "opportunistic", 20)
    rack.step("o", peak=20 * GIB)
    rack.arrive("g", "guaranteed", 8)
    rack.step("o", peak=20 * GIB)
    rack.steps(12, "g", step_s=3.0, peak=8 * GIB)
    rack.tell(TimePassed(busy=True), 57)
    assert state(rack) != "stuck", "half a minute, and 19 of its mini-batches"
    rack.tell(TimePassed(busy=True), 4)
    assert state(rack) == "stuck"


def test_a_job_that_never_runs_steadily_is_taken_as_it_is() -> None:
    rack = Rack()
    rack.arrive("g", "guaranteed", 8)
    for at in range(400):
        rack.step("g", 0.1 if at % 2 else 0.6, peak=8 * GIB)
        rack.tell(TimePassed(busy=True))
    assert state(rack) in ("baseline", "run", "verify")


def test_limits_are_renewed_before_their_lease_is_over() -> None:
    rack = Rack()
    rack.steady()
    renewed = 0
    for _ in range(40):
        renewed += sum(isinstance(a, SetLimits) and a.limits.job == "o" for a in rack.tell(TimePassed(True), 0.25))
        assert rack.limits["o"].lease_s >= 2
    assert renewed >= 9


def test_only_an_opportunistic_job_that_does_not_let_go_is_pressed_ever_harder() -> None:
    rack = Rack()
    rack.arrive("o", "opportunistic", 30)
    rack.step("o", peak=30 * GIB)
    rack.deaf.add("o")
    rack.arrive("g", "guaranteed", 20)
    pressed = []
    for _ in range(60):
        pressed += kinds(rack.tell(TimePassed(True), 1))
    assert pressed[:4] == [HardLimit, Suspend, Terminate, Kill]
    assert state(rack) == "arrival"
    rack.tell(RankEnded(JobId("o")))
    assert state(rack) == "arrival", "its memory is not free before the device shows it"
    assert StartRank in kinds(rack.tell(Freed(JobId("o"))))


def test_each_way_of_pressing_has_its_time_before_the_next_and_killing_is_repeated() -> None:
    rack = Rack()
    rack.arrive("o", "opportunistic", 30)
    rack.step("o", peak=30 * GIB)
    rack.deaf.add("o")
    rack.arrive("g", "guaranteed", 20)
    begun_s, pressed = rack.now_s, []
    for _ in range(120):
        pressed += [(round(rack.now_s - begun_s, 1), kind) for kind in kinds(rack.tell(TimePassed(True), 0.5))]
    assert [kind for _, kind in pressed[:5]] == [HardLimit, Suspend, Terminate, Kill, Kill]
    assert [round(at_s - before_s) for (before_s, _), (at_s, _) in pairwise(pressed[:5])] == [1, 10, 10, 10]
    assert 5 <= pressed[0][0] <= 6, "a limit may take 5 s to be applied"


def test_who_has_let_go_once_is_asked_gently_the_next_time() -> None:
    rack = Rack()
    rack.arrive("o", "opportunistic", 30)
    rack.step("o", peak=30 * GIB)
    rack.arrive("g", "guaranteed", 8)
    assert kinds(rack.tell(TimePassed(True), 6)) == [HardLimit]
    assert StartRank in kinds(rack.step("o", peak=24 * GIB)), "late, but it has applied its limit"
    rack.tell(RankEnded(JobId("g")))
    rack.tell(Freed(JobId("g")))
    rack.step("o", peak=30 * GIB)
    rack.arrive("h", "guaranteed", 8)
    assert kinds(rack.tell(TimePassed(True), 6)) == [HardLimit]


def test_a_limit_that_the_driver_enforces_counts_as_applied() -> None:
    rack = Rack()
    rack.arrive("o", "opportunistic", 30)
    rack.step("o", peak=30 * GIB)
    rack.deaf.add("o")
    rack.arrive("g", "guaranteed", 20)
    rack.tell(TimePassed(True), 6)
    rack.tell(HardLimited(JobId("o"), 12 * GIB, ok=False))
    assert state(rack) == "arrival"
    rack.tell(HardLimited(JobId("o"), 12 * GIB, ok=True))
    assert state(rack) == "init"


def test_a_suspended_job_comes_back_when_there_is_room() -> None:
    rack = Rack()
    rack.arrive("o", "opportunistic", 30)
    rack.step("o", peak=30 * GIB, stable=30 * GIB)
    rack.deaf.add("o")
    rack.arrive("g", "guaranteed", 20)
    rack.tell(TimePassed(True), 6)
    rack.tell(TimePassed(True), 2)
    assert StartRank in kinds(rack.tell(Suspended(JobId("o"), ok=True)))
    rack.tell(RankEnded(JobId("g")))
    assert Resume in kinds(rack.tell(Freed(JobId("g"))))
    assert rack.gpu.state == "alone"


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
    """No admission any more, also of those who were let in and wait for memory."""
    rack = Rack()
    rack.arrive("o", "opportunistic", 30)
    rack.step("o", peak=30 * GIB)
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


def test_allocations_that_fail_take_memory_from_the_others_before_anything_spills() -> None:
    """Reference: §3.3."""
    rack = Rack()
    rack.steady()
    rack.step("g", peak=8 * GIB, retries=3)
    assert state(rack) == "surge" and rack.stopped("o")
    rack.step("o", peak=20 * GIB)
    assert rack.gib("g") == 8.5
    rack.step("g", peak=8 * GIB)
    assert state(rack) == "baseline"


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
    rack.arrive("o", "opportunistic", 32)
    rack.step("o", peak=32 * GIB)
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


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(events, st.sampled_from([0.0, 0.05, 1.0, 6.0, 40.0])), max_size=60))
def test_acknowledged_limits_never_exceed_the_device_and_no_job_can_stop_for_ever(
    told: list[tuple[GpuEvent, float]],
) -> None:
    """Any events in any order: invariants after each (`Rack.tell`), every change of state has a reason, and every limit
    that goes out ends in something other than a stop."""
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


@settings(max_examples=30, deadline=None)
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


# ---- the ledger alone ----


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


def test_who_owes_memory_is_not_stopped_before_the_boundary_where_it_gives_it() -> None:
    """A job that is held before it can give memory back would be pressed for what it may not do. Reference: §3.1.1."""
    rack = Rack()
    rack.steady()
    rack.deaf.add("o")
    for _ in range(40):
        rack.step("g", peak=8 * GIB, spill=8 * GIB)
        assert state(rack) == "surge" and rack.limits["o"].busy == 1
    rack.deaf.clear()
    rack.step("o", peak=8 * GIB)
    rack.step("g", peak=16 * GIB)
    assert rack.stopped("o") and rack.gib("g") == 16
