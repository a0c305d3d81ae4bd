"""Groups as the log has them, and what one host wants of them."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.core.ids import HostId, JobId
from plugins.facts import Place
from plugins.interleave.policy.decide import Decision, EndedJob, PoolView, decide, effective_hosts
from plugins.interleave.policy.exhaustive import exhaustive
from plugins.interleave.policy.groups import (
    PlacedJob,
    arranger_of,
    coordinator_of,
    groups_of,
    pool_of,
    processes_on,
    proposer_of,
)
from plugins.interleave.policy.hosts import best_groups, capped, given_hosts
from plugins.interleave.policy.model import Group, JobProfile, iteration_s, score_of
from plugins.interleave.policy.order import Waiting
from plugins.interleave.policy.regroup import rearranged
from plugins.interleave.policy.rules import WEIGHTS
from plugins.interleave.policy.schedule import schedule
from plugins.interleave.policy.turn_order import turn_order
from tests.families import examples

HOSTS = [HostId(f"h{n}") for n in range(1, 9)]
J1, J2, J3, J4 = (JobId(f"j{n}") for n in range(1, 5))


def placed(job: JobId, *hosts: int, most: int = 8, pool: str = "auto", each: int = 1) -> PlacedJob:
    """A job with `each` processes on each of these hosts, rank 0 on the first."""
    places, at = [], 0
    for n in hosts:
        places.append(Place(HOSTS[n - 1], tuple(range(at, at + each)), ()))
        at += each
    return PlacedJob(job, pool, 1, 0, tuple(places), 1 if most else 0, most)


def waiting(job: JobId, work_s: float, net_s: float, left: float = 100.0) -> Waiting:
    return Waiting(JobProfile(job, work_s, net_s), left)


def view(me: int, jobs: list[PlacedJob], profiles: list[Waiting], **more: Any) -> PoolView:
    known = {each.profile.job: each for each in profiles}
    live = frozenset(HOSTS)
    of: dict[str, Any] = {"me": HOSTS[me - 1], "pool": "auto", "jobs": tuple(jobs), "profiles": known, "live": live}
    return PoolView(**{**of, **more})


def test_jobs_on_the_same_hosts_are_a_group_and_a_chain_of_them_is_one() -> None:
    jobs = [placed(J1, 1, 2), placed(J2, 2, 3), placed(J3, 4), placed(J4, 3, pool="lab/x")]
    groups = groups_of(jobs)
    assert [(group.name, group.jobs, group.hosts) for group in groups] == [
        ("auto/j1", (J1, J2), ("h1", "h2", "h3")),
        ("auto/j3", (J3,), ("h4",)),
        ("lab/x/j4", (J4,), ("h3",)),
    ]


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.sets(st.integers(1, 8), min_size=1, max_size=4), min_size=1, max_size=6), st.randoms())
def test_no_host_is_in_two_groups_of_a_pool_in_whatever_order_jobs_are_heard(
    sets: list[set[int]], rng: random.Random
) -> None:
    """Reference: §4.3.2: groups divide the hosts."""
    jobs = [placed(JobId(f"j{n + 1}"), *sorted(hosts)) for n, hosts in enumerate(sets)]
    groups = groups_of(jobs)
    hosts = [host for group in groups for host in group.hosts]
    assert len(hosts) == len(set(hosts))
    shuffled = list(jobs)
    rng.shuffle(shuffled)
    assert groups_of(shuffled) == groups


def test_a_pool_is_of_one_tenant_unless_it_is_auto() -> None:
    assert pool_of("lab", "x") != pool_of("ops", "x")
    assert pool_of("lab", "auto") == pool_of("ops", "auto") == "auto"
    assert pool_of("lab", "") == ""


def test_the_job_with_the_least_left_has_the_first_turn_then_the_lowest_number() -> None:
    assert turn_order([JobId("j10"), JobId("j9")]) == ["j9", "j10"]
    assert turn_order([J1, J2, J3], {J2: 10.0, J3: 1000.0}) == [J2, J3, J1]
    assert turn_order([J1, J2], {J1: 900.0, J2: 1000.0}) == [J1, J2], "by powers of two: hosts measure a little unlike"


def test_who_decides_follows_from_the_log_and_from_who_lives() -> None:
    jobs = {job.job: job for job in (placed(J1, 3, 1), placed(J2, 1, 2))}
    (group,) = groups_of(jobs.values())
    assert coordinator_of(jobs[J1], HOSTS) == "h3", "the host of its lowest process"
    assert proposer_of(group, jobs, HOSTS) == "h3"
    assert proposer_of(group, jobs, HOSTS[:2]) == "h1", "h3 is gone, and h1 has the lowest process that is left"
    assert arranger_of(jobs.values(), HOSTS) == "h1"
    assert arranger_of(jobs.values(), HOSTS[1:]) == "h2"


def test_a_job_keeps_its_processes_and_has_one_at_least_on_each_host() -> None:
    job = placed(J1, 1, 2, each=2)
    assert processes_on(job, HOSTS[:2]) == {"h1": 2, "h2": 2}
    assert processes_on(job, HOSTS[:1]) == {"h1": 4}
    assert processes_on(job, HOSTS[:3]) == {"h1": 2, "h2": 1, "h3": 1}
    assert processes_on(job, HOSTS[:6]) == dict.fromkeys(HOSTS[:6], 1)


def test_every_job_keeps_a_process_where_it_has_to() -> None:
    jobs = {job.job: job for job in (placed(J1, 1, 2), placed(J2, 2, 1))}
    apart = [Group((JobProfile(J1, 1, 1),), 1), Group((JobProfile(J2, 1, 1),), 1)]
    assert given_hosts(apart, jobs, HOSTS[:2]) == (("h1",), ("h2",))
    both = {J1: placed(J1, 1, 2), J2: placed(J2, 1, 2)}
    words = given_hosts(apart, both, HOSTS[:2])
    assert isinstance(words, str)
    assert "must keep a process on h1" in words


def test_a_group_has_no_more_hosts_than_each_of_its_jobs_can_use() -> None:
    profiles = JobProfile(J1, 100, 1), JobProfile(J2, 1, 1)
    groups = [Group(profiles[:1], 6), Group(profiles[1:], 2)]
    few = {J1: placed(J1, 1, most=4), J2: placed(J2, 2, most=2)}
    assert [group.hosts for group in capped(groups, {**few, J2: placed(J2, 2)})] == [4, 4]
    assert [group.hosts for group in capped(groups, few)] == [4, 2]
    assert [group.hosts for group in best_groups(profiles, few, 8, WEIGHTS)] == [4, 2]


def test_jobs_whose_rank_0_is_on_one_host_stay_together_and_each_such_host_counts() -> None:
    profiles = JobProfile(J1, 10, 1), JobProfile(J2, 2, 6), JobProfile(J3, 10, 1)
    jobs = {J1: placed(J1, 1), J2: placed(J2, 2), J3: placed(J3, 2, 1)}
    groups = best_groups(profiles, jobs, 4, WEIGHTS)
    assert {frozenset(job.job for job in group.jobs) for group in groups} <= {
        *(frozenset(each) for each in ({J1}, {J2, J3}, {J1, J2, J3}))
    }
    apart = {J1: placed(J1, 1), J2: placed(J2, 2), J3: placed(J3, 3)}
    sends = JobProfile(J1, 20, 0.1), JobProfile(J2, 0.1, 6), JobProfile(J3, 0.1, 6)
    assert [group.hosts for group in exhaustive(sends, 8, WEIGHTS, 3)[1] if len(group.jobs) > group.hosts] == [1]
    for hosts in range(3, 9):
        for group in best_groups(sends, apart, hosts, WEIGHTS):
            assert group.hosts >= len(group.jobs), "each rank 0 has a host of its own"


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 1 << 30))
def test_where_nothing_binds_them_the_best_groups_are_those_of_all_groupings(seed: int) -> None:
    """Reference: §4.4.7 looks at all groupings of a few jobs."""
    rng = random.Random(seed)
    profiles = [JobProfile(JobId(f"j{n + 1}"), rng.uniform(1, 20), rng.uniform(0.1, 9)) for n in range(3)]
    jobs = {job.job: placed(job.job, n + 1) for n, job in enumerate(profiles)}
    found = score_of(best_groups(profiles, jobs, 8, WEIGHTS), 8, WEIGHTS)
    free, groups = exhaustive(profiles, 8, WEIGHTS, 3)
    assert found <= free + 1e-9
    if all(group.hosts >= len(group.jobs) for group in groups):
        assert found == pytest.approx(free)


def test_where_every_job_has_to_run_none_is_left_out_though_fewer_would_be_busier() -> None:
    jobs = [JobProfile(J1, 10, 1), JobProfile(J2, 0.1, 50), JobProfile(J3, 12, 2)]
    assert schedule(jobs, 3, WEIGHTS).jobs < 3
    assert schedule(jobs, 3, WEIGHTS, jobs_min=3).jobs == 3
    groups = [Group((jobs[0],), 1), Group((jobs[1], jobs[2]), 1)]
    change = rearranged(groups, 0, 4, WEIGHTS, lambda some, hosts: schedule(some, hosts, jobs_min=len(some)).groups)
    assert change is not None
    assert {job.job for group in change.groups for job in group.jobs} >= {J1}


def test_a_group_whose_jobs_are_not_on_all_its_hosts_is_as_fast_as_its_busiest_host() -> None:
    jobs = {job.job: job for job in (placed(J1, 1, 2), placed(J2, 2, 3))}
    profiles = {J1: JobProfile(J1, 10, 1), J2: JobProfile(J2, 10, 1)}
    (group,) = groups_of(jobs.values())
    assert effective_hosts(group, jobs, profiles) == 2, "h2 has half of both, 10 s; h1 and h3 have 5 s"


# ---- decisions -------------------------------------------------------------------------------------------------------

CPU, NET = (10.0, 1.0), (2.0, 6.0)
"""Host-seconds of computing and seconds of communication of a job that computes, and of one that sends."""


def test_a_job_that_came_joins_the_group_whose_gaps_it_fills() -> None:
    """Reference: §4.3.2, regrouping when a job arrives."""
    jobs = [placed(J1, 1, 2), placed(J2, 3, 4), placed(J3, 2, 1)]
    profiles = [waiting(J1, *CPU), waiting(J2, *NET), waiting(J3, *CPU)]
    assert decide(view(1, jobs, profiles)).wish is None, "nothing came"
    decision = decide(view(1, jobs, profiles, came=frozenset([J3])))
    assert decision.wish is not None
    new = {job: set(each.processes) for job, each in decision.wish.jobs.items()}
    assert new[J3] == new[J2], "it shares hosts with the job that sends"
    assert HOSTS[1] in new[J3], "where its rank 0 is"
    assert not new.get(J1, {HOSTS[0]}) & new[J3]
    assert decide(view(3, jobs, profiles, came=frozenset([J3]))).wish is None, "j1 is the lowest of its group, on h1"
    stays = [placed(J1, 1, 2), placed(J2, 3, 4), placed(J3, 1, 2)]
    decision = decide(view(1, stays, profiles, came=frozenset([J3])))
    assert decision.wish is None
    assert "must keep a process on h1" in decision.words


def test_only_who_is_to_decide_wants_anything() -> None:
    jobs = [placed(J1, 1, 2), placed(J2, 1, 2)]
    profiles = [waiting(J1, *CPU), waiting(J2, *CPU)]
    went = (EndedJob(J3, frozenset(HOSTS[1:4])),)
    of = {"idle": tuple(HOSTS[2:4]), "went": went, "whole": 0.05}
    wishes = [decide(view(me, jobs, profiles, **of)).wish for me in (1, 2, 3)]
    assert wishes[0] is not None
    assert wishes[1] is wishes[2] is None


def test_hosts_of_a_job_that_ended_go_to_those_that_are_left() -> None:
    jobs = [placed(J1, 1, 2), placed(J2, 1, 2)]
    profiles = [waiting(J1, *CPU), waiting(J2, *CPU)]
    went = (EndedJob(J3, frozenset(HOSTS[:2])),)
    decision = decide(view(1, jobs, profiles, idle=tuple(HOSTS[2:4]), went=went))
    assert decision.wish is not None
    assert {host for new in decision.wish.jobs.values() for host in new.processes} == set(HOSTS[:4])
    assert all(new.replaces == 0 and new.epoch == 1 for new in decision.wish.jobs.values())
    for job, each_s in decision.wish.predicted.items():
        assert each_s < iteration_s([profiles[0].profile, profiles[1].profile], 2), job


def test_nothing_is_decided_about_an_unprofiled_job_or_who_shares_hosts_with_it() -> None:
    jobs = [placed(J1, 1, 2), placed(J2, 2, 3), placed(J3, 4)]
    went = (EndedJob(J4, frozenset(HOSTS[:4])),)
    known = [waiting(J1, *CPU), waiting(J3, *CPU)]
    decision = decide(view(1, jobs, known, went=went, whole=0.02))
    assert decision.wish is None
    decision = decide(view(4, jobs, known, went=went, idle=(HOSTS[4],)))
    assert decision.wish is not None
    assert set(decision.wish.jobs) == {J3}, "the group of j1 and j2 stays as it is"


def test_a_job_that_is_not_elastic_is_in_a_group_and_never_moved() -> None:
    jobs = [placed(J1, 1, 2, most=0), placed(J2, 1, 2)]
    profiles = [waiting(J1, *CPU), waiting(J2, *CPU)]
    went = (EndedJob(J3, frozenset(HOSTS[:2])),)
    decision = decide(view(1, jobs, profiles, idle=tuple(HOSTS[2:4]), went=went, whole=0.02))
    assert decision.wish is None
    assert "cannot be moved" in decision.words


def test_a_job_with_a_host_that_does_not_answer_is_left_alone() -> None:
    jobs = [placed(J1, 1, 2), placed(J2, 3)]
    profiles = [waiting(J1, *CPU), waiting(J2, *CPU)]
    live = frozenset(HOSTS) - {HOSTS[1]}
    decision = decide(view(1, jobs, profiles, live=live, idle=(HOSTS[4],), whole=0.02))
    assert decision.wish is not None
    assert set(decision.wish.jobs) == {J2}


@pytest.mark.parametrize("gain", [0.02, 0.05])
def test_what_is_not_worth_it_is_left_as_it_is(gain: float) -> None:
    jobs = [placed(J1, 1, 2), placed(J2, 3, 4)]
    profiles = [waiting(J1, 10.0, 0.01), waiting(J2, 10.0, 0.01)]
    decision = decide(view(1, jobs, profiles, whole=gain))
    assert decision.wish is None
    assert "less than" in decision.words or "best that was found" in decision.words


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 1 << 30))
def test_a_wish_is_always_one_that_the_log_can_take_and_raises_the_score(seed: int) -> None:
    rng = random.Random(seed)
    jobs = []
    for n in range(rng.randint(1, 5)):
        hosts = rng.sample(range(1, 7), rng.randint(1, 3))
        jobs.append(placed(JobId(f"j{n + 1}"), *hosts, most=rng.choice((0, 4, 8)), each=rng.randint(1, 2)))
    profiles = [waiting(job.job, rng.uniform(1, 20), rng.uniform(0.1, 10)) for job in jobs]
    taken = {host for job in jobs for host in job.hosts}
    idle = tuple(host for host in HOSTS if host not in taken)
    came = frozenset(job.job for job in jobs if rng.random() < 0.5)
    went = (EndedJob(JobId("j9"), frozenset(rng.sample(HOSTS, 2))),)
    for me in range(1, 9):
        decision: Decision = decide(view(me, jobs, profiles, idle=idle, came=came, went=went, whole=0.05))
        if decision.wish is None:
            continue
        by_name = {job.job: job for job in jobs}
        for job, new in decision.wish.jobs.items():
            old = by_name[job]
            assert old.most, "a job that is not elastic is never moved"
            assert old.fewest <= sum(new.processes.values()) <= old.most
            assert sum(new.processes.values()) >= min(old.most, sum(old.processes.values()))
            assert old.keeps & set(new.processes)
            assert set(new.processes) <= set(HOSTS)
        assert set(decision.wish.predicted) >= set(decision.wish.jobs)


def test_all_anew_is_the_best_grouping_that_there_is() -> None:
    jobs = [placed(J1, 1, 2), placed(J2, 3, 4), placed(J3, 5, 6), placed(J4, 7, 8)]
    profiles = [waiting(J1, *CPU), waiting(J2, *NET), waiting(J3, *CPU), waiting(J4, *NET)]
    decision = decide(view(1, jobs, profiles, whole=0.02))
    assert decision.wish is not None
    after = [
        msgspec.structs.replace(
            job, places=tuple(Place(host, (n,), ()) for n, host in enumerate(sorted(new.processes)))
        )
        for job in jobs
        if (new := decision.wish.jobs.get(job.job)) is not None
    ] + [job for job in jobs if job.job not in decision.wish.jobs]
    known = {each.profile.job: each.profile for each in profiles}
    now = score_of([Group((known[j.job],), 2) for j in jobs], 8, WEIGHTS)
    then = [Group(tuple(known[j] for j in group.jobs), len(group.hosts)) for group in groups_of(after)]
    assert score_of(then, 8, WEIGHTS) > 1.05 * now
