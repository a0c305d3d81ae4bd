"""Tensors to aggregators: exact, within every loss limit, the same by index and by scan, close to the minimum."""

import itertools
from fractions import Fraction

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from covey.core.ids import HostId, JobId
from plugins.aggregator.policy.assign import (
    AggregationProfile,
    Assignment,
    Packing,
    Tensor,
    assign,
    best_fit,
    by_scan,
    flaw,
    largest_first,
    refusal_of,
)
from plugins.aggregator.policy.cycle import Cycle, Share, cycle_of, grown, sound
from plugins.aggregator.policy.pools import best_pool, free_of, need_of, pools_of
from plugins.aggregator.policy.scale import OrphanedTensor, emptied, least_loaded
from tests.families import examples


def profile(name: str, period: int, *works: int, limit: Fraction = Fraction(1, 10)) -> AggregationProfile:
    return AggregationProfile(
        JobId(name), period, tuple(Tensor(f"t{at}", work) for at, work in enumerate(works)), 1, limit
    )


@st.composite
def profiles(draw: st.DrawFn, most: int = 6, tensors: int = 5) -> list[AggregationProfile]:
    found = []
    for at in range(draw(st.integers(1, most))):
        period = draw(st.sampled_from([4, 5, 6, 8, 9, 10, 12, 16, 20, 24, 25, 60]))
        works = draw(st.lists(st.integers(0, min(4, period)), min_size=1, max_size=tensors))
        found.append(profile(f"j{at}", period, *works, limit=draw(st.sampled_from([Fraction(1, 10), Fraction(1, 25)]))))
    return found


def play(jobs: list[AggregationProfile], empty: Cycle = Cycle()) -> list[Cycle]:
    cycles: list[Cycle] = []
    for job in jobs:
        found = assign(job, cycles, None, empty)
        assert found is not None
        cycles = list(found.cycles)
    return cycles


@given(jobs=profiles(), lanes=st.integers(1, 3), times=st.integers(1, 3))
def test_no_accepted_assignment_hurts_anyone_or_overfills_an_aggregator(
    jobs: list[AggregationProfile], lanes: int, times: int
) -> None:
    """The limits are the constraints of the integer program. Reference: §4.3.3.2, IV.1 and IV.2."""
    cycles: list[Cycle] = []
    for job in jobs:
        found = assign(job, cycles, None, Cycle({}, lanes, times))
        assert isinstance(found, Assignment)
        cycles = list(found.cycles)
        assert len(found.on) == len(job.tensors)
        assert all(sound(cycle) for cycle in cycles)
        assert sum(cycle.shares[job.job].work_us for cycle in cycles if job.job in cycle.shares) == job.work_us
        assert all(cycle.shares for cycle in cycles), "none was started for nothing"


@given(jobs=profiles(), lanes=st.integers(1, 2), times=st.integers(1, 3))
def test_the_index_and_the_scan_agree(jobs: list[AggregationProfile], lanes: int, times: int) -> None:
    """The index is ours. Reference: Pseudocode 3."""
    empty = Cycle({}, lanes, times)
    cycles: list[Cycle] = []
    for job in jobs:
        found = assign(job, cycles, None, empty)
        assert found == by_scan(job, cycles, empty)
        assert found is not None
        cycles = list(found.cycles)


@given(jobs=profiles(), data=st.data())
def test_tensors_of_many_jobs_mixed_go_where_a_scan_would_put_them(
    jobs: list[AggregationProfile], data: st.DataObject
) -> None:
    start = play(jobs[: len(jobs) // 2])
    works = [(job, tensor) for job in jobs[len(jobs) // 2 :] for tensor in job.tensors]
    packing, plain = Packing(start), list(start)
    for job, tensor in data.draw(st.permutations(works)):
        share = job.share(tensor.work_us)
        at = best_fit(plain, job.job, share)
        assert packing.place(job.job, share) == at
        if at is not None:
            plain[at] = grown(plain[at], job.job, share)
        assert packing.cycles == plain


@given(jobs=profiles(), period=st.sampled_from([4, 5, 7, 12, 25]), work=st.integers(0, 30))
def test_an_aggregator_refuses_exactly_what_would_hurt_or_overfill_it(
    jobs: list[AggregationProfile], period: int, work: int
) -> None:
    for cycle in play(jobs):
        share = Share(period, work)
        why = refusal_of(cycle, JobId("new"), share)
        after = cycle_of({**cycle.shares, JobId("new"): share}, now_us=cycle.us)
        assert bool(why) == (not sound(after))
        assert not why or "free" in why or "would lose" in why


def minimum(jobs: list[AggregationProfile]) -> int:
    """The fewest aggregators that can serve these, by trying every partition of the tensors."""
    works = [(job, tensor) for job in jobs for tensor in job.tensors]
    best = len(works)

    def put(at: int, cycles: list[Cycle]) -> None:
        nonlocal best
        if len(cycles) >= best and at < len(works):
            return
        if at == len(works):
            if all(sound(cycle) for cycle in cycles):
                best = min(best, len(cycles))
            return
        job, tensor = works[at]
        share = job.share(tensor.work_us)
        for each in range(len(cycles)):
            put(at + 1, [grown(cycle, job.job, share) if n == each else cycle for n, cycle in enumerate(cycles)])
        put(at + 1, [*cycles, grown(Cycle(), job.job, share)])

    put(0, [])
    return best


@given(jobs=profiles(most=3, tensors=2))
@settings(max_examples=examples(40), deadline=None)
def test_at_most_one_aggregator_more_than_exhaustive_search_on_small_cases(jobs: list[AggregationProfile]) -> None:
    """Reference: §4.3.3.2, the integer program."""
    ordered = [profile(job.job, job.period_us, *sorted((t.work_us for t in job.tensors), reverse=True)) for job in jobs]
    assert minimum(ordered) <= len(play(ordered)) <= minimum(ordered) + 1


def test_over_all_small_sets_of_three_jobs_it_is_the_minimum_in_nearly_all() -> None:
    kinds = [(6, (2,)), (12, (3, 2)), (5, (1,)), (10, (4, 3)), (20, (6,))]
    cases = list(itertools.combinations(kinds, 3))
    more = [
        len(play(jobs)) - minimum(jobs)
        for case in cases
        for jobs in [[profile(f"j{at}", period, *works) for at, (period, works) in enumerate(case)]]
    ]
    assert max(more) <= 1 and sum(more) <= len(cases) // 10


def test_a_job_that_needs_too_many_new_aggregators_gets_none() -> None:
    job = profile("j", 4, 3, 3, 3)
    assert assign(job, (), 2) is None
    found = assign(job, (), 3)
    assert found is not None and found.on == (0, 1, 2)


def test_aggregators_that_are_barred_are_left_out() -> None:
    cycles = play([profile("a", 10, 1), profile("b", 9, 1)])
    found = assign(profile("c", 10, 1), cycles, None, Cycle(), barred=[0])
    assert len(cycles) == 2 and found is not None and found.on == (2,)


def test_what_nobody_could_sum_is_told_in_words() -> None:
    assert flaw(profile("j", 4, 1, 2)) == ""
    assert "split it" in flaw(profile("j", 4, 5))
    assert "above 0" in flaw(profile("j", 0, 0))
    assert "above 0" in flaw(profile("j", 4, 1, limit=Fraction(0)))
    assert "no time" in flaw(profile("j", 4, -1))
    assert "one name" in flaw(AggregationProfile(JobId("j"), 4, (Tensor("a", 1), Tensor("a", 1))))


def test_tensors_come_largest_first_and_then_by_name() -> None:
    tensors = [Tensor("b", 1), Tensor("c", 3), Tensor("a", 1)]
    assert [tensor.name for tensor in largest_first(tensors)] == ["c", "a", "b"]


# ---- scaling down ----------------------------------------------------------------------------------------------------


@given(jobs=profiles(), ended=st.sets(st.integers(0, 5), max_size=4))
def test_an_aggregator_is_emptied_as_a_whole_or_not_at_all(jobs: list[AggregationProfile], ended: set[int]) -> None:
    """Reference: §4.3.3.3, job exit."""
    known = {job.job: job for at, job in enumerate(jobs) if at not in ended}
    kept = [{job: share for job, share in cycle.shares.items() if job in known} for cycle in play(jobs)]
    cycles = {HostId(f"h{at}"): cycle_of(shares) for at, shares in enumerate(kept) if shares}
    assume(cycles)
    host = least_loaded(cycles, {host: at for at, host in enumerate(cycles)})
    assert host is not None and all(cycles[host].load <= cycle.load for cycle in cycles.values())
    works = [OrphanedTensor(job, "t", share.work_us) for job, share in cycles[host].shares.items()]
    found = emptied(host, works, cycles, known, {})
    if found is not None:
        assert host not in found.cycles and all(sound(cycle) for cycle in found.cycles.values())
        assert sorted(work.job for work, _ in found.moves) == sorted(cycles[host].shares)
        held = sum(share.work_us for cycle in cycles.values() for share in cycle.shares.values())
        assert held == sum(share.work_us for cycle in found.cycles.values() for share in cycle.shares.values())
    else:
        left = [cycle for name, cycle in cycles.items() if name != host]
        for work in sorted(works, key=lambda work: (-work.work_us, work.job)):
            at = best_fit(left, work.job, known[work.job].share(work.work_us))
            if at is None:
                break
            left[at] = grown(left[at], work.job, known[work.job].share(work.work_us))
        else:
            raise AssertionError("all of it fits on the others")


def test_the_last_aggregator_is_not_emptied_into_nothing() -> None:
    job = profile("j", 4, 1)
    (cycle,) = play([job])
    assert emptied(HostId("a"), [OrphanedTensor(job.job, "t0", 1)], {HostId("a"): cycle}, {job.job: job}, {}) is None


# ---- pools -----------------------------------------------------------------------------------------------------------


def test_a_job_goes_to_the_pool_with_the_least_that_suffices() -> None:
    assert best_pool({"p0": 3, "p1": 5, "p2": 9}, 4.2) == "p1"
    assert best_pool({"p0": 3, "p1": 4}, 4.2) is None
    assert best_pool({"p1": 5, "p0": 5}, 5) == "p0"


@given(hosts=st.integers(0, 200), size=st.integers(1, 40))
def test_pools_share_no_host_and_are_nearly_equal(hosts: int, size: int) -> None:
    pools = pools_of([HostId(f"h{at}") for at in range(hosts)], size)
    assert [host for pool in pools for host in pool] == [f"h{at}" for at in range(hosts)]
    sizes = {len(pool) for pool in pools}
    assert not sizes or (max(sizes) <= size and max(sizes) - min(sizes) <= 1)


@given(jobs=profiles())
def test_what_a_pool_has_free_and_a_job_needs_are_counted_in_lanes(jobs: list[AggregationProfile]) -> None:
    cycles = play(jobs)
    assert 0 <= free_of(cycles) <= len(cycles)
    assert need_of(jobs[0]) == Fraction(sum(t.work_us for t in jobs[0].tensors), jobs[0].period_us)
