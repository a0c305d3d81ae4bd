"""Mischief strikes single call sites of the product, each story others, and nothing once all is healed."""

from chaos.faults import heal
from chaos.story import tell
from chaos.world.mischief import Mischief
from chaos.world.world import World


def test_a_quarter_of_the_sites_are_armed_and_those_fire_a_quarter_of_the_time() -> None:
    struck: dict[str, int] = {}
    for seed in range(200):
        mischief = Mischief(seed)
        mischief.on = True
        struck[str(seed)] = sum(_called_by_ours(mischief) for _ in range(40))
    armed = [count for count in struck.values() if count]
    assert 30 <= len(armed) <= 70
    assert 7 <= sum(armed) / len(armed) <= 13


def _called_by_ours(mischief: Mischief) -> bool:
    """The answer of `strikes`, asked from a line of one of the product's modules."""
    scope = {"__name__": "plugins.somewhere", "mischief": mischief}
    exec(compile("found = mischief.strikes('disk')", "plugins/somewhere.py", "exec"), scope)
    return bool(scope["found"])


def test_users_stand_ins_and_the_simulator_itself_are_left_alone() -> None:
    for seed in range(50):
        mischief = Mischief(seed)
        mischief.on = True
        assert not any(mischief.strikes("disk") for _ in range(20))


def test_healing_ends_it() -> None:
    with World(1) as world:
        world.mischief.on = True
        heal(world)
        assert not world.mischief.on


def test_a_story_with_mischief_is_the_same_every_time() -> None:
    assert tell("mischief", 5, until=15.0).story_hash == tell("mischief", 5, until=15.0).story_hash
