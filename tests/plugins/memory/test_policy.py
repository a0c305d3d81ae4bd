"""Decisions by example and by property: placement, lending, eviction, settings."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.ids import HostId
from covey.core.units import GIB, MIB
from plugins.memory.policy import eviction, lending, placement
from plugins.memory.policy.lending import Budget, Headroom
from plugins.memory.policy.placement import LenderPeer
from plugins.memory.policy.settings import MemorySettings

H = [HostId(f"h{n}") for n in range(12)]
hosts = st.lists(st.sampled_from(H), unique=True)


def budget(
    free: int, lent: int = 0, touched: int = 0, cap: int = 1 << 40, pressure: float = 0.0, now: int | None = None
) -> Budget:
    return Budget(
        total_bytes=64 * GIB,
        used_bytes=64 * GIB - free,
        used_now_bytes=64 * GIB - (free if now is None else now),
        pressure=pressure,
        headroom_bytes=8 * GIB,
        lend_bytes=cap,
        lent_bytes=lent,
        touched_bytes=touched,
    )


# ---- placement -------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 1e9), st.integers(0, 10**9))))
def test_the_activities_of_many_slabs_are_that_of_each(slabs: list[tuple[float, int]]) -> None:
    old, measured = [before for before, _ in slabs], [now for _, now in slabs]
    assert placement.activities(old, measured) == [placement.activity(*slab) for slab in slabs]
    with pytest.raises(ValueError):
        placement.activities([*old, 0.0], measured)


def test_a_slab_is_hot_above_the_threshold_not_at_it() -> None:
    assert not placement.is_hot(20.0)
    assert placement.is_hot(20.1)


def test_what_a_host_could_lend_is_counted_in_slabs_of_the_one_who_asks() -> None:
    peers = [
        LenderPeer(H[0], "alive", 16, 64 * MIB),
        LenderPeer(H[1], "alive", 15, 64 * MIB),
        LenderPeer(H[2], "alive", 2, GIB),
        LenderPeer(H[3], "alive", None, 64 * MIB),
        LenderPeer(H[4], "gone", 3, 2 * GIB),
        LenderPeer(H[5], "suspect", 3, GIB),
    ]
    counted = placement.in_slabs_of(peers, GIB)
    assert [peer.slabs_free for peer in counted] == [1, 0, 2, None, 6, 3]
    assert [(peer.host, peer.state) for peer in counted] == [(peer.host, peer.state) for peer in peers]
    assert placement.askable(counted[::-1]) == [H[0], H[2]], "fifteen small ones are no large one"
    assert placement.in_slabs_of(peers, 64 * MIB)[2].slabs_free == 32


@given(candidates=st.lists(st.sampled_from(H)), holding=hosts, seed=st.integers(0, 1000))
def test_two_different_candidates_are_asked_and_a_holder_only_for_want_of_others(
    candidates: list[HostId], holding: list[HostId], seed: int
) -> None:
    asked = placement.hosts_to_ask(candidates, holding, random.Random(seed))
    assert len(asked) == len(set(asked)) == min(2, len(set(candidates)))
    assert set(asked) <= set(candidates)
    fresh = set(candidates) - set(holding)
    assert len(set(asked) & fresh) == min(2, len(fresh))


def test_every_host_is_asked_now_and_then() -> None:
    rng = random.Random(1)
    asked = [host for _ in range(400) for host in placement.hosts_to_ask(H, [], rng)]
    assert {host: asked.count(host) > 30 for host in H} == dict.fromkeys(H, True)


def test_the_freer_host_is_taken_and_between_equals_the_one_with_fewer_of_our_slabs() -> None:
    assert placement.freest(H[:2], {H[0]: 3, H[1]: 5}) == H[1]
    assert placement.freest(H[:2], {H[0]: 5, H[1]: 5}) == H[0]
    assert placement.freest(H[:2], {H[0]: 5, H[1]: 5}, {H[0]: 1}) == H[1]
    assert placement.freest(H[:2], {H[0]: 6, H[1]: 5}, {H[0]: 9}) == H[0]
    assert placement.freest(H[:2], {H[0]: 0}) is None
    assert placement.freest((), {}) is None


# ---- lending ---------------------------------------------------------------------------------------------------------


def test_headroom_is_a_size_or_a_share() -> None:
    assert Headroom(fixed_bytes=GIB).of(64 * GIB) == GIB
    assert Headroom(fraction=0.125).of(64 * GIB) == 8 * GIB


def test_memory_in_use_starts_at_the_first_measurement_and_is_smoothed_after() -> None:
    """The average is an EWMA with beta 0.2; its start is ours. Reference: §2.5.1."""
    assert lending.memory_used(None, 100.0) == 100.0
    assert lending.memory_used(100.0, 200.0) == pytest.approx(120.0)


def test_what_is_promised_but_not_touched_is_not_spare() -> None:
    assert lending.spare_bytes(budget(free=10 * GIB)) == 2 * GIB
    assert lending.spare_bytes(budget(free=10 * GIB, lent=GIB)) == GIB
    assert lending.spare_bytes(budget(free=10 * GIB, lent=GIB, touched=GIB)) == 2 * GIB


def test_what_jobs_may_take_of_this_host_is_not_spare() -> None:
    def spare(promised: int, **of: int) -> int:
        return lending.spare_bytes(msgspec.structs.replace(budget(**of), promised_bytes=promised))

    assert spare(40 * GIB, free=60 * GIB) == 16 * GIB, "64 GiB, less 40 and headroom"
    assert spare(40 * GIB, free=60 * GIB, lent=10 * GIB) == 6 * GIB
    assert spare(40 * GIB, free=20 * GIB) == 12 * GIB, "what jobs have taken does not count twice"
    assert spare(60 * GIB, free=60 * GIB) == 0


def test_nothing_is_spare_below_headroom_above_the_cap_or_under_pressure() -> None:
    assert lending.spare_bytes(budget(free=8 * GIB)) == 0
    assert lending.spare_bytes(budget(free=1 * GIB)) == 0
    assert lending.spare_bytes(budget(free=20 * GIB, lent=GIB, cap=GIB)) == 0
    assert lending.spare_bytes(budget(free=20 * GIB, pressure=11.0)) == 0
    assert lending.spare_bytes(budget(free=20 * GIB, pressure=lending.PRESSURE_MAX)) == 12 * GIB, "above it, not at it"


def test_auto_lends_half_of_what_is_free_above_headroom() -> None:
    assert lending.lend_auto(20 * GIB, 8 * GIB) == 6 * GIB
    assert lending.lend_auto(4 * GIB, 8 * GIB) == 0


def test_what_restores_headroom_is_taken_back() -> None:
    """Reference: §2.5.2."""
    assert eviction.bytes_to_free(budget(free=8 * GIB, lent=GIB)) == 0
    assert eviction.bytes_to_free(budget(free=8 * GIB - 1, lent=GIB)) == 1
    assert eviction.bytes_to_free(budget(free=8 * GIB - 65 * MIB, lent=GIB)) == 65 * MIB
    assert eviction.bytes_to_free(budget(free=0, lent=GIB)) == GIB


def test_a_spike_of_a_second_neither_evicts_nor_lends() -> None:
    assert eviction.bytes_to_free(budget(free=9 * GIB, now=GIB, lent=GIB)) == 0
    assert eviction.bytes_to_free(budget(free=GIB, now=9 * GIB, lent=GIB)) == 0, "already freed"
    assert lending.spare_bytes(budget(free=20 * GIB, now=9 * GIB)) == GIB
    assert lending.spare_bytes(budget(free=9 * GIB, now=20 * GIB)) == GIB


# ---- settings --------------------------------------------------------------------------------------------------------


def test_the_defaults_are_the_papers_where_it_has_any() -> None:
    settings = MemorySettings()
    assert settings.hot is None, "in proportion: 20 for the paper's slab of 1 GiB"
    assert settings.cold_share == 0
    assert settings.headroom_kept == Headroom(fraction=0.125), "8 of 64 GiB"
    assert settings.page_bytes == 4096
    assert settings.slab_bytes == 64 * MIB
    assert settings.lend_max_bytes is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("slab", "many"),
        ("slab", "5000 B"),
        ("slab", "1 TiB"),
        ("page", "3000 B"),
        ("headroom", "110 %"),
        ("headroom", "lots"),
        ("lend", "some"),
        ("lease", "0 s"),
        ("grace", "soon"),
        ("spill_queue", "64 KiB"),
        ("spill_queue", "1025 MiB"),
        ("hot_requests_per_s", -1.0),
        ("hot_requests_per_s", float("nan")),
        ("hot_requests_per_s", "lots"),
        ("cold_share", 1.0),
        ("cold_share", -0.1),
        ("drawn", 1),
        ("drawn", 1000),
    ],
)
def test_a_wrong_value_is_refused_and_its_key_named(key: str, value: object) -> None:
    with pytest.raises(msgspec.ValidationError, match=key):
        msgspec.convert({key: value}, MemorySettings)


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="slabb"):
        msgspec.convert({"slabb": "64 MiB"}, MemorySettings)


def test_sizes_and_shares_are_read_as_people_write_them() -> None:
    settings = msgspec.convert({"lend": "0 B", "headroom": "1 GiB", "slab": "16 MiB", "lease": "2min"}, MemorySettings)
    assert settings.lend_max_bytes == 0
    assert settings.headroom_kept == Headroom(fixed_bytes=GIB)
    assert settings.slab_bytes == 16 * MIB
    assert settings.lease_s == 120
    measured = msgspec.convert({"headroom": "auto", "hot_requests_per_s": 5, "drawn": 4}, MemorySettings)
    assert (measured.headroom_kept, measured.hot, measured.drawn) == (None, 5.0, 4)
