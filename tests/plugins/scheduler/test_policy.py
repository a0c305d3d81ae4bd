"""Order, placement and words, by example and by property."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.ids import HostId, JobId
from plugins.scheduler.messages.spec import JobSpec, Pack
from plugins.scheduler.policy import explain, order
from plugins.scheduler.policy.explain import QueuePositions
from plugins.scheduler.policy.order import Row, gittins, ordered, queue_of, select
from plugins.scheduler.policy.place import place, spread
from plugins.scheduler.policy.settings import SchedulerSettings


def row(number: int, **more: Any) -> Row:
    given: dict[str, Any] = {
        "id": JobId(f"j{number}"),
        "number": number,
        "tenant": "t",
        "job_class": "guaranteed",
        "gpus": 1,
        "submitted": number,
        "attained_gpu_s": 0.0,
        "running": False,
    }
    return Row(**{**given, **more})


def ids(rows: list[Row]) -> list[str]:
    return [one.id for one in rows]


# ---- order ----


def test_a_job_sinks_at_the_very_instant_it_reaches_a_threshold() -> None:
    assert [queue_of(service, (4.0, 12.0)) for service in (0, 3.999, 4, 11.9, 12, 1e9)] == [0, 0, 1, 1, 2, 2]
    assert queue_of(1e9, ()) == 0


def test_a_higher_queue_comes_first_and_inside_a_queue_whoever_runs_stays() -> None:
    rows = [
        row(1, attained_gpu_s=10.0, running=True, first=1.0),
        row(2),
        row(3, running=True, first=3.0),
        row(4, attained_gpu_s=12.0, first=0.0),
    ]
    assert ids(ordered(rows, (5.0,), {})) == ["j3", "j2", "j1", "j4"]


def test_a_promoted_job_leads_its_queue_and_the_one_promoted_first_leads_them() -> None:
    rows = [row(1, running=True, first=0.0), row(2, promoted=8.0), row(3, promoted=7.0)]
    assert ids(ordered(rows, (5.0,), {})) == ["j3", "j2", "j1"]


def test_quota_comes_before_no_quota_and_opportunistic_jobs_come_last() -> None:
    rows = [row(1, job_class="opportunistic", running=True), row(2, tenant="free"), row(3, tenant="paid")]
    assert ids(ordered(rows, (5.0,), {"paid": 4})) == ["j3", "j2", "j1"]
    assert ids(ordered(rows, (5.0,), {}, default=8)) == ["j2", "j3", "j1"]


@pytest.mark.parametrize(
    ("discipline", "expected"),
    [
        ("las", ["j2", "j3", "j1"]),
        ("srsf", ["j1", "j2", "j3"]),
        ("srtf", ["j1", "j3", "j2"]),
        ("sjf", ["j2", "j1", "j3"]),
        ("fifo", ["j1", "j2", "j3"]),
        ("fjf", ["j1", "j2", "j3"]),
        ("gittins", ["j1", "j3", "j2"]),
        ("dgittins", ["j3", "j2", "j1"]),
    ],
)
def test_each_discipline_has_its_own_order(discipline: order.Discipline, expected: list[str]) -> None:
    rows = [
        row(1, gpus=2, attained_gpu_s=9.0, remaining_s=1.0),
        row(2, gpus=1, attained_gpu_s=0.0, remaining_s=10.0),
        row(3, gpus=4, attained_gpu_s=3.0, remaining_s=5.0),
    ]
    found = sorted(rows, key=lambda one: order.key(one, (5.0,), discipline, totals=(4.0, 10.0, 20.0)))
    assert ids(found) == expected


def test_a_gang_that_does_not_fit_is_skipped_and_smaller_ones_behind_it_run() -> None:
    rows = [row(1, gpus=3), row(2, gpus=2), row(3, gpus=1)]
    assert select(rows, 4, {}).run == ("j1", "j3")
    assert select(rows, 4, {}, stop_at_first=True).run == ("j1",)


def test_running_jobs_that_were_not_selected_are_to_be_preempted() -> None:
    rows = [row(1, gpus=4), row(2, gpus=1, running=True)]
    chosen = select(rows, 4, {})
    assert (chosen.run, chosen.preempt) == (("j1",), ("j2",))


def test_a_tenant_at_its_quota_waits_although_gpus_are_free() -> None:
    rows = [row(1, tenant="a", gpus=2, running=True), row(2, tenant="a", gpus=2), row(3, tenant="b", gpus=1)]
    chosen = select(rows, 8, {"a": 3, "b": 1})
    assert (chosen.run, chosen.over_quota) == (("j1", "j3"), ("j2",))
    rows[1] = row(2, tenant="a", gpus=2, job_class="opportunistic")
    assert select(rows, 8, {"a": 3, "b": 1}).run == ("j1", "j2", "j3")


ROWS = st.lists(
    st.builds(
        lambda tenant, gpus, attained, running: {
            "tenant": tenant,
            "gpus": gpus,
            "attained_gpu_s": attained,
            "running": running,
        },
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 9),
        st.floats(0, 100),
        st.booleans(),
    ),
    max_size=20,
).map(lambda many: [row(number, **one) for number, one in enumerate(many)])


@given(ROWS, st.integers(0, 30), st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 10)))
def test_a_decision_never_gives_more_than_there_is_or_a_quota_allows(
    rows: list[Row], capacity: int, quotas: dict[str, int]
) -> None:
    walk = ordered(rows, (10.0, 50.0), quotas)
    chosen = select(walk, capacity, quotas)
    run = [one for one in walk if one.id in chosen.run]
    assert sum(one.gpus for one in run) <= capacity
    for tenant, quota in quotas.items():
        assert sum(one.gpus for one in run if one.tenant == tenant) <= quota
    assert set(chosen.preempt) == {one.id for one in walk if one.running} - set(chosen.run)
    for n, one in enumerate(walk):
        if one.id not in chosen.run:
            ahead = [other for other in walk[:n] if other.id in chosen.run]
            mine = sum(other.gpus for other in ahead if other.tenant == one.tenant)
            full = sum(other.gpus for other in ahead) + one.gpus > capacity
            assert full or mine + one.gpus > quotas.get(one.tenant, 10**9), "it was skipped although it fits"


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(0, 60), st.one_of(st.integers(1, 60), st.none())
)
def test_the_gittins_index_is_hits_over_their_cost(totals: list[int], attained: int, delta: int | None) -> None:
    totals = sorted(totals)
    limit = math.inf if delta is None else delta
    hits = [total - attained for total in totals if attained < total <= attained + limit]
    beyond = 0 if delta is None else delta * sum(total > attained + delta for total in totals)
    expected = len(hits) / (sum(hits) + beyond) if hits else 0.0
    assert gittins(attained, limit, totals) == pytest.approx(expected)
    assert order.best_gittins(attained, totals) >= gittins(attained, limit, totals) - 1e-12


# ---- placement ----


def free(*counts: int) -> dict[HostId, int]:
    return {HostId(f"h{n}"): count for n, count in enumerate(counts)}


def test_a_skewed_gang_takes_whole_hosts_and_then_the_tightest_fit() -> None:
    assert place(free(5, 8, 3, 8), 18, 1, 0.8, 0.3) == {"h1": 8, "h3": 8, "h2": 2}
    assert place(free(5, 8, 3, 8), 3, 1, 0.8, 0.3) == {"h2": 3}


def test_an_even_gang_fills_the_smallest_gaps_first() -> None:
    assert place(free(5, 8, 0, 1, 3), 6, 1, 0.1, 0.3) == {"h3": 1, "h4": 3, "h0": 2}


def test_skew_at_the_limit_still_fills_gaps_and_one_worker_takes_the_tightest_host() -> None:
    assert place(free(2, 1), 2, 1, 0.3, 0.3) == {"h1": 1, "h0": 1}
    assert place(free(2, 1), 2, 1, 0.31, 0.3) == {"h0": 2}
    assert place(free(4, 2, 3), 1, 2, 0.0, 0.3) == {"h1": 1}


def test_a_gang_that_has_shown_nothing_goes_to_the_fewest_hosts() -> None:
    """Found so: eight workers beside an idle host and three with one free GPU were put on all four."""
    assert place(free(1, 1, 1, 8), 8, 1, None, 0.3) == {"h3": 8}
    assert place(free(1, 2, 3, 8), 2, 1, None, 0.3) == {"h1": 2}, "into the gap that it fits into whole"
    assert place(free(1, 4, 8, 8), 18, 1, None, 0.3) == {"h2": 8, "h3": 8, "h1": 2}


def test_a_person_may_ask_for_one_host_for_gaps_or_for_a_host_each() -> None:
    assert place(free(1, 1, 1, 8), 8, 1, None, 0.3, "any") == {"h0": 1, "h1": 1, "h2": 1, "h3": 5}
    assert place(free(1, 1, 1, 8), 8, 1, 0.9, 0.3, "any") == {"h0": 1, "h1": 1, "h2": 1, "h3": 5}
    assert place(free(4, 7), 8, 1, None, 0.3, "host") is None, "it waits for a host with room for all"
    assert place(free(8, 9, 4), 8, 1, 0.0, 0.3, "host") == {"h0": 8}
    assert place(free(8, 4, 3, 5), 3, 4, None, 0.3, "apart") == {"h1": 1, "h3": 1, "h0": 1}, "the tightest hosts first"
    assert place(free(8, 8), 3, 4, None, 0.3, "apart") is None, "two hosts for three nodes"


def test_a_job_without_gpus_lies_apart_too() -> None:
    ranks = {HostId("h1"): 5, HostId("h2"): 0}
    assert spread(ranks, 2, "apart") == {"h1": 1, "h2": 1}
    assert spread(ranks, 3, "apart") == {}
    assert spread(ranks, 3, "host") == {"h2": 3}
    assert spread(ranks, 3) == {"h2": 3}


@given(
    st.lists(st.integers(0, 9), max_size=6),
    st.integers(1, 12),
    st.integers(1, 3),
    st.sampled_from([None, 0.2, 0.5]),
    st.sampled_from(["few", "host", "any", "apart"]),
)
def test_a_place_is_found_exactly_when_a_gang_fits_and_on_as_few_hosts_as_needed(
    counts: list[int], workers: int, each: int, skew: float | None, pack: Pack
) -> None:
    there = free(*counts)
    chosen = place(there, workers, each, skew, 0.3, pack)
    room = sorted((count // each for count in counts), reverse=True)
    able = {"host": max(room, default=0) >= workers, "apart": sum(map(bool, room)) >= workers}
    assert (chosen is not None) == able.get(pack, sum(room) >= workers)
    if chosen is None:
        return
    assert sum(chosen.values()) == workers and all(0 < n <= there[host] // each for host, n in chosen.items())
    if pack == "apart":
        assert set(chosen.values()) == {1}
    elif pack == "host" or workers == 1:
        assert len(chosen) == 1
    elif pack == "few" and skew is None:
        fewest = next(n for n in range(len(room) + 1) if sum(room[:n]) >= workers)
        assert len(chosen) == fewest
        if fewest == 1:
            (host,) = chosen
            assert there[host] // each == min(count for count in room if count >= workers), "not the best fit"


def test_a_gang_is_placed_whole_or_not_at_all() -> None:
    assert place(free(3, 3), 7, 1, 0.0, 0.3) is None
    assert place(free(3, 3), 3, 2, 0.9, 0.3) is None, "a worker's GPUs lie on one host"
    assert place(free(3, 3), 2, 2, 0.9, 0.3) == {"h0": 1, "h1": 1}


@given(
    st.lists(st.integers(0, 9), max_size=8),
    st.integers(1, 40),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.2, 0.5, 1.0]),
)
def test_placement_uses_what_is_free_and_nothing_else(counts: list[int], workers: int, each: int, skew: float) -> None:
    """Few hosts above PACKLIMIT, any gaps below it. Reference: Gu 2021 §3.3.3.3 (NSDI'19 §3.4)."""
    there = free(*counts)
    chosen = place(there, workers, each, skew, 0.3)
    slots = sum(count // each for count in counts)
    if slots < workers:
        assert chosen is None
        return
    assert chosen is not None and sum(chosen.values()) == workers
    assert all(0 < count * each <= there[host] for host, count in chosen.items())
    if skew > 0.3:
        largest = sorted((count // each for count in counts), reverse=True)
        fewest = next(n for n in range(1, len(largest) + 1) if sum(largest[:n]) >= workers)
        assert len(chosen) == fewest, "a skewed gang goes to as few hosts as possible"


def test_workers_without_gpus_go_where_the_fewest_ranks_are() -> None:
    assert spread(free(3, 0, 1), 4) == {"h1": 3, "h2": 1}
    assert spread({}, 4) == {}


# ---- words ----


def spec(**fields: Any) -> JobSpec:
    return JobSpec.parse({"argv": ["train"], **fields})


def test_a_waiting_job_hears_its_place_who_is_ahead_and_what_would_let_it_start() -> None:
    rows = ordered(
        [
            row(1, tenant="bob", gpus=4, running=True, first=1.0),
            row(2, tenant="alice", gpus=3),
            row(3, tenant="carol", gpus=2),
        ],
        (10.0,),
        {},
    )
    said = explain.waits_for(
        JobId("j3"), QueuePositions(rows), select(rows, 4, {}).over_quota, 4, explain.OrderInForce((10.0,), {}, None)
    )
    assert said == (
        "2nd of the waiting jobs, in queue 0; it needs 2 GPUs and 0 are free; ahead: j2 (alice, 3 GPUs); "
        "it starts when enough of j1 (bob, 4 GPUs) have ended"
    )


def test_a_job_is_told_who_sinks_below_it_soon_and_is_stopped_for_it_then() -> None:
    def said(*others: order.Row, mine: order.Row, preempts: bool = True) -> str:
        rows = order.ordered([*others, mine], (3200.0,), {})
        in_force = explain.OrderInForce((3200.0,), {}, None, preempts)
        return explain.waits_for(mine.id, QueuePositions(rows), select(rows, 4, {}).over_quota, 4, in_force)

    young, wide = row(2, gpus=2), row(1, gpus=4, running=True, first=1.0, attained_gpu_s=3160.0)
    assert said(wide, mine=young).endswith(
        "(t, 4 GPUs) have ended, or when j1 falls behind it after about 10 s of running"
    )
    assert "falls behind" not in said(wide, mine=young, preempts=False), "nobody is stopped for anybody"
    assert "falls behind" not in said(wide, row(0, gpus=1), mine=young), "somebody else comes first"
    old = row(2, gpus=2, attained_gpu_s=4000.0, first=2.0)
    assert "falls behind" not in said(wide, mine=old), "there is no queue below its own"
    halves = [row(n, gpus=2, running=True, first=1.0, attained_gpu_s=3200.0 - 100 * n) for n in (1, 3)]
    assert said(*halves, mine=young).endswith("j1 falls behind it after about 50 s of running"), "the first suffices"
    both = "j1 falls behind it after about 50 s of running, j3 falls behind it after about 2 min 30 s of running"
    assert said(*halves, mine=row(2, gpus=4)).endswith(both)


def test_a_job_larger_than_what_is_alive_waits_for_hosts() -> None:
    rows = [row(1, gpus=9)]
    said = explain.waits_for(
        JobId("j1"), QueuePositions(rows), select(rows, 4, {}).over_quota, 4, explain.OrderInForce((10.0,), {}, None)
    )
    assert "the hosts that are alive have 4: it starts when more hosts join" in said


def test_a_job_whose_quota_was_lowered_under_it_is_told_so() -> None:
    rows = [row(1, gpus=3)]
    said = explain.waits_for(
        JobId("j1"),
        QueuePositions(rows),
        select(rows, 8, {"t": 2}).over_quota,
        8,
        explain.OrderInForce((10.0,), {"t": 2}, None),
    )
    assert "the quota of tenant t is now 2: raise it, or cancel the job" in said


def test_impossible_jobs_are_named_with_the_right_code() -> None:
    rack = free(2, 4)
    assert explain.over_rack(spec(workers=6), rack) is None
    assert explain.over_rack(spec(workers=3, gpus_per_worker=2), rack) is None
    never = explain.over_rack(spec(workers=4, gpus_per_worker=2), rack)
    assert never is not None and never.code == 7 and "it needs 8 GPUs, and this rack has 6" in never.why
    never = explain.over_rack(spec(workers=2, gpus_per_worker=3), rack)
    assert never is not None and "this rack's hosts have room for 1 workers with 3 GPUs each" in never.why
    assert explain.over_rack(spec(workers=4000, gpus_per_worker=0), rack) is None
    never = explain.over_quota(spec(workers=3), 2)
    assert never is not None and never.code == 4
    assert explain.over_quota(spec(workers=3, **{"class": "opportunistic"}), 2) is None


def test_the_rank_that_failed_first_is_blamed_and_one_that_was_stopped_comes_last() -> None:
    assert explain.first_failure({3: -15, 1: 0, 2: -9, 0: 1}) == (2, -9)
    assert explain.first_failure({3: -15, 1: 0}) == (3, -15)
    assert explain.first_failure({3: 0, 1: 0}) is None
    assert [explain.job_code(code) for code in (0, 3, -9, -15)] == [0, 3, 137, 143]
    assert [explain.ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 112)] == [
        "1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "112th",
    ]  # fmt: skip


def test_settings_that_cannot_be_are_refused() -> None:
    for wrong in (
        {"queue_thresholds_gpu_s": (5.0, 5.0)},
        {"queue_thresholds_gpu_s": (0.0,)},
        {"packlimit": 1.5},
        {"host_lost_after_s": 0},
        {"place_attempts": 0},
        {"quotas": {"a": -1}},
    ):
        with pytest.raises(ValueError):
            SchedulerSettings(**wrong)
