"""Files of a host are lost, rolled back or damaged while it is down, and an operator does what its agent advises."""

from typing import Literal

import pytest

from chaos.faults import SPOILT, Damage, swarm
from chaos.rackworld import SimRack
from chaos.story import tell
from covey.wire.checked import StateRefused


def test_an_agent_that_refuses_its_files_stays_down_until_its_advice_is_followed() -> None:
    with SimRack(5, 3) as rack:
        rack.start()
        rack.settle()
        host = rack.hosts["h2"]
        host.power_off()
        host.disk.damage("identity", "rotten")
        host.power_on()
        rack.run(20)
        assert host.refused is not None and host.refused.status == StateRefused.status
        assert "h2" not in rack.alive(), "systemd does not start it again"
        person = rack.administered()
        rack.settle()
        assert person.obeyed == ["h2 deletes identity"]
        assert host.refused is None


def test_a_memory_plugin_whose_record_is_damaged_begins_anew() -> None:
    with SimRack(6, 3) as rack:
        rack.start()
        rack.settle()
        person = rack.administered()
        pager = rack.pager("h2", "vol1", 1 << 18, 20.0)
        rack.run(8)
        host = rack.hosts["h2"]
        host.power_off()
        host.disk.damage("memory/agent", "rotten")
        host.disk.damage("memory/copy-of-agent", "lost")
        host.power_on()
        rack.until(lambda: bool(person.obeyed), 20.0, "the plugin is off and somebody deletes the record")
        assert person.obeyed == ["h2 deletes memory/agent and its copy"]
        rack.until(lambda: not pager.alive, 90.0, "the pager has its volume again, and read all of it back")
        assert not rack.stale and not rack.wrong


@pytest.mark.parametrize("how", ["lost", "rotten"])
def test_a_record_that_is_gone_while_its_processes_run_is_read_from_its_copy(
    how: Literal["lost", "rotten"],
) -> None:
    """Without their secrets the agent's own processes would refuse it, for ever."""
    with SimRack(6, 3) as rack:
        rack.start()
        rack.settle()
        person = rack.administered()
        pager = rack.pager("h2", "vol1", 1 << 18, 20.0)
        rack.run(8)
        host = rack.hosts["h2"]
        agent = host.agent
        assert agent is not None
        agent.signal(9)
        host.disk.damage("memory/agent", how)
        host.start_agent()
        rack.until(lambda: not pager.alive, 60.0, "the pager reads all of it back")
        assert not person.obeyed and not rack.stale and not rack.wrong


@pytest.mark.parametrize("seed", range(40))
def test_a_swarm_damages_files_of_one_host_only_and_never_pages(seed: int) -> None:
    plan = swarm(seed, ("h1", "h2", "h3", "h4"), 10.0, 100.0)
    damages = [fault for _, fault in plan if isinstance(fault, Damage)]
    assert len({fault.host for fault in damages}) <= 1, "two voters without a log forget what was committed"
    assert all(fault.name in SPOILT for fault in damages)


@pytest.mark.parametrize("seed", [pytest.param(16, marks=pytest.mark.long), 34])
def test_ranks_whose_state_went_with_the_power_do_not_restart_under_the_same_epoch(seed: int) -> None:
    """The ranks began at round 0 of what an aggregator had summed long ago, and waited for ever."""
    tell("files_damaged", seed)
