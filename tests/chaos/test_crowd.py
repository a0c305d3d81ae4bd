"""Machines only, many hosts: membership converges and no live host is called dead; slabs fall evenly and none is
lost."""

import pytest

from chaos.crowds.crowd import GossipCrowd, gossip_story
from chaos.crowds.memory_crowd import memory_story
from chaos.world.world import World


def test_a_crowd_agrees_and_hears_of_a_death_within_bounds() -> None:
    result = gossip_story(1, 30)
    assert result.agreed_s < 20
    assert 1.0 < result.first_knows_s <= result.all_know_s < 20
    assert result.falsely_dead == 0


def test_hosts_that_know_only_one_other_find_all() -> None:
    with World(2) as world:
        crowd = GossipCrowd(world, 20, join=True)
        world.run(30)
        assert crowd.agreed()
        crowd.check()


def test_two_halves_of_a_crowd_that_meet_again_agree() -> None:
    with World(3) as world:
        crowd = GossipCrowd(world, 16)
        world.run(10)
        names = list(crowd.hosts)
        cut = [(a, b) for a in names[:8] for b in names[8:]]
        world.network.cut(cut + [(b, a) for a, b in cut])
        world.run(40)
        assert not crowd.agreed()
        world.network.heal()
        world.run(130)
        assert crowd.agreed()


@pytest.mark.cpu_seconds(300)  # a thousand hosts take half a minute on a busy machine
@pytest.mark.parametrize("count", [300, pytest.param(1000, marks=pytest.mark.long)])
def test_many_borrowers_spread_their_slabs_evenly_and_leak_none(count: int) -> None:
    result = memory_story(1, count, slabs=2)
    assert result.mapped == result.slabs
    assert result.lent_most <= 3 * result.lent_mean
    assert result.leaked == 0


def test_members_of_slabs_without_a_disk_lie_apart_whoever_dies_or_gives_way() -> None:
    """Members lie on different hosts, in different racks of eight."""
    result = memory_story(3, 100, slabs=1, members=2)
    assert result.mapped == result.slabs == 200
    assert result.lost_to_kills > 0
    assert (result.one_rack, result.leaked) == (0, 0)


def test_the_same_seed_is_the_same_crowd() -> None:
    assert memory_story(7, 40) == memory_story(7, 40)
    assert memory_story(7, 40).story_hash != memory_story(8, 40).story_hash
