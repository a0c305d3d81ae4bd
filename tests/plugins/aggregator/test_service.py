"""The aggregator room of whole simulated agents, its aggd processes, and the ranks of a job, while things die.

Gossip, links, disks and processes are the simulator's; agents and aggd are the real ones. The log and the runner are
played here: where the job runs is told to every agent when it starts, and ranks stay alive when agents die.
"""

import random
from collections.abc import Callable
from typing import Any, cast

import pytest

from chaos import faults
from chaos.host import SimProcess
from chaos.rackworld import SimRack
from covey.core import HostId, JobId
from covey.ports import Command, Env
from covey.tensorstream import TensorStream
from covey.tensorwire import ballot_of
from covey.wire import AggregatorAt, AggregatorLost, Frame
from plugins import facts
from plugins.aggregator import ROOM
from plugins.aggregator.messages import Settings
from plugins.aggregator.service import AggregatorService
from plugins.base import Refused
from plugins.facts import Place
from tests.plugins.aggregator.harness import Tensor, contribution, initial, reference

JOB = JobId("j1")
TENSOR = Tensor("w", "model", (40,))


class Rank:
    """One rank's process on its host, and its line to whichever agent runs there."""

    def __init__(self, job: "Job", host: str, rank: int) -> None:
        self.job_on_rack, self.host, self.rank = job, host, rank
        self.results: list[bytes] = []
        self.told: list[AggregatorAt] = []
        self.process = job.rack.hosts[host].run(f"rank-{rank}", self.main)
        self.tensors: TensorStream | None = None

    async def main(self, env: Env, _command: Command) -> int:
        job = self.job_on_rack
        self.tensors = TensorStream(env.bytes, env.spawn, JOB, self.rank, job.workers, self.lost, part_bytes=32)
        for at in self.told:
            self.tensors.moved(at)
        await self.tensors.model("w", initial(TENSOR, self.rank).tobytes(), TENSOR.shape)
        for round in range(1, job.rounds + 1):
            self.results.append(await self.tensors.push_pull("w", contribution(TENSOR, self.rank, round).tobytes()))
            await job.pause(env)
        await self.tensors.push_pull("covey/leave", bytes(4))
        return 0

    # ---- jobs.sock ----

    @property
    def job(self) -> JobId:
        return JOB

    @property
    def epoch(self) -> int:
        return self.job_on_rack.grant

    uid = 1000

    def send(self, frame: Frame) -> None:
        assert isinstance(frame, AggregatorAt)
        self.told.append(frame)

        async def moved() -> None:
            if self.tensors is not None:
                self.tensors.moved(frame)

        self.process.spawn("moved", moved())

    def lost(self, epoch: int, why: str) -> None:
        room, agent = self.job_on_rack.room(self.host), self.job_on_rack.rack.hosts[self.host].agent
        if room is not None and agent is not None and agent.alive:
            agent.spawn("frame", room.frame(cast(Any, self), AggregatorLost(epoch, why)))


class Job:
    def __init__(self, rack: SimRack, hosts: list[str], rounds: int = 40, step_s: float = 0.25, grant: int = 1) -> None:
        self.rack, self.rounds, self.step_s, self.grant, self.workers = rack, rounds, step_s, grant, len(hosts)
        self.places = tuple(Place(HostId(host), (rank,), ()) for rank, host in enumerate(hosts))
        self.ranks = [Rank(self, host, rank) for rank, host in enumerate(hosts)]
        self._boots: dict[str, object] = {}
        self.tell_agents()

    async def pause(self, env: Env) -> None:
        import asyncio

        await asyncio.sleep(env.rng.uniform(0.5, 1.5) * self.step_s)

    def room(self, host: str) -> AggregatorService | None:
        agent = self.rack.agents.get(host)
        return cast(AggregatorService | None, agent.rooms.get("aggregator")) if agent is not None else None

    def tell_agents(self) -> None:
        """As the log and the joining ranks would: each agent learns of the job once it is up, also after a restart."""
        for host in self.rack.alive():
            agent, room = self.rack.agents[host], self.room(host)
            if room is None or not self.rack.began(host) or self._boots.get(host) is agent or not agent.boot:
                continue
            self._boots[host] = agent
            ranks = [rank for rank in self.ranks if rank.host == host and rank.process.alive]
            room.host.peers = lambda job, ranks=ranks: ranks if job == JOB else []  # type: ignore[method-assign,misc]
            process = self.rack.hosts[host].agent
            assert process is not None
            process.spawn("log", self._tell(agent, ranks))
        self.rack.world.at(self.rack.world.now + 0.1, self.tell_agents)

    async def _tell(self, agent: Any, ranks: list[Rank]) -> None:
        agent.bus.tell(facts.JobPlaced(JOB, self.grant, "t", self.workers, self.places))
        for rank in ranks:
            agent.bus.tell(facts.JobJoined(JOB, self.grant, rank.rank))

    def owner(self) -> str:
        """Who sums the job by the highest epoch that any rank was told; empty while none was."""
        told = [at for rank in self.ranks for at in rank.told]
        return max(told, key=lambda at: at.epoch).host if told else ""

    def ended(self) -> bool:
        return not any(rank.process.alive for rank in self.ranks)

    def reached(self, round: int) -> Callable[[], bool]:
        return lambda: all(len(rank.results) >= round for rank in self.ranks)

    def finish(self, within_s: float = 200.0) -> None:
        """All ranks end well, with the results that one process would have computed."""
        self.rack.until(self.ended, within_s, "every rank has ended")
        expected = [array.tobytes() for array in reference(TENSOR, self.workers, self.rounds)]
        for rank in self.ranks:
            assert rank.process.code == 0
            assert rank.results == expected, f"rank {rank.rank}"


def settled_rack(seed: int, hosts: int = 4, settings: Any = None) -> SimRack:
    rack = SimRack(seed, hosts=hosts, rooms=(ROOM,), settings=settings).start()
    rack.settle()
    return rack


def aggd_of(rack: SimRack, host: str) -> SimProcess:
    return rack.hosts[host].find("aggd")[-1]


def test_a_job_finds_an_aggregator_and_ends_with_the_sums_in_rank_order() -> None:
    with settled_rack(1) as rack:
        job = Job(rack, ["h1", "h2", "h3", "h3"], rounds=12)
        job.finish()
        assert len({at.epoch for rank in job.ranks for at in rank.told}) == 1
        story = [(line.event, line.reason) for line in rack.agents["h1"].journal.story("j1")]
        assert [event for event, _ in story][:2] == ["tensors offered", "tensors assigned"]


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
        room = job.room(owner)
        assert room is not None and room.owner.serves(JOB, before)
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


def test_home_and_aggregator_die_together_and_the_next_home_takes_over() -> None:
    with settled_rack(8) as rack:
        job = Job(rack, ["h1", "h2", "h3"], rounds=60)
        rack.until(job.reached(5), 60, "round 5")
        home = rack.hosts["h1"].agent
        assert home is not None
        before = job.ranks[1].told[-1].epoch
        home.signal(9)  # its rank lives on, but hears of no new aggregator until an agent is there again
        aggd_of(rack, job.owner()).signal(9)
        rack.until(lambda: job.ranks[1].told[-1].epoch > before, 60, "the next home has found another")
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
                rack.agents[host].bus.tell(facts.JobUnplaced(JOB, 1, True))

            process.spawn("over", over())
        rack.run(3)
        assert rack.ask(owner, "aggregator.tensors", {}) == []
        for host in rack.alive():
            room = job.room(host)
            assert room is not None
            assert not room.owner.jobs and not room.directory.known and not room.home.jobs


def test_a_rank_of_an_earlier_run_is_told_that_it_is_over() -> None:
    with settled_rack(10) as rack:
        job = Job(rack, ["h1", "h2"], rounds=1000)
        rack.until(job.reached(5), 60, "round 5")
        for host in rack.alive():
            process = rack.hosts[host].agent
            assert process is not None

            async def again(host: str = host) -> None:
                rack.agents[host].bus.tell(facts.JobPlaced(JOB, 2, "t", 2, job.places))

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
        metrics = rack.agents[owner].rooms["aggregator"].metrics()
        assert metrics["covey_aggregator_jobs"] == 1 and metrics["covey_aggregator_rounds"] >= 10
        job.finish()


def test_hosts_that_do_not_serve_are_never_chosen_and_the_job_waits_until_one_does() -> None:
    with settled_rack(12, settings={"aggregator": {"serve": False}}) as rack:
        job = Job(rack, ["h1", "h2"], rounds=3)
        rack.run(10)
        assert not job.owner()
        story = [line.event for line in rack.agents["h1"].journal.story("j1")]
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


def test_a_host_that_is_told_to_serve_no_more_ends_its_aggd_and_its_jobs_move() -> None:
    with settled_rack(13) as rack:
        job = Job(rack, ["h1", "h2"], rounds=60)
        rack.until(job.reached(5), 60, "round 5")
        owner = job.owner()
        aggd, agent = aggd_of(rack, owner), rack.hosts[owner].agent
        assert agent is not None
        cast(Any, rack.agents[owner].config.rooms)["aggregator"] = Settings(serve=False)
        agent.signal(9)
        rack.hosts[owner].revive()
        rack.until(job.reached(20), 90, "fifteen rounds more")
        assert not aggd.alive and not rack.hosts[owner].find("aggd") and job.owner() != owner
        job.finish()


def test_a_full_disk_stops_neither_the_room_nor_its_jobs() -> None:
    with settled_rack(3) as rack:
        job = Job(rack, ["h1", "h2", "h3"])
        rack.until(job.reached(5), 60, "round 5")
        for host in rack.hosts:
            faults.strike(rack.world, faults.FillDisk(host, 0.0, 6.0))
        aggd_of(rack, job.owner()).signal(9)
        job.finish()
        assert {agent.health["aggregator"].state for agent in rack.agents.values()} == {"on"}
