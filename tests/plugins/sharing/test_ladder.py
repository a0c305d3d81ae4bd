"""The controller of one guaranteed job: it gets mini-batches and gives reasons."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.sharing.machine.ladder import Ladder
from plugins.sharing.machine.rivals import Naive, SpreadLadder, Throttle
from plugins.sharing.policy.interference import TOLERANCE, StepSamples
from plugins.sharing.policy.ladder import FREE, STOPPED, U_START
from plugins.sharing.policy.rivals import Aimd, Tgs
from tests.families import examples

ALONE_S, IDLE_S = 0.022, 0.012


class Job:
    """A guaranteed job whose mini-batches take `alone_s`, more by `harm(u)`."""

    def __init__(self, ladder: Ladder) -> None:
        self.ladder, self.now_s, self.alone_s, self.reasons = ladder, 0.0, ALONE_S, list[str]()
        self.rng = random.Random(3)

    def step(self, harm: float = 0.0) -> str | None:
        step_s = self.alone_s * (1 + harm) * self.rng.uniform(0.99, 1.01)
        self.now_s += step_s
        why = self.ladder.stepped(step_s, IDLE_S, self.now_s)
        self.ladder.check()
        if why is not None:
            self.reasons.append(why)
        return why

    def run(self, steps: int, harm_above: float = 9.0, harm: float = 0.2) -> None:
        """Run `steps` mini-batches, slower by `harm` while the rung is above `harm_above`."""
        for _ in range(steps):
            self.step(harm if self.ladder.u > harm_above else 0.0)

    def until(self, phase: str, harm: float = 0.0) -> None:
        for _ in range(2000):
            if self.ladder.phase == phase:
                return
            self.step(harm)
        raise AssertionError(f"never {phase}")


def phase(job: Job) -> str:
    return job.ladder.phase


def test_the_others_are_stopped_until_the_job_was_measured_alone() -> None:
    job = Job(Ladder())
    assert job.ladder.phase == "baseline" and job.ladder.rates == STOPPED
    job.until("run")
    assert job.ladder.rates.head_s == pytest.approx(0.25 * IDLE_S, rel=0.01)
    assert job.ladder.baseline.mean_s == pytest.approx(ALONE_S, rel=0.01)


def test_a_mini_batch_begun_under_the_limits_before_says_nothing_about_the_new_ones() -> None:
    job = Job(Ladder())
    job.until("run")
    job.step(harm=5.0)
    assert job.ladder.window.count == 0
    job.step()
    assert job.ladder.window.count == 1 and job.ladder.window.mean_s < 2 * ALONE_S


def test_mini_batches_heard_of_late_are_judged_by_the_limits_they_ran_under() -> None:
    """Mini-batches of 6 ms each, in reports of fifteen, as an agent hears them. When they ended tells which limits
    they ran under: else the first ones after a stop look as if the job had grown slower by itself, and the others
    continue at that rung."""
    ladder, rng = Ladder(), random.Random(5)
    now_s, u, told = 0.0, ladder.u, list[tuple[float, float]]()
    reasons: list[str] = []
    harmed = 0
    for _ in range(400):
        for _ in range(15):
            harm = 0.3 if u > 1.05 else 0.0
            harmed += harm > 0
            step_s = 0.006 * (1 + harm) * rng.uniform(0.98, 1.02)
            now_s += step_s
            told.append((step_s, now_s))
        for step_s, ended_s in told:
            why = ladder.stepped(step_s, 0.0, now_s, ended_s)
            ladder.check()
            if why is not None:
                reasons.append(why)
        told.clear()
        u = ladder.u
    assert not any("it has changed" in why for why in reasons)
    assert ladder.u < 1.1 and harmed < 6000 / 4


def test_while_nothing_hurts_it_climbs_to_the_idle_phases_and_into_the_busy_ones() -> None:
    job = Job(Ladder())
    job.run(400)
    assert job.ladder.u > 1.05
    assert len(job.reasons) > 5 and all("; others now: " in why for why in job.reasons)


def test_a_violation_stops_the_others_first_and_blames_them_only_if_it_recovers() -> None:
    job = Job(Ladder())
    job.run(200)
    rung = job.ladder.u
    job.until("verify", 0.2)
    assert job.ladder.rates == STOPPED
    job.until("run")
    assert 1 <= job.ladder.u < rung
    assert job.ladder.too_much == rung


def test_a_job_that_grew_slower_by_itself_gets_a_new_baseline_and_others_their_rung() -> None:
    job = Job(Ladder())
    job.run(200)
    rung = job.ladder.u
    job.alone_s *= 1.5
    job.until("verify")
    job.until("baseline")
    job.until("run")
    assert job.ladder.baseline.mean_s == pytest.approx(1.5 * ALONE_S, rel=0.01)
    assert job.ladder.u == pytest.approx(rung)
    assert job.ladder.too_much is None


def test_a_job_that_grew_faster_by_itself_is_noticed_too() -> None:
    job = Job(Ladder())
    job.run(100)
    job.alone_s *= 0.6
    job.until("verify")
    job.until("baseline")
    job.until("run")
    assert job.ladder.baseline.mean_s == pytest.approx(0.6 * ALONE_S, rel=0.01)


def test_what_was_too_much_is_approached_and_not_crossed_again_soon() -> None:
    job = Job(Ladder())
    job.run(400, harm_above=0.8)
    assert job.ladder.too_much is not None
    for _ in range(100):
        job.run(1, harm_above=0.8)
        assert job.ladder.u <= 0.85
        assert job.ladder.u > 0.4 or job.ladder.phase != "run"
    job.until("run")


def test_nobody_is_blamed_for_a_job_that_is_faster_than_its_baseline() -> None:
    job = Job(Ladder())
    job.run(40)
    baseline = job.ladder.baseline
    job.ladder.baseline = StepSamples(baseline.count, baseline.mean_s * 1.07, baseline.squares)  # it came out too long
    job.until("verify")
    assert "has it changed?" in job.reasons[-1]
    job.until("run")
    assert job.ladder.too_much is None


def test_three_far_too_long_mini_batches_in_a_row_are_enough() -> None:
    """Reference: §3.3: with unstable performance, a pessimistic strategy."""
    job = Job(Ladder())
    job.run(60)
    assert phase(job) == "run"
    for _ in range(4):  # the first may have begun under other limits
        job.step(1.0)
    assert phase(job) == "verify"


def test_one_checkpoint_of_a_minute_changes_nothing() -> None:
    job = Job(Ladder())
    job.run(100)
    before = job.ladder.u
    job.step(2000.0)
    job.run(60)
    assert job.ladder.u >= before or "whose fault" not in "".join(job.reasons[-3:])
    assert job.ladder.baseline.mean_s == pytest.approx(ALONE_S, rel=0.02)


def test_a_job_that_is_away_leaves_everything_to_the_others_until_it_is_back() -> None:
    """Reference: figure 12, the decoding phase."""
    job = Job(Ladder())
    job.run(200)
    rung, busy = job.ladder.u, job.ladder.rates.busy
    assert job.ladder.passed(job.now_s + 0.1, busy=False) is None
    assert job.ladder.passed(job.now_s + 5, busy=True) is None
    assert "idle" in (job.ladder.passed(job.now_s + 5, busy=False) or "")
    assert phase(job) == "idle" and job.ladder.rates.busy == busy
    job.now_s += 5
    job.step()
    assert phase(job) == "run" and job.ladder.u == rung


def test_a_job_that_goes_away_while_it_is_measured_does_not_stop_the_others() -> None:
    job = Job(Ladder())
    job.run(3)
    assert job.ladder.passed(job.now_s + 5, busy=False) is not None
    assert job.ladder.rates.idle == 1 and job.ladder.rates.busy == 0
    job.step()
    assert job.ladder.phase == "baseline"


def test_an_old_baseline_is_taken_again_without_blame() -> None:
    job = Job(Ladder())
    job.run(30)
    job.ladder.quiet = 39
    job.until("verify")
    rung = job.ladder.resume_u
    job.until("run")
    assert job.ladder.u == rung and job.ladder.too_much is None
    assert job.ladder.baseline.count > 24


def test_without_an_idle_flag_the_ladder_is_a_throttle() -> None:
    job = Job(Ladder(flag=False))
    job.run(300)
    rates = job.ladder.rates
    assert rates.idle == rates.busy > 0
    assert job.ladder.passed(job.now_s + 50, busy=False) is None


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("step"), st.floats(1e-4, 50), st.floats(0, 1)),
            st.tuples(st.just("pass"), st.floats(0, 100), st.booleans()),
            st.tuples(st.just("restart"), st.just(0.0), st.just(0.0)),
        ),
        max_size=200,
    ),
    st.booleans(),
)
def test_whatever_a_job_does_the_rates_are_shares_and_every_change_has_a_reason(
    events: list[tuple[str, float, float]], flag: bool
) -> None:
    ladder, now_s = Ladder(flag=flag), 0.0
    for kind, number, more in events:
        before = (ladder.phase, ladder.u)
        now_s += number
        if kind == "step":
            why = ladder.stepped(number, number * more, now_s)
        elif kind == "pass":
            why = ladder.passed(now_s, bool(more))
        else:
            why = ladder.restart("it changed")
        ladder.check()
        assert (ladder.phase, ladder.u) == before or why


# ---- the others ----


def test_idle_phases_that_vanish_do_not_change_the_rates_for_ever() -> None:
    """The mean of idle phases halves every seven mini-batches and is never nothing; each change is a page for ranks to
    read."""
    ladder = Ladder()
    ladder.stepped(0.01, 0.005, 0.0)
    ladder.phase, ladder.u = "run", 0.5
    told = []
    for at in range(1, 400):
        ladder.stepped(0.01, 0.0, at * 0.01)
        ladder.phase, ladder.u = "run", 0.5
        told.append(ladder.rates)
    assert len(set(told[100:])) == 1 and told[-1].head_s == 0 and len(set(told[:50])) > 40


def test_naive_packing_never_limits_anything() -> None:
    assert Naive().rates == FREE
    assert Naive().stepped(1, 0, 1) is None and Naive().passed(1, True) is None


def test_a_throttle_measures_alone_first_and_keeps_that_baseline_for_ever() -> None:
    throttle = Throttle(Aimd())
    for step in range(32):
        assert throttle.rates == STOPPED
        throttle.stepped(0.02, 0.01, step)
    for step in range(100):
        throttle.stepped(0.02, 0.01, step)
    assert throttle.rates.idle == throttle.rates.busy == pytest.approx(0.1)
    for step in range(1000):
        throttle.stepped(0.03, 0.01, step)  # it has changed by itself; the throttle will never know
    assert throttle.rates.busy < 0.001


def test_tgs_decides_by_the_clock() -> None:
    throttle = Throttle(Tgs(), TOLERANCE, ticks=True)
    for step in range(40):
        throttle.stepped(0.02, 0.01, step)
    before = throttle.rates.busy
    assert throttle.passed(1.0, True) is not None
    assert throttle.rates.busy == pytest.approx(1.5 * before)


def test_the_spread_ladder_differs_below_one_only() -> None:
    job = Job(SpreadLadder())
    job.until("run")
    assert job.ladder.rates.idle == 0.25 and job.ladder.rates.head_s > 1
    job.run(300)
    assert job.ladder.u > 1 and job.ladder.rates.idle == 1


def test_busy_time_is_not_shared_on_a_baseline_that_is_not_known_well() -> None:
    job = Job(Ladder())
    for _ in range(3000):
        job.rng = random.Random(job.rng.random())
        step_s = ALONE_S * job.rng.uniform(0.2, 1.8)
        job.now_s += step_s
        job.ladder.stepped(step_s, IDLE_S, job.now_s)
        job.ladder.check()
        if job.ladder.u > 1:
            baseline = job.ladder.baseline
            assert baseline.error_s < TOLERANCE / 3 * baseline.mean_s
    assert job.ladder.baseline.count >= 64


def phase_of(ladder: Ladder) -> str:
    return ladder.phase


def test_a_rung_is_climbed_only_while_somebody_computes_under_it() -> None:
    """Otherwise a job that comes later would have what did no harm while no job was there."""
    ladder, now_s, rungs = Ladder(), 0.0, []
    for used in (False, True, False):
        for _ in range(2000):
            now_s += 0.02
            ladder.stepped(0.02, 0.01, now_s, used=used)
        rungs.append(ladder.resume_u if phase_of(ladder) == "verify" else ladder.u)
    assert rungs[0] == U_START and rungs[1] > 1 and rungs[2] == rungs[1]


def test_a_job_is_not_measured_alone_while_one_beside_it_has_not_answered_yet() -> None:
    """A job is slowed by another that starts: as a baseline that would excuse all later harm."""
    ladder, now_s = Ladder(), 0.0
    for _ in range(500):
        now_s += 0.028
        ladder.stepped(0.028, 0.0, now_s, held=False)
    assert phase_of(ladder) == "baseline" and not ladder.baseline.count and not ladder.window.count
    for _ in range(500):
        now_s += 0.02
        ladder.stepped(0.02, 0.0, now_s)
        if phase_of(ladder) == "run":
            break
    assert phase_of(ladder) == "run" and 0.0199 < ladder.baseline.mean_s < 0.0201
    for _ in range(500):
        now_s += 0.028
        ladder.stepped(0.028, 0.0, now_s, held=False)
    assert phase_of(ladder) == "verify", "what it suffers counts from the start, and nobody is acquitted"
    assert 0.0199 < ladder.baseline.mean_s < 0.0201
