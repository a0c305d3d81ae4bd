"""What is noticed of the jobs on a GPU: who is steady, away, stuck, short of memory; and how the story tells it."""

from typing import Any

import pytest

from covey.core import JobId, LogEvent
from covey.units import GIB
from plugins.sharing.machine.events import Freed, RankEnded, Retagged, TimePassed
from tests.plugins.sharing.gpu_rack import Rack, state


def said(actions: list[Any]) -> str:
    return " | ".join(each.reason for each in actions if isinstance(each, LogEvent))


def starting() -> Rack:
    """A guaranteed job alone on the device, for no time yet."""
    rack = Rack()
    rack.now_s = 1000.0
    rack.arrive("g", "guaranteed", 8)
    assert state(rack) == "init"
    return rack


def test_a_job_that_runs_steadily_is_measured_alone_from_then_on() -> None:
    rack = starting()
    reasons = ""
    while state(rack) == "init":
        reasons = said(rack.step("g", peak=8 * GIB))
    assert state(rack) == "baseline"
    assert reasons.startswith("g runs steadily: ") and reasons.endswith("mini-batches alone")


def test_a_job_that_is_unsteady_is_taken_as_it_is_after_two_minutes_and_not_before() -> None:
    rack = starting()
    at, reasons = 0, ""
    while state(rack) == "init":
        at += 1
        rack.step("g", 0.1 if at % 2 else 0.9, peak=8 * GIB)
        reasons = said(rack.tell(TimePassed(busy=True)))
    assert state(rack) == "baseline" and 1120 < rack.now_s < 1122
    assert reasons == "g does not run steadily after 120 s: taken as it is"
    assert "no mini-batch for" in said(rack.tell(TimePassed(busy=False), 20)), "it is watched from its last mini-batch"
    assert state(rack) == "idle"


def test_a_job_that_waits_for_memory_is_not_watched_yet() -> None:
    rack = Rack()
    rack.now_s = 1000.0
    rack.arrive("o", "opportunistic", 30)
    rack.step("o", peak=30 * GIB)
    rack.arrive("g", "guaranteed", 8)
    rack.tell(TimePassed(busy=True), 1)
    rack.step("o", peak=24 * GIB)
    assert state(rack) == "init"


def test_a_job_stuck_before_it_ever_ran_steadily_begins_anew_when_it_moves_again() -> None:
    rack = starting()
    rack.step("g", peak=8 * GIB)
    assert said(rack.tell(TimePassed(busy=True), 29)) == "" and state(rack) == "init"
    reasons = said(rack.tell(TimePassed(busy=True), 2))
    assert state(rack) == "stuck" and reasons == "g is busy but has finished no mini-batch for 31 s: is it stuck?"
    assert said(rack.tell(TimePassed(busy=True), 100)) == "", "told once"
    assert said(rack.step("g", peak=8 * GIB)) == "g finishes mini-batches again"
    assert state(rack) == "init", "two minutes have passed, but it was stuck and is not taken as it is"


def test_a_job_that_is_silent_on_an_idle_device_is_away_or_loading_but_not_stuck() -> None:
    """Reference: figure 12."""
    rack = starting()
    rack.step("g", peak=8 * GIB)
    rack.tell(TimePassed(busy=False), 60)
    assert state(rack) == "init", "it may read its data first"
    rack = Rack()
    rack.steady()
    assert "no mini-batch for 40.0 s and the device idle" in said(rack.tell(TimePassed(busy=False), 40))
    assert state(rack) == "idle"


def test_a_job_may_lack_memory_before_it_runs_steadily() -> None:
    """Reference: §3.3 and figure 7a."""
    rack = Rack()
    rack.arrive("o", "opportunistic", 20)
    rack.step("o", peak=20 * GIB)
    rack.arrive("g", "guaranteed", 8)
    rack.step("o", peak=20 * GIB)
    assert state(rack) == "init"
    assert "g placed 8 GiB in host memory: the others stop and give way" in said(
        rack.step("g", peak=8 * GIB, spill=8 * GIB)
    )
    assert state(rack) == "surge"
    assert said(rack.step("g", peak=8 * GIB, spill=8 * GIB)) == "", "told once"
    rack.tell(TimePassed(busy=True), 125)
    assert state(rack) == "stuck", "but not taken as it is"
    rack.step("g", peak=8 * GIB, spill=8 * GIB)
    assert state(rack) == "surge"
    rack.step("o", peak=16 * GIB)
    assert said(rack.step("g", peak=16 * GIB)) == "g has all its memory on the device again"
    assert state(rack) == "init"


@pytest.mark.parametrize("trouble", ["surge", "stuck"])
def test_with_a_job_in_trouble_its_trouble_ends(trouble: str) -> None:
    """The next guaranteed job is measured anew, and the others run freely until it comes."""
    rack = Rack()
    rack.steady()
    if trouble == "surge":
        rack.step("g", peak=8 * GIB, spill=8 * GIB)
    else:
        rack.tell(TimePassed(busy=True), 40)
    assert state(rack) == trouble
    rack.tell(RankEnded(JobId("g")))
    assert state(rack) == "alone" and not rack.stopped("o")
    rack.tell(Freed(JobId("g")))
    rack.arrive("h", "guaranteed", 8)
    rack.step("o", peak=20 * GIB)
    rack.step("h", peak=8 * GIB)
    assert state(rack) == "init" and rack.stopped("o")


def test_a_job_that_ended_is_downgraded_and_the_one_that_runs_is_watched_on() -> None:
    rack = Rack()
    rack.steady()
    rack.tell(RankEnded(JobId("g")))
    rack.tell(Retagged(JobId("o"), "guaranteed", 1))
    while state(rack) == "init":
        rack.step("o", peak=8 * GIB)
    ladder = rack.gpu.ladder
    assert ladder is not None
    rack.tell(Retagged(JobId("g"), "opportunistic", 1))
    assert rack.gpu.ladder is ladder and state(rack) == "baseline"


def test_the_story_of_a_surge_says_what_failed_and_how_it_ended() -> None:
    """Reference: §3.3 and figure 7a."""
    rack = Rack()
    rack.steady()
    assert said(rack.step("g", peak=8 * GIB, retries=3)) == "g failed to allocate 3 times: the others stop and give way"
    assert "all its memory" in said(rack.step("g", peak=8 * GIB)) and state(rack) == "baseline", "it lacks nothing now"
    rack.step("g", peak=8 * GIB, spill=40 * GIB)
    rack.step("o", peak=0)
    assert said(rack.step("g", peak=32 * GIB, spill=16 * GIB)).startswith("g wants more than the device has")


def test_a_split_is_judged_only_while_all_jobs_go_by_it() -> None:
    """Introspective: what is measured must be what was tried. Reference: §3.3 and figure 10."""
    rack = Rack(gib=24)
    for job in ("a", "b"):
        rack.arrive(job, "opportunistic", 16)
    rack.steps(3, "a", "b", peak=0, stable=0)
    while "trial" not in [each.event for each in rack.out if isinstance(each, LogEvent)]:
        rack.steps(1, "a", "b", peak=0, stable=0)
    assert [rack.gpu.members[JobId(job)].steps.count for job in ("a", "b")] == [0, 0]
    rack.deaf.add("b")
    rack.out.clear()
    rack.steps(30, "a", "b", peak=0, stable=0)
    assert not any(isinstance(each, LogEvent) for each in rack.out), "b has not applied its limit"
    rack.deaf.clear()
    rack.steps(8, "a", "b", peak=0, stable=0)
    assert any(isinstance(each, LogEvent) and each.event == "trial" for each in rack.out)
