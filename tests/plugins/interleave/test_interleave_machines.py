"""Groups and turns, as stories and under random events."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from covey.core import HostId, JobId
from plugins.interleave.machine.groups import Groups, HostsChanged, JobEnded, JobSubmitted, SetGroup, SubtaskTimed
from plugins.interleave.machine.turns import Asked, Finished, OrderChanged, Run, Turns

A, B, C = JobId("a"), JobId("b"), JobId("c")
HOSTS = [HostId(f"h{n}") for n in range(12)]


def profiled(of: Groups, job: JobId, work_s: float, net_s: float) -> None:
    for _ in range(3):
        of.handle(SubtaskTimed(job, "comp", work_s / 4, 4), 0.0)
        of.handle(SubtaskTimed(job, "comm", net_s, 4), 0.0)
        of.check()


def test_one_job_computes_while_two_communicate() -> None:
    """Reference: §4.3.1: one CPU subtask, a primary and a secondary network subtask."""
    turns = Turns([A, B, C])
    assert turns.handle(Asked(A, "comm"), 0.0) == [Run(A, "primary")]
    assert turns.handle(Asked(B, "comm"), 0.0) == [Run(B, "secondary")]
    assert turns.handle(Asked(C, "comp"), 0.0) == [Run(C, "comp")]
    assert turns.handle(Finished(A), 0.0) == [Run(B, "primary")]
    assert turns.handle(Asked(A, "comp"), 0.0) == []
    assert turns.handle(Finished(C), 0.0) == [Run(A, "comp")]


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_turns_are_kept_whatever_is_asked(seed: int) -> None:
    rng = random.Random(seed)
    jobs = [JobId(f"j{n}") for n in range(5)]
    turns = Turns(jobs)
    for _ in range(80):
        job = rng.choice(jobs)
        events: list[Asked | Finished] = [Asked(job, "comp"), Asked(job, "comm"), Finished(job), Finished(job)]
        event = rng.choice(events)
        turns.handle(event if rng.random() < 0.95 else OrderChanged(tuple(rng.sample(jobs, 3))), 0.0)
        turns.check()


def test_jobs_are_tried_on_few_hosts_and_then_arranged_together() -> None:
    """Reference: §4.3.2, profiling."""
    of = Groups(HOSTS)
    for job in (A, B, C):
        of.handle(JobSubmitted(job), 0.0)
        of.check()
    assert [len(group.hosts) for group in of.groups.values()] == [4, 4, 4]
    profiled(of, A, 120, 10)
    profiled(of, B, 120, 10)
    assert not of.arranged
    profiled(of, C, 240, 20)
    assert of.arranged
    assert sum(len(group.hosts) for group in of.groups.values()) == 12


def test_hosts_of_a_group_whose_last_job_ended_go_to_others() -> None:
    of = Groups(HOSTS)
    for job in (A, B):
        of.handle(JobSubmitted(job), 0.0)
        profiled(of, job, 300, 25)
    for job in (A, B):
        actions = of.handle(JobEnded(job), 0.0)
        of.check()
        assert any(isinstance(each, SetGroup) for each in actions)
    assert of.groups == {}


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_no_host_is_in_two_groups_whatever_happens_and_epochs_only_grow(seed: int) -> None:
    rng = random.Random(seed)
    of = Groups(HOSTS, timings_min=1)
    names = [JobId(f"j{n}") for n in range(8)]
    epochs: dict[int, int] = {}
    for at in range(50):
        job = rng.choice(names)
        kind = rng.randrange(10)
        if kind < 2:
            found = of.handle(JobSubmitted(job), float(at))
        elif kind == 2:
            found = of.handle(JobEnded(job), float(at))
        elif kind == 3:
            found = of.handle(HostsChanged(tuple(rng.sample(HOSTS, rng.randrange(13)))), float(at))
        else:
            found = of.handle(SubtaskTimed(job, rng.choice(["comp", "comm"]), rng.uniform(1, 60), 4), float(at))
        of.check()
        for each in found:
            if isinstance(each, SetGroup):
                assert each.epoch > epochs.get(each.group, 0)
                epochs[each.group] = each.epoch
