"""What is noticed of the jobs on a GPU: which are steady, away, stuck, short of memory; and how the story tells it."""

from types import SimpleNamespace
from typing import Any

import pytest

from covey.core.events import LogEvent
from covey.core.ids import JobId
from covey.core.units import GIB
from covey.ports.devices import DeviceHealth, DeviceSample
from plugins.sharing.machine.events import Freed, RankEnded, Retagged, TimePassed
from plugins.sharing.service.watch import DeviceWatch
from tests.plugins.sharing.gpu_rack import Rack, said, state


async def test_the_use_of_a_device_is_not_known_while_its_driver_does_not_say() -> None:
    samples = [DeviceSample(0, None), DeviceSample(0, 0.5), DeviceSample(0, None)]

    class Says:
        async def sample(self, uuid: str) -> DeviceSample:
            return samples.pop(0)

        async def health(self, uuid: str) -> DeviceHealth:
            return DeviceHealth()

    now_s = [0.0]
    env: Any = SimpleNamespace(
        probes=SimpleNamespace(devices=Says()), clock=SimpleNamespace(now_s=lambda: now_s[0]), log=None
    )
    watch = DeviceWatch(env)
    assert watch.utilization("GPU-1") is None
    for used in (None, 0.5):
        await watch.look("GPU-1")
        assert watch.utilization("GPU-1") == watch.use("GPU-1", 0, "").utilization == used
    now_s[0] = 60.0
    await watch.look("GPU-1")
    assert watch.utilization("GPU-1") is None, "what it was a minute ago says nothing"


def starting() -> Rack:
    """A GPU with a guaranteed job alone on the device, for no time yet."""
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
    assert reasons == "g does not run steadily after 120 s: measured as it is"
    assert "no mini-batch for" in said(rack.tell(TimePassed(busy=False), 20)), "it is watched from its last mini-batch"
    assert state(rack) == "idle"


def test_a_job_that_waits_for_memory_is_not_watched_yet() -> None:
    rack = Rack()
    rack.now_s = 1000.0
    rack.hold("o", 30)
    rack.arrive("g", "guaranteed", 8)
    rack.tell(TimePassed(busy=True), 1)
    rack.step("o", peak=24 * GIB)
    assert state(rack) == "init"


def test_a_job_stuck_before_it_ever_ran_steadily_begins_anew_when_it_moves_again() -> None:
    rack = starting()
    rack.step("g", peak=8 * GIB)
    assert said(rack.tell(TimePassed(busy=True), 29)) == "" and state(rack) == "init"
    reasons = said(rack.tell(TimePassed(busy=True), 2))
    assert state(rack) == "stuck" and reasons == "g is busy but has not finished a mini-batch for 31 s: is it stuck?"
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


def test_a_split_is_judged_only_while_all_jobs_go_by_it() -> None:
    """Introspective scaling: what is measured must be what was tried. Reference: §3.3 and figure 10."""
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
    rack.hold("o", 20)
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


def test_a_job_whose_mini_batches_are_uneven_for_good_is_taken_as_it_is() -> None:
    rack = Rack()
    rack.arrive("g", "guaranteed", 8)
    for _ in range(256):
        assert state(rack) == "init"
        rack.step("g", step_s=0.01)
        rack.step("g", step_s=0.03)
    assert state(rack) == "baseline"


def test_a_job_that_is_away_frees_the_others_and_its_return_is_noticed() -> None:
    """Reference: figure 12."""
    rack = Rack()
    rack.steady()
    rack.tell(TimePassed(busy=False), 5)
    assert state(rack) == "idle"
    assert rack.limits["o"].idle == 1 and rack.limits["o"].head_s is None
    rack.step("g", peak=8 * GIB)
    assert state(rack) == "run"


def test_a_long_first_mini_batch_keeps_the_others_stopped_for_the_next_dozens_only() -> None:
    rack = Rack()
    rack.hold("o", 8)
    rack.arrive("g", "guaranteed", 8)
    rack.step("o")
    rack.step("g", step_s=0.5)
    rack.steps(31, "g", step_s=0.001)
    assert state(rack) == "init" and rack.stopped("o")
    rack.steps(10, "g", step_s=0.001)
    assert state(rack) == "baseline"
