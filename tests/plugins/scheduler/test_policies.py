"""Rules, skew and the packing limit."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.ids import HostId, JobId
from plugins.scheduler.policy.explain import OrderInForce, QueuePositions, waits_for
from plugins.scheduler.policy.order import Row, ordered, select
from plugins.scheduler.policy.packing import PACKLIMIT, SpreadLoss, cost, refit, skew
from plugins.scheduler.policy.place import place
from plugins.scheduler.policy.rules import COVEY, LAS_PUBLISHED, OrderRules
from plugins.scheduler.policy.settings import SchedulerSettings

MODELS = {
    "vgg19": (548.1, 392.0, True), "vgg16": (527.8, 392.0, True), "vgg11": (506.8, 392.0, True),
    "alexnet": (235.9, 144.0, True), "resnet152": (230.2, 9.0, False), "resnet101": (170.4, 9.0, False),
    "resnet50": (97.7, 9.0, False), "inception4": (162.9, 5.9, False), "inception3": (91.0, 7.8, False),
    "googlenet": (26.7, 3.9, False),
}  # fmt: skip
"""Models: MB of all tensors, MB of the largest, and whether the model was measured to mind being spread."""


@pytest.mark.parametrize(
    "wrong",
    [
        {"thresholds_gpu_s": (5, 5)},
        {"thresholds_gpu_s": (0,)},
        {"quantum_s": 0},
        {"knob": (1, 0)},
        {"preempt_s": -1},
        {"starve_limit_s": 0},
        {"discipline": "magic"},
        {"inside": "out"},
    ],
)
def test_rules_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        OrderRules(**wrong)


def test_the_two_presets_are_what_they_are_said_to_be() -> None:
    assert (LAS_PUBLISHED.thresholds_gpu_s, LAS_PUBLISHED.inside) == ((3200,), "first")
    assert LAS_PUBLISHED.knob is None and LAS_PUBLISHED.starve_limit_s is None and LAS_PUBLISHED.quantum_s is None
    assert (COVEY.thresholds_gpu_s, COVEY.inside, COVEY.narrow_first) == ((3200, 51200), "sticky", True)


def test_skew_is_the_share_of_the_largest_tensor() -> None:
    assert skew([1, 1, 2]) == 0.5
    assert skew([7]) == 1.0
    assert skew([]) == 0.0


@pytest.mark.parametrize("name", MODELS)
def test_the_default_limit_packs_exactly_the_models_that_mind(name: str) -> None:
    """Reference: Gu 2021, §3.3.3.1 and table 3.3."""
    total, largest, minds = MODELS[name]
    count = math.ceil((total - largest) / largest)
    tensors = [int(largest * 1000), *[int((total - largest) * 1000 / count)] * count]
    assert (skew(tensors) > PACKLIMIT) == minds
    hosts = {HostId("a"): 2, HostId("b"): 4, HostId("c"): 1}
    chosen = place(hosts, 3, 1, skew(tensors), PACKLIMIT)
    assert chosen == ({"b": 3} if minds else {"c": 1, "a": 2})


def test_the_limit_moves_to_where_it_separates_who_loses_from_who_does_not() -> None:
    """Reference: Gu 2021, §3.3.3.3, a linear classifier on placement and performance."""
    seen = [
        SpreadLoss(0.05, 0.01),
        SpreadLoss(0.2, 0.02),
        SpreadLoss(0.4, 0.03),
        SpreadLoss(0.6, 0.4),
        SpreadLoss(0.7, 0.5),
    ]
    assert refit(seen) == 0.5
    assert refit([*seen, SpreadLoss(0.45, 0.3)], 0.3) == pytest.approx(0.425)


def test_the_limit_stays_without_evidence_of_both_kinds_or_when_it_separates_already() -> None:
    assert refit([]) == PACKLIMIT
    assert refit([SpreadLoss(0.9, 0.0), SpreadLoss(0.1, 0.0)]) == PACKLIMIT
    assert refit([SpreadLoss(0.9, 0.5), SpreadLoss(0.1, 0.0)], 0.7) == 0.7


SEEN = st.lists(st.builds(SpreadLoss, st.floats(0, 1), st.floats(0, 2)), max_size=20)


@given(SEEN, st.floats(0, 1))
def test_no_limit_would_have_cost_less_than_the_fitted_one(seen: list[SpreadLoss], now: float) -> None:
    """Reference: §3.3.3.3, PACKLIMIT."""
    fitted = refit(seen, now)
    assert cost(seen, fitted) <= cost(seen, now)
    if any(one.slowdown > 0.05 for one in seen) and any(one.slowdown <= 0.05 for one in seen):
        inner = [
            limit / 20 for limit in range(21) if min(s.skew for s in seen) <= limit / 20 < max(s.skew for s in seen)
        ]
        assert all(cost(seen, fitted) <= cost(seen, limit) + 1e-9 for limit in inner)


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 8)), st.integers(1, 20), st.floats(0, 1))
def test_placement_does_not_care_in_what_order_it_hears_of_hosts(
    free: dict[str, int], gpus: int, skewed: float
) -> None:
    there = {HostId(host): count for host, count in free.items()}
    turned = dict(reversed(there.items()))
    assert place(there, gpus, 1, skewed, 0.3) == place(turned, gpus, 1, skewed, 0.3)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=8), st.integers(1, 20), st.floats(0, 1), st.randoms())
def test_equal_hosts_are_alike_to_placement(counts: list[int], gpus: int, skewed: float, dice: Any) -> None:
    """Reference: §3.3.3.3."""
    mixed = list(counts)
    dice.shuffle(mixed)

    def parts(order: list[int]) -> list[int] | None:
        chosen = place({HostId(f"h{at}"): count for at, count in enumerate(order)}, gpus, 1, skewed, 0.3)
        return None if chosen is None else sorted(chosen.values())

    assert parts(counts) == parts(mixed)


def row(number: int, **more: Any) -> Row:
    given: dict[str, Any] = {"gpus": 1, "attained_gpu_s": 0.0, "running": False, "tenant": "t"}
    return Row(id=JobId(f"j{number}"), number=number, job_class="guaranteed", submitted=number, **{**given, **more})


def test_the_agent_orders_by_the_rules_that_the_simulator_calls_covey() -> None:
    settings = SchedulerSettings()
    assert settings.queue_thresholds_gpu_s == COVEY.thresholds_gpu_s
    assert (settings.narrow_first, settings.starve_limit_s) == (COVEY.narrow_first, COVEY.starve_limit_s)
    rows = [row(1, gpus=8), row(2, gpus=2), row(3, gpus=2, running=True, first=9.0), row(4, gpus=1, attained_gpu_s=4e3)]
    found = ordered(rows, settings.queue_thresholds_gpu_s, {}, None, settings.narrow_first)
    assert [one.id for one in found] == ["j3", "j2", "j1", "j4"]


def test_a_job_that_is_passed_by_a_narrower_one_is_told_why() -> None:
    rows = ordered([row(1, gpus=8), row(2, gpus=2), row(3, gpus=7, running=True)], (3200.0,), {}, None, True)
    said = waits_for(
        JobId("j1"), QueuePositions(rows), select(rows, 8, {}).over_quota, 8, OrderInForce((3200.0,), {}, None)
    )
    assert "ahead: j2 (t, 2 GPUs), since jobs with fewer GPUs go first" in said
    assert (
        said.startswith("2nd of the waiting jobs, in queue 0")
        and "it starts when enough of j3 (t, 7 GPUs) have ended" in said
    )
