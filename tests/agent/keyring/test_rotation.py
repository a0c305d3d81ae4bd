"""Keys are rotated on whole simulated agents while they run, restart and fail."""

from typing import Any

import pytest

from agent.keyring.policy import name
from agent.keyring.views import KeysTurned
from chaos.faults import Kill, Lose, Partition, strike
from chaos.rackworld import SimRack
from covey.core.errors import Refused


def turn(rack: SimRack, on: str) -> KeysTurned:
    found: KeysTurned = rack.ask(on, "agent.turn_keys", {})
    return found


def by_hand(rack: SimRack, on: str, step: str, id: str) -> KeysTurned:
    found: KeysTurned = rack.ask(on, "agent.turn_keys", {"step": step, "id": id})
    return found


def rotate(rack: SimRack, on: str) -> list[str]:
    """The steps of a whole rotation, or of the rest of one."""
    steps = []
    while True:
        turned = turn(rack, on)
        steps.append(turned.step)
        if turned.done:
            return steps


def keys(rack: SimRack) -> set[tuple[bytes, ...]]:
    return {rack.agents[name].keyring.keys for name in rack.alive() if rack.began(name)}


def drops(rack: SimRack) -> int:
    """Datagrams dropped because of their key or their seal, on all hosts."""
    counted: list[Any] = [rack.agents[name].gossip.counters for name in rack.alive()]
    return sum(one.get(f"dropped_{why}", 0) for one in counted for why in ("unknown_key", "unsealed", "other_cluster"))


def test_a_key_is_rotated_without_a_restart_and_hosts_lose_nothing_of_one_another() -> None:
    with SimRack(31) as rack:
        rack.start()
        rack.settle()
        first, term = keys(rack), rack.agents["h1"].log.term
        assert rotate(rack, "h2") == ["install", "use", "remove"]
        (after,) = keys(rack)
        assert len(after) == 1 and {after} != first
        rack.run(5.0)
        lost = drops(rack)
        rack.run(60.0)
        assert drops(rack) == lost, "nothing is dropped any more"
        assert rack.settled() and rack.agents["h1"].log.term == term, "nobody was thought to be lost"
        strike(rack.world, Kill("host", "h3", 3.0))
        rack.run(10.0)
        rack.settle(60.0)
        assert keys(rack) == {after}, "a host that starts again has the new key, though its file has the old one"
        assert rotate(rack, "h3") == ["install", "use", "remove"] and keys(rack) != {after}


def test_a_key_is_rolled_by_hand_and_no_host_is_left_deaf() -> None:
    with SimRack(38) as rack:
        rack.start()
        rack.settle()
        ((old,),) = ([name(key) for key in ring] for ring in keys(rack))

        def refused(on: str, step: str, id: str, why: str) -> None:
            before = keys(rack)
            with pytest.raises(Refused, match=why):
                by_hand(rack, on, step, id)
            assert keys(rack) == before

        refused("h1", "use", "0badc0de", "no host has key")
        refused("h1", "remove", "0badc0de", "no host has key")
        refused("h1", "drop", old, "no step")
        refused("h1", "", old, "no step")
        refused("h1", "remove", old, "h1, h2, h3, h4 seal with it")
        gone = lambda: any(v.host == "h4" and v.state == "gone" for v in rack.agents["h1"].hosts())  # noqa: E731
        strike(rack.world, Kill("host", "h4", 600.0))
        rack.until(gone, 60.0, "h4 is gone")
        strike(rack.world, Lose(0.1, for_s=5.0))
        installed = by_hand(rack, "h1", "install", "")
        assert (installed.hosts, installed.gone) == (("h1", "h2", "h3"), ("h4",))
        new = installed.id
        rack.heal()
        rack.settle(90.0)
        refused("h2", "remove", old, "seal with it")
        refused("h1", "use", new, "h4: without it")
        refused("h4", "install", new, "h4 lacks key")
        assert by_hand(rack, "h3", "install", new).hosts == ("h4",)
        assert by_hand(rack, "h4", "use", new).hosts == ("h1", "h2", "h3", "h4")
        strike(rack.world, Kill("host", "h4", 600.0))
        rack.until(gone, 60.0, "h4 is gone")
        refused("h1", "remove", old, "h4: gone, and its keys are not known")
        rack.heal()
        rack.settle(90.0)
        assert by_hand(rack, "h4", "remove", old).hosts == ("h1", "h2", "h3", "h4")
        assert {tuple(name(key) for key in ring) for ring in keys(rack)} == {(new,)}
        lost = drops(rack)
        rack.run(20.0)
        assert rack.settled() and drops(rack) == lost


def test_a_host_that_does_not_answer_stops_a_rotation_and_any_host_ends_it() -> None:
    with SimRack(32) as rack:
        rack.start()
        rack.settle()
        (old,) = keys(rack)
        assert turn(rack, "h1").step == "install"
        strike(rack.world, Partition(("h4",), ("h1", "h2", "h3"), False, 600.0))
        rack.run(0.5)
        with pytest.raises(Refused, match="h4: it does not answer"):
            turn(rack, "h1")
        assert all(old[0] in ring for ring in keys(rack)), "the old key is still there"
        rack.heal()
        rack.settle(90.0)
        assert rotate(rack, "h4") == ["use", "remove"]
        (after,) = keys(rack)
        assert len(after) == 1 and after != old


def test_a_host_that_was_gone_gets_the_new_key_before_the_old_one_goes() -> None:
    with SimRack(33) as rack:
        rack.start()
        rack.settle()
        (old,) = keys(rack)
        strike(rack.world, Kill("host", "h4", 600.0))
        gone = lambda: any(v.host == "h4" and v.state == "gone" for v in rack.agents["h1"].hosts())  # noqa: E731
        rack.until(gone, 60.0, "h4 is gone")
        assert turn(rack, "h1").gone == ("h4",)
        assert turn(rack, "h1").step == "use"
        rack.heal()
        rack.run(3.0)
        assert rack.agents["h4"].keyring.keys == old, "it hears the others only by the old key"
        refused = turn(rack, "h1")
        assert (refused.step, refused.hosts) == ("install", ("h4",)), "and nothing is removed before it has the new one"
        assert rotate(rack, "h1") == ["use", "remove"]
        assert len(keys(rack)) == 1 and keys(rack) != {old}
        rack.settle(90.0)


@pytest.mark.parametrize("seed", range(34, 37))
def test_agents_that_restart_during_a_rotation_end_with_one_key(seed: int) -> None:
    with SimRack(seed) as rack:
        rack.start()
        rack.settle()
        (old,) = keys(rack)
        for _ in range(60):
            strike(rack.world, Kill("agent", rack.rng.choice(sorted(rack.hosts)), rack.rng.uniform(0.1, 4.0)))
            rack.run(rack.rng.uniform(0.0, 2.0))
            try:
                if turn(rack, rack.rng.choice([name for name in rack.alive() if rack.began(name)])).done:
                    break
            except (Refused, TimeoutError):
                pass
        rack.heal()
        rack.settle(90.0)
        (after,) = keys(rack)
        assert len(after) == 1 and after != old
