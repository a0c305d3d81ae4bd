"""The aggregator plugin of whole simulated agents, its aggd processes, and the ranks of a job, while things die.

Gossip, links, disks and processes are the simulator's; agents and aggd are the real ones. The log and the runner are
played here: where the job runs is told to every agent when it starts, and ranks stay alive when agents die.
"""

import random
from typing import Any, cast

import pytest

from chaos import faults
from chaos.rackworld import SimRack
from chaos.world.host import SimProcess
from covey.core import JobId
from covey.errors import Refused
from covey.tensorwire import ballot_of
from plugins import facts
from plugins.aggregator.messages import AggregatorSettings
from plugins.aggregator.plugin import PLUGIN
from tests.plugins.aggregator.ranks import Job

JOB = JobId("j1")


def settled_rack(seed: int, hosts: int = 4, settings: Any = None) -> SimRack:
    rack = SimRack(seed, hosts=hosts, plugins=(PLUGIN,), settings=settings).start()
    rack.settle()
    return rack


def aggd_of(rack: SimRack, host: str) -> SimProcess:
    return rack.hosts[host].find("aggd")[-1]


def test_a_job_finds_an_aggregator_and_ends_with_the_sums_in_rank_order() -> None:
    with settled_rack(1) as rack:
        job = Job(rack, ["h1", "h2", "h3", "h3"], rounds=12)
        job.finish()
        assert len({at.epoch for rank in job.ranks for at in rank.told}) == 1
        story = [(line.event, line.reason) for line in rack.agents["h1"].event_log.lines_of("j1")]
        assert [event for event, _ in story][:3] == ["tensors offered", "tensors summed here", "tensors assigned"]
        assert job.owner() == "h1", "of hosts that are as good, one of the job's own sums it"


@pytest.mark.parametrize("seed", [2, 3])
def test_a_killed_aggd_is_started_again_and_the_job_goes_on_without_losing_a_bit(seed: int) -> None:
    with settled_rack(seed) as rack:
        job = Job(rack, ["h1", "h2", "h3"])
        for round in (5, 15, 25):
            rack.until(job.reached(round), 60, f"round {round}")
            killed = rack.world.now
            aggd_of(rack, job.owner()).signal(9)
            rack.until(job.reached(round + 3), 20, "three rounds more")
            assert rack.world.now - killed < 6
        job.finish()
        assert len({at.epoch for rank in job.ranks for at in rank.told}) >= 4


@pytest.mark.parametrize("seed", [4, 5])
def test_a_host_that_sums_is_lost_and_another_takes_over(seed: int) -> None:
    with settled_rack(seed) as rack:
        job = Job(rack, ["h1", "h2"], rounds=60)
        rack.until(job.reached(3), 60, "round 3")
        for _ in range(2):
            owner = job.owner()
            if owner in ("h1", "h2"):
                aggd_of(rack, owner).signal(9)  # its ranks would die with the host
            else:
                rack.hosts[owner].power_off()
            done = len(job.ranks[0].results)
            rack.until(job.reached(min(done + 5, 60)), 60, "five rounds more")
            rack.hosts[owner].power_on()
            rack.run(5)
        job.finish()


def test_an_agent_that_restarts_finds_its_aggd_and_its_jobs_again() -> None:
    with settled_rack(6) as rack:
        job = Job(rack, ["h1", "h2", "h3"])
        rack.until(job.reached(4), 60, "round 4")
        owner, before = job.owner(), job.ranks[0].told[-1].epoch
        aggd = aggd_of(rack, owner)
        agent = rack.hosts[owner].agent
        assert agent is not None
        agent.signal(9)
        rack.run(1.0)
        rack.hosts[owner].revive()
        rack.until(job.reached(12), 60, "round 12")
        rack.run(10)
        assert aggd_of(rack, owner) is aggd and aggd.alive
        assert job.ranks[0].told[-1].epoch == before
        plugin = job.plugin(owner)
        assert plugin is not None and plugin.owner.serves(JOB, before)
        job.finish()


def test_every_agent_of_the_job_dies_in_turn_and_the_job_does_not_notice() -> None:
    with settled_rack(7) as rack:
        job = Job(rack, ["h1", "h2", "h3"], rounds=80)
        for round, host in ((5, "h1"), (25, "h2"), (45, "h3"), (60, "h1")):
            rack.until(job.reached(round), 90, f"round {round}")
            agent = rack.hosts[host].agent
            assert agent is not None
            agent.signal(9)
            rack.run(2.0)
            rack.hosts[host].revive()
        job.finish()


def test_coordinator_and_aggregator_die_together_and_the_next_coordinator_takes_over() -> None:
    with settled_rack(8) as rack:
        job = Job(rack, ["h1", "h2", "h3"], rounds=60)
        rack.until(job.reached(5), 60, "round 5")
        coordinator = rack.hosts["h1"].agent
        assert coordinator is not None
        before = job.ranks[1].told[-1].epoch
        coordinator.signal(9)  # its rank lives on, but hears of no new aggregator until an agent is there again
        aggd_of(rack, job.owner()).signal(9)
        rack.until(lambda: job.ranks[1].told[-1].epoch > before, 60, "the next coordinator has found another")
        assert ballot_of(job.ranks[1].told[-1].epoch) % 3 == 1  # a number that only the second rank's host may use
        rack.hosts["h1"].revive()
        rack.until(lambda: len(job.ranks[0].results) > 20, 60, "the first rank goes on")
        job.finish()


def test_a_job_whose_run_is_over_is_forgotten_everywhere() -> None:
    with settled_rack(9) as rack:
        job = Job(rack, ["h1", "h2"], rounds=3)
        job.finish()
        owner = job.owner()
        for host in rack.alive():
            process = rack.hosts[host].agent
            assert process is not None

            async def over(host: str = host) -> None:
                rack.agents[host].bus.publish(facts.JobUnplaced(JOB, 1, True))

            process.spawn("over", over())
        rack.run(3)
        assert rack.ask(owner, "aggregator.tensors", {}) == []
        for host in rack.alive():
            plugin = job.plugin(host)
            assert plugin is not None
            assert not plugin.owner.jobs and not plugin.directory.known and not plugin.coordinator.jobs


def test_a_rank_of_an_earlier_run_is_told_that_it_is_over() -> None:
    with settled_rack(10) as rack:
        job = Job(rack, ["h1", "h2"], rounds=1000)
        rack.until(job.reached(5), 60, "round 5")
        for host in rack.alive():
            process = rack.hosts[host].agent
            assert process is not None

            async def again(host: str = host) -> None:
                rack.agents[host].bus.publish(facts.JobPlaced(JOB, 2, "t", 2, job.places, job.tables))

            process.spawn("again", again())
        rack.world.strict = False  # the ranks end by an exception, as they should
        rack.until(job.ended, 60, "the old ranks have ended")
        assert all(rank.process.code == 1 for rank in job.ranks)
        complaints = [complaint.what for complaint in rack.world.complaints]
        assert all("taken back" in what for what in complaints)


def test_what_is_summed_where_is_answered_for_this_host_and_for_others() -> None:
    with settled_rack(11) as rack:
        job = Job(rack, ["h1", "h2"], rounds=40)
        rack.until(job.reached(10), 60, "round 10")
        rack.run(2)
        owner = job.owner()
        (row,) = rack.ask(owner, "aggregator.tensors", {})
        assert (row.job, row.host, row.workers, row.joined, row.tensors, row.bytes) == (JOB, owner, 2, 2, 1, 160)
        assert row.rounds >= 10 and row.received_bytes >= 160 * 2 * 10 and row.sent_bytes >= 160 * 2 * 10
        other = next(host for host in rack.alive() if host != owner)
        (seen,) = rack.ask(other, "aggregator.tensors", {"host": owner})
        assert seen.job == JOB and seen.host == owner
        with pytest.raises(Refused, match="no host"):
            rack.ask(other, "aggregator.tensors", {"host": "h9"})
        metrics = rack.agents[owner].plugins["aggregator"].metrics()
        assert metrics["covey_aggregator_jobs"] == 1 and metrics["covey_aggregator_rounds"] >= 10
        job.finish()


def test_hosts_that_do_not_serve_are_never_chosen_and_the_job_waits_until_one_does() -> None:
    with settled_rack(12, settings={"aggregator": {"serve": False}}) as rack:
        job = Job(rack, ["h1", "h2"], rounds=3)
        rack.run(10)
        assert not job.owner()
        story = [line.event for line in rack.agents["h1"].event_log.lines_of("j1")]
        assert story.count("nobody sums its tensors") == 1
        for rank in job.ranks:
            rank.process.signal(9)
        rack.run(1)


@pytest.mark.parametrize("seed", range(20, 26))
def test_whatever_is_killed_the_results_are_the_same(seed: int) -> None:
    chance = random.Random(seed)
    with settled_rack(seed) as rack:
        job = Job(rack, ["h1", "h2", "h3"], rounds=50)
        for _ in range(6):
            rack.run(chance.uniform(0.2, 6.0))
            host = chance.choice(["h1", "h2", "h3", "h4"])  # a generator of its own
            what = chance.choice(["agent", "aggd", "aggd"])
            for process in rack.hosts[host].find(what):
                process.signal(9)
            rack.world.at(rack.world.now + chance.uniform(0.1, 8.0), rack.hosts[host].revive)
        job.finish(300)
        assert [len(rank.results) for rank in job.ranks] == [50, 50, 50]


def test_a_host_that_is_told_to_serve_no_more_ends_its_aggd_and_its_jobs_move() -> None:
    with settled_rack(13) as rack:
        job = Job(rack, ["h1", "h2"], rounds=60)
        rack.until(job.reached(5), 60, "round 5")
        owner = job.owner()
        aggd, agent = aggd_of(rack, owner), rack.hosts[owner].agent
        assert agent is not None
        cast(Any, rack.agents[owner].config.plugins)["aggregator"] = AggregatorSettings(serve=False)
        agent.signal(9)
        rack.hosts[owner].revive()
        rack.until(job.reached(20), 90, "fifteen rounds more")
        assert not aggd.alive and not rack.hosts[owner].find("aggd") and job.owner() != owner
        job.finish()


def test_a_full_disk_stops_neither_the_plugin_nor_its_jobs() -> None:
    with settled_rack(3) as rack:
        job = Job(rack, ["h1", "h2", "h3"])
        rack.until(job.reached(5), 60, "round 5")
        for host in rack.hosts:
            faults.strike(rack.world, faults.FillDisk(host, 0.0, 6.0))
        aggd_of(rack, job.owner()).signal(9)
        job.finish()
        assert {agent.health["aggregator"].state for agent in rack.agents.values()} == {"on"}
