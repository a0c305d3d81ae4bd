"""A read of the whole rack, however long one host's answer is, or whether it answers: it ends nobody, and everybody
sees it whole, or hears who is missing."""

import signal
from collections.abc import Mapping
from typing import Any

import pytest

from agent.api.gathering import LISTS
from agent.api.rack_view import RackView
from chaos.askers import as_root
from chaos.rackworld import SimRack
from covey.core.errors import Refused
from covey.core.ids import HostId
from plugins.views import SlabView


def slabs(count: int) -> list[SlabView]:
    """An empty volume, as its borrower tells it."""
    return [SlabView("data", n, HostId("h1"), "cold", None, 1 << 30, 0, 0, 0.0, 0) for n in range(count)]


@pytest.mark.parametrize(("count", "seen"), [(8_192, 8_192), (300_000, 0)])
def test_agentctl_slabs_beside_a_volume_of_many_slabs_ends_no_agent(
    monkeypatch: pytest.MonkeyPatch, count: int, seen: int
) -> None:
    """8,192 slabs are 1.5 MB of rows; 300,000 are more than is sent, and that host is said to be missing."""
    here = RackView._here

    async def many(self: RackView, read: str, arguments: Mapping[str, Any]) -> list[Any]:
        if read == "memory.slabs":
            return slabs(count) if self._agent.id == "h1" else []
        return await here(self, read, arguments)

    monkeypatch.setattr(RackView, "_here", many)
    with SimRack(3, hosts=3) as rack:
        rack.start()
        rack.settle()
        agents = {name: host.agent for name, host in rack.hosts.items()}
        found = rack.answer("h2", "agent.rack_slabs", {})
        assert len(found.data) == seen
        assert [(each.host, "too long" in each.why) for each in found.unanswered] == ([] if seen else [("h1", True)])
        assert {name: host.agent for name, host in rack.hosts.items()} == agents
        assert all(host.agent is not None and host.agent.alive for host in rack.hosts.values())
        assert rack.agents["h1"].messenger.counters["answers_too_long"] == (seen == 0)


def test_a_read_that_raises_is_refused_and_its_agent_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    here = RackView._here

    async def wrong(self: RackView, read: str, arguments: Mapping[str, Any]) -> list[Any]:
        if self._agent.id == "h1":
            raise KeyError("our mistake")
        return await here(self, read, arguments)

    with SimRack(4, hosts=3) as rack:
        rack.start()
        rack.settle()
        monkeypatch.setattr(RackView, "_here", wrong)
        agent = rack.hosts["h1"].agent
        found = rack.answer("h2", "agent.gpus", {})
        assert {row.host for row in found.data} == {"h2", "h3"}
        assert [each.host for each in found.unanswered] == ["h1"]
        rack.run(3.0)
        assert rack.hosts["h1"].agent is agent and agent is not None and agent.alive
        assert rack.agents["h1"].messenger.counters["answers_failed"] >= 1


def test_of_a_host_that_stands_still_nothing_is_missing_without_a_word() -> None:
    """Every list of HTTP names it within as long as the reader waits; once it goes on, all its rows are there."""
    with SimRack(5, hosts=3) as rack:
        rack.start()
        rack.settle()
        rack.ask("h3", "memory.create", {"volume": "wide", "size_bytes": 512 << 20})
        agent = rack.hosts["h3"].agent
        assert agent is not None
        agent.signal(signal.SIGSTOP)
        began_s = rack.world.now
        for command in LISTS.values():
            asked_s = rack.world.now
            found = rack.answer("h1", command, {"timeout_s": 0.25})
            assert [each.host for each in found.unanswered] == ["h3"], command
            assert 0.2 < rack.world.now - asked_s < 0.4
        with pytest.raises(Refused) as refused:
            rack.ask("h1", "agent.why", {"id": "wide", "timeout_s": 0.25})
        assert (refused.value.code, "h3" in refused.value.why) == (8, True)
        assert rack.world.now - began_s < 3.0, "gossip has it alive or suspect all the time"
        slabs = []

        async def ask() -> None:
            slabs.append(await rack.agents["h1"].commands["agent.rack_slabs"](as_root({"timeout_s": 20.0})))

        asker = rack.hosts["h1"].agent
        assert asker is not None
        asker.spawn("a patient reader", ask())
        rack.run(10.0)
        assert not slabs, "it waits as long as it said"
        agent.signal(signal.SIGCONT)
        rack.until(lambda: bool(slabs), 5.0, "the host that goes on has answered")
        assert (len(slabs[0].data), slabs[0].unanswered) == (8192, ())
