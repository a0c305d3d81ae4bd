"""Steps as ranks report them: what of them people and the log are told."""

import msgspec
import pytest

from agent.jobs.socket.jobs_socket import BOUNDARY_MAX, PROBLEM_MAX, SECONDS_MAX, STEP_MAX
from covey.core.ids import HostId, JobId
from plugins.facts import JobHooked, StepTimed, StepTiming
from plugins.scheduler.messages.commands import Attained, Command, RanksReported
from plugins.scheduler.messages.wire import JobNowAnswer
from plugins.scheduler.service.ranks import step_times
from plugins.scheduler.service.ranks.step_times import STEPS_ENOUGH, StepTimes

J1 = JobId("j1")


def timed(step: int, step_s: float = 1.0, *, epoch: int = 1, rank: int = 0, memory: int = 0) -> StepTimed:
    return StepTimed(J1, epoch, rank, step, step_s, 0.0, step_s / 4, {}, step_s / 2, memory, "optimizer")


def test_medians_are_told_once_there_are_enough_steps() -> None:
    times = StepTimes()
    for step in range(STEPS_ENOUGH - 1):
        times.stepped(timed(step, 2.0, rank=step % 2, memory=100 + step % 2))
    assert times.of(J1, 1).timing() is None and times.news({J1: 1}) == {}
    times.stepped(timed(STEPS_ENOUGH - 1, 500.0))
    assert times.of(J1, 1).timing() == StepTiming(2.0, 1.0, 0.5, 101, "optimizer"), "one slow step is not the median"
    assert times.news({J1: 1})[J1].step == STEPS_ENOUGH - 1


def test_a_step_that_comes_late_is_not_the_newest() -> None:
    times = StepTimes()
    for step in (5, 3):
        times.stepped(msgspec.structs.replace(timed(step), metrics={"loss": float(step), f"m{step}": 1.0}))
    assert (times.of(J1, 1).step, times.of(J1, 1).metrics) == (5, {"loss": 5.0, "m5": 1.0, "m3": 1.0})


def test_a_later_start_begins_anew_and_one_that_is_over_is_forgotten() -> None:
    times = StepTimes()
    times.stepped(timed(9, epoch=1))
    times.hooked(JobHooked(J1, 2, 0, "torch 2.13.0", ""))
    times.hooked(JobHooked(J1, 2, 1, "", "covey-job is not installed"))
    assert times.newest_epoch(J1) == 2 and times.of(J1, 2).step is None
    assert times.of(J1, 2).hooked == {0: "torch 2.13.0", 1: "covey-job is not installed"}
    times.forget(J1, 2)
    assert times.newest_epoch(J1) == 1 and times.newest_epoch(JobId("j2")) == 0


def test_only_so_many_grants_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "JOBS_MAX", 3)
    times = StepTimes()
    for epoch in (1, 2, 3, 1, 4):
        times.stepped(timed(7, epoch=epoch))
    assert [times.of(J1, epoch).step for epoch in (1, 2, 3, 4)] == [7, None, 7, 7]


def test_the_largest_figures_that_a_script_may_say_pass_every_message() -> None:
    """Else the log would refuse the report of a rank's end, and the job would never end."""
    times = StepTimes()
    largest = StepTimed(
        J1, 1, 0, STEP_MAX, SECONDS_MAX, 0.0, SECONDS_MAX, {}, SECONDS_MAX, STEP_MAX, "b" * BOUNDARY_MAX
    )
    for _ in range(STEPS_ENOUGH):
        times.stepped(largest)
    times.hooked(JobHooked(J1, 1, 0, "", "p" * PROBLEM_MAX))
    steps, host = times.of(J1, 1), HostId("h1")
    ended = RanksReported(wall_s=0.0, job=J1, epoch=1, host=host, codes={}, step=steps.step, step_s=steps.step_s())
    attained = Attained(wall_s=0.0, host=host, service_gpu_s={}, steps=times.news({J1: 1}))
    for command in (ended, attained):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=Command) == command
    answer = JobNowAnswer(1, {}, steps.step, {}, timing=steps.timing(), hooked=steps.hooked)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=JobNowAnswer) == answer
