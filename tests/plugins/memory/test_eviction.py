"""Taking slabs back: how many, which, how many to ask about, and where they go; by example and by property."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core import HostId
from covey.units import GIB, MIB
from plugins.memory.policy import eviction, lending
from plugins.memory.policy.lending import Budget
from plugins.memory.policy.placement import Peer

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
def test_a_lender_never_plans_to_free_more_than_it_lends_nor_less_than_needed_when_it_can(
    free: int, lent: int, cap: int, pressure: float
) -> None:
    now = budget(free, lent, cap, pressure)
    planned = eviction.bytes_to_free(now)
    needed = max(0, 8 * GIB - free, lent - cap)
    assert 0 <= planned <= lent
    assert planned >= min(needed, lent)
    if pressure <= lending.PRESSURE_MAX:
        assert planned == min(needed, lent), "and no more, when nobody waits for memory"


@given(free=st.integers(0, 64 * GIB), lent=st.integers(0, 900), cap=st.integers(0, 900))
def test_slabs_of_one_size_are_planned_as_the_paper_does(free: int, lent: int, cap: int) -> None:
    now = budget(free, lent * SLAB, cap * SLAB)
    assert lending.slabs_to_free(now, SLAB, lent) == -(-eviction.bytes_to_free(now) // SLAB)


def test_under_pressure_an_eighth_goes_even_with_headroom_intact() -> None:
    assert eviction.bytes_to_free(budget(20 * GIB, 8 * GIB)) == 0
    assert eviction.bytes_to_free(budget(20 * GIB, 8 * GIB, pressure=30.0)) == GIB
    assert eviction.bytes_to_free(budget(20 * GIB, 3, pressure=30.0)) == 1
    assert eviction.bytes_to_free(budget(20 * GIB, 0, pressure=30.0)) == 0


# ---- which -----------------------------------------------------------------------------------------------------------


@given(activities=slabs, evict=st.integers(0, 50))
def test_of_slabs_of_one_size_the_e_least_active_of_those_asked_go(activities: dict[int, float], evict: int) -> None:
    sizes = dict.fromkeys(activities, SLAB)
    gone = eviction.slabs_to_evict(activities, sizes, evict * SLAB)
    assert gone == lending.least_active(activities, evict)
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


def test_a_small_idle_slab_is_spared_when_the_large_one_is_needed_anyway() -> None:
    sizes = {"small": SLAB, "large": 16 * SLAB, "busy": SLAB}
    assert eviction.slabs_to_evict({"small": 1.0, "large": 2.0, "busy": 3.0}, sizes, 2 * SLAB) == ["large"]


@given(
    sizes=st.dictionaries(st.integers(0, 60), st.sampled_from([SLAB, 16 * SLAB]), max_size=40),
    needed=st.integers(0, 300 * SLAB),
    share=st.floats(-1, 3),
    seed=st.integers(0, 1 << 30),
)
def test_slabs_are_asked_about_until_they_hold_what_is_needed_and_at_most_as_much_again(
    sizes: dict[int, int], needed: int, share: float, seed: int
) -> None:
    asked = eviction.candidates_for(sizes, needed, random.Random(seed), share)
    held = sum(sizes[slab] for slab in asked)
    wanted = needed * (1 + min(1.0, max(0.0, share)))
    assert len(asked) == len(set(asked))
    assert held >= min(wanted, sum(sizes.values())) if needed else asked == []
    assert not asked or held - sizes[asked[-1]] < wanted, "nobody is asked in vain"


@given(activities=slabs, evict=st.integers(0, 20), chance=st.randoms(use_true_random=False))
def test_the_order_in_which_activities_come_in_does_not_change_how_active_the_evicted_are(
    activities: dict[int, float], evict: int, chance: random.Random
) -> None:
    order = list(activities)
    chance.shuffle(order)
    other = {slab: activities[slab] for slab in order}
    sizes = dict.fromkeys(activities, SLAB)
    one, two = (eviction.slabs_to_evict(told, sizes, evict * SLAB) for told in (activities, other))
    assert [activities[slab] for slab in one] == [activities[slab] for slab in two]


# ---- how many to ask about -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("busy", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_evicting_blindly_is_the_formula_without_extra(busy: float) -> None:
    assert eviction.chance_all_lightly_active(10, 0, busy) == pytest.approx((1 - busy) ** 10)


@given(evict=st.integers(1, 30), busy=st.floats(0, 1))
def test_asking_one_more_never_makes_it_worse_and_the_answer_is_a_chance(evict: int, busy: float) -> None:
    found = [eviction.chance_all_lightly_active(evict, extra, busy) for extra in range(evict + 1)]
    assert all(-1e-12 <= chance <= 1 + 1e-9 for chance in found)
    assert all(one <= two + 1e-9 for one, two in pairwise(found))


def test_for_few_slabs_the_exact_chance_is_the_count_of_all_draws() -> None:
    """Six slabs of which three are busy, two asked about for one to go: only a draw of two busy ones fails."""
    assert eviction.chance_of_finite(1, 1, 6, 3) == pytest.approx(1 - math.comb(3, 2) / math.comb(6, 2))
    assert eviction.chance_of_finite(3, 3, 3, 1) == 0, "all must go, and one is busy"
    assert eviction.chance_of_finite(2, 2, 2, 0) == 1


@given(evict=st.integers(1, 10), busy=st.floats(0.05, 0.95))
def test_the_formula_is_the_exact_chance_for_many_slabs(evict: int, busy: float) -> None:
    many = 200_000
    exact = eviction.chance_of_finite(evict, evict, many, round(busy * many))
    assert eviction.chance_all_lightly_active(evict, evict, round(busy * many) / many) == pytest.approx(exact, abs=1e-3)


@given(evict=st.integers(1, 20), busy=st.floats(0, 1), wanted=st.floats(0.01, 0.999))
def test_no_more_are_asked_about_than_the_chance_wanted_needs(evict: int, busy: float, wanted: float) -> None:
    extra = eviction.extra_for(evict, busy, wanted)
    assert 0 <= extra <= evict
    assert extra == evict or eviction.chance_all_lightly_active(evict, extra, busy) >= wanted
    assert extra == 0 or eviction.chance_all_lightly_active(evict, extra - 1, busy) < wanted


def test_the_share_of_busy_slabs_is_counted_over_what_was_told() -> None:
    assert eviction.busy_share([0.0, 19.0, 21.0, 100.0]) == 0.5
    assert eviction.busy_share([]) == 0


# ---- where to --------------------------------------------------------------------------------------------------------


def test_a_hot_slab_moves_when_it_can_be_copied_in_time() -> None:
    assert eviction.fate(100.0, SLAB, 200e6, grace_s=10.0) == "move"
    assert eviction.fate(20.0, SLAB, 200e6, grace_s=10.0) == "disk", "not hot"
    assert eviction.fate(100.0, 64 * GIB, 200e6, grace_s=10.0) == "disk", "would take minutes"
    assert eviction.fate(100.0, 0, 0.0, grace_s=10.0) == "move", "nothing to copy"


def test_the_most_active_slab_moves_first() -> None:
    assert eviction.order_of_moves({"a": 1.0, "b": 9.0, "c": 5.0, "d": 9.0}) == ["b", "d", "c", "a"]


def test_a_slab_moves_to_where_it_is_not_evicted_again_at_once() -> None:
    peers = [
        Peer(H[0], "alive", 9),
        Peer(H[1], "alive", 1),
        Peer(H[2], "alive", 2),
        Peer(H[3], "suspect", 9),
        Peer(H[4], "alive", 0),
        Peer(H[5], "alive", None),
        Peer(H[6], "alive", 9),
    ]
    assert eviction.movable_to(peers, leaving=H[0], me=H[6]) == [H[2]]
    assert eviction.movable_to(peers, leaving=H[0], me=H[6], slabs=2) == [H[1], H[2]], "better one slab than none"
    assert eviction.movable_to(peers[3:6], leaving=H[0], me=H[6]) == []


@given(
    free=st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=8),
    leaving=st.sampled_from(H),
    me=st.sampled_from(H),
    slabs=st.integers(1, 5),
)
def test_an_evicted_slab_never_goes_to_where_it_came_from_nor_home(
    free: list[int | None], leaving: HostId, me: HostId, slabs: int
) -> None:
    peers = [Peer(host, "alive", room) for host, room in zip(H, free, strict=False)]
    found = eviction.movable_to(peers, leaving, me, slabs)
    assert leaving not in found
    assert me not in found
    assert found == sorted(found)
    with_room = [peer.host for peer in peers if peer.slabs_free and peer.host not in (leaving, me)]
    assert bool(found) == bool(with_room), "when anybody has room somebody is found"
