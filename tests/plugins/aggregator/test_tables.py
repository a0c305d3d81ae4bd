"""A job whose tensors have several owners: which tables a host knows, and whole simulated agents that sum them."""

import re
from typing import Any

import msgspec
import pytest

from chaos.rackworld import SimRack
from covey.core.errors import Refused
from covey.core.ids import HostId, JobId
from covey.tensors.numbers.blocks import table_id
from covey.tensors.numbers.updates import Adam
from plugins.aggregator.machine.events import GangPlaced
from plugins.aggregator.machine.owner import Owner
from plugins.aggregator.messages import Demand, Handover
from plugins.aggregator.policy import Candidate, ranked, ranked_for
from plugins.aggregator.service.moves import move_of
from plugins.aggregator.service.tables import JobTables
from plugins.facts import HostView, JobPlaced, Place, TensorsSeen
from plugins.gossiped import AggregatorNow
from tests.families import in_gate
from tests.plugins.aggregator.harness import Tensor
from tests.plugins.aggregator.ranks import TENSOR, Job
from tests.plugins.aggregator.test_service import aggd_of, settled_rack

JOB = JobId("j1")
ADAM = Tensor("w", "model", (40,), Adam(weight_decay=0.01))
PLACES = tuple(Place(HostId(f"h{at}"), (at,), ()) for at in range(3))


def placed(grant: int = 1) -> JobPlaced:
    return JobPlaced(JOB, grant, "t", 3, PLACES, 3)


def gang(table: int, grant: int = 1, several: bool = False) -> GangPlaced:
    return GangPlaced(table_id(JOB, table), grant, 3, PLACES, HostId(f"h{table}"), several or table > 0)


def test_only_table_0_is_open_until_somebody_needs_another() -> None:
    tables = JobTables()
    assert tables.place(placed()) == ([gang(0)], [gang(1), gang(2)])
    assert tables.ids(JOB) == ["j1"]
    assert tables.open(JobId("j1/2")) == [gang(2), gang(0, several=True)]
    assert tables.open(JobId("j1/2")) == []
    assert tables.ids(JOB) == ["j1", "j1/2"]
    assert tables.place(placed(2)) == ([gang(0, 2, several=True), gang(2, 2)], [gang(1, 2)])


def test_ranks_that_join_others_leave_the_tables_of_their_job_as_they_are() -> None:
    """All of the tables lie on one host in the end; the pushes of its ranks are cut as before."""
    tables = JobTables()
    tables.place(placed())
    tables.open(JobId("j1/2"))
    together = (Place(HostId("h1"), (1, 0, 2), (), 2),)
    opened, others = tables.place(msgspec.structs.replace(placed(), places=together))
    assert [gang.job for gang in opened] == ["j1", "j1/2"] and [gang.job for gang in others] == ["j1/1"]
    assert {gang.prefers for gang in (*opened, *others)} == {"h1"}
    assert [gang.job for gang in tables.open(JobId("j1/1"))] == ["j1/1", "j1"], "what nobody used yet may be used now"
    assert tables.unplace(JOB) == ["j1", "j1/1", "j1/2"]


def direct(table: int, grant: int = 1) -> GangPlaced:
    return GangPlaced(table_id(JOB, table), grant, 3, PLACES, HostId(f"h{table}"), True, True)


def test_where_ranks_may_own_no_table_is_open_before_one_of_them_needs_it() -> None:
    """A table that is offered before ranks are there would go to an aggregator."""
    tables = JobTables(direct=True)
    assert tables.place(placed()) == ([], [direct(0), direct(1), direct(2)])
    assert tables.open(JOB) == [direct(0)] and not tables.open(JOB)
    assert tables.open(JobId("j1/2")) == [direct(2)]
    assert tables.place(placed()) == ([direct(0), direct(2)], [direct(1)]), "the same run, told again"
    assert tables.place(placed(2)) == ([], [direct(0, 2), direct(1, 2), direct(2, 2)]), "ranks of a new run will say"
    assert tables.hosts_of_ranks(JOB) == {"h0", "h1", "h2"} and tables.grant(JOB) == 2


def test_what_ranks_need_before_the_log_tells_of_their_run_is_kept_for_that_run() -> None:
    tables = JobTables(direct=True)
    tables.place(placed())
    tables.use(JOB, 2)
    tables.use(JobId("j1/1"), 1)
    assert tables.place(placed(2)) == ([direct(0, 2)], [direct(1, 2), direct(2, 2)])
    tables.use(JOB, 3)
    tables.unplace(JOB)
    assert tables.place(placed(3)) == ([direct(0, 3)], [direct(1, 3), direct(2, 3)])


def test_a_job_whose_ranks_are_all_on_one_host_is_not_direct() -> None:
    tables = JobTables(direct=True)
    together = (Place(HostId("h1"), (0, 1, 2), ()),)
    (first,), _ = tables.place(msgspec.structs.replace(placed(), places=together))
    assert (first.job, first.direct, first.stays) == ("j1", False, False)
    assert not tables.hosts_of_ranks(JOB) and not tables.open(JOB)


@pytest.mark.parametrize("table", ["j1", "j1/3", "j1/15", "j2/1", "j2"])
def test_a_table_that_the_job_has_not_is_never_opened(table: str) -> None:
    tables = JobTables()
    tables.place(placed())
    assert not tables.open(JobId(table)) and tables.ids(JOB) == ["j1"]


def test_a_rank_may_come_before_the_log_tells_of_its_gang() -> None:
    tables = JobTables()
    tables.use(JobId("j1/2"), 1)
    tables.use(JobId("j1/9"), 1)
    assert not tables.open(JobId("j1/2"))
    assert tables.place(placed()) == ([gang(0, several=True), gang(2)], [gang(1)])


def test_all_tables_of_a_job_end_with_it() -> None:
    tables = JobTables()
    tables.place(placed())
    tables.open(JobId("j1/1"))
    assert tables.unplace(JOB) == ["j1", "j1/1", "j1/2"]
    assert tables.unplace(JOB) == ["j1"] and not tables.open(JobId("j1/1")) and not tables.hosts()


def test_what_all_owners_have_seen_counts_for_the_jobs_skew() -> None:
    tables = JobTables()
    tables.place(placed())
    assert tables.seen(TensorsSeen(JOB, 1, 900, 400)) == TensorsSeen(JOB, 1, 900, 900)
    assert tables.seen(TensorsSeen(JobId("j1/2"), 1, 900, 600)) == TensorsSeen(JOB, 1, 900, 1000)
    assert tables.seen(TensorsSeen(JOB, 1, 2000, 1500)) == TensorsSeen(JOB, 1, 2000, 2100)
    tables.place(placed(2))
    assert tables.seen(TensorsSeen(JOB, 2, 100, 50)) == TensorsSeen(JOB, 2, 100, 100), "a run begins with nothing seen"


def host(name: str, load: float = 0.0, jobs: int = 0) -> Candidate:
    return Candidate(HostId(name), False, load, jobs, 0.0)


def test_a_table_that_stays_is_offered_to_its_host_however_busy_that_is() -> None:
    hosts = [host("h0"), host("h1", 0.8, 5), host("h2")]
    assert ranked(JOB, hosts, (), HostId("h1"), True)[0] == "h1"
    assert ranked(JOB, hosts, (), HostId("h1"))[-1] == "h1"
    assert ranked(JOB, hosts, (HostId("h1"),), HostId("h1"), True)[-1] == "h1"
    assert ranked(JOB, [host("h0"), host("h2"), host("h5")], (), HostId("h2"))[0] == "h2"


def test_a_measured_table_comes_back_to_its_host_if_that_has_room() -> None:
    demand = Demand(1000, 100)
    busy = Candidate(HostId("h1"), False, 0.0, 1, 0.0, 1000, 400)
    full = Candidate(HostId("h1"), False, 0.0, 1, 0.0, 1000, 700)
    tight = Candidate(HostId("h2"), False, 0.0, 1, 0.0, 1000, 630)
    assert ranked_for(JOB, demand, [busy, tight], stays_on=HostId("h1"))[0][0] == "h1"
    assert ranked_for(JOB, demand, [busy, tight])[0][0] == "h2"
    assert ranked_for(JOB, demand, [full, tight], stays_on=HostId("h1")) == (["h2"], ["h1"])


def test_every_host_of_a_job_owns_a_table_of_it() -> None:
    with settled_rack(31) as rack:
        job = Job(rack, ["h1", "h2", "h3"], rounds=12, cut=True)
        job.finish()
        assert [job.owner(table) for table in (1, 2)] == ["h2", "h3"]
        assert {at.table for rank in job.ranks for at in rank.told} == {0, 1, 2}
        near = {(bool(at.near), at.host == rank.host) for rank in job.ranks for at in rank.told}
        assert near == {(True, True), (False, False)}, "a unix socket reaches ranks of its host alone"
        said = [line.reason for line in rack.agents["h1"].event_log.lines_of("j1") if line.event == "tensors assigned"]
        assert any(line.startswith("table 2: to h3 at ") for line in said)


def test_a_table_that_began_elsewhere_comes_to_its_host() -> None:
    """With this seed gossip has not told of the others yet when the first ranks begin."""
    with settled_rack(36) as rack:
        job = Job(rack, ["h1", "h2", "h3"], rounds=160, cut=True)
        rack.until(job.reached(3), 60, "round 3")
        elsewhere = [table for table, home in ((1, "h2"), (2, "h3")) if job.owner(table) != home]
        assert elsewhere, "with another seed"
        rack.until(lambda: [job.owner(table) for table in (1, 2)] == ["h2", "h3"], 20, "each has its table")
        job.finish()
        said = [line.reason for line in rack.agents["h1"].event_log.lines_of("j1") if line.event == "tensors offered"]
        assert sum("it is to be summed on" in reason for reason in said) == len(elsewhere)


def test_the_first_table_comes_to_its_host_too_once_there_are_others() -> None:
    """The first owner was the least busy host, whichever that was."""
    with settled_rack(39) as rack:
        job = Job(rack, ["h1", "h2", "h3"], rounds=160)
        rack.until(job.reached(3), 60, "round 3")
        plugin = job.plugin("h1")
        assert plugin is not None
        away = Handover(JOB, plugin.directory.known[JOB].epoch, HostId("h3"), "for this test")
        process = rack.hosts["h1"].agent
        assert process is not None
        process.spawn("handover", plugin.on_message(HostId("h1"), away))
        rack.until(lambda: job.owner() == "h3", 20, "it moved")
        rack.run(25)
        assert job.owner() == "h3", "one table may be anywhere"
        job.ranks[0].wanted(2)
        rack.until(lambda: job.owner() == "h1" and job.owner(2) == "h3", 30, "each host has one")
        job.finish()


@pytest.mark.parametrize("tensor", [TENSOR, ADAM])
def test_a_person_moves_a_table_to_another_host_where_it_stays(tensor: Tensor) -> None:
    """Any agent may be asked to move it; no sum is lost, and no moment of an optimizer."""
    with settled_rack(42) as rack:
        job = Job(rack, ["h1", "h2", "h3"], rounds=160, cut=True, tensor=tensor)
        rack.until(lambda: [job.owner(table) for table in (1, 2)] == ["h2", "h3"], 60, "each has its table")
        plugin, process = job.plugin("h1"), rack.hosts["h1"].agent
        assert plugin is not None and process is not None
        epoch = max(at.epoch for rank in job.ranks for at in rank.told if at.table == 1)
        wish = {"job": "j1/1", "epoch": epoch, "from": "h2", "to": "h3"}
        move = plugin.commands()["move"]

        async def ask() -> None:
            await move(wish)

        process.spawn("move", ask())
        rack.until(lambda: job.owner(1) == "h3", 10, "h3 has it")
        moved = [at for rank in job.ranks for at in rank.told if (at.table, at.host) == (1, "h3")]
        assert moved and all(at.handed_over for at in moved)
        rack.run(25)
        assert [job.owner(table) for table in (1, 2)] == ["h3", "h3"]
        job.finish()


@pytest.mark.parametrize(
    ("wish", "code", "why"),
    [
        ({"to": "h9"}, 3, "there is no host 'h9'"),
        ({"from": "h9"}, 3, "there is no host 'h9'"),
        ({"to": "h2"}, 4, "h2 already sums it"),
        ({"to": "h4"}, 4, "h4 does not sum tensors"),
        ({"to": "h5"}, 4, "h5 is suspect"),
        ({"job": "../x"}, 2, "Expected `str` matching"),
        ({"epoch": "many"}, 2, "Expected `int`"),
        ({"to": None}, 2, "Expected `str`"),
        ({"from": 7}, 2, "Expected `str`"),
    ],
)
def test_what_cannot_be_moved_is_said_in_words(wish: dict[str, Any], code: int, why: str) -> None:
    sums = {"aggregator": msgspec.msgpack.encode(AggregatorNow("10.0.0.1:9", 0, 0.0))}
    alive = [HostView(host=HostId(name), state="alive", values=sums) for name in ("h2", "h3")]
    others = [HostView(host=HostId("h4"), state="alive"), HostView(host=HostId("h5"), state="suspect", values=sums)]
    with pytest.raises(Refused, match=re.escape(why)) as refused:
        move_of({"job": "j1/1", "epoch": 5, "from": "h2", "to": "h3"} | wish, [*alive, *others])
    assert refused.value.code == code


def test_a_table_is_found_for_who_asks_first() -> None:
    """The coordinator's own rank has no Block in the table yet."""
    with settled_rack(37) as rack:
        job = Job(rack, ["h1", "h2", "h3"], rounds=40)
        rack.until(job.reached(2), 60, "round 2")
        job.ranks[2].wanted(1)
        rack.until(lambda: any(at.table == 1 for at in job.ranks[2].told), 10, "an owner of table 1")
        assert job.owner(1) == "h2"
        job.finish()


@pytest.mark.parametrize(
    ("seed", "tensor"), in_gate(2, [(32, TENSOR), (33, ADAM), (33, TENSOR), (34, TENSOR), (32, ADAM)])
)
def test_owners_die_one_after_the_other_and_no_bit_is_lost(seed: int, tensor: Tensor) -> None:
    """No moment of an optimizer is lost either."""
    with settled_rack(seed) as rack:
        job = Job(rack, ["h1", "h2", "h3"], cut=True, tensor=tensor)
        for round, table in ((5, 1), (14, 2), (23, 0)):
            rack.until(job.reached(round), 60, f"round {round}")
            dead = job.owner(table)
            aggd_of(rack, dead).signal(9)
            rack.until(job.reached(round + 3), 20, "three rounds more")
            assert job.owner(table), f"nobody owns table {table} after {dead}"
        job.finish()  # checks every bit


def test_the_host_that_finds_owners_is_lost_and_its_ranks_go_on() -> None:
    """Only its agent is lost: the coordinator is then the next host, which knows the tables by its own ranks."""
    with settled_rack(35) as rack:
        job = Job(rack, ["h1", "h2", "h3"], rounds=60, cut=True)
        rack.until(job.reached(4), 60, "round 4")
        agent = rack.hosts["h1"].agent
        assert agent is not None
        agent.signal(9)
        rack.run(8)
        before = max(at.epoch for at in job.ranks[1].told if at.table == 2)
        aggd_of(rack, "h3").signal(9)
        heard = job.ranks[1].told
        rack.until(lambda: max(at.epoch for at in heard if at.table == 2) > before, 20, "h2 found another owner")
        rack.hosts["h1"].start_agent()  # which tells its rank
        job.finish()


def test_a_job_that_ended_leaves_no_table_behind() -> None:
    with settled_rack(36) as rack:
        job = Job(rack, ["h1", "h2", "h3"], rounds=6, cut=True)
        job.finish()
        unplaced(rack, job)
        rack.run(3)
        for name in rack.alive():
            plugin = job.plugin(name)
            assert plugin is not None
            assert not plugin.owner.jobs and not plugin.directory.known and not plugin.coordinator.jobs
            plugin.owner.check()


def test_an_owner_that_was_away_when_the_job_ended_drops_its_table_too() -> None:
    """The owner knows the table from its disk, and is told of the end alone."""
    with settled_rack(36) as rack:
        job = Job(rack, ["h1", "h2", "h3"], rounds=1000, cut=True)
        rack.until(lambda: job.owner(1) == "h2", 60, "h2 has its table")
        agent = rack.hosts["h2"].agent
        assert agent is not None
        agent.signal(9)
        job.told = False  # by nobody from now on
        before = rack.agents["h2"]
        rack.hosts["h2"].start_agent()
        rack.until(lambda: rack.agents["h2"] is not before and rack.began("h2"), 10, "it is back")
        rack.until(lambda: "j1/1" in owner(job, "h2").jobs, 10, "h2 knows its table")
        unplaced(rack, job)
        rack.run(3)
        owner(job, "h2").check()
        assert not owner(job, "h2").jobs


def owner(job: Job, host: str) -> Owner:
    plugin = job.plugin(host)
    assert plugin is not None
    return plugin.owner


def unplaced(rack: SimRack, job: Job) -> None:
    from plugins.facts import JobUnplaced

    for name in rack.alive():
        process = rack.hosts[name].agent
        assert process is not None

        async def tell(bus: object = rack.agents[name].bus) -> None:
            bus.publish(JobUnplaced(job.name, job.grant, True))  # type: ignore[attr-defined]

        process.spawn("log", tell())
