"""What a class may do: policies by example and by hypothesis."""

from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.ids import JobId
from plugins.scheduler.machine.log.models import GANGS_MAX, Models
from plugins.scheduler.messages.spec import JobSpec
from plugins.scheduler.policy.classes import choose, gpus_to_keep, is_late, may_upgrade, victims
from plugins.scheduler.policy.order import Row, ordered, promoted_after, select

THRESHOLDS = (10.0,)
HOSTS = ("h1", "h2", "h3")


def row(number: int, gpus: int, tenant: str = "a", running: bool = False, attained: float = 0.0) -> Row:
    return Row(
        id=JobId(f"j{number}"),
        number=number,
        tenant=tenant,
        job_class="guaranteed",
        gpus=gpus,
        submitted=number,
        attained_gpu_s=attained,
        running=running,
    )


def test_only_auto_jobs_are_late_and_only_where_that_is_wanted() -> None:
    """Reference: AntMan §3.3."""
    assert is_late("auto", 300.0, 300.0) and not is_late("auto", 299.9, 300.0)
    assert not is_late("guaranteed", 1e9, 300.0) and not is_late("opportunistic", 1e9, 300.0)
    assert not is_late("auto", 1e9, None)


def test_a_job_is_upgraded_whole_or_not_at_all() -> None:
    """Reference: AntMan §3.3, job upgrade: a partial one does not help."""
    assert may_upgrade(4, 4, closed=False) and not may_upgrade(4, 3, closed=False)
    assert may_upgrade(4, None, closed=False) and not may_upgrade(1, 4, closed=True)


def test_preemption_by_the_order_stays_inside_a_tenant() -> None:
    """Reference: scheduling.md 8, composition."""
    rows = [row(1, 4, "a", running=True, attained=50.0), row(2, 4, "b", running=True, attained=50.0), row(3, 2, "b")]
    chosen = choose(ordered(rows, THRESHOLDS, {"a": 4, "b": 4}), 8, {"a": 4, "b": 4})
    assert (chosen.run, chosen.preempt) == (("j3", "j1"), ("j2",))
    assert select(ordered(rows, THRESHOLDS, {}), 8, {}).preempt == ("j2",), "in one order the last one goes"
    rows = [row(1, 4, "a", running=True, attained=50.0), row(2, 4, "b", running=True), row(3, 2, "b")]
    assert choose(ordered(rows, THRESHOLDS, {"a": 6, "b": 6}), 8, {"a": 6, "b": 6}).preempt == (), "promised too much"


def test_tenants_without_a_quota_share_one_order_and_yield_to_a_promise() -> None:
    rows = [row(1, 6, "x", running=True, attained=50.0), row(2, 2, "y", running=True), row(3, 4, "a")]
    chosen = choose(ordered(rows, THRESHOLDS, {"a": 4}), 8, {"a": 4})
    assert (chosen.run, chosen.preempt) == (("j3", "j2"), ("j1",))


ROWS = st.lists(
    st.tuples(st.integers(1, 6), st.sampled_from("abc"), st.booleans(), st.sampled_from([0.0, 50.0])), max_size=10
)


@given(ROWS, st.integers(1, 12))
def test_without_quotas_and_with_one_tenants_it_is_the_plain_walk(
    rows: list[tuple[int, str, bool, float]], capacity: int
) -> None:
    made = [row(n, g, t, run, done) for n, (g, t, run, done) in enumerate(rows)]
    assert choose(ordered(made, THRESHOLDS, {}), capacity, {}) == select(ordered(made, THRESHOLDS, {}), capacity, {})
    held = sum(each.gpus for each in made if each.running)
    mine = [row(n, g, "a", run, done) for n, (g, _, run, done) in enumerate(rows)]
    quotas = {"a": capacity}
    plain = select(ordered(mine, THRESHOLDS, quotas), capacity, quotas)
    ours = choose(ordered(mine, THRESHOLDS, quotas), max(capacity, held), quotas)
    assert (ours.run, ours.preempt) == (plain.run, plain.preempt)


@given(ROWS, st.integers(1, 12), st.dictionaries(st.sampled_from("abc"), st.integers(0, 8)))
def test_no_quota_or_rack_is_exceeded_and_another_tenants_order_takes_nobodys_gpus(
    rows: list[tuple[int, str, bool, float]], capacity: int, quotas: Mapping[str, int]
) -> None:
    made = [row(n, g, t, run, done) for n, (g, t, run, done) in enumerate(rows)]
    while sum(each.gpus for each in made if each.running) > capacity:
        made.remove(next(each for each in made if each.running))
    chosen = choose(ordered(made, THRESHOLDS, quotas), capacity, quotas)
    of = {each.id: each for each in made}
    assert sum(of[id].gpus for id in chosen.run) <= capacity
    for tenant, quota in quotas.items():
        assert sum(of[id].gpus for id in chosen.run if of[id].tenant == tenant) <= quota
    for id in chosen.preempt:
        tenant = of[id].tenant
        mine = sum(each.gpus for each in made if each.tenant == tenant and each.running)
        newcomers = [other for other in chosen.run if of[other].tenant == tenant and not of[other].running]
        assert tenant not in quotas or newcomers or mine > quotas[tenant], f"{id} lost its GPUs to another tenant"
    assert {*chosen.run, *chosen.preempt} >= {each.id for each in made if each.running}


def test_what_a_gang_keeps_is_where_most_is_and_only_where_a_worker_will_fit() -> None:
    totals = {"h1": 4, "h2": 4, "h3": 1}
    assert gpus_to_keep({}, {"h1": 1, "h2": 3, "h3": 1}, totals, 1, 4) == {"h2": 3}
    assert gpus_to_keep({"h1": 1}, {"h1": 1, "h2": 3, "h3": 1}, totals, 1, 4) == {"h1": 1}, "it stays where it began"
    assert gpus_to_keep({}, {"h1": 1, "h2": 3, "h3": 1}, totals, 2, 2) == {"h2": 3}
    assert gpus_to_keep({}, {"h3": 1}, totals, 1, 2) == {}, "one GPU will never be two"


BY_HOST = st.fixed_dictionaries({host: st.integers(0, 4) for host in HOSTS})


@given(BY_HOST, BY_HOST, st.integers(1, 6), st.integers(1, 4))
def test_a_reservation_only_grows_and_never_beyond_the_gang(
    there: dict[str, int], more: dict[str, int], workers: int, each: int
) -> None:
    totals = dict.fromkeys(HOSTS, 8)
    mine = gpus_to_keep({}, there, totals, workers, each)
    later = {host: there[host] + more[host] for host in HOSTS}
    then = gpus_to_keep(mine, later, totals, workers, each)
    for kept, most in ((mine, there), (then, later)):
        assert sum(kept.values()) <= workers * each
        assert all(0 < gpus <= most[host] for host, gpus in kept.items())
    assert all(then.get(host, 0) >= gpus for host, gpus in mine.items())


def test_the_fewest_and_newest_guests_stop() -> None:
    most = {"h1": 9, "h2": 9}
    guests = [("new", {"h1": 1}), ("mid", {"h2": 2}), ("old", {"h1": 2})]
    assert victims({"h1": 0, "h2": 1}, guests, most, 1, 3) == ["mid"], "the newest alone would not have helped"
    assert victims({"h1": 0, "h2": 3}, guests, most, 1, 3) == []
    assert victims({"h1": 0, "h2": 0}, guests, most, 1, 3) == ["new", "old"]
    assert victims({"h1": -9, "h2": -9}, guests, most, 1, 3) is None
    assert victims({"h1": 0, "h2": 0}, guests, {"h1": 2, "h2": 9}, 1, 3) is None, "one GPU there is kept for others"


@given(BY_HOST, st.lists(BY_HOST, max_size=5), BY_HOST, st.integers(1, 6), st.integers(1, 3))
def test_nobody_stops_in_vain(
    free: dict[str, int], held: list[dict[str, int]], most: dict[str, int], workers: int, each: int
) -> None:
    def fits(stopped: Iterable[int]) -> bool:
        have = {host: gpus + sum(held[one][host] for one in stopped) for host, gpus in free.items()}
        return sum(min(gpus, most[host]) // each for host, gpus in have.items()) >= workers

    guests = list(enumerate(held))
    stop = victims(free, guests, most, workers, each)
    assert (stop is None) == (not fits(range(len(held))))
    assert stop is None or fits(stop)
    for one in stop or []:
        assert not fits([other for other in stop or [] if other != one]), "without this one it would fit too"


def test_the_knob_and_the_limit_promote_after_what_the_rules_say() -> None:
    """Reference: Tiresias §3.3, PROMOTEKNOB and STARVELIMIT."""
    assert promoted_after(1, 100, 0, (2, 1), None) == 200
    assert promoted_after(1, 100, 150, (2, 1), None) == 50 and promoted_after(1, 100, 250, (2, 1), None) == 0
    assert promoted_after(0, 100, 0, (2, 1), None) is None, "not in the highest queue"
    assert promoted_after(1, 0, 0, (2, 1), 7) == 7 and promoted_after(1, 100, 190, (2, 1), 7) == 7
    assert promoted_after(1, 30.0, 0.0, (1, 2), None) == pytest.approx(15.0)


def model(name: str = "resnet", workers: int = 2, skew: float = 0.0) -> JobSpec:
    return JobSpec.parse({"argv": ["x"], "name": name, "workers": workers, "skew": skew})


def test_the_next_job_of_a_name_is_placed_by_what_the_last_one_showed() -> None:
    models = Models()
    assert models.skew(model()) is None
    models.saw_tensors(model(), 60, 100)
    assert models.skew(model()) == models.skew(model(workers=8)) == 0.6
    assert models.skew(model("other")) is None
    assert models.skew(model(), seen=(1, 10)) == 0.1, "its own tensors count more"
    assert models.skew(model(skew=0.2), seen=(1, 10)) == 0.2, "and its own word most"


def test_a_gang_is_spread_only_after_its_tensors_and_its_steps_were_seen() -> None:
    """Its steps on one host, and on several. Reference: Tiresias §3.3: the skew is measured, not believed."""
    models, spec = Models(), model(skew=0.1)
    assert models.shown_skew(spec) is None, "what it says of itself is not enough"
    models.saw_tensors(model(), 10, 100)
    assert models.shown_skew(model()) is None, "no step was timed"
    models.saw_steps(model(), 2, 1.02)
    assert models.shown_skew(model()) is None, "and none on one host"
    models.saw_steps(model(), 1, 1.0)
    assert models.shown_skew(model()) == 0.1
    assert models.shown_skew(model(workers=8)) is None, "a gang of another size may mind"
    models.saw_steps(model(), 2, 1.5)
    assert models.shown_skew(model()) is None, "its steps took half as long again"


def test_packlimit_moves_when_a_model_that_was_thought_to_mind_does_not() -> None:
    """Reference: Tiresias §3.4."""
    models = Models()
    for name, largest, spread_s in (("tame", 40, 1.01), ("wild", 70, 1.5)):
        models.saw_tensors(model(name), largest, 100)
        models.saw_steps(model(name), 1, 1.0)
        assert models.packlimit(0.3) == 0.3, "only one kind of gang was seen"
        models.saw_steps(model(name), 2, spread_s)
    assert models.packlimit(0.3) == pytest.approx(0.55)
    restored = Models(models.tensors, models.steps)
    assert restored.packlimit(0.3) == pytest.approx(0.55)
    for number in range(GANGS_MAX):
        models.saw_steps(model(f"n{number}"), 1, 1.0)
    assert models.packlimit(0.3) == 0.3 and len(models.steps) == GANGS_MAX, "the longest unseen are forgotten"
