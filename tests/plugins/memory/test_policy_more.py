"""Where a slab goes, by example and property: thresholds, racks, the view as a hint; and headroom that is measured."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.ids import HostId
from covey.core.units import GIB, MIB
from covey.ports.probes import MemoryNow
from plugins.memory.policy import copying, headroom, lending, placement, spilling
from plugins.memory.policy.headroom import HeadroomGrowth
from plugins.memory.policy.lending import PRESSURE_MAX, Budget, Headroom
from plugins.memory.policy.placement import LenderPeer
from plugins.memory.policy.settings import MemorySettings

H = [HostId(f"h{n:02d}") for n in range(24)]
hosts = st.lists(st.sampled_from(H), unique=True)
racks = st.dictionaries(st.sampled_from(H), st.sampled_from(["", "r1", "r2", "r3", "r4"]))


# ---- thresholds ------------------------------------------------------------------------------------------------------


def test_the_threshold_of_a_slab_is_in_proportion_to_its_size() -> None:
    assert placement.hot_for(GIB) == placement.HOT_SLAB == 20
    assert placement.hot_for(64 * MIB) == 1.25
    with pytest.raises(ValueError, match="0 bytes"):
        placement.hot_for(0)


def test_without_a_cold_threshold_no_slab_is_given_back_unasked() -> None:
    assert not placement.is_cold(0.0)
    assert not placement.is_cold(0.0, None)


def test_a_slab_is_cold_below_the_threshold_not_at_it() -> None:
    assert placement.is_cold(0.9, cold=1.0)
    assert not placement.is_cold(1.0, cold=1.0)


@pytest.mark.parametrize("cold", [-1.0, 20.0, 25.0, float("nan")])
def test_a_cold_threshold_that_would_map_and_unmap_for_ever_is_refused(cold: float) -> None:
    with pytest.raises(ValueError, match="ColdSlab"):
        placement.is_cold(1.0, cold, hot=20.0)


@given(rate=st.floats(0, 1e6), hot=st.floats(0.1, 1e5), share=st.floats(0, 0.999))
def test_no_slab_is_hot_and_cold_at_once(rate: float, hot: float, share: float) -> None:
    assert not (placement.is_hot(rate, hot) and placement.is_cold(rate, hot * share, hot))


# ---- racks -----------------------------------------------------------------------------------------------------------


def grouped(size: int, candidates: list[HostId], rack_of: dict[HostId, str], rng: random.Random) -> list[HostId]:
    """Place one member after another, each asked for and chosen as any slab is."""
    group: list[HostId] = []
    for _ in range(size):
        asked = placement.hosts_to_ask(placement.hosts_apart(candidates, group, rack_of), [], rng)
        chosen = placement.freest(asked, {host: rng.randrange(1, 9) for host in asked})
        if chosen is None:
            break
        group.append(chosen)
    return group


@given(candidates=hosts, rack_of=racks, size=st.integers(1, 6), seed=st.integers(0, 1 << 30))
def test_no_two_of_a_mirror_group_lie_in_one_rack_while_there_are_racks_enough(
    candidates: list[HostId], rack_of: dict[HostId, str], size: int, seed: int
) -> None:
    group = grouped(size, candidates, rack_of, random.Random(seed))
    where = Counter(rack_of.get(host) or host for host in group)
    there_are = len({rack_of.get(host) or host for host in candidates})
    assert len(where) == min(len(group), there_are)
    assert len(group) == min(size, len(candidates)) == len(set(group))


@given(candidates=hosts, rack_of=racks, size=st.integers(1, 9), seed=st.integers(0, 1 << 30))
def test_with_too_few_racks_of_equal_size_the_group_is_spread_evenly(
    candidates: list[HostId], rack_of: dict[HostId, str], size: int, seed: int
) -> None:
    group = grouped(size, candidates, rack_of, random.Random(seed))
    where = Counter(rack_of.get(host) or host for host in group)
    room = Counter(rack_of.get(host) or host for host in candidates)
    for fuller, members in where.items():
        for emptier in room:
            assert members - where[emptier] <= 1 or where[emptier] == room[emptier], (fuller, emptier)


def test_a_host_without_a_label_is_a_rack_of_its_own_and_not_the_rack_of_its_name() -> None:
    assert placement.hosts_apart(H[:3], [H[0]], {}) == H[1:3]
    assert placement.hosts_apart(H[:3], [H[0]], {H[1]: H[0]}) == H[1:3], "a rack that is called like a host"
    assert placement.hosts_apart(H[:3], [H[0]], {H[0]: "r", H[1]: "r"}) == [H[2]]
    assert placement.hosts_apart(H[:1], [H[0]], {}) == []


# ---- the view as a hint ----------------------------------------------------------------------------------------------


@given(
    free=st.dictionaries(st.sampled_from(H), st.integers(1, 50)),
    holding=hosts,
    seed=st.integers(0, 1 << 30),
    drawn=st.integers(0, 30),
)
def test_by_view_two_different_hosts_are_asked_and_a_holder_only_for_want_of_others(
    free: dict[HostId, int], holding: list[HostId], seed: int, drawn: int
) -> None:
    asked = placement.hosts_to_ask_by_view(free, holding, random.Random(seed), drawn=drawn)
    assert len(asked) == len(set(asked)) == min(2, len(free))
    fresh = set(free) - set(holding)
    assert len(set(asked) & fresh) == min(2, len(fresh))


@given(free=st.dictionaries(st.sampled_from(H), st.integers(1, 50), min_size=2), seed=st.integers(0, 1 << 30))
def test_with_all_hosts_drawn_the_freest_of_the_view_are_asked(free: dict[HostId, int], seed: int) -> None:
    asked = placement.hosts_to_ask_by_view(free, [], random.Random(seed), drawn=len(H))
    freest = sorted(free.values(), reverse=True)[: placement.CHOICES]
    assert sorted((free[host] for host in asked), reverse=True) == freest


@given(free=st.dictionaries(st.sampled_from(H), st.integers(1, 50)), seed=st.integers(0, 1 << 30))
def test_with_two_drawn_by_view_the_same_two_are_asked_as_by_lot(free: dict[HostId, int], seed: int) -> None:
    by_lot = placement.hosts_to_ask(list(free), [], random.Random(seed))
    assert set(placement.hosts_to_ask_by_view(free, [], random.Random(seed), drawn=2)) == set(by_lot)


# ---- equal hosts -----------------------------------------------------------------------------------------------------


@given(
    free=st.lists(st.integers(0, 5), min_size=2, max_size=len(H)),
    holding=hosts,
    seed=st.integers(0, 1 << 30),
    chance=st.randoms(use_true_random=False),
)
def test_the_order_in_which_hosts_are_known_changes_nothing(
    free: list[int], holding: list[HostId], seed: int, chance: random.Random
) -> None:
    peers = [LenderPeer(host, "alive", slabs) for host, slabs in zip(H, free, strict=False)]
    others = peers.copy()
    chance.shuffle(others)
    offers = {peer.host: peer.slabs_free or 0 for peer in peers}

    def taken(known: list[LenderPeer], held: list[HostId]) -> tuple[tuple[HostId, ...], HostId | None]:
        asked = placement.hosts_to_ask(placement.askable(known), held, random.Random(seed))
        return asked, placement.freest(asked, offers)

    assert taken(peers, holding) == taken(others, holding[::-1])


@given(seed=st.integers(0, 1 << 30), shift=st.integers(1, 23), holding=st.integers(0, 12))
def test_equal_hosts_that_change_names_change_only_names(seed: int, shift: int, holding: int) -> None:
    """The hosts asked are decided by place among the sorted names, never by a name itself."""
    other = [HostId(f"x{host}") for host in H]
    one = placement.hosts_to_ask(H, H[:holding], random.Random(seed))
    two = placement.hosts_to_ask(other, other[:holding], random.Random(seed))
    assert [H.index(host) for host in one] == [other.index(host) for host in two]
    free = dict.fromkeys(H, shift)
    by_view = placement.hosts_to_ask_by_view(free, H[:holding], random.Random(seed))
    assert len(set(by_view) - set(H[:holding])) == placement.CHOICES


# ---- headroom that is measured ---------------------------------------------------------------------------------------


def memory(free: int, pressure: float = 0.0) -> MemoryNow:
    return MemoryNow(64 * GIB, free, pressure)


def after(seconds: list[float]) -> HeadroomGrowth:
    growth = HeadroomGrowth()
    for own in seconds:
        growth = headroom.grown(growth, own)
    return growth


def test_a_growing_host_keeps_what_it_takes_while_slabs_come_back_and_half_again() -> None:
    """Headroom that follows the host is future work of the paper. Reference: §2.5.1."""
    growth = after([second * 200.0 * MIB for second in range(30)])
    assert growth.peak_bytes_per_s == pytest.approx(200 * MIB)
    assert after([0.0, 200.0 * MIB]).peak_bytes_per_s == 200 * MIB, "seen after the first second"
    assert headroom.headroom_auto(memory(40 * GIB), growth, 14.0) == pytest.approx(1.5 * 14 * 200 * MIB, rel=1e-6)


def test_growth_is_forgotten_by_half_in_ten_minutes_and_shrinking_is_no_growth() -> None:
    growth = after([second * 100.0 * MIB for second in range(20)])
    quiet = growth
    for _ in range(605):
        quiet = headroom.grown(quiet, 1.0 * GIB)
    assert quiet.peak_bytes_per_s == pytest.approx(growth.peak_bytes_per_s / 2, rel=0.02)
    assert after([10.0 * GIB, 8.0 * GIB, 1.0 * GIB]).peak_bytes_per_s == 0


def test_a_burst_of_a_second_counts_as_what_it_is_over_the_spell() -> None:
    assert after([0.0] * 10 + [float(GIB)] * 10).peak_bytes_per_s == pytest.approx(GIB / 5, rel=0.02)


def test_while_tasks_wait_for_memory_twice_as_much_is_kept() -> None:
    calm = headroom.headroom_auto(memory(40 * GIB), HeadroomGrowth(), 14.0)
    assert headroom.headroom_auto(memory(40 * GIB, pressure=PRESSURE_MAX), HeadroomGrowth(), 14.0) == calm, (
        "above it, not at it"
    )
    assert headroom.headroom_auto(memory(40 * GIB, pressure=50.0), HeadroomGrowth(), 14.0) == pytest.approx(
        2 * calm, abs=1
    )


@given(
    own=st.lists(st.floats(0, 64 * GIB), max_size=40),
    free=st.integers(0, 64 * GIB),
    pressure=st.floats(0, 100),
    react_s=st.floats(0, 1000),
)
def test_headroom_stays_between_floor_and_ceiling(own: list[float], free: int, pressure: float, react_s: float) -> None:
    kept = headroom.headroom_auto(memory(free, pressure), after(own), react_s)
    assert 0.03 * 64 * GIB - 1 <= kept <= 0.25 * 64 * GIB + 1


def test_what_is_lent_is_not_growth_of_the_host_itself() -> None:
    """MemAvailable falls when a borrower writes to a slab; that is no need of local programs."""
    assert headroom.own_memory(memory(40 * GIB), touched_bytes=4 * GIB) == 20 * GIB
    assert headroom.own_memory(memory(63 * GIB), touched_bytes=4 * GIB) == 0


@given(
    limit=st.integers(1 * GIB, 64 * GIB),
    used=st.integers(0, 64 * GIB),
    lent=st.integers(0, 100),
    pressure=st.floats(0, 100),
)
def test_spare_is_never_more_than_the_limit_leaves(limit: int, used: int, lent: int, pressure: float) -> None:
    """A cgroup's limit reaches the lender as a smaller total, so nothing beyond it is ever lent. Reference: §2.5.1."""
    kept = Headroom(fraction=0.125).of(limit)
    now = Budget(limit, float(used), used, pressure, kept, 1 << 50, lent * 64 * MIB, 0)
    spare = lending.spare_bytes(now)
    assert 0 <= spare <= max(0, limit - used - kept - lent * 64 * MIB)
    assert spare == 0 or pressure <= lending.PRESSURE_MAX


@pytest.mark.parametrize("page", ["512 B", "1 KiB", "4 KiB", "64 KiB"])
def test_no_volume_is_larger_than_its_log_can_become(page: str) -> None:
    """A log that is written again and again takes 1.5 times the volume's size, and segments are told apart by twice
    their length."""
    settings = MemorySettings(page=page, slab="1 GiB")
    pages = settings.volume_max_bytes // settings.page_bytes
    length = spilling.segment_blocks(settings.volume_max_bytes, settings.page_bytes)
    slots = spilling.PLACES_MAX // (spilling.STRIDE * length)
    assert slots * length >= spilling.TAKES_MOST * pages - length
    assert (settings.volume_max_bytes == 1 << 40) == (page in ("4 KiB", "64 KiB"))


# ---- copies in the background ----------------------------------------------------------------------------------------


def test_a_copy_takes_a_quarter_of_the_time_while_requests_come() -> None:
    one, slab = 128 << 10, 64 << 20
    assert copying.pause_s(0.0004, one, slab, busy=False) == 0.0
    assert copying.pause_s(0.0004, one, slab, busy=True) == pytest.approx(0.0012)


@given(took_s=st.floats(1e-5, 0.05), waiting=st.integers(0, 1 << 35), pieces=st.integers(1, 2000), busy=st.booleans())
def test_no_copy_makes_way_for_longer_than_a_grace_allows(took_s: float, waiting: int, pieces: int, busy: bool) -> None:
    pause_s = copying.pause_s(took_s, 1 << 17, waiting, busy)
    assert 0.0 <= pause_s <= (copying.SHARE - 1) * took_s
    assert pause_s == 0.0 or (took_s + pause_s) * waiting / (1 << 17) <= copying.DUE_S * 1.001
