"""Tenants without a quota take turns: whose job is next, what counts, and what does not change."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.errors import Refused
from covey.core.ids import JobId
from plugins.scheduler.machine.log.job_table import TENANTS_MAX, JobTable
from plugins.scheduler.messages.commands import Applied, CancelAsked, NotApplied, WeightSet
from plugins.scheduler.policy import explain
from plugins.scheduler.policy.classes import choose
from plugins.scheduler.policy.explain import QueuePositions
from plugins.scheduler.policy.fair import HALF_LIFE_S, FairTurns, RecentUse, TenantUse
from plugins.scheduler.policy.order import Row, ordered
from plugins.scheduler.service import asked
from tests.plugins.scheduler.little import Little
from tests.plugins.scheduler.test_queue import Told

THRESHOLDS = (10.0,)


def row(number: int, tenant: str, gpus: int = 1, running: bool = False, attained: float = 0.0) -> Row:
    return Row(
        id=JobId(f"j{number}"), number=number, tenant=tenant, job_class="guaranteed", gpus=gpus, submitted=number,
        attained_gpu_s=attained, running=running, first=1.0 if running else None,
    )  # fmt: skip


def run_of(rows: list[Row], capacity: int, use: TenantUse | None = None) -> list[str]:
    turns = FairTurns(THRESHOLDS, use or TenantUse({}, {}))
    return list(choose(ordered(rows, THRESHOLDS, {}, None, True), capacity, {}, None, turns).run)


def test_a_thousand_jobs_of_one_tenant_do_not_stand_before_anothers_first() -> None:
    rows = [*[row(n, "crowd", running=n < 8) for n in range(1000)], row(1000, "late", 4), row(1001, "late")]
    assert run_of(rows, 12)[8:] == ["j1001", "j8", "j9", "j10"], "the gang does not fit beside the first turn"
    assert run_of(rows, 13)[8:] == ["j1001", "j1000"]
    alone = [row(n, "crowd", running=n < 8) for n in range(1000)]
    assert run_of(alone, 12)[8:] == ["j8", "j9", "j10", "j11"]


def test_each_start_counts_at_once_and_in_proportion_to_the_weight() -> None:
    rows = [*[row(n, "a") for n in range(50)], *[row(50 + n, "b") for n in range(50)]]
    tenants = Counter("a" if int(id[1:]) < 50 else "b" for id in run_of(rows, 20))
    assert tenants == {"a": 10, "b": 10}
    heavy = TenantUse({}, {"b": 3.0})
    assert Counter("a" if int(id[1:]) < 50 else "b" for id in run_of(rows, 20, heavy)) == {"a": 5, "b": 15}


def test_who_used_the_rack_of_late_waits_until_others_caught_up() -> None:
    rows = [row(1, "a"), row(2, "a"), row(3, "b"), row(4, "b")]
    assert run_of(rows, 3, TenantUse({"a": 1.5}, {})) == ["j3", "j4", "j1"]
    day = RecentUse().after(0.0, 8 * HALF_LIFE_S)
    assert day.after(HALF_LIFE_S).gpu_s == 4 * HALF_LIFE_S
    use, each_s = RecentUse(), 600.0
    for step in range(1, 2000):
        use = use.after(step * each_s, 8 * each_s)
    assert math.isclose(use.gpus(use.at_s), 8.0, rel_tol=0.01), "eight GPUs for ever are eight"
    assert use.gpus(use.at_s + 30 * HALF_LIFE_S) < 1e-7
    assert use.after(0.0, 5.0).at_s == use.at_s, "time does not go back"


def quota_run(rows: list[Row], capacity: int, quotas: dict[str, int | None], turns: FairTurns | None) -> list[str]:
    return list(choose(ordered(rows, THRESHOLDS, quotas, None, True), capacity, quotas, None, turns).run)


@pytest.mark.parametrize(("quotas", "starts"), [((8, 8), (5, 3)), ((4, 12), (2, 6)), ((4, 4), (4, 4))])
def test_overbooked_tenants_come_to_the_same_part_of_their_quotas(
    quotas: tuple[int, int], starts: tuple[int, int]
) -> None:
    rows = [*[row(n, "a") for n in range(20)], *[row(20 + n, "b") for n in range(20)]]
    both: dict[str, int | None] = dict(zip("ab", quotas, strict=True))
    use = TenantUse({}, {"a": 7.0}) if quotas != (8, 8) else TenantUse({"b": 1.5}, {})
    run = quota_run(rows, 8, both, FairTurns(THRESHOLDS, use))
    assert Counter("a" if int(id[1:]) < 20 else "b" for id in run) == dict(zip("ab", starts, strict=True))
    assert all(int(id[1:]) < 20 for id in quota_run(rows, 8, {"a": 8, "b": 8}, None)), "without turns the first has all"


ROWS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.booleans(), st.sampled_from([0.0, 50.0])), max_size=12
)
QUOTAS = st.fixed_dictionaries({tenant: st.integers(0, 12) for tenant in "abc"})


@given(ROWS, QUOTAS, st.integers(1, 30), st.dictionaries(st.sampled_from("abc"), st.floats(0, 20), max_size=3))
def test_turns_of_quotas_change_who_starts_alone_and_nothing_where_all_fit(
    given_rows: list[tuple[str, int, bool, float]], quotas: dict[str, int], capacity: int, recent: dict[str, float]
) -> None:
    rows, left, free = [], dict(quotas), capacity
    for n, (tenant, gpus, runs, done) in enumerate(given_rows):
        runs = runs and gpus <= min(left[tenant], free)
        left[tenant], free = left[tenant] - gpus * runs, free - gpus * runs
        rows.append(row(n, tenant, gpus, runs, done))
    limits: dict[str, int | None] = {**quotas}
    plain = quota_run(rows, capacity, limits, None)
    fair = quota_run(rows, capacity, limits, FairTurns(THRESHOLDS, TenantUse(recent, {})))
    used = {tenant: sum(each.gpus for each in rows if each.id in fair and each.tenant == tenant) for tenant in "abc"}
    assert all(used[tenant] <= quotas[tenant] for tenant in "abc") and sum(used.values()) <= capacity
    here = {each.tenant for each in rows}
    if len(here) < 2 or sum(quotas[tenant] for tenant in here) <= capacity:
        assert fair == plain
    for tenant in "abc":  # a job is stopped by one of its own tenant alone, as without turns
        stops = {each.id for each in rows if each.running and each.id not in fair and each.tenant == tenant}
        assert not stops or any(each.id in fair and not each.running and each.tenant == tenant for each in rows)
    waits = [each for each in rows if each.id not in fair and not each.running]
    room = capacity - sum(used.values())
    if all(each.id in fair for each in rows if each.running):  # what a stop leaves over is for the next look
        assert all(each.gpus > min(room, quotas[each.tenant] - used[each.tenant]) for each in waits), "what fits runs"


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 6), st.booleans(), st.sampled_from([0.0, 50.0])), max_size=12
    ),
    st.integers(1, 20),
    st.dictionaries(st.sampled_from("abc"), st.floats(0, 20), max_size=3),
)
def test_with_one_tenant_nothing_changes_and_each_has_its_own_order(
    given_rows: list[tuple[str, int, bool, float]], capacity: int, recent: dict[str, float]
) -> None:
    one = [row(n, "a", g, run, done) for n, (_, g, run, done) in enumerate(given_rows)]
    plain = ordered(one, THRESHOLDS, {}, None, True)
    turns = FairTurns(THRESHOLDS, TenantUse(recent, {}))
    assert turns.ordered(plain, {}, None) == plain
    assert choose(plain, capacity, {}, None, turns) == choose(plain, capacity, {})
    several = [row(n, t, g, run, done) for n, (t, g, run, done) in enumerate(given_rows)]
    plain = ordered(several, THRESHOLDS, {}, None, True)
    found = turns.ordered(plain, {}, None)
    for tenant in "abc":
        assert [each for each in found if each.tenant == tenant] == [each for each in plain if each.tenant == tenant]
    assert turns.ordered(plain, {}, 4) == plain, "who has a quota takes no turns"


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=60), st.integers(1, 40), st.integers(1, 3),
    st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.5, 1.0, 2.0, 5.0])),
)  # fmt: skip
def test_no_tenant_that_waits_is_behind_another_by_more_than_one_job(
    tenants: list[str], capacity: int, gpus: int, weights: dict[str, float]
) -> None:
    """Reference: start-time fair queueing (Goyal et al. 1996): while two wait, what they got, over their weights,
    differs by one job at most."""
    rows = [row(n, tenant, gpus) for n, tenant in enumerate(tenants)]
    runs = set(run_of(rows, capacity, TenantUse({}, weights)))
    got = Counter(dict.fromkeys(tenants, 0))
    for each in rows:
        got[each.tenant] += each.gpus if each.id in runs else 0
    assert got.total() == min(len(rows), capacity // gpus) * gpus, "no GPU is left while a job that fits waits"
    for mine in {each.tenant for each in rows if each.id not in runs}:
        for other in got:
            weight = weights.get(other, 1.0)
            assert got[mine] / weights.get(mine, 1.0) >= (got[other] - gpus) / weight, (mine, other, got)


def test_the_leader_starts_the_late_tenants_first_job_next_and_counts_service_by_day() -> None:
    little = Little([4, 4], {}, queue_thresholds_gpu_s=(1000.0,))
    crowd = [little.submit(1, "crowd") for _ in range(12)]
    guest = little.submit(1, "guest", kind="opportunistic")
    little.settle()
    assert [little.state(id) for id in crowd].count("running") == 8
    late = little.submit(1, "late")
    little.serve(little.queue.jobs[crowd[0]], 50.0)
    little.end(little.queue.jobs[crowd[0]])
    little.settle()
    assert (little.state(late), little.state(crowd[8])) == ("running", "queued")
    for id in (*crowd[1:], late):
        little.say(CancelAsked(wall_s=1.0, job=id))
    little.settle()
    little.serve(little.queue.jobs[guest], 50.0)
    assert set(little.queue.recent) == {"crowd"}, "what opportunistic jobs attain counts for nobody"
    little.restore()
    assert little.copy.recent == little.queue.recent


def test_weights_are_set_in_the_log_kept_and_bounded() -> None:
    told = Told()
    assert told.say(WeightSet(wall_s=1.0, tenant="ml", weight=2.0, by="root")) == Applied()
    assert told.say(WeightSet(wall_s=1.0, tenant="ml", weight=2.0)) == Applied(), "heard again"
    assert told.queue.weights == {"ml": 2.0} and told.notes == [("tenant/ml", "weight set")]
    copy = JobTable()
    copy.restore(told.queue.snapshot())
    assert copy.weights == {"ml": 2.0}
    assert told.say(WeightSet(wall_s=1.0, tenant="ml", weight=1.0)) == Applied() and told.queue.weights == {}
    told.queue.weights = {f"t{number}": 2.0 for number in range(TENANTS_MAX)}
    assert isinstance(told.say(WeightSet(wall_s=1.0, tenant="one-more", weight=3.0)), NotApplied)
    assert told.say(WeightSet(wall_s=1.0, tenant="t5", weight=3.0)) == Applied()
    for number in range(TENANTS_MAX + 5):
        told.queue.attain(f"t{number}", 1.0 + number)
    assert len(told.queue.recent) == TENANTS_MAX and "t0" not in told.queue.recent
    for wrong in ("many", 0, -1, 1e9, None, float("nan")):
        with pytest.raises(Refused, match="invalid weight"):
            asked.weight_set({"tenant": "ml", "weight": wrong})


def test_a_job_that_is_passed_by_another_tenants_is_told_so() -> None:
    rows = [row(1, "crowd", running=True), row(2, "crowd"), row(3, "late")]
    positions = QueuePositions(FairTurns(THRESHOLDS).ordered(ordered(rows, THRESHOLDS, {}, None, True), {}, None))
    said = explain.waits_for(JobId("j2"), positions, (), 1, explain.OrderInForce(THRESHOLDS, {}, None))
    assert "2nd of the waiting jobs" in said and "ahead: j3 (late, 1 GPU), since it is the turn of late" in said
