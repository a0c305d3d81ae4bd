"""Ranks that own the tables of their job (direct exchange): whole simulated agents, ranks that sum on their own ports,
while ranks, agents and hosts die. Every sum is checked to the bit at a job's end."""

import msgspec
import pytest

from chaos.rackworld import SimRack
from covey.core.events import Heard, LogEvent
from covey.core.ids import HostId, JobId
from covey.tensors.numbers.updates import Adam
from covey.wire.sums import DropJob, GetStatus, Now, RanksAway, Serve
from plugins import facts
from plugins.aggregator.machine.direct_tables import (
    DirectTables,
    RankDone,
    RankFailed,
    RankServes,
    RanksMayOwn,
    ServeByRank,
)
from plugins.aggregator.machine.events import Keep
from plugins.aggregator.messages import AggregatorSettings, Offer
from plugins.aggregator.service import AggregatorService
from plugins.views import AggregatorJobView
from tests.families import in_gate
from tests.plugins.aggregator.harness import Tensor
from tests.plugins.aggregator.ranks import TENSOR, Job
from tests.plugins.aggregator.test_service import settled_rack

JOB = JobId("j1")
HOSTS = ["h1", "h2", "h3"]
ADAM = Tensor("w", "model", (40,), Adam(weight_decay=0.01))


def direct_rack(seed: int, hosts: int = 4, **settings: object) -> SimRack:
    return settled_rack(seed, hosts, {"aggregator": {"direct": "auto", **settings}})


def plugin(job: Job, host: str) -> AggregatorService:
    found = job.plugin(host)
    assert found is not None
    return found


def rows(rack: SimRack) -> list[AggregatorJobView]:
    """The rows that `agentctl tensors` shows."""
    return [row for host in rack.alive() for row in rack.ask(host, "aggregator.tensors", {})]


def by(rack: SimRack) -> dict[str, tuple[str, str]]:
    """Table -> host and who sums it there."""
    return {row.job: (row.host, row.by) for row in rows(rack)}


def kill_agent(rack: SimRack, host: str) -> None:
    agent = rack.hosts[host].agent
    assert agent is not None
    agent.signal(9)


def said(rack: SimRack, event: str) -> list[str]:
    lines = [line for host in rack.alive() for line in rack.agents[host].event_log.lines_of("j1")]
    return [line.reason for line in lines if line.event == event]


@pytest.mark.parametrize("tensor", [TENSOR, ADAM])
def test_a_rank_of_each_host_owns_a_table_and_no_aggd_is_started(tensor: Tensor) -> None:
    with direct_rack(50) as rack:
        job = Job(rack, HOSTS, rounds=12, cut=True, direct=True, tensor=tensor)
        rack.until(job.reached(4), 60, "round 4")
        rack.run(2)
        assert by(rack) == {
            "j1": ("h1", "rank 0"),
            "j1/1": ("h2", "rank 1"),
            "j1/2": ("h3", "rank 2"),
        }
        assert all(row.joined == 3 and row.rounds and row.bytes and not row.not_direct for row in rows(rack))
        job.finish()
        assert not [host for host in rack.hosts if rack.hosts[host].find("aggd")]
        near = {(bool(at.near), at.host == rank.host) for rank in job.ranks for at in rank.told}
        assert near == {(True, True), (False, False)}, "a unix socket reaches ranks of its host alone"


def test_the_lowest_rank_of_a_host_owns_its_table() -> None:
    with direct_rack(51) as rack:
        job = Job(rack, ["h1", "h1", "h2", "h2"], rounds=12, cut=True, direct=True)
        rack.until(job.reached(4), 60, "round 4")
        rack.run(2)
        assert by(rack) == {"j1": ("h1", "rank 0"), "j1/1": ("h2", "rank 2")}
        job.finish()


def test_a_job_on_one_host_is_summed_by_aggd_as_ever() -> None:
    with direct_rack(52) as rack:
        job = Job(rack, ["h2", "h2"], rounds=20, direct=True)
        rack.until(job.reached(10), 60, "round 10")
        rack.run(2)
        (row,) = rows(rack)
        assert (row.by, row.not_direct) == ("aggd", "all its ranks are on one host")
        job.finish()


def test_ranks_that_cannot_own_are_summed_for_by_aggd_and_it_is_said_why() -> None:
    with direct_rack(53) as rack:
        job = Job(rack, HOSTS, rounds=40, cut=True)
        rack.until(job.reached(4), 60, "round 4")
        rack.run(2)
        assert {row.by for row in rows(rack)} == {"aggd"}
        assert all("h1: no rank there can own its tables" in row.not_direct for row in rows(rack))
        job.finish()


def test_a_host_that_is_set_to_never_leaves_its_table_to_ranks_of_others() -> None:
    with settled_rack(54, settings={"aggregator": {"direct": "auto"}}) as rack:
        plugin_of_h2 = rack.agents["h2"].plugins["aggregator"]
        assert isinstance(plugin_of_h2, AggregatorService)
        plugin_of_h2.direct.settings = msgspec.structs.replace(plugin_of_h2.settings, direct="never")
        job = Job(rack, HOSTS, rounds=40, cut=True, direct=True)
        rack.until(job.reached(4), 60, "round 4")
        rack.run(2)
        assert by(rack)["j1/1"] == ("h3", "rank 2"), "the next host in the order of ranks"
        job.finish()


def test_a_rank_that_says_that_it_sums_nothing_is_told_to_sum_its_table_anew() -> None:
    with direct_rack(55) as rack:
        job = Job(rack, HOSTS, rounds=60, cut=True, direct=True)
        rack.until(job.reached(4), 60, "round 4")
        epoch = job.epoch(1)
        job.ranks[1].say(Now("", [], 0.0, 0, 0, 0))
        rack.until(lambda: job.epoch(1) > epoch, 1, "a newer epoch")
        assert job.owner(1) == "h2"
        job.finish()


@pytest.mark.parametrize("seed", [56, 57])
def test_a_rank_that_owns_is_lost_and_the_next_owner_is_found_at_once(seed: int) -> None:
    """Here the rank's process only loses its sums and its agent; its script would be healed."""
    with direct_rack(seed) as rack:
        job = Job(rack, HOSTS, rounds=60, cut=True, direct=True)
        rack.until(job.reached(4), 60, "round 4")
        epoch = job.epoch(1)
        rank = job.ranks[1]
        assert rank.sums is not None
        rank.sums.forget()
        rank.say(rank.sums.now())
        rack.until(lambda: job.epoch(1) > epoch, 3, "another owner")
        rack.until(job.reached(20), 60, "round 20")
        job.finish()


def test_the_end_of_a_ranks_process_is_told_to_the_coordinator_at_once() -> None:
    with direct_rack(58) as rack:
        rack.world.strict = False
        job = Job(rack, HOSTS, rounds=1000, cut=True, direct=True)
        rack.until(job.reached(4), 60, "round 4")
        epoch = job.epoch(2)
        job.ranks[2].process.signal(9)
        rack.until(lambda: job.epoch(2) > epoch, 2, "another owner")
        assert job.owner(2) == "h1", "the next host whose rank can own"
        rack.run(1)
        assert by(rack)["j1/2"] == ("h1", "rank 0") and not rack.hosts["h1"].find("aggd")
        for rank in job.ranks:
            rank.process.signal(9)
        rack.run(1)
        assert "tensors dropped" in {line.event for line in rack.agents["h3"].event_log.lines_of("j1")}


def test_a_table_goes_home_from_another_ranks_hands() -> None:
    """Rank 1 answers no order at first, so another host's rank owns its table; later it is brought home."""
    with direct_rack(59) as rack:
        job = Job(rack, HOSTS, rounds=160, cut=True, direct=True)
        job.ranks[1].is_deaf = True
        rack.until(lambda: job.owner(1) not in ("", "h2"), 60, "another host sums table 1")
        rack.until(job.reached(3), 60, "round 3")
        job.ranks[1].is_deaf = False
        rack.until(lambda: job.owner(1) == "h2", 60, "it is home")
        job.finish()
        assert any("it is to be summed on h2" in reason for reason in said(rack, "tensors offered"))


@pytest.mark.parametrize("host", in_gate(1, HOSTS))
def test_an_agent_that_restarts_finds_the_tables_of_its_rank_under_the_same_epoch(host: str) -> None:
    with direct_rack(60) as rack:
        job = Job(rack, HOSTS, cut=True, direct=True, rounds=120)
        rack.until(job.reached(4), 60, "round 4")
        table = HOSTS.index(host)
        before = [job.epoch(each) for each in range(3)]
        kill_agent(rack, host)
        rack.run(1.0)
        rack.hosts[host].revive()
        rack.until(job.reached(20), 60, "round 20")
        rack.run(15)
        after = [job.epoch(each) for each in range(3)]
        assert after == before
        assert by(rack)["j1" if not table else f"j1/{table}"] == (host, f"rank {table}")
        assert plugin(job, host).direct.serves(JobId("j1" if not table else f"j1/{table}"), before[table])
        job.finish()


def test_a_rank_that_comes_back_without_its_table_is_not_believed_to_own_it() -> None:
    with direct_rack(61) as rack:
        job = Job(rack, HOSTS, cut=True, direct=True, rounds=120)
        rack.until(job.reached(4), 60, "round 4")
        epoch = job.epoch(1)
        kill_agent(rack, "h2")
        assert job.ranks[1].sums is not None
        job.ranks[1].sums.forget()
        rack.run(0.5)
        rack.hosts["h2"].revive()
        rack.until(lambda: job.epoch(1) > epoch, 12, "a new owner")
        job.finish()


def test_an_owner_that_answers_no_order_is_replaced() -> None:
    with direct_rack(62) as rack:
        job = Job(rack, HOSTS, cut=True, direct=True, rounds=100)
        rack.until(job.reached(4), 60, "round 4")
        job.ranks[2].is_deaf = True
        rack.until(lambda: job.owner(2) != "h3", 10, "another owner")
        assert any("did not answer within 5 s" in reason for reason in said(rack, "tensors dropped"))
        job.finish()


def test_a_rank_that_cannot_listen_owns_nothing() -> None:
    with direct_rack(68) as rack:
        job = Job(rack, HOSTS, cut=True, direct=True, rounds=40)
        job.ranks[1].cannot_listen = True
        rack.until(lambda: job.owner(1) == "h3", 3, "the next host owns table 1, before anybody's patience ends")
        assert "rank 1 on h2 cannot listen at" in said(rack, "tensors dropped")[0]
        job.finish()


@pytest.mark.parametrize("to", ["h1", "h3"])
def test_a_person_moves_a_table_to_another_hosts_rank_where_it_stays(to: str) -> None:
    with direct_rack(63) as rack:
        job = Job(rack, HOSTS, cut=True, direct=True, rounds=160)
        rack.until(job.reached(4), 60, "round 4")
        move(rack, job, "j1/1", "h2", to)
        rack.until(lambda: job.owner(1) == to, 10, "it moved")
        rack.run(25)
        assert by(rack)["j1/1"] == (to, f"rank {HOSTS.index(to)}")
        assert len([row for row in rows(rack) if row.host == to]) == 2, "two tables on one rank"
        job.finish()


def test_a_person_moves_a_table_to_a_host_without_ranks_whose_aggd_then_sums_it() -> None:
    with direct_rack(64) as rack:
        job = Job(rack, HOSTS, cut=True, direct=True, rounds=160)
        rack.until(job.reached(4), 60, "round 4")
        move(rack, job, "j1/1", "h2", "h4")
        rack.until(lambda: job.owner(1) == "h4", 15, "it moved")
        rack.run(25)
        assert by(rack)["j1/1"] == ("h4", "aggd") and by(rack)["j1"] == ("h1", "rank 0")
        (row,) = [row for row in rows(rack) if row.host == "h4"]
        assert row.not_direct == "none of its ranks is on h4"
        move(rack, job, "j1/1", "h4", "h3")
        rack.until(lambda: job.owner(1) == "h3", 15, "it moved back to a rank")
        rack.run(2)
        assert by(rack)["j1/1"] == ("h3", "rank 2")
        job.finish()


def move(rack: SimRack, job: Job, table: str, owner: str, to: str) -> None:
    number = int(table.partition("/")[2] or 0)
    epoch = job.epoch(number)
    command, process = plugin(job, "h1").commands()["move"], rack.hosts["h1"].agent
    assert process is not None

    async def ask() -> None:
        await command({"job": table, "epoch": epoch, "from": owner, "to": to})

    process.spawn("move", ask())


def test_ranks_that_have_left_are_told_of_to_ranks_that_own() -> None:
    with direct_rack(65) as rack:
        job = Job(rack, HOSTS, cut=True, direct=True, rounds=100)
        rack.until(job.reached(4), 60, "round 4")
        process = rack.hosts["h2"].agent
        assert process is not None

        async def left() -> None:
            rack.agents["h2"].bus.publish(facts.RanksLeft(JOB, 1, {0: facts.GoneRank(HostId("h1"), 19)}))

        process.spawn("left", left())
        orders = job.ranks[1].orders
        rack.until(lambda: any(isinstance(said.order, RanksAway) for said in orders), 4, "rank 1 was told")
        rack.run(3)
        assert len([said for said in orders if isinstance(said.order, RanksAway)]) == 1, "once"
        for rank in job.ranks:
            rank.process.signal(9)
        rack.run(1)


def test_a_rank_speaks_only_of_its_own_run_and_at_an_address_of_its_host() -> None:
    with direct_rack(66) as rack:
        job = Job(rack, HOSTS, cut=True, direct=True, rounds=100)
        rack.until(job.reached(4), 60, "round 4")
        rank, service = job.ranks[1], plugin(job, "h2")
        assert rank.sums is not None
        now = rank.sums.now()
        (own,) = now.jobs
        others = [
            msgspec.structs.replace(own, job=JobId(name), epoch=epoch)
            for name, epoch in (("j2", own.epoch), ("j1/99", own.epoch), ("j1/x", own.epoch), ("j1", 7 << 32 | 1))
        ]
        rank.is_deaf = True  # what it is asked for anyway does not hide what it says here
        rank.say(msgspec.structs.replace(now, jobs=[own, *others]))
        rack.run(0.3)
        (found,) = [each for each in service._ranks.all if each.peer.rank == 1]
        assert [(each.job, each.epoch) for each in found.jobs] == [("j1/1", own.epoch)]
        assert service.direct.serves(JobId("j1/1"), own.epoch)
        rank.say(msgspec.structs.replace(now, address="10.0.0.99:7"))
        rack.run(0.2)
        assert found.now is not None and not found.now.address, "ranks would be sent to another host"
        assert not service.direct.serves(JobId("j1/1"), own.epoch)
        rank.is_deaf = False
        job.finish()


def test_the_ranks_of_an_earlier_run_own_nothing_of_the_next() -> None:
    with direct_rack(67) as rack:
        rack.world.strict = False
        job = Job(rack, HOSTS, cut=True, direct=True, rounds=1000)
        rack.until(job.reached(4), 60, "round 4")
        for host in rack.alive():
            process = rack.hosts[host].agent
            assert process is not None

            async def again(host: str = host) -> None:
                rack.agents[host].bus.publish(facts.JobPlaced(JOB, 2, "t", 3, job.places, 3))

            process.spawn("again", again())
        rack.until(job.ended, 60, "the old ranks have ended")
        rack.run(5)
        for host in HOSTS:
            assert not plugin(job, host).direct.tables
        assert not rows(rack) and not any(rack.hosts[host].find("aggd") for host in rack.hosts)


@pytest.mark.parametrize("seed", in_gate(2, range(70, 74)))
def test_agents_die_in_turn_and_a_direct_job_does_not_notice(seed: int) -> None:
    with direct_rack(seed) as rack:
        job = Job(rack, HOSTS, rounds=80, cut=True, direct=True)
        for round, host in ((5, "h1"), (25, "h2"), (45, "h3"), (60, "h1")):
            rack.until(job.reached(round), 90, f"round {round}")
            kill_agent(rack, host)
            rack.run(2.0)
            rack.hosts[host].revive()
        job.finish()


def test_orders_to_a_rank_carry_the_address_and_the_memory_of_its_host() -> None:
    with direct_rack(74, memory_bytes_max=1 << 24) as rack:
        job = Job(rack, HOSTS, rounds=12, cut=True, direct=True)
        job.finish()
        given = job.ranks[1].orders
        assert {said.memory_bytes_max for said in given} == {1 << 24}
        assert len({said.ip for said in given}) == 1 and given[0].ip == rack.agents["h2"].config.advertise
        assert {type(said.order) for said in given} <= {Serve, GetStatus, DropJob}


def test_tables_of_ranks_that_are_done_are_let_go_without_a_word() -> None:
    """Otherwise each job would end with a search for owners that nobody needs."""
    machine = DirectTables(AggregatorSettings(), HostId("h1"))
    machine.handle(RanksMayOwn(JOB, 1, {0: 7}), 0.0)
    offer = Offer(JOB, 1 << 32 | 1, 2, b"sixteen bytes !!", direct=True)
    (serve,) = machine.handle(Heard(HostId("h2"), offer), 0.0)
    assert isinstance(serve, ServeByRank)
    machine.handle(RankServes(JOB, offer.epoch, 7, "10.0.0.1:9"), 0.0)
    done = machine.handle(RankDone(7), 1.0)
    assert [type(action) for action in done] == [LogEvent, Keep] and not machine.tables
    assert not machine.handle(RankFailed(7, "it has ended"), 2.0)
    machine.check()
