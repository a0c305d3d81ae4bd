"""The recipes of docs/guides/upgrades.md for voters, on whole simulated agents."""

from typing import Any

import pytest

from agent.config import parse
from chaos.faults import Kill, strike
from chaos.rackworld import SimRack
from chaos.stories import train
from chaos.story import ended, tell
from covey.core.errors import Refused
from tests.families import in_gate


def change(rack: SimRack, on: str, add: str = "", remove: str = "") -> str:
    return str(rack.ask(on, "agent.change_voters", {"add": add, "remove": remove})["said"])


def vote(rack: SimRack, *hosts: str, within_s: float = 30.0) -> None:
    """Wait until every living host knows that these vote, and that nothing is under way."""

    def known() -> bool:
        found = [rack.agents[name].log.configuration for name in rack.alive() if rack.began(name)]
        return bool(found) and all(now.hosts == hosts and not (now.learner or now.leaving) for now in found)

    rack.until(known, within_s, f"{hosts} vote")


def rewrite(rack: SimRack, name: str, voters: list[str], called: str = "") -> None:
    """Write another leader.voters, or another name, into agent.toml, and restart the agent."""
    host = rack.hosts[name]
    others = [f"{other.ip}:7946" for other in rack.hosts.values() if other.name != name]
    tree: dict[str, Any] = {
        "name": called or name,
        "state_dir": host.disk.root,
        "run_dir": host.run_dir,
        "advertise": host.ip,
        "gossip": {"bind": f"{host.ip}:7946", "seeds": others},
        "control": {"bind": f"{host.ip}:7947"},
        "leader": {"voters": voters},
    }
    host.main = rack._main(host, parse(tree, "agent.toml", {}, tuple(rack.plugins)), rack.keys)
    strike(rack.world, Kill("agent", name, 1.0))
    rack.run(2.0)


def test_a_rack_of_one_grows_to_three_and_keeps_its_jobs() -> None:
    with SimRack(11, 3, quotas={"red": 8}, settings={"leader": {"voters": ["h1"]}}) as rack:
        rack.start()
        rack.settle()
        job = train(rack, rounds=12)
        assert "h2 will vote" in change(rack, "h3", add="h2")
        vote(rack, "h1", "h2")
        (note,) = [note for note in rack.ask("h1", "agent.health", {})["notes"] if "hosts vote" in note]
        assert note.startswith("2 hosts vote")
        change(rack, "h2", add="h3")
        vote(rack, "h1", "h2", "h3")
        strike(rack.world, Kill("host", "h1", 60.0))
        rack.until(lambda: rack.leader() in ("h2", "h3"), 10.0, "the first host is not needed any more")
        rack.run(70.0)
        ended(rack, {job: ("done", "failed")})


def test_voters_written_into_the_file_of_a_rack_of_one_do_not_count_and_that_is_told() -> None:
    """Before, this ended in a traceback and an endless restart."""
    with SimRack(12, 3, settings={"leader": {"voters": ["h1"]}}) as rack:
        rack.start()
        rack.settle()
        for name in rack.hosts:
            rewrite(rack, name, ["h1", "h2", "h3"])
        rack.settle()
        vote(rack, "h1")
        for name in rack.hosts:
            (note,) = rack.ask(name, "agent.health", {})["notes"]
            assert "agent.toml says leader.voters = h1, h2, h3; the log says h1, and the log counts" in note
        for new in ("h2", "h3"):
            change(rack, "h1", add=new)
            rack.run(5.0)
        vote(rack, "h1", "h2", "h3")
        assert not any(rack.ask(name, "agent.health", {})["notes"] for name in rack.hosts)


def test_a_dead_voter_is_replaced() -> None:
    with SimRack(13) as rack:
        rack.start()
        rack.settle()
        strike(rack.world, Kill("host", "h3", 600.0))
        rack.run(20.0)
        with pytest.raises(Refused, match="cannot be removed now"):
            change(rack, "h1", remove="h2")
        assert "h4 will replace h3" in change(rack, "h1", "h4", "h3")
        vote(rack, "h1", "h2", "h4")
        rows = {row.host: row.part for row in rack.ask("h4", "agent.voters", {}).rows}
        assert rows == {"h1": "votes", "h2": "votes", "h4": "votes"}
        rack.heal()
        rack.settle(90.0)
        vote(rack, "h1", "h2", "h4")
        assert rack.agents["h3"].voter().part == "observes"


def test_the_voter_that_leads_is_retired() -> None:
    with SimRack(14) as rack:
        rack.start()
        rack.settle()
        leader = rack.leader()
        assert leader is not None
        others = sorted({"h1", "h2", "h3"} - {leader})
        assert f"{leader} will stop voting" in change(rack, "h4", remove=leader)
        vote(rack, *others)
        assert rack.leader() in others
        assert "h4 will vote" in change(rack, leader, add="h4")
        vote(rack, *sorted([*others, "h4"]))


def test_a_host_that_is_away_or_unknown_is_no_voter() -> None:
    with SimRack(15) as rack:
        rack.start()
        rack.settle()
        with pytest.raises(Refused, match="gossip knows no host of that name"):
            change(rack, "h1", add="h9")
        strike(rack.world, Kill("host", "h4", 600.0))
        rack.until(
            lambda: any(v.host == "h4" and v.state == "gone" for v in rack.agents["h1"].hosts()), 60.0, "h4 is gone"
        )
        rack.run(1.0)
        with pytest.raises(Refused, match="it is away"):
            change(rack, "h1", add="h4")


@pytest.mark.parametrize("seed", in_gate(3, range(1, 61)))
def test_the_leader_adds_two_voters_one_by_one_whatever_fails(seed: int) -> None:
    tell("voters_grown", seed)


def test_a_rack_whose_voters_a_person_chose_does_not_grow() -> None:
    with SimRack(16, 4, settings={"leader": {"voters": ["h1"]}}) as rack:
        rack.start()
        rack.settle()
        change(rack, "h1", add="h2")
        vote(rack, "h1", "h2")
        change(rack, "h1", remove="h2")
        vote(rack, "h1")
        rack.run(120.0)
        vote(rack, "h1")


def test_a_rack_of_one_grows_by_itself_once_it_has_three_hosts() -> None:
    with SimRack(17, 3, settings={"leader": {"voters": ["h1"]}}) as rack:
        rack.start()
        rack.settle()
        rack.run(20.0)
        assert rack.agents["h1"].log.configuration.hosts == ("h1",), "hosts that have just come do not vote"
        vote(rack, "h1", "h2", "h3", within_s=60.0)
        assert not any(agent.log.configuration.by_people for agent in rack.agents.values())


def test_a_host_that_is_drained_is_not_made_a_voter() -> None:
    with SimRack(18, 4, settings={"leader": {"voters": ["h1"]}}) as rack:
        rack.start()
        rack.settle()
        rack.ask("h1", "scheduler.drain", {"id": "h2", "by": "ann"})
        vote(rack, "h1", "h3", "h4", within_s=90.0)


def test_a_host_with_another_name_does_not_start_with_what_is_its_former_names() -> None:
    with SimRack(19, 3) as rack:
        rack.start()
        rack.settle()
        rewrite(rack, "h2", ["h1", "h2", "h3"], called="h9")
        refused = rack.hosts["h2"].refused
        assert refused is not None and refused.what == "this host is named h9, and was h2 before"
        assert 'name = "h2" in agent.toml' in refused.next and "hosts forget h2" in refused.next
        assert all(view.host != "h9" for view in rack.agents["h1"].hosts())
        rewrite(rack, "h2", ["h1", "h2", "h3"])
        rack.settle()
        vote(rack, "h1", "h2", "h3")


def test_a_voter_votes_on_at_another_address() -> None:
    with SimRack(21) as rack:
        rack.start()
        rack.settle()
        host, network = rack.hosts["h3"], rack.world.network
        host.power_off()
        del network.hosts_by_ip[host.ip]
        host.ip = "10.0.7.3"
        network.hosts_by_ip[host.ip], network.names["h3"] = host, (host.ip,)
        host.power_on()
        rewrite(rack, "h3", ["h1", "h2", "h3"])
        rack.settle()
        strike(rack.world, Kill("host", "h1", 600.0))
        rack.until(lambda: rack.leader() in ("h2", "h3"), 30.0, "two of three lead, one at its new address")
        assert "h4 will replace h1" in change(rack, "h4", "h4", "h1")
        vote(rack, "h2", "h3", "h4")
