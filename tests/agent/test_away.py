"""A planned restart is not a death: what an agent says before it restarts, what others make of it, and for how long."""

import signal

import pytest

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import lenders
from chaos.story import tell


def shown(rack: SimRack, on: str, host: str) -> tuple[str, int]:
    row = next(row for row in rack.ask(on, "agent.hosts", {}) if row.host == host)
    return row.state, round(row.away_s)


def stopped(rack: SimRack, name: str) -> None:
    agent = rack.hosts[name].agent
    assert agent is not None
    agent.signal(signal.SIGTERM)
    rack.until(lambda: not agent.alive, 6.0, "it has ended")


@pytest.mark.long
@pytest.mark.parametrize("seed", [1])
def test_a_rolling_restart_moves_no_slab_and_spends_no_attempt(seed: int) -> None:
    assert tell("rolling_restart", seed).story == "rolling_restart"


def test_a_host_that_restarts_is_away_until_it_said_and_gone_afterwards() -> None:
    with SimRack(7, hosts=4) as rack:
        rack.start()
        rack.settle()
        stopped(rack, "h4")
        rack.run(18.0)
        state, away_s = shown(rack, "h1", "h4")
        assert state == "away" and 38 <= away_s <= 43
        assert [line.event for line in rack.answer("h1", "agent.why", {"id": "h4"}).data][-1] == "away"
        rack.run(30.0)
        assert shown(rack, "h2", "h4")[0] == "away"
        rack.run(15.0)
        assert {shown(rack, name, "h4") for name in ("h1", "h2", "h3")} == {("gone", 0)}
        rack.hosts["h4"].start_agent()
        rack.settle()
        assert shown(rack, "h1", "h4") == ("alive", 0)


@pytest.mark.parametrize("knew", [True, False])
def test_a_host_that_restarts_while_another_is_away_knows_that_it_is(knew: bool) -> None:
    """It knows that from its own file if it was told before it ended, from the others otherwise."""
    with SimRack(8, hosts=4) as rack:
        rack.start()
        rack.settle()
        rack.run(15.0)
        away, other = ("h4", "h3") if knew else ("h3", "h4")
        if not knew:
            faults.strike(rack.world, faults.Kill("agent", "h4", 1.5))
        stopped(rack, away)
        if knew:
            rack.run(12.0)
            stopped(rack, other)
            rack.run(1.0)
            rack.hosts[other].start_agent()
        rack.run(8.0)
        assert shown(rack, other, away)[0] == "away"
        rack.run(60.0)
        assert shown(rack, other, away)[0] == "gone"


def test_slabs_of_a_host_that_stays_away_are_placed_anew_once_its_time_is_over() -> None:
    with SimRack(12, hosts=3, settings={"gossip": {"away_s": 20}}) as rack:
        rack.start()
        rack.settle()
        rack.pager("h1", "vol", 1 << 20, 200.0)
        rack.until(lambda: "h3" in lenders(rack, "h1"), 60.0, "a slab lies on h3")
        rack.hosts["h3"].main = None
        stopped(rack, "h3")
        rack.run(18.0)
        assert "h3" in lenders(rack, "h1")
        rack.run(12.0)
        assert lenders(rack, "h1") in (["h2"], [])


def test_a_host_that_says_no_time_has_left_at_once() -> None:
    with SimRack(9, hosts=4, settings={"gossip": {"away_s": 0}}) as rack:
        rack.start()
        rack.settle()
        stopped(rack, "h4")
        rack.run(1.0)
        assert {shown(rack, name, "h4") for name in ("h1", "h2", "h3")} == {("left", 0)}


def test_nothing_new_is_placed_on_a_host_that_is_away() -> None:
    with SimRack(10, hosts=3, gpus=2) as rack:
        rack.start()
        rack.settle()
        rack.run(5.0)
        rack.ask("h1", "memory.create", {"volume": "vol", "size_bytes": 1 << 20})
        stopped(rack, "h3")
        rack.run(3.0)
        spec = {"argv": ["sleeper", "300"], "workers": 6, "gpus_per_worker": 1, "cwd": "/", "tenant": "red"}
        job = rack.submit(spec, "wide-gang-1", on="h1")
        pager = rack.pager("h1", "vol", 1 << 20, 30.0)
        rack.run(25.0)
        assert rack.plugin("h1", "scheduler").queue.jobs[job].state == "queued", "two of its six GPUs are away"
        assert lenders(rack, "h1") == ["h2"]
        assert pager.alive


def test_a_volume_keeps_its_slabs_while_its_agent_is_away_for_longer_than_a_lease() -> None:
    with SimRack(11, hosts=4, settings={"gossip": {"away_s": 50}, "memory": {"lease": "20 s"}}) as rack:
        rack.start()
        rack.settle()
        rack.pager("h1", "vol", 1 << 20, 200.0)
        rack.until(lambda: bool(lent_by_others(rack)), 60.0, "slabs are lent")
        rack.run(10.0)
        before = lent_by_others(rack)
        stopped(rack, "h1")
        rack.run(45.0)
        assert lent_by_others(rack) == before
        rack.hosts["h1"].start_agent()
        rack.settle()
        rack.run(10.0)
        assert before <= lent_by_others(rack)


def lent_by_others(rack: SimRack) -> set[tuple[str, int, int]]:
    """The slabs that h1 borrowed: lender, slab and epoch."""
    return {
        (name, lent.slab.index, lent.slab.epoch)
        for name in ("h2", "h3", "h4")
        for lent in rack.plugin(name, "memory").lending.machine.lent.values()
        if lent.borrower == "h1"
    }
