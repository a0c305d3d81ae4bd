"""The demand of a job, from its trial iterations; and the windows that its coordinator measures afterwards."""

from fractions import Fraction

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from covey.core.ids import HostId, JobId
from plugins.aggregator import policy
from plugins.aggregator.machine.cycle_ledger import CycleLedger, Reservation
from plugins.aggregator.machine.profiler import Profiler
from plugins.aggregator.messages import AggregatorSettings, Demand, WorkCounters
from plugins.aggregator.policy import Candidate
from plugins.aggregator.policy.cycle import executions
from plugins.aggregator.policy.measured import MeasuredIterations
from plugins.aggregator.policy.profile import Pace, calibrated, demand_of, differs, is_outlier

TENTH = Fraction(1, 10)
RULES = AggregatorSettings(trial_iterations=10, revert_iterations=20)


# ---- policy ----------------------------------------------------------------------------------------------------------


def test_an_iteration_is_the_mean_of_the_trials_without_those_that_save_or_evaluate() -> None:
    pace = Pace()
    for at in range(30):
        pace = pace.plus(1_000_000 if at % 10 == 9 else 100_000 + at)
    assert pace.measured.count == 27
    demand = demand_of(pace.measured, busy_us=300_000, iterations=30, limit=TENTH)
    assert demand == Demand(100_014, 10_000, 100), "27 of 30 count for D, all 30 had their sums"


def test_a_job_that_became_slower_for_good_is_not_taken_for_outliers() -> None:
    pace = Pace()
    for _ in range(20):
        pace = pace.plus(100_000)
    before = pace.measured.count
    for _ in range(20):
        pace = pace.plus(500_000)
    assert pace.measured.count - before >= 14
    assert not is_outlier((500_000,) * 9, 500_000)
    assert not is_outlier((1,) * 4, 100) and is_outlier((1,) * 5, 100), "of few nothing can be said"


def test_nobody_needs_more_than_all_of_a_lane_and_no_iterations_tell_nothing() -> None:
    assert demand_of(MeasuredIterations(2, 200), 500, 2, TENTH) == Demand(100, 100, 100)
    assert demand_of(MeasuredIterations(2, 200), 1, 2, TENTH) == Demand(100, 1, 100), "half a microsecond is some"
    assert (
        demand_of(MeasuredIterations(), 500, 2, TENTH) is None
        and demand_of(MeasuredIterations(2, 200), 500, 0, TENTH) is None
    )


def test_only_what_was_measured_alone_changes_the_pace_that_losses_are_judged_by() -> None:
    """The pace is calibrated while the job runs. Reference: §4.3.3.1, calibrated while the job runs."""
    old, new = Demand(100_000, 1_000), Demand(140_000, 2_000)
    assert calibrated(old, new, alone=False) == Demand(100_000, 2_000)
    assert calibrated(old, new, alone=True) == Demand(120_000, 2_000)
    assert differs(old, new) and not differs(old, Demand(104_000, 1_100))


# ---- whom gossip shows to have room ----------------------------------------------------------------------------------

DEMAND = Demand(100_000, 30_000)


def seen(host: str, used_us: int, cycle_us: int = 100_000, **changes: bool) -> Candidate:
    return Candidate(HostId(host), changes.get("suspect", False), 0.0, 1 if cycle_us else 0, 0.0, cycle_us, used_us)


def test_best_fit_comes_first_then_one_without_jobs_and_the_full_ones_are_no_room() -> None:
    """Reference: Pseudocode 3, lines 16-24."""
    hosts = [seen("idle", 0, 0), seen("half", 30_000), seen("tight", 45_000), seen("full", 45_001)]
    assert policy.ranked_for(JobId("j1"), DEMAND, hosts) == (["tight", "half", "idle"], ["full"])


def test_what_hurt_goes_to_those_with_little_to_do_only() -> None:
    hosts = [seen("idle", 0, 0), seen("half", 50_000), seen("quiet", 20_000)]
    assert policy.ranked_for(JobId("j1"), DEMAND, hosts, quiet=True)[0] == ["quiet", "idle"]


def test_a_host_that_may_be_gone_is_not_asked_to_hold_room() -> None:
    assert policy.ranked_for(JobId("j1"), DEMAND, [seen("a", 0, suspect=True)]) == ([], ["a"])
    silent = msgspec.structs.replace(seen("a", 44_000), age_s=policy.AGE_S + 1)
    assert policy.ranked_for(JobId("j1"), DEMAND, [silent, seen("b", 30_000)])[0] == ["b", "a"], "nor first one silent"


def test_a_job_looks_in_the_pool_with_the_least_room_that_suffices_first() -> None:
    """Reference: §4.3.3.4."""
    first = [seen(f"a{at:02}", 30_000) for at in range(40)]
    second = [seen(f"b{at:02}", 35_000) for at in range(40)]
    likely, _ = policy.ranked_for(JobId("j1"), DEMAND, [*first, *second])
    assert len(likely) == 80 and {host[0] for host in likely[:40]} == {"b"}


# ---- what is promised ------------------------------------------------------------------------------------------------

DEMANDS = st.builds(Demand, st.integers(1_000, 20_000), st.integers(0, 20_000), st.integers(10, 500))


@given(st.lists(st.tuples(st.sampled_from("tlrx"), st.integers(0, 5), DEMANDS), max_size=40), st.sampled_from([1, 8]))
def test_whatever_is_asked_what_is_promised_fits_and_hurts_nobody(
    acts: list[tuple[str, int, Demand]], times: int
) -> None:
    """The ledger's `check` compares C, W and every loss; a refused job leaves all as it was. Reference: §4.3.3.2,
    IV.1-IV.3"""
    ledger = CycleLedger(times)
    for at, (what, which, demand) in enumerate(acts):
        job = JobId(f"j{which}")
        before = dict(ledger.demands), ledger.cycle
        match what:
            case "t":
                refused = ledger.take(job, demand)
            case "r":
                refused = ledger.reserve(job, demand, Reservation(HostId("h"), 1, at, at + 3.0))
            case "l":
                ledger.leave(job)
                refused = ""
            case _:
                ledger.expire(float(at))
                refused = ""
        ledger.check()
        assert ledger.cycle.used_us <= ledger.cycle.us
        for one, promised in ledger.demands.items():
            assert ledger.loss(one) * 1000 < promised.limit_permille
            assert ledger.load(one) <= 1
            assert executions(ledger.cycle.us, promised.period_us) >= 1
        if refused:
            assert (dict(ledger.demands), ledger.cycle) == before


def test_a_short_job_takes_its_part_of_the_cycle_each_time_that_it_runs_in_it() -> None:
    """Reference: §4.3.3.2."""
    ledger = CycleLedger()
    assert ledger.take(JobId("j1"), Demand(100, 30)) == ledger.take(JobId("j2"), Demand(50, 10)) == ""
    assert (ledger.load(JobId("j1")), ledger.load(JobId("j2"))) == (0.3, 0.2)
    assert ledger.take(JobId("j3"), Demand(96, 1, 500)) == ""
    assert ledger.loss(JobId("j3")) == 0.04 and ledger.loss(JobId("j2")) == 0.0


def test_room_that_is_held_counts_and_is_given_back_when_nobody_comes() -> None:
    ledger = CycleLedger()
    assert ledger.reserve(JobId("j1"), Demand(100, 60), Reservation(HostId("a"), 1, 7, 20.0)) == ""
    assert "us free" in ledger.take(JobId("j2"), Demand(100, 60))
    ledger.release(JobId("j1"), HostId("b"), 7)
    assert JobId("j1") in ledger.demands, "another cannot release it"
    ledger.release(JobId("j1"), HostId("a"), 6)
    assert JobId("j1") in ledger.demands, "nor does an attempt that is over"
    ledger.expire(20.0)
    assert ledger.take(JobId("j2"), Demand(100, 60)) == ""


# ---- windows ---------------------------------------------------------------------------------------------------------


class Watched:
    """A gauge, an owner's counters, and a clock."""

    def __init__(self) -> None:
        self.gauge, self.now_s, self.step = Profiler(RULES), 0.0, 0
        self.busy_us = self.iterations = self.beside = self.changes = 0
        self.gauge.begin(0.0)

    def run(self, count: int, period_us: int, work_us: int = 1_000, steps: bool = True) -> list[str]:
        found = []
        for _ in range(count):
            self.now_s += period_us / 1e6
            self.step, self.iterations, self.busy_us = self.step + 1, self.iterations + 1, self.busy_us + work_us
            asks = self.gauge.stepped(self.step, period_us, self.now_s) if steps else self.gauge.due(self.now_s)
            if asks:
                work = WorkCounters(True, self.busy_us, self.iterations, 4, 8, self.beside, self.changes)
                found.append(self.gauge.heard(work, self.now_s))
        return [one for one in found if one]


def test_a_trial_ends_with_what_the_job_needs() -> None:
    """Reference: §4.3.3.1."""
    watched = Watched()
    assert watched.run(30, 200_000, 7_000) == ["profiled"]
    assert watched.gauge.demand == Demand(200_000, 7_000, 100)


def test_rounds_are_counted_where_the_script_says_no_steps() -> None:
    watched = Watched()
    found = watched.run(200, 250_000, 9_000, steps=False)
    assert found[0] == "profiled" and watched.gauge.demand == Demand(250_000, 9_000, 100)


def test_a_job_that_loses_its_limit_is_hurt_beside_others_and_measured_again_alone() -> None:
    watched = Watched()
    watched.run(30, 200_000)
    watched.beside = 1
    watched.changes += 1
    assert watched.run(60, 230_000) == ["hurt", "hurt"]
    assert watched.gauge.lost == 1 - Fraction(200, 230)
    watched.beside = 0
    watched.changes += 1
    assert "hurt" not in watched.run(60, 230_000)
    assert watched.gauge.demand is not None and watched.gauge.demand.period_us > 210_000


def test_a_loss_under_the_limit_is_only_told() -> None:
    watched = Watched()
    watched.run(30, 200_000)
    watched.beside = 1
    assert set(watched.run(60, 210_000)) == {"judged"}


def test_a_window_in_which_somebody_came_or_left_is_begun_anew() -> None:
    watched = Watched()
    watched.run(30, 200_000)
    watched.beside = 1
    for _ in range(5):
        watched.changes += 1
        assert watched.run(19, 300_000) == []


def test_an_owner_is_asked_soon_after_it_was_assigned_then_now_and_then() -> None:
    gauge = Profiler(RULES)
    assert gauge.lost == gauge.iterations == 0
    gauge.begin(100.0)
    asked = [at for at in range(100, 140) if gauge.due(float(at))]
    assert asked == [103, 113, 123, 133]


def test_within_a_window_counters_are_asked_for_at_its_end_only() -> None:
    """The end comes after as many iterations as a trial has, and not before two seconds."""
    for period_us, steps in ((1_000_000, 10), (62_500, 32)):
        watched = Watched()
        watched.run(1, 100_000_000)
        for at in range(1, steps + 1):
            watched.now_s, watched.iterations = watched.now_s + period_us / 1e6, watched.iterations + 1
            assert watched.gauge.stepped(1 + at, period_us, watched.now_s) == (at == steps)


def test_a_step_with_the_number_of_the_last_begins_a_window_anew() -> None:
    watched = Watched()
    watched.run(8, 200_000)
    for _ in range(4):
        watched.step -= 1
        assert watched.run(8, 200_000) == []


def test_a_script_that_counts_its_steps_anew_begins_a_window_anew() -> None:
    watched = Watched()
    watched.run(8, 200_000)
    watched.step = 0
    assert watched.run(9, 200_000) == [] and watched.run(10, 200_000) == ["profiled"]


def test_a_process_that_counts_its_work_anew_begins_a_window_anew() -> None:
    watched = Watched()
    watched.busy_us = 1_000_000
    watched.run(8, 200_000, 7_000)
    watched.busy_us = 0
    assert watched.run(30, 200_000, 7_000) == ["profiled"] and watched.gauge.demand == Demand(200_000, 7_000, 100)
