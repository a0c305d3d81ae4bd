"""Seeds that show new states are kept and varied; a variation is as repeatable as its seed."""

import pytest

from chaos import novelty
from chaos.faults import Partition, strike, swarm
from chaos.novelty import Seen, signature, varied
from chaos.rackworld import SimRack
from chaos.stories import train
from chaos.story import tell

HOSTS = ("h1", "h2", "h3", "h4")


def test_a_variation_changes_one_fault_and_is_the_same_every_time() -> None:
    lengths = set()
    for seed in range(30):
        plan = swarm(seed, HOSTS, 10.0, 60.0)
        for number in (1, 2):
            other = varied(plan, seed, number, HOSTS)
            assert other == varied(plan, seed, number, HOSTS)
            assert other != plan
            assert sum(entry not in plan for entry in other) <= 1
            assert sum(entry not in other for entry in plan) <= 1
            assert list(other) == sorted(other, key=lambda entry: entry[0])
            lengths.add(len(other) - len(plan))
    assert lengths == {-1, 0, 1}, "dropped, moved, added"


@pytest.mark.long
def test_states_are_counted_without_changing_the_story_and_another_one_shows_others() -> None:
    seen = Seen()
    assert tell("swarm", 2, until=20.0, seen=seen).story_hash == tell("swarm", 2, until=20.0).story_hash
    known = set(seen.states)
    assert known
    tell("swarm", 2, until=20.0, seen=seen)
    assert seen.states == known, "the same story shows nothing new"
    tell("swarm", 3, until=40.0, seen=seen)
    assert seen.states > known


@pytest.mark.long
def test_a_variation_is_another_story_than_its_seed() -> None:
    assert tell("swarm", 2, until=60.0, vary=1).story_hash == tell("swarm", 2, until=60.0, vary=1).story_hash
    hashes = {tell("swarm", 2, until=60.0, vary=number).story_hash for number in range(4)}
    assert len(hashes) > 1


def test_leases_and_what_gangs_do_are_part_of_a_state() -> None:
    with SimRack(1, quotas={"red": 4}) as rack:
        rack.start()
        rack.settle()
        idle = signature(rack)
        train(rack, rounds=200)
        rack.run(5.0)
        assert novelty._gangs(rack) == ["whole "]
        working = [name for name, host in rack.hosts.items() if host.find("trainer")]
        assert all("r held" in novelty._scheduler(rack, name) for name in working)
        whole = signature(rack)
        follower = next(name for name in working if name != rack.leader())
        strike(rack.world, Partition((follower,), tuple(set(rack.hosts) - {follower}), False, 60.0))
        rack.run(22.0)
        assert "r expiring" in novelty._scheduler(rack, follower)
        assert len({idle, whole, signature(rack)}) == 3
