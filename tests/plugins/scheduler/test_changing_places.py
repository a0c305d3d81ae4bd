"""Processes of an elastic job come to its hosts and leave them, on a rack of fakes: what runs, what each carries, and
which GPUs are held until when."""

import asyncio

import pytest

from covey.core.events import Heard
from covey.core.ids import HostId, JobId
from plugins.facts import Place, RankEndedHere, RanksEnded
from plugins.scheduler.messages.wire import NotReserved, Reserve, Reserved
from plugins.scheduler.policy.carrying import carried_after, first_carried
from plugins.scheduler.service.ranks.early_ends import SOON_S
from plugins.scheduler.service.ranks.reports import with_late_ranks
from tests.plugins.scheduler.rack import FakeHost, Rack, on_a_rack, submit, until
from tests.plugins.scheduler.test_replacing import H1, H2, Healing

J1 = JobId("j1")


def arranged(rack: Rack, *places: Place) -> None:
    """Let every copy of the log have these places of the job from now on."""
    after = {process for place in places for process in place.ranks}
    for host in rack.hosts.values():
        queue = host.service.queue
        job = queue.jobs[J1]
        before = {process for place in job.start.places for process in place.ranks}
        for place in job.start.places:
            queue.release(job, place.host, place.gpus)
        carried = job.start.carried or first_carried(job.spec.world_size, len(before))
        job.start.carried = carried_after(carried, before - after, len(after - before))
        assert job.start.carried.keys() == after
        job.start.places, job.healing.healed = places, job.healing.healed + 1
        for place in places:
            queue.hold(job, place)
        host.service.ranks.dirty[J1] = None


async def elastic(rack: Rack) -> tuple[FakeHost, str, str]:
    """An elastic job that runs with one process on the first GPU of a host; the host, and its two GPUs."""
    await submit(rack, workers=1, workers_max=4, gpus_per_worker=1)
    await until(lambda: rack.job("j1").state == "running")
    (place,) = rack.job("j1").start.places
    host = rack.hosts[place.host]
    await until(lambda: (J1, 1) in host.machine.ranks)
    (free,) = host.service.ranks.reservations.free()
    return host, place.gpus[0], free


def carries(host: FakeHost) -> dict[int, tuple[int, ...]]:
    spec = host.machine.ranks[J1, 1]
    return {rank.rank: spec.carried[rank.rank] for rank in spec.ranks}


@on_a_rack()
async def test_processes_come_and_go_and_gpus_are_free_once_they_have_ended(rack: Rack) -> None:
    host, one, other = await elastic(rack)
    held = host.service.ranks.reservations
    arranged(rack, Place(host.id, (0, 2), (one, other), since=1))
    await until(lambda: carries(host) == {0: (0, 1), 2: (2, 3)})
    now = host.machine.ranks[J1, 1]
    assert [(rank.local_rank, rank.gpus) for rank in now.ranks] == [(0, (one,)), (1, (other,))]
    assert (now.config, now.since, len(host.machine.starts)) == (1, 1, 1) and not held.free()
    host.machine.die_slowly = True
    arranged(rack, Place(host.id, (0,), (one,), since=1))
    await until(lambda: carries(host) == {0: (0, 1, 2, 3)})
    await host.service.ranks.look([J1])
    assert not held.free(), "the process that left may still run"
    host.runner.all_left(J1, 1)
    await until(lambda: held.free() == [other])
    (hold,) = held.all()
    assert hold.started and hold.gpus == (one,)
    rack.finish("j1")
    await until(lambda: rack.job("j1").state == "done")
    await until(lambda: len(held.free()) == 2)


@on_a_rack()
async def test_a_job_is_served_by_the_gpus_that_it_holds_also_while_processes_end(rack: Rack) -> None:
    host, one, other = await elastic(rack)
    ranks = host.service.ranks

    async def served() -> float:
        """GPU·s of ten seconds."""
        before = ranks.service_gpu_s.get(J1, 0.0)
        await asyncio.sleep(10.0)
        return ranks.service_gpu_s[J1] - before

    assert await served() == pytest.approx(10.0, abs=1.1), "one process, one GPU"
    arranged(rack, Place(host.id, (0, 2), (one, other), since=1))
    await until(lambda: len(carries(host)) == 2)
    assert await served() == pytest.approx(20.0, abs=2.1), "its lower number is 1 all the same"
    host.machine.die_slowly = True
    arranged(rack, Place(host.id, (0,), (one,), since=1))
    await until(lambda: len(carries(host)) == 1)
    assert await served() == pytest.approx(20.0, abs=2.1), "the process that left may still run"
    host.runner.all_left(J1, 1)
    await until(lambda: ranks.reservations.free() == [other])
    assert await served() == pytest.approx(10.0, abs=1.1)
    assert rack.job("j1").attained_gpu_s == pytest.approx(60.0, abs=15.0), "the log hears every ten seconds"
    assert rack.job("j1").ran_s(ranks.log.rack_clock.now_s()) < rack.job("j1").attained_gpu_s


@on_a_rack()
async def test_nobody_is_given_the_gpu_of_a_process_that_left_and_may_still_run(rack: Rack) -> None:
    host, one, other = await elastic(rack)
    arranged(rack, Place(host.id, (0, 2), (one, other), since=1))
    await until(lambda: len(carries(host)) == 2)
    host.machine.die_slowly = True
    arranged(rack, Place(host.id, (0,), (one,), since=1))
    coordinator = next(name for name in rack.hosts if name != host.id)

    async def answer(attempt: int) -> object:
        await host.service.ranks.dispatch(Heard(coordinator, Reserve(JobId("j7"), 1, attempt, 1, 1, False, 60.0)))
        await until(lambda: any(getattr(said, "attempt", 0) == attempt for _, _, said in rack.said))
        return next(said for _, _, said in rack.said if getattr(said, "attempt", 0) == attempt)

    assert isinstance(await answer(101), NotReserved), "the log has it free; this host has not looked yet"
    await until(lambda: len(carries(host)) == 1)
    assert isinstance(await answer(102), NotReserved)
    host.runner.all_left(J1, 1)
    await until(lambda: host.service.ranks.reservations.free())
    said = await answer(103)
    assert isinstance(said, Reserved) and said.gpus == (other,)


@on_a_rack()
async def test_processes_hear_that_they_carry_other_ranks_though_all_of_them_stay(rack: Rack) -> None:
    """The change was on another host."""
    host, one, _ = await elastic(rack)
    third = next(each for each in rack.hosts.values() if each.id != host.id)
    gpu = third.service.ranks.reservations.free()[0]
    arranged(rack, Place(host.id, (0,), (one,)), Place(third.id, (2,), (gpu,), since=1))
    await until(lambda: carries(host) == {0: (0, 1)} and (J1, 1) in third.machine.ranks)
    assert carries(third) == {2: (2, 3)}
    assert host.machine.ranks[J1, 1].since == 0 and host.machine.ranks[J1, 1].config == 1


@on_a_rack()
async def test_the_end_of_a_process_is_not_told_once_others_carry_its_ranks(rack: Rack) -> None:
    """The log would refuse that, and be told again for ever."""
    host, one, other = await elastic(rack)
    arranged(rack, Place(host.id, (0, 2), (one, other), since=1))
    await until(lambda: len(carries(host)) == 2)
    host.publish(RankEndedHere(J1, 1, 2, 0))
    arranged(rack, Place(host.id, (0,), (one,), since=1))
    entries, end_s = len(rack.entries), host.env.clock.now_s() + 5 * SOON_S
    await until(lambda: host.env.clock.now_s() > end_s)
    assert len(carries(host)) == 1
    said = b"".join(rack.entries[entries:])
    assert b"RanksDone" not in said


@pytest.mark.parametrize("stays", [True, False])
def test_an_end_before_the_place_changed_is_told_of_those_that_are_in_it(stays: bool) -> None:
    told = Healing(workers_max=8)
    place = told.job.place_on(H2)
    assert place is not None and place.ranks == (2, 3) and told.job.place_on(H1) is not None
    left = place.ranks[:1] if stays else ()
    new = Place(H2, (*left, 7), place.gpus[: len(left)], since=1)
    told.job.start.places = tuple(new if each.host == H2 else each for each in told.job.start.places)
    fact = RanksEnded(told.id, told.job.grant.epoch, {3: -9, 2: 0}, "", False, 0)
    late = with_late_ranks(fact, told.job, HostId(H2))
    assert late is not None and late.since == 1 and late.lost
    assert late.codes == ({2: 0, 7: -15} if stays else {7: -15})
