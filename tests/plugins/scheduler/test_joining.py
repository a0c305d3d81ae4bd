"""Ranks that continue on a host that has others of their gang, on a rack of fakes: what runs, what is held,
reported."""

import pytest

from covey.core.events import Heard
from covey.core.ids import HostId, JobId
from plugins.facts import JobPlaced, RanksEnded
from plugins.scheduler.messages.commands import Attained, JobHeals, MoveAsked
from plugins.scheduler.messages.wire import Reserve
from plugins.scheduler.service.ranks.reports import with_late_ranks
from tests.plugins.scheduler.rack import Rack, on_a_rack, refused, submit, until
from tests.plugins.scheduler.test_replacing import H1, H2, Healing
from tests.plugins.scheduler.test_service_faults import apply_slowly

J1 = JobId("j1")


async def spread(rack: Rack) -> tuple[HostId, HostId]:
    """A gang of two that runs on two hosts, each of which has room for both, and continues without either."""
    blocks = await submit(rack, workers=4, pack="apart")
    await until(lambda: rack.job(blocks.id).state == "running")
    await submit(rack, workers=2, gpus_per_worker=1)
    await until(lambda: rack.job("j2").state == "running" and len(rack.job("j2").start.places) == 2)
    one, other = [place.host for place in rack.job("j2").start.places]
    await until(lambda: all((JobId("j2"), 1) in rack.hosts[host].machine.ranks for host in (one, other)))
    rack.finish(blocks.id)
    await until(lambda: rack.job(blocks.id).state == "done")
    await heal(rack, one, other)
    return one, other


async def heal(rack: Rack, *hosts: HostId) -> None:
    for host in hosts:
        place = rack.job("j2").place_on(host)
        said = {JobId("j2"): JobHeals(1, place.since, True, place.ranks)}
        told = Attained(wall_s=1.0, host=host, service_gpu_s={}, heals=said)
        await rack.hosts[host].service.queue_log.insist(told)


async def move(rack: Rack, one: HostId, to: HostId) -> None:
    asked = MoveAsked(wall_s=1.0, job=JobId("j2"), epoch=1, host=one, to=to, coordinator=to)
    await rack.hosts[to].service.queue_log.insist(asked)


@on_a_rack()
async def test_ranks_join_those_that_run_and_both_are_one_place(rack: Rack) -> None:
    one, other = await spread(rack)
    before = rack.hosts[other].machine.ranks[JobId("j2"), 1]
    await move(rack, one, other)
    await until(lambda: len(rack.hosts[other].machine.ranks[JobId("j2"), 1].ranks) == 2)
    now = rack.hosts[other].machine.ranks[JobId("j2"), 1]
    assert now.ranks[0] == before.ranks[0] and now.ranks[1].local_rank == 1, "who was there stays what it was"
    assert now.ranks[1].gpus != now.ranks[0].gpus and now.since == 1 and now.env == before.env
    assert not rack.hosts[one].machine.ranks and len(rack.hosts[other].machine.starts) == 2
    await until(lambda: len(rack.hosts[one].service.ranks.reservations.free()) == 2)
    (hold,) = rack.hosts[other].service.ranks.reservations.all()
    assert len(hold.gpus) == 2 and hold.started
    told = [fact for fact in rack.hosts[one].told if isinstance(fact, JobPlaced) and fact.job == "j2"]
    assert [place.host for place in told[-1].places] == [other]
    assert now.nodes == (other,) and now.tables == before.tables == 2, "its tensors are cut as those of the others"
    assert {fact.tables for fact in told} == {2}, "whoever sums them knows as many tables as before"
    rack.finish("j2")
    await until(lambda: rack.job("j2").state == "done")
    await until(lambda: all(len(host.service.ranks.reservations.free()) == 2 for host in rack.hosts.values()))


@on_a_rack()
async def test_ranks_that_came_go_on_while_the_copy_of_the_log_has_them_elsewhere(rack: Rack) -> None:
    one, other = await spread(rack)
    third = next(host for host in rack.hosts if host not in (one, other))
    await move(rack, one, third)
    await until(lambda: (JobId("j2"), 1) in rack.hosts[third].machine.ranks)
    await until(lambda: not rack.hosts[one].machine.ranks)
    rack.slow[third] = 0
    new = await rack.restart(str(third))
    await apply_slowly(rack, str(third))
    assert (JobId("j2"), 1) in new.machine.ranks and (JobId("j2"), 1) not in new.machine.ends
    rack.finish("j2")
    await until(lambda: rack.job("j2").state == "done")


@on_a_rack()
async def test_a_host_whose_supervisor_takes_no_more_says_so_and_the_gang_stays(rack: Rack) -> None:
    one, other = await spread(rack)
    rack.hosts[other].machine.takes_no_more = True
    said = await refused(rack.hosts[other].call("move", id="j2", what=str(one), to=str(other)))
    assert "their supervisor is not running now" in said.why
    assert [place.host for place in rack.job("j2").start.places] == sorted([one, other])


@on_a_rack()
async def test_ranks_that_ended_before_others_joined_them_are_reported_with_these(rack: Rack) -> None:
    one, other = await spread(rack)
    leaves = rack.hosts[one].service.ranks
    leaves.may_leave = lambda job, place: False
    await move(rack, one, other)
    await until(lambda: len(rack.job("j2").start.places) == 1)
    rack.hosts[other].runner.end(JobId("j2"), 1, {rack.hosts[other].machine.ranks[JobId("j2"), 1].ranks[0].rank: 0})
    leaves.may_leave = lambda job, place: True
    leaves.dirty[JobId("j2")] = None
    await until(lambda: rack.job("j2").tally.attempt == 2 and rack.job("j2").state == "running")
    assert rack.job("j2").tally.hosts_lost == 1


@pytest.mark.parametrize("since", [0, 1])
def test_what_ended_is_told_once_more_only_where_more_came(since: int) -> None:
    told = Healing()
    fact = RanksEnded(told.id, told.job.grant.epoch, {2: 0, 3: -9}, "why", False, since)
    assert with_late_ranks(fact, told.job, H2) is None and with_late_ranks(fact, None, H2) is None
    told.move(H1, H2)
    told.replace(H1, H2, gpus=("x", "y"), joins=True)
    late = with_late_ranks(fact, told.job, H2)
    if since:
        assert late is None
    else:
        assert late == RanksEnded(told.id, told.job.grant.epoch, {2: 0, 3: -9, 0: -15, 1: -15}, "why", True, 1)
    assert with_late_ranks(fact, told.job, H1) is None


@on_a_rack()
async def test_gpus_for_ranks_that_do_not_come_are_given_back_while_the_others_run(rack: Rack) -> None:
    one, other = await spread(rack)
    coordinator = next(name for name in rack.hosts if name not in (one, other, rack.leader))
    rack.cut_off(coordinator)
    host = rack.hosts[other]
    ask = Reserve(JobId("j2"), 1, 5, 1, 1, False, 5.0, joins=True)
    await host.service.ranks.dispatch(Heard(coordinator, ask))
    assert not host.service.ranks.reservations.free()
    await until(lambda: len(host.service.ranks.reservations.free()) == 1, 30.0)
    assert rack.job("j2").state == "running"
