"""Groups and turns, as stories and under random events."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.core.ids import HostId, JobId
from covey.tensors.turns.rules import LAPS
from plugins.interleave.machine.timed import JobTimings
from plugins.interleave.machine.turns import Finished, OrderChanged, Run, TurnAsked, Turns
from plugins.interleave.policy import model
from plugins.interleave.policy.model import Group, JobProfile
from plugins.interleave.policy.rules import LEAN, OURS, PRINTED, GroupRules
from sim.groups.one_mind import (
    PATIENCE_S,
    GroupHostsChanged,
    Groups,
    JobEnded,
    JobSubmitted,
    Progressed,
    ReviewDue,
    SetGroup,
    Shared,
    SubtaskReported,
)
from tests.families import examples

A, B, C = JobId("a"), JobId("b"), JobId("c")
HOSTS = [HostId(f"h{n:02}") for n in range(12)]
HOURS_S = 5.5 * 3600
NAMES = [JobId(f"j{n}") for n in range(4)]


def profiled(of: Groups, job: JobId, work_s: float, net_s: float) -> None:
    for _ in range(3):
        of.handle(SubtaskReported(job, "comp", work_s / 4, 4), 0.0)
        of.handle(SubtaskReported(job, "comm", net_s, 4), 0.0)
        of.check()


def test_one_job_computes_while_two_communicate() -> None:
    """Reference: §4.3.1: one CPU subtask, a primary and a secondary network subtask."""
    turns = Turns([A, B, C])
    assert turns.handle(TurnAsked(A, "comm"), 0.0) == [Run(A, "primary")]
    assert turns.handle(TurnAsked(B, "comm"), 0.0) == [Run(B, "secondary")]
    assert turns.handle(TurnAsked(C, "comp"), 0.0) == [Run(C, "comp")]
    assert turns.handle(Finished(A), 0.0) == [Run(B, "primary")]
    assert turns.handle(TurnAsked(A, "comp"), 0.0) == []
    assert turns.handle(Finished(C), 0.0) == [Run(A, "comp")]


@settings(max_examples=examples(150), deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_turns_are_kept_whatever_is_asked(seed: int) -> None:
    rng = random.Random(seed)
    jobs = [JobId(f"j{n}") for n in range(5)]
    turns = Turns(jobs)
    for _ in range(80):
        job = rng.choice(jobs)
        events: list[TurnAsked | Finished] = [
            TurnAsked(job, "comp"),
            TurnAsked(job, "comm"),
            Finished(job),
            Finished(job),
        ]
        event = rng.choice(events)
        turns.handle(event if rng.random() < 0.95 else OrderChanged(tuple(rng.sample(jobs, 3))), 0.0)
        turns.check()


def test_jobs_are_tried_in_turns_and_then_arranged_together() -> None:
    """Reference: §4.3.2, profiling."""
    of = Groups(HOSTS)
    for job in (A, B, C):
        of.handle(JobSubmitted(job), 0.0)
        of.check()
    assert [len(group.hosts) for group in of.groups.values()] == [12], "too few hosts for two groups"
    profiled(of, A, 120, 10)
    profiled(of, B, 120, 10)
    assert not of.arranged
    profiled(of, C, 240, 20)
    assert of.arranged
    assert sum(len(group.hosts) for group in of.groups.values()) == 12


def test_many_hosts_try_jobs_out_in_several_groups() -> None:
    of = Groups([HostId(f"h{n:02}") for n in range(50)])
    for n in range(7):
        of.handle(JobSubmitted(JobId(f"j{n}")), 0.0)
        of.check()
    assert sorted(len(group.hosts) for group in of.groups.values()) == [16, 17, 17]
    assert sorted(len(group.jobs) for group in of.groups.values()) == [2, 2, 3]


def test_who_has_least_left_of_what_it_said_is_next() -> None:
    of = Groups(HOSTS[:1], timings_min=1, group_max=1)
    names = [JobId(f"j{n}") for n in range(8)]
    for n, job in enumerate(names):
        of.handle(JobSubmitted(job, 100 + n), 0.0)
    for job in names:
        profiled(of, job, 80, 20)
    assert of.waiting() == [job for job in names if job in of.waiting()], "the one that said least is first"
    for done in (90, 1):
        of.handle(Progressed(names[7], done), 1.0)
        assert of.waiting()[0] == names[7], "what is said late does not count back"


def waiting_on_one_host(manner: GroupRules = OURS) -> Groups:
    """Groups of four jobs of which one runs; they declare 400, 300, 200 and 100 iterations."""
    of = Groups(HOSTS[:1], manner, timings_min=1, group_max=1)
    for n, job in enumerate(NAMES):
        of.handle(JobSubmitted(job, 400 - 100 * n), 0.0)
    for job in NAMES:
        profiled(of, job, 80, 20)
    return of


def test_who_waited_for_hours_goes_before_all_others() -> None:
    of = waiting_on_one_host()
    of.handle(JobSubmitted(A, 5), HOURS_S)
    for need in ("comp", "comm"):
        of.handle(SubtaskReported(A, need, 20, 4), HOURS_S)
    assert of.waiting()[0] == A, "it has least left"
    of.handle(Progressed(A, 0), PATIENCE_S)
    assert of.waiting()[-1] == A, "all others have waited too long"


def test_as_printed_jobs_go_in_the_order_in_which_they_came() -> None:
    """Reference: Algorithm 1, lines 2 and 5."""
    of = waiting_on_one_host(PRINTED)
    assert of.waiting() == [job for job in NAMES if job in of.waiting()] and len(of.waiting()) == 3
    ours = waiting_on_one_host().waiting()
    assert ours == [job for job in reversed(NAMES) if job in ours]


def test_a_long_job_that_was_put_aside_is_brought_back_when_another_ends() -> None:
    """The job holds one host of twelve, where an iteration takes a minute and a half; alone it would take 35 s."""
    of = Groups(HOSTS, timings_min=1)
    for job, said in ((A, 1000), (B, 20), (C, 30)):
        of.handle(JobSubmitted(job, said), 0.0)
    for job in (A, B, C):
        profiled(of, job, 80, 10)
    of.groups = {1: Shared((A,), tuple(HOSTS[:1])), 2: Shared((B, C), tuple(HOSTS[1:]))}
    of.handle(JobEnded(B), 10.0)
    of.check()
    (its,) = [group for group in of.groups.values() if A in group.jobs]
    assert len(its.hosts) > 1


def two_groups(manner: GroupRules) -> Groups:
    """Groups with A alone on one host, where an iteration takes 90 s; B and C on eleven, in 20 s."""
    of = Groups(HOSTS, manner, timings_min=1)
    for job in (A, B, C):
        of.handle(JobSubmitted(job, 100), 0.0)
    for job in (A, B, C):
        profiled(of, job, 80, 10)
    of.groups = {1: Shared((A,), tuple(HOSTS[:1])), 2: Shared((B, C), tuple(HOSTS[1:]))}
    return of


def test_new_jobs_are_tried_out_where_turns_come_soonest_and_not_all_in_one_place() -> None:
    of = two_groups(OURS)
    found = []
    for n in range(4):
        job = JobId(f"new{n}")
        of.handle(JobSubmitted(job), 1.0)
        of.check()
        found.append(next(at for at, group in of.groups.items() if job in group.jobs))
    assert found == [2, 1, 2, 1]


def test_as_printed_new_jobs_are_tried_out_together_on_the_fewest_hosts() -> None:
    """Reference: §4.3.2: a group that profiles already, or that with the smallest number of machines."""
    of = two_groups(PRINTED)
    for n in range(3):
        of.handle(JobSubmitted(JobId(f"new{n}")), 1.0)
    assert [len(group.jobs) for _, group in sorted(of.groups.items())] == [4, 2]


def test_when_no_group_is_busier_with_a_new_job_all_are_regrouped_if_worth_it() -> None:
    """Two jobs keep the network of all hosts busy and processors three fifths of the time; a third in their group
    changes nothing, but in fewer hosts each all compute more. As printed it waits until something ends."""
    for manner, runs in ((OURS, True), (PRINTED, False)):
        of = Groups(HOSTS, manner, timings_min=1)
        for job in (A, B, C):
            of.handle(JobSubmitted(job, 1000), 0.0)
            if job == B:
                for known in (A, B):
                    profiled(of, known, 72, 10)
                of.groups = {1: Shared((A, B), tuple(HOSTS))}
        profiled(of, C, 72, 10)
        running = {job for group in of.groups.values() for job in group.jobs}
        assert {A, B} <= running and (C in running) == runs


def put_aside(manner: GroupRules = OURS) -> Groups:
    """Groups in which A, by far the longest, holds one host of twelve, where an iteration takes 90 s and alone 17; B
    and C have the rest."""
    of = two_groups(manner)
    of.arranged = True
    of.jobs[A].declared = 5000
    return of


def test_a_review_brings_back_who_would_be_left_over_at_the_end() -> None:
    of = put_aside()
    was = model.iteration_s([of.profile(A)], 1)
    actions = of.handle(ReviewDue(), 1800.0)
    of.check()
    (its,) = [group for group in of.groups.values() if A in group.jobs]
    assert model.iteration_s([of.profile(job) for job in its.jobs], len(its.hosts)) < was / 2
    assert any(isinstance(each, SetGroup) and A in each.jobs for each in actions)
    assert of.handle(ReviewDue(), 3600.0) == [], "nothing is better now"


def test_a_review_changes_nothing_as_printed_nor_while_a_job_is_tried_out() -> None:
    """Reference: §4.3.2: groups change when a job comes or ends."""
    assert put_aside(PRINTED).handle(ReviewDue(), 1800.0) == []
    of = put_aside()
    of.handle(JobSubmitted(JobId("new")), 1.0)
    assert of.handle(ReviewDue(), 1800.0) == []
    assert Groups(HOSTS).handle(ReviewDue(), 1800.0) == [], "nobody is there"


def test_jobs_that_need_no_time_at_all_keep_their_hosts_through_a_review() -> None:
    """No grouping of these jobs is worth anything, so none is better than the present one."""
    of = Groups(HOSTS, timings_min=1)
    for job in (A, B):
        of.handle(JobSubmitted(job, 10), 0.0)
    of.groups, of.arranged = {1: Shared((A, B), tuple(HOSTS))}, True
    for job in (A, B):
        of.jobs[job] = JobTimings(comp=1, comm=1)
    assert of.handle(ReviewDue(), 1800.0) == []
    of.check()


def test_plans_lean_to_computing_and_printed_ones_take_times_as_measured() -> None:
    assert two_groups(PRINTED).profile(A).net_s == pytest.approx(10)
    assert two_groups(OURS).profile(A).net_s == pytest.approx(10 * LEAN)
    assert [job.net_s for job in two_groups(OURS)._weighted().values()] == pytest.approx([10 * LEAN] * 3)
    assert two_groups(OURS).profile(A).work_s == pytest.approx(two_groups(PRINTED).profile(A).work_s)


def test_as_printed_nobody_bonuses() -> None:
    """Reference: Algorithm 1: a grouping is as good as its hosts are busy."""
    for manner, expected in ((PRINTED, {0.0}), (OURS, None)):
        of = waiting_on_one_host(manner)
        bonuses = {profile.bonus for profile in of._weighted().values()}
        assert bonuses == expected if expected else min(bonuses) > 0


def test_a_job_keeps_the_hosts_that_it_has() -> None:
    """A had the last four hosts and gets eight: its own, and four of those that B gives back."""
    of = Groups(HOSTS)
    of.groups = {1: Shared((B,), tuple(HOSTS[:8])), 2: Shared((A,), tuple(HOSTS[8:]))}
    of.jobs = {A: JobTimings(), B: JobTimings()}
    of._replace([1, 2], [Group((JobProfile(A, 1, 1),), 8), Group((JobProfile(B, 1, 1),), 4)], 1.0)
    of.check()
    now = {job: set(group.hosts) for group in of.groups.values() for job in group.jobs}
    assert now[A] > set(HOSTS[8:]) and now[B] < set(HOSTS[:8])


def test_nobody_is_passed_over_for_ever() -> None:
    """The first job of the plan asks again and again; the last has its turn after `LAPS` others."""
    turns = Turns([A, B, C])
    turns.handle(TurnAsked(A, "comp"), 0.0)
    turns.handle(TurnAsked(C, "comp"), 0.0)
    turns.handle(TurnAsked(B, "comp"), 0.0)
    began = []
    for _ in range(3 * LAPS):
        holder = turns.holds["comp"]
        for run in turns.handle(Finished(holder), 0.0):
            began.append(run.job)
        turns.handle(TurnAsked(holder, "comp"), 0.0)
        turns.check()
    assert C in began[: 2 * LAPS] and began.index(B) < began.index(C)


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


@settings(max_examples=examples(100), deadline=None)
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
            found = of.handle(GroupHostsChanged(tuple(rng.sample(HOSTS, rng.randrange(13)))), float(at))
        elif kind == 4:
            found = of.handle(ReviewDue(), float(at))
        else:
            found = of.handle(SubtaskReported(job, rng.choice(["comp", "comm"]), rng.uniform(1, 60), 4), float(at))
        of.check()
        for each in found:
            if isinstance(each, SetGroup):
                assert each.epoch > epochs.get(each.group, 0)
                epochs[each.group] = each.epoch


@settings(max_examples=examples(50), deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_permutation_of_equal_hosts_changes_nothing(seed: int) -> None:
    """These jobs share the same number of hosts, whatever hosts are called."""
    rng = random.Random(seed)
    other = dict(zip(HOSTS, rng.sample(HOSTS, len(HOSTS)), strict=True))
    one, two = Groups(HOSTS, timings_min=1), Groups([other[host] for host in HOSTS], timings_min=1)
    names = [JobId(f"j{n}") for n in range(6)]
    for at in range(40):
        job, kind = rng.choice(names), rng.randrange(10)
        if kind == 0:
            there = tuple(rng.sample(HOSTS, rng.randrange(1, 13)))
            one.handle(GroupHostsChanged(there), float(at))
            two.handle(GroupHostsChanged(tuple(other[host] for host in there)), float(at))
        else:
            event: JobSubmitted | JobEnded | SubtaskReported = JobSubmitted(job)
            if kind == 1:
                event = JobEnded(job)
            elif kind > 3:
                event = SubtaskReported(job, rng.choice(["comp", "comm"]), rng.uniform(1, 60), 4)
            one.handle(event, float(at))
            two.handle(event, float(at))
        assert shape(one) == shape(two)


def shape(of: Groups) -> list[tuple[tuple[JobId, ...], int]]:
    return sorted((group.jobs, len(group.hosts)) for group in of.groups.values())
