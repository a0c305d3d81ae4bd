"""A tenant on many hosts does not exceed its budget: old views, hosts that die and come back, a rack that is split."""

import pytest

from chaos.crowds.budget_crowd import BudgetCrowd, BudgetResult, budget_story
from chaos.crowds.memory_crowd import SLAB
from chaos.world.world import World
from plugins.memory.policy.budgets import SETTLED_S


def kept(found: BudgetResult) -> None:
    """Assert that the tenant is over its budget by a slab or two for a moment, has a budget in each part of a split
    rack, and is back within it."""
    most = found.budget + found.budget // 8
    assert found.wanted > 2 * most
    assert found.filled >= found.budget - 1, "it gets what it may have"
    assert max(found.most_calm, found.most_faults) <= most, found
    assert found.budget < found.most_split <= 2 * most, found
    assert found.budget - 2 <= found.after_split <= most and found.after_faults <= most, found


def test_a_tenant_that_wants_three_times_its_budget_on_all_hosts_gets_its_budget() -> None:
    with World(1) as world:
        crowd = BudgetCrowd(world, 8, 6, 16, liars=3)
        crowd.heat(500)
        crowd.watch(25.0)
        assert 15 <= crowd.has_bytes() // SLAB <= crowd.most_bytes // SLAB <= 18
        assert crowd.most_bytes <= crowd.bound_bytes


def test_what_a_lender_holds_over_the_budget_after_a_split_comes_back() -> None:
    with World(2) as world:
        crowd = BudgetCrowd(world, 6, 4, 6, loss=0.0)
        crowd.split(3)
        crowd.heat(500)
        crowd.watch(25.0)
        assert crowd.has_bytes() // SLAB >= 11, "a budget on each side"
        crowd.heal()
        crowd.watch(SETTLED_S + 30.0)
        assert 5 <= crowd.has_bytes() // SLAB <= 7
        crowd.check()


@pytest.mark.long
@pytest.mark.parametrize("liars", [0, 12])
@pytest.mark.parametrize("seed", range(1, 11))
def test_a_budget_holds_through_deaths_restarts_and_a_split(seed: int, liars: int) -> None:
    kept(budget_story(seed, liars=liars))


@pytest.mark.long
def test_a_story_of_budgets_is_the_same_every_time() -> None:
    one, other = (budget_story(5, count=4, slabs=3, budget=4).story_hash for _ in range(2))
    assert one == other
