"""The aggregator plugin of whole simulated agents, its aggd processes, and the ranks of a job, while things die.

Gossip, links, disks and processes are the simulator's; agents and aggd are the real ones. The log and the runner are
played here: where the job runs is told to every agent when it starts, and ranks stay alive when agents die.
"""

import asyncio
import random
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from chaos import faults
from chaos.rackworld import SimRack
from chaos.world.host import SimProcess
from covey.core.errors import Refused
from covey.core.ids import HostId, JobId
from covey.tensors.numbers.tensor_wire import ballot_of
from covey.wire.sums import GetStatus, JobCounters, Now, Order, RanksAway, Serve
from plugins import facts
from plugins.aggregator.machine.coordinator import JobStepped
from plugins.aggregator.machine.process_words import ProcessUp, Served
from plugins.aggregator.messages import AggregatorSettings, Assigned, Offer, Probe, Serving, WorkCounters, WorkOf
from plugins.aggregator.plugin import PLUGIN
from plugins.aggregator.service import STRANGER_S, AggregatorService, metrics
from plugins.aggregator.service.away import RanksAwayNow
from plugins.facts import HostView, Place
from plugins.gossiped import AggregatorNow
from tests.plugins.aggregator.loopback import SECRET, Quiet
from tests.plugins.aggregator.ranks import Job
from tests.virtual_time import play

JOB = JobId("j1")


def settled_rack(seed: int, hosts: int = 4, settings: Any = None) -> SimRack:
    """A rack whose aggregators sum all jobs, unless `settings` says otherwise."""
    settings = {"aggregator": {"direct": "never"} | (settings or {}).get("aggregator", {})}
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
        measured = rack.agents[owner].plugins["aggregator"].metrics()
        rounds = measured[metrics.ROUNDS.of()]
        assert measured[metrics.JOBS.of()] == 1 and isinstance(rounds, float) and rounds >= 10
        job.finish()


def test_hosts_that_do_not_serve_are_never_chosen_and_the_job_waits_until_one_does() -> None:
    with settled_rack(12, settings={"aggregator": {"serve": False}}) as rack:
        job = Job(rack, ["h1", "h2"], rounds=3)
        rack.run(10)
        assert not job.owner()
        story = [line.event for line in rack.agents["h1"].event_log.lines_of("j1")]
        assert story.count("no host sums its tensors") == 1
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
        cast(Any, rack.agents[owner].config.plugins)["aggregator"] = AggregatorSettings(serve=False, direct="never")
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


# ---- the plugin of one agent alone, and a disk that takes its time ---------------------------------------------------

H1, H2, H3 = HostId("h1"), HostId("h2"), HostId("h3")
G1 = 1 << 32
PLACES = (Place(H1, (0, 1), ()), Place(H2, (2,), ()))


class PlayedAgent:
    """The parts of an agent that the plugin uses: where messages go is nobody's business here. `written`: set while its
    disk writes."""

    id, advertise = H1, "10.0.0.1"

    def __init__(self) -> None:
        self.views = [HostView(host=H1, state="alive")]
        self.ranks = [
            SimpleNamespace(job=JOB, epoch=epoch, rank=0, may_own=False, gone=False, told=[]) for epoch in (1, 0)
        ]
        """One rank of the present run, and one that outlived the run before."""
        for rank in self.ranks:
            rank.send = rank.told.append
        self.written = asyncio.Event()
        self.written.set()
        self.orders: list[Order] = []
        self.serves: list[JobCounters] = []
        self.busy_s = 0.0
        clock = SimpleNamespace(now_s=lambda: asyncio.get_running_loop().time())
        absent, disk = SimpleNamespace(), SimpleNamespace(read=self._read, replace=self._replace)
        probes = SimpleNamespace(cores=lambda: 1, devices=SimpleNamespace(devices=list))
        self.env = SimpleNamespace(
            clock=clock, rng=random.Random(1), entropy=bytes, spawn=self._spawn, log=Quiet(), disk=disk,
            probes=probes, processes=absent, bytes=absent, run_dir="/run",
        )  # fmt: skip
        self._tasks: set[asyncio.Task[Any]] = set()

    def plugin(self) -> AggregatorService:
        made = AggregatorService(cast(Any, self))
        made._order = self._obeyed  # type: ignore[method-assign]
        made._up.set()
        made.dispatch(ProcessUp("10.0.0.1:9", {}), made.owner)
        return made

    def settings(self, kind: Any) -> AggregatorSettings:
        return AggregatorSettings(serve=False, lanes=1, direct="never")

    def hosts(self) -> list[HostView]:
        return self.views

    def peers(self, job: JobId) -> list[Any]:
        return self.ranks

    def spread(self, key: str, value: Any) -> None: ...
    def publish(self, fact: Any) -> None: ...
    def note(self, *line: str) -> None: ...

    async def send(self, *letter: Any) -> bool:
        return True

    async def ask(self, *question: Any) -> Any:
        raise TimeoutError

    async def settle(self) -> None:
        while under_way := [task for task in self._tasks if not task.done()]:
            await asyncio.gather(*under_way)

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.get_running_loop().create_task(work))

    async def _read(self, name: str) -> None: ...

    async def _replace(self, name: str, data: bytes) -> None:
        await self.written.wait()

    async def _obeyed(self, order: Order) -> Now:
        self.orders.append(order)
        return Now("10.0.0.1:9", self.serves, self.busy_s, 0, 0, 0)


def counted(epoch: int, job: JobId = JOB) -> JobCounters:
    return JobCounters(job, epoch, 3, 3, 1, 4, 9, 0, 0, 5_000, 9)


def test_ranks_of_this_run_hear_of_the_newest_owner_alone_however_slow_the_disk() -> None:
    async def story() -> PlayedAgent:
        agent = PlayedAgent()
        plugin = agent.plugin()
        plugin.on_fact(facts.JobPlaced(JOB, 1, "t", 3, PLACES, 1))
        agent.written.clear()
        for epoch, owner in ((G1 + 2, H2), (G1 + 5, H3)):
            await plugin.on_message(H2, Assigned(JOB, epoch, owner, "10.0.0.3:9", SECRET))
            await asyncio.sleep(1)
        assert not agent.ranks[0].told, "what is not on disk may be forgotten"
        agent.written.set()
        await agent.settle()
        return agent

    present, former = play(story()).ranks
    assert [(at.epoch, at.host) for at in present.told] == [(G1 + 5, H3)]
    assert [(at.epoch, at.address) for at in former.told] == [(G1, "")], "its run is over"


def test_a_process_is_told_to_serve_the_newest_offer_alone_however_slow_the_disk() -> None:
    async def story() -> PlayedAgent:
        agent = PlayedAgent()
        plugin = agent.plugin()
        plugin.owner.settings = AggregatorSettings()
        agent.written.clear()
        for epoch in (G1 + 2, G1 + 5):
            await plugin.on_message(H2, Offer(JOB, epoch, 3, SECRET))
            await asyncio.sleep(1)
        agent.written.set()
        await agent.settle()
        return agent

    assert [order.epoch for order in play(story()).orders if isinstance(order, Serve)] == [G1 + 5]


def test_who_asks_about_another_epoch_than_the_one_served_is_told_no() -> None:
    async def story() -> list[Any]:
        agent = PlayedAgent()
        plugin = agent.plugin()
        plugin.owner.settings = AggregatorSettings()
        await plugin.on_message(H2, Offer(JOB, G1 + 5, 3, SECRET))
        plugin.dispatch(Served(JOB, G1 + 5), plugin.owner)
        agent.serves = [counted(G1 + 2)]  # an answer of before, that is
        late = await plugin.answer(H2, WorkOf(JOB, G1 + 5))
        agent.serves = [counted(G1 + 5)]
        questions = [kind(JOB, epoch) for epoch in (G1 + 2, G1 + 5) for kind in (Probe, WorkOf)]
        return [late, *[await plugin.answer(H2, question) for question in questions]]

    late, no, unknown, yes, known = play(story())
    assert late == unknown == WorkCounters(False)
    assert (no, yes, known.known, known.busy_us) == (Serving(False), Serving(True), True, 5_000)


def test_a_host_is_gone_once_it_was_not_seen_for_long_and_asked_while_it_is_there() -> None:
    sums = {"aggregator": msgspec.msgpack.encode(AggregatorNow("10.0.0.1:9", 0, 0.0))}

    async def story() -> None:
        agent = PlayedAgent()
        plugin = agent.plugin()
        await plugin.start()
        plugin.on_fact(facts.JobPlaced(JOB, 1, "t", 3, PLACES, 1))
        await asyncio.sleep(STRANGER_S)
        assert not plugin._rack().gone, "gossip may not have told of it yet"
        await asyncio.sleep(1)
        assert plugin._rack().gone == {H2}
        states = ("alive", "suspect", "away", "gone", "left")
        agent.views += [HostView(host=HostId(state), state=cast(Any, state), values=sums) for state in states]
        assert [(one.host, one.suspect) for one in plugin._rack().candidates] == [("alive", False), ("suspect", True)]

    play(story())


def test_a_process_that_was_found_again_is_as_busy_as_it_is_since() -> None:
    async def story() -> float:
        agent = PlayedAgent()
        agent.busy_s = 5_000.0
        plugin = agent.plugin()
        watching = asyncio.create_task(plugin._watch_aggd())
        await asyncio.sleep(2.5)
        watching.cancel()
        assert len([order for order in agent.orders if isinstance(order, GetStatus)]) == 3
        return plugin._load

    assert play(story()) == 0.0


def test_the_steps_of_the_first_rank_of_the_first_host_count_for_a_job() -> None:
    async def story() -> list[Any]:
        plugin, found = PlayedAgent().plugin(), list[Any]()
        plugin.on_fact(facts.JobPlaced(JOB, 1, "t", 3, PLACES, 1))
        plugin.dispatch = lambda event, machine: found.append(event)  # type: ignore[method-assign]
        for rank, step_s in ((0, 0.5), (1, 0.5), (2, 0.5), (0, 0.0), (0, 1e6)):
            plugin.on_fact(facts.StepTimed(JOB, 1, rank, 7, step_s, step_s, 0.0, {}))
        return [event for event in found if isinstance(event, JobStepped)]

    assert play(story()) == [JobStepped(JOB, 1, 7, 500_000)]


def test_ranks_that_left_are_told_of_to_sums_of_their_own_run_once() -> None:
    away = RanksAwayNow()
    away.left(facts.RanksLeft(JOB, 1, {2: facts.GoneRank(H2, 19)}))
    told = counted(G1 + 2, JobId("j1/1"))
    jobs = [counted(G1 + 2), counted(2 * G1 + 1), msgspec.structs.replace(told, away=[2]), counted(G1, JobId("j2"))]
    (order,) = away.orders(Now("", jobs, 0.0, 0, 0, 0))
    assert order == RanksAway(JOB, G1 + 2, {2: "rank 2 on h2 ended with 0 after its step 19"})
    away.forget(JOB)
    assert not list(away.orders(Now("", jobs, 0.0, 0, 0, 0)))
