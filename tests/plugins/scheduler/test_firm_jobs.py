"""A stop loses what a job has not saved: who is stopped for it, and who is not (`machine/leader/firm_jobs.py`)."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.ids import JobId
from plugins.facts import SavedAt
from plugins.scheduler.machine.leader.admission import taken_back
from plugins.scheduler.machine.leader.firm_jobs import FirmJobs, JobRun, is_spent
from plugins.scheduler.messages.commands import Attained, CancelAsked, JobUse, TakenBack
from plugins.scheduler.policy import explain
from plugins.scheduler.policy.order import STOP_PART, stoppable_for
from plugins.scheduler.policy.rules import OrderRules
from plugins.scheduler.service.views import QueueSnapshot
from sim.jobs.engine import RUN, Engine, SimJob
from tests.plugins.scheduler.little import Little


class Watched(Engine):
    """The engine, which asserts at every stop that it costs little, or that stops had not lost too often before."""

    lost = 0

    def _decide(self) -> None:
        self.lost = 0 if self.losses is None else self.losses.lost
        super()._decide()

    def _preempt(self, job: int, preempt_s: int) -> None:
        assert self.losses is not None and self.rules.unsaved_stops is not None
        held_s, saved_s = self.now - self.losses.since_s[job], self.losses.saved_s[job]
        lost_s = self.losses.lost_s(job) if self.state[job] == RUN else 0
        if saved_s is None:
            assert self.lost < self.rules.unsaved_stops
        else:
            cost_s = lost_s + self.rules.preempt_s + self.rules.restore_s
            assert STOP_PART * cost_s <= held_s, f"{cost_s} s for {held_s} s"
        super()._preempt(job, preempt_s)


@given(
    st.lists(st.tuples(st.integers(0, 90), st.sampled_from((1, 1, 2, 4)), st.integers(1, 90)), min_size=1, max_size=25),
    st.sampled_from((0, 3, 10, 25)),
    st.integers(0, 3),
    st.sampled_from((0, 1)),
)
def test_no_stop_costs_more_than_a_tenth_of_what_the_job_has_run(
    drawn: list[tuple[int, int, int]], every_s: int, unsaved_stops: int, stop_s: int
) -> None:
    jobs = [SimJob(at, *each) for at, each in enumerate(sorted(drawn))]
    rules = OrderRules(
        thresholds_gpu_s=(8, 64),
        checkpoint_every_s=every_s,
        unsaved_stops=unsaved_stops,
        preempt_s=stop_s,
        restore_s=stop_s,
        narrow_first=True,
    )
    out = Watched(jobs, 4, rules).run()
    assert all(end >= job.submit_s + job.duration_s for job, end in zip(jobs, out.end_s, strict=True))


def test_for_how_long_a_job_may_be_stopped() -> None:
    assert stoppable_for(599.0, 0.0, 60.0) == -1 and stoppable_for(600.0, 0.0, 60.0) == 0
    assert stoppable_for(1500.0, 0.0, 60.0) == 100, "100 s later it holds 1,600 s and loses 160"
    assert stoppable_for(6000.0, 541.0, 60.0) == -1


def test_a_job_is_firm_until_it_saves_and_again_later() -> None:
    jobs = FirmJobs(3)
    assert not jobs.put(1, JobRun(0.0, None, False, 60.0), 0.0) and jobs.put(1, JobRun(0.0, None, True, 60.0), 100.0)
    assert not jobs.put(1, JobRun(0.0, 1500.0, True, 60.0), 1500.0) and jobs.next_s() == 1601.0
    assert not jobs.closed(1600.9) and jobs.closed(1601.0) == [1] and jobs.firm == {1}
    assert jobs.put(2, JobRun(1500.0, 1500.0, False, 60.0), 1501.0), "it has hardly begun"
    jobs.drop(1)
    assert jobs.firm == {2} and not FirmJobs(None).put(2, JobRun(1500.0, 1500.0, False, 60.0), 1501.0)
    assert jobs.put(3, JobRun(0.0, 1500.0, False, 151.0), 1500.0), "what its restart took is measured"


def two_jobs(**settings: Any) -> tuple[Little, Any]:
    """A GPU whose job has sunk to the second queue."""
    little = Little([1], {}, **settings)
    first = little.submit(1, "t")
    little.settle()
    little.serve(little.queue.jobs[first], 200.0)
    return little, first


@pytest.mark.parametrize("saves", ["never", "when it is told to end"])
def test_the_leader_goes_by_what_it_heard_of_checkpoints(saves: str) -> None:
    little, first = two_jobs(unsaved_stops=1, restart_s=0.5)
    stops = 0
    for step in (1, 2):
        second = little.submit(1, "t")
        said = little.look()
        stopped = any(isinstance(command, TakenBack) and command.job == first for command in said)
        stops += stopped
        if saves == "when it is told to end" and stopped:
            told = {first: SavedAt(step, 1.0, "x")}
            little.say(Attained(wall_s=1.0, host=next(iter(little.totals)), service_gpu_s={}, saved=told))
        little.settle()
        (runs,) = little.jobs("running")
        assert runs.id == (second if stopped else first)
        if stopped:
            little.end(runs)
            little.settle()
    job = little.queue.jobs[first]
    assert stops == (2 if saves == "when it is told to end" else 1)
    assert is_spent(job, 1) == (saves == "never") and job.measured.saves_at_stop == (stops == 2)
    why = QueueSnapshot(little.queue, little.settings, little.totals).reason(job)
    assert (explain.not_stopped_again(1) in why) == (saves == "never")


def test_where_stops_lose_a_tenants_jobs_are_not_stopped_before_one_saves() -> None:
    little, first = two_jobs(unsaved_stops=1, restart_s=0.5)
    host = next(iter(little.totals))

    def is_stopped(job: JobId, saves: bool = False) -> bool:
        """Whether this job, which runs, is stopped for a new one; then all end. `saves`: it saves meanwhile."""
        little.submit(1, "v")
        stopped = any(isinstance(command, TakenBack) for command in little.look())
        if saves:
            little.say(Attained(wall_s=1.0, host=host, service_gpu_s={}, saved={job: SavedAt(1, 1.0, "x")}))
        while little.queue.live():
            little.settle()
            little.end(little.jobs("running")[0])
        return stopped

    def sunk(tenant: str) -> JobId:
        job = little.submit(1, tenant)
        little.settle()
        little.serve(little.queue.jobs[job], 200.0)
        return job

    assert is_stopped(first), "nobody knows yet"
    second = sunk("t")
    why = QueueSnapshot(little.queue, little.settings, little.totals).reason(little.queue.jobs[second])
    assert explain.not_stopped_for_tenant("t", second) in why
    assert not is_stopped(second) and is_stopped(sunk("u"), saves=True)
    told = sunk("t")
    little.say(CancelAsked(wall_s=1.0, job=told))
    little.say(Attained(wall_s=1.0, host=host, service_gpu_s={}, saved={told: SavedAt(1, 1.0, "x")}))
    little.end(little.queue.jobs[told])
    assert is_stopped(sunk("t")), "one of the tenant's jobs saved when it was told to end"
    assert not is_stopped(sunk("t")), "and this one had not"
    assert is_stopped(sunk("u")) and is_stopped(sunk("u")) and not is_stopped(sunk("u")), "it makes good for one stop"


def test_a_checkpoint_from_before_a_stop_that_is_told_late_is_none_of_the_stop() -> None:
    little, first = two_jobs()
    little.submit(1, "t")
    assert any(isinstance(command, TakenBack) for command in little.look())
    little.now_s += 3.0
    job, host = little.queue.jobs[first], next(iter(little.totals))
    for step, age_s in enumerate((8.0, 1.0), 1):
        told = {first: SavedAt(step, 100.0 - age_s, "x")}
        little.say(Attained(wall_s=100.0, host=host, service_gpu_s={}, saved=told))
        assert job.state == "stopping" and job.measured.saves_at_stop == (age_s < 3.0)


def test_a_stop_that_is_not_over_has_not_lost_yet() -> None:
    little = Little([2], {}, unsaved_stops=1)
    for job in [little.submit(1, "t") for _ in range(2)]:
        little.settle()
        little.serve(little.queue.jobs[job], 200.0)
    for _ in range(2):
        little.submit(1, "v")
        assert any(isinstance(command, TakenBack) for command in little.look()), "it may save yet"


def test_what_a_restart_takes_is_measured_from_the_stop_to_the_first_step() -> None:
    little = Little([2], {}, restart_s=60.0)
    job = little.queue.jobs[little.submit(2, "t")]
    host = next(iter(little.totals))
    for start, (stop_s, unserved_s, starting_gpu_s) in enumerate(((7.0, 1.0, 2.0), (9.0, 4.0, 12.0))):
        little.settle()
        little.now_s += unserved_s + 100.0
        little.serve(job, 200.0)
        use = JobUse(job.grant.epoch, starting_gpu_s=starting_gpu_s)
        little.say(Attained(wall_s=1.0, host=host, service_gpu_s={}, uses={job.id: use}))
        assert job.bill.restart_s is None, "nothing was started again yet" if not start else "the start is not over"
        little.say(taken_back(job, "preempted", "for another", 1.0))
        little.now_s += stop_s
        little.end(job, -15)
    assert job.bill.restart_s is not None
    settled_s = job.bill.restart_s - 7.0 - 4.0 - 12.0 / 2  # what `settle` waited between placing and the look after it
    assert 0.0 <= settled_s <= 1.0 and job.bill.stopped_s == 9.0
    assert little.copy.jobs[job.id].bill == job.bill
    little.settle()
    assert little.leader.stops.runs[job.number].restart_s == job.bill.restart_s
