"""Taking slabs back: how much, which, how many to ask about, and where they go; by example and by property."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.ids import HostId
from covey.core.units import GIB, MIB
from plugins.memory.policy import eviction, lending
from plugins.memory.policy.lending import Budget
from plugins.memory.policy.placement import LenderPeer

H = [HostId(f"h{n}") for n in range(8)]
SLAB = 64 * MIB
slabs = st.dictionaries(st.integers(0, 60), st.floats(0, 1e6), max_size=40)


def budget(free: int, lent: int, cap: int = 1 << 50, pressure: float = 0.0) -> Budget:
    used = 64 * GIB - free
    return Budget(64 * GIB, float(used), used, pressure, 8 * GIB, cap, lent, lent)


# ---- how many --------------------------------------------------------------------------------------------------------


@given(
    free=st.integers(0, 64 * GIB),
    lent=st.integers(0, 64 * GIB),
    cap=st.integers(0, 64 * GIB),
    pressure=st.floats(0, 100),
)
def test_a_lender_plans_to_free_at_most_what_it_lends_and_what_is_needed_if_it_can(
    free: int, lent: int, cap: int, pressure: float
) -> None:
    now = budget(free, lent, cap, pressure)
    planned = eviction.bytes_to_free(now)
    needed = max(0, 8 * GIB - free, lent - cap)
    assert 0 <= planned <= lent
    assert planned >= min(needed, lent)
    if pressure <= lending.PRESSURE_MAX:
        assert planned == min(needed, lent), "and no more, when nobody waits for memory"


def test_under_pressure_an_eighth_goes_even_with_headroom_intact() -> None:
    assert eviction.bytes_to_free(budget(20 * GIB, 8 * GIB)) == 0
    assert eviction.bytes_to_free(budget(20 * GIB, 8 * GIB, pressure=30.0)) == GIB
    assert eviction.bytes_to_free(budget(20 * GIB, 3, pressure=30.0)) == 1
    assert eviction.bytes_to_free(budget(20 * GIB, 0, pressure=30.0)) == 0
    assert eviction.bytes_to_free(budget(20 * GIB, 8 * GIB, pressure=lending.PRESSURE_MAX)) == 0, "above it, not at it"


# ---- which -----------------------------------------------------------------------------------------------------------


@given(activities=slabs, evict=st.integers(0, 50))
def test_of_slabs_of_one_size_the_e_least_active_of_those_asked_go(activities: dict[int, float], evict: int) -> None:
    """Reference: §2.5.2."""
    sizes = dict.fromkeys(activities, SLAB)
    gone = eviction.slabs_to_evict(activities, sizes, evict * SLAB)
    assert gone == sorted(activities, key=lambda slab: activities[slab])[:evict]
    kept = [activities[slab] for slab in activities if slab not in gone]
    assert len(gone) == min(evict, len(activities))
    assert all(activities[slab] <= least for slab in gone for least in kept)


@given(
    slabs=st.dictionaries(
        st.integers(0, 60), st.tuples(st.floats(0, 1e6), st.sampled_from([SLAB, 4 * SLAB, 16 * SLAB])), max_size=30
    ),
    needed=st.integers(0, 200 * SLAB),
)
def test_of_slabs_of_any_size_enough_go_when_there_are_and_none_that_could_be_spared(
    slabs: dict[int, tuple[float, int]], needed: int
) -> None:
    activities = {slab: rate for slab, (rate, _) in slabs.items()}
    sizes = {slab: size for slab, (_, size) in slabs.items()}
    gone = eviction.slabs_to_evict(activities, sizes, needed)
    held = sum(sizes[slab] for slab in gone)
    assert held >= min(needed, sum(sizes.values()))
    assert all(held - sizes[slab] < needed for slab in gone)
    assert [activities[slab] for slab in gone] == sorted(activities[slab] for slab in gone)


def test_of_two_slabs_of_which_one_can_be_spared_the_more_active_is() -> None:
    """The rule is ours, for slabs that differ in size; among slabs of one size none can be spared. Reference: §2.5.2,
    the E least active go."""
    sizes = {"idle": 4 * SLAB, "busier": 4 * SLAB, "busiest": 12 * SLAB}
    activities = {"idle": 1.0, "busier": 2.0, "busiest": 3.0}
    assert eviction.slabs_to_evict(activities, sizes, 16 * SLAB) == ["idle", "busiest"]
    assert eviction.slabs_to_evict(activities, sizes, 17 * SLAB) == ["idle", "busier", "busiest"]
    assert eviction.slabs_to_evict(activities, sizes, 12 * SLAB) == ["busiest"]


@given(
    sizes=st.dictionaries(st.integers(0, 60), st.sampled_from([SLAB, 16 * SLAB]), max_size=40),
    needed=st.integers(0, 300 * SLAB),
    extra=st.none() | st.integers(0, 40),
    seed=st.integers(0, 1 << 30),
)
def test_slabs_are_asked_about_that_hold_what_is_needed_and_at_most_as_many_again(
    sizes: dict[int, int], needed: int, extra: int | None, seed: int
) -> None:
    asked = eviction.candidates_for(sizes, needed, random.Random(seed), extra)
    assert len(asked) == len(set(asked))
    assert set(asked) <= set(sizes)
    held = [sum(sizes[slab] for slab in asked[:count]) for count in range(len(asked) + 1)]
    evict = next((count for count, size in enumerate(held) if size >= needed), len(sizes))
    assert len(asked) == min(len(sizes), evict + (evict if extra is None else min(extra, evict)))


@given(lent=st.integers(0, 60), evict=st.integers(0, 20), extra=st.integers(0, 40), seed=st.integers(0, 1 << 30))
def test_of_slabs_of_one_size_e_and_at_most_e_more_are_asked_about(
    lent: int, evict: int, extra: int, seed: int
) -> None:
    """E' <= E: no more slabs are asked about beyond those that go. Reference: §2.5.2."""
    asked = eviction.candidates_for(dict.fromkeys(range(lent), SLAB), evict * SLAB, random.Random(seed), extra)
    assert len(asked) == min(lent, min(lent, evict) + min(extra, lent, evict))


# ---- how many to ask about -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("busy", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_evicting_blindly_is_the_formula_without_extra(busy: float) -> None:
    assert eviction.chance_all_lightly_active(10, 0, busy) == pytest.approx((1 - busy) ** 10)


@given(evict=st.integers(1, 30), busy=st.floats(0, 1))
def test_asking_one_more_never_makes_it_worse_and_the_answer_is_a_chance(evict: int, busy: float) -> None:
    found = [eviction.chance_all_lightly_active(evict, extra, busy) for extra in range(evict + 1)]
    assert all(-1e-12 <= chance <= 1 + 1e-9 for chance in found)
    assert all(one <= two + 1e-9 for one, two in pairwise(found))


@given(evict=st.integers(1, 20), busy=st.floats(0, 1), wanted=st.floats(0.01, 0.999))
def test_no_more_are_asked_about_than_the_chance_wanted_needs(evict: int, busy: float, wanted: float) -> None:
    """The number asked is the paper's formula turned round. Reference: §2.5.2, Figure 2.7."""
    extra = eviction.extra_for(evict, busy, wanted)
    assert 0 <= extra <= evict
    assert extra == evict or eviction.chance_all_lightly_active(evict, extra, busy) >= wanted
    assert extra == 0 or eviction.chance_all_lightly_active(evict, extra - 1, busy) < wanted


def test_with_a_tenth_of_slabs_busy_three_more_are_enough_19_times_in_20() -> None:
    """The number asked is the paper's formula turned round. Reference: §2.5.2, Figure 2.7."""
    assert eviction.extra_for(10, 0.1) == 3
    assert eviction.chance_all_lightly_active(10, 2, 0.1) < 0.95 < eviction.chance_all_lightly_active(10, 3, 0.1)


# ---- where to --------------------------------------------------------------------------------------------------------


def test_a_slab_moves_to_where_it_is_not_evicted_again_at_once() -> None:
    peers = [
        LenderPeer(H[0], "alive", 9),
        LenderPeer(H[1], "alive", 1),
        LenderPeer(H[2], "alive", 2),
        LenderPeer(H[3], "suspect", 9),
        LenderPeer(H[4], "alive", 0),
        LenderPeer(H[5], "alive", None),
        LenderPeer(H[6], "alive", 9),
    ]
    assert eviction.movable_to(peers, leaving=H[0], me=H[6]) == [H[2]]
    assert eviction.movable_to(peers, leaving=H[0], me=H[6], slabs=2) == [H[1], H[2]], "better one slab than none"
    assert eviction.movable_to(peers[3:6], leaving=H[0], me=H[6]) == []
    peers += [LenderPeer(H[7], "alive", 4)]
    assert eviction.movable_to(peers, leaving=H[0], me=H[6], slabs=2) == [H[7]], "room for two for each"
    assert eviction.movable_to(peers, leaving=H[0], me=H[6], slabs=3) == [H[1], H[2], H[7]]
