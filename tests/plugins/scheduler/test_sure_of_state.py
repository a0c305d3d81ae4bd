"""Processes of an elastic job end only while one that stays has the job's state: what the log remembers until a host
has said so, and what hosts do meanwhile, on a rack of fakes."""

import asyncio

import pytest

from covey.core.ids import HostId
from plugins.facts import JobPlaced, Place, RankEndedHere, RanksAwaited, RanksHeal
from plugins.scheduler.machine.gang.hangs import Hangs
from plugins.scheduler.machine.gang.rank_signs import RankSigns
from plugins.scheduler.machine.log.replacing import taken_over
from plugins.scheduler.messages.commands import (
    Applied,
    Attained,
    CancelAsked,
    JobHeals,
    MoveAsked,
    RanksDone,
    Replaced,
    StateStays,
)
from plugins.scheduler.messages.wire import EnvOf, RankHangs, StacksWanted
from plugins.scheduler.service.ranks.rankspec import ranks_spec
from plugins.scheduler.service.ranks.sure_of_state import staying
from tests.plugins.scheduler.rack import Rack, on_a_rack, submit, until
from tests.plugins.scheduler.test_arranging import H1, H2, H3, H4, Elastic
from tests.plugins.scheduler.test_growing import elastic, first, heal
from tests.plugins.scheduler.test_queue import refusal


def stays(told: Elastic, host: HostId, config: int | None = None, epoch: int | None = None) -> None:
    """Let a host say that a process there has the state."""
    job = told.job
    said = StateStays(job.grant.epoch if epoch is None else epoch, job.healing.healed if config is None else config)
    told.say(Attained(wall_s=1.0, host=host, service_gpu_s={}, stays={told.id: said}))


def moved(told: Elastic, host: HostId, to: HostId) -> None:
    """Move the processes of a host to another one."""
    job, place = told.job, told.job.place_on(host)
    asked = MoveAsked(wall_s=1.0, job=told.id, epoch=job.grant.epoch, host=host, to=to, coordinator=H1)
    assert told.say(asked) == Applied(told.id)
    gpus = tuple(f"{to}.{at}" for at in range(len(place.gpus)))
    place = Place(to, place.ranks, gpus, job.healing.healed + 1)
    new = {host: taken_over(place, job.place_on(to))}
    assert told.say(Replaced(wall_s=1.0, job=told.id, epoch=job.grant.epoch, places=new)) == Applied(told.id)


@pytest.mark.parametrize("change", ["shrinks", "moves"])
def test_hosts_leave_a_job_as_it_was_until_one_says_that_who_stays_has_its_state(change: str) -> None:
    told = Elastic()
    told.grow(h3=1)
    before = told.job
    was = before.start.places, before.start.carried, before.start.came, before.healing.healed
    if change == "shrinks":
        told.scale(4)
    else:
        moved(told, H2, H4)
    now = told.job
    sure = now.as_sure()
    assert (sure.start.places, sure.start.carried, sure.start.came, sure.healing.healed) == was
    assert (now.healing.healed, now.start.places != was[0]) == (2, True)
    gone = H3 if change == "shrinks" else H2
    assert sure.place_on(gone) is not None and sure.left_on(gone) is None and now.left_on(gone) is not None
    told.queue.changed()
    stays(told, gone)
    stays(told, H1, config=1)
    stays(told, H1, epoch=0)
    assert told.job.healing.sure is not None and not told.queue.changed()
    stays(told, H1)
    assert told.job.as_sure() is told.job and told.queue.changed() == [told.id]
    stays(told, H1)
    assert not told.queue.changed()


def test_what_is_known_for_sure_stays_so_until_the_newest_change_is() -> None:
    told = Elastic()
    told.grow(h3=1, h4=1)
    told.scale(5)
    told.scale(4)
    assert told.job.healing.healed == 3 and told.job.as_sure().healing.healed == 1
    stays(told, H1, config=2)
    assert told.job.as_sure().processes == 6, "the process that had it may be one of those that end since"
    stays(told, H1)
    assert told.job.as_sure().processes == 4


def test_a_change_that_ends_no_process_is_not_waited_for() -> None:
    told = Elastic()
    told.grow(h3=1)
    assert told.job.healing.sure is None
    told.lose(H3)
    assert told.job.healing.sure is None, "those that ended are gone already"


@pytest.mark.parametrize("why", ["a host is lost", "the place is left", "a process is done", "it stops"])
def test_nobody_waits_for_the_state_where_that_would_be_in_vain(why: str) -> None:
    told = Elastic()
    told.grow(h3=1, h4=1)
    told.scale(5)
    (leaving,) = (place.host for place in told.job.healing.leaving)
    assert told.job.as_sure() is not told.job
    if why == "a host is lost":
        told.lose(H2)
    elif why == "the place is left":
        told.left(leaving)
    elif why == "a process is done":
        told.report(told.id, H2, {2: 0, 3: 0})
    else:
        told.say(CancelAsked(wall_s=1.0, job=told.id))
    assert told.job.as_sure() is told.job


@pytest.mark.parametrize("first", [H1, H2, "early"])
@pytest.mark.parametrize("change", ["moves", "moves beside others", "shrinks and grows"])
def test_a_job_whose_processes_end_by_themselves_waits_for_none_that_was_to_begin(change: str, first: HostId) -> None:
    """Nobody would give it the state, and the job would fail when all its work is done."""
    told = Elastic()
    if change == "shrinks and grows":
        told.grow(h4=1)
        told.scale(4)
        assert told.say(told.grown(h1=1, h3=1)) == Applied()
        told.scale(7)
    else:
        moved(told, H2, H4 if change == "moves" else H1)
    was = told.job.as_sure().start.places
    if first == "early":
        said = RanksDone(wall_s=9.0, job=told.id, epoch=told.job.grant.epoch, host=H1, steps={1: 5})
        assert told.say(said) == Applied(told.id)
    for place in sorted(was, key=lambda place: place.host != first):
        report = told.report(told.id, place.host, dict.fromkeys(place.ranks, 0), since=place.since)
        assert report == Applied(told.id) and told.job.start.places == was
    assert (told.job.state, told.job.ending.exit_code) == ("done", 0)


@pytest.mark.parametrize("change", ["shrinks", "moves"])
def test_a_change_that_waits_is_undone_when_a_host_is_lost(change: str) -> None:
    """Processes that are yet to end may be the last that have its state."""
    told = Elastic()
    told.grow(h3=1)
    if change == "shrinks":
        told.grow(h4=1)
        told.scale(4)
        last, gone = H4, H3
    else:
        moved(told, H3, H4)
        last, gone = H3, H2
    assert told.job.left_on(last) is not None
    told.say(Attained(wall_s=1.0, host=H1, service_gpu_s={}, heals={told.id: JobHeals(1, 0, True, ())}))
    was = told.job.as_sure()
    assert told.lose(gone) == Applied(told.id)
    job = told.job
    assert job.state == "running" and job.healing.sure is None and not job.healing.leaving
    assert job.start.places == tuple(place for place in was.start.places if place.host != gone)
    assert job.healing.healed > was.healing.healed + 1 and job.healing.have[H1] == ()
    assert told.lose(H1) == Applied(told.id) and (job.state, list(told.names)[-1]) == ("running", last)


def test_what_failed_or_was_asked_to_end_brings_nothing_back() -> None:
    told = Elastic()
    moved(told, H2, H4)
    told.left(H2)
    assert set(told.names) == {H1, H4} and told.job.healing.sure is None


def test_gpus_that_another_job_has_meanwhile_stay_its_own() -> None:
    told = Elastic()
    told.scale(4)
    told.grow(h2=1)
    freed = told.job.place_on(H2).gpus[2:]
    told.scale(4)
    other = told.submit(1)
    told.grant(other)
    assert told.place(other, Place(H2, (0,), freed)) == Applied(other)
    here = told.job.place_on(H1)
    told.report(told.id, H1, dict.fromkeys(here.ranks, 0), since=here.since)
    assert told.queue.holders[H2][freed[0]] == other and told.job.processes == 4


def test_no_process_moves_once_another_one_has_ended() -> None:
    told = Elastic()
    asked = MoveAsked(wall_s=1.0, job=told.id, epoch=1, host=H2, to=H4, coordinator=H1)
    assert told.say(asked) == Applied(told.id)
    told.say(RanksDone(wall_s=9.0, job=told.id, epoch=1, host=H1, steps={1: 5}))
    place = Place(H4, told.job.place_on(H2).ranks, ("h4.0", "h4.1"), 1)
    refused = refusal(told.say(Replaced(wall_s=1.0, job=told.id, epoch=1, places={H2: place})))
    assert refused.why == "some of its processes have ended already"


def test_a_process_that_is_yet_to_end_and_hangs_is_found() -> None:
    """It may be the last with the state, and others wait for it."""
    told = Elastic(hang_s=30.0)
    told.grow(h3=1)
    (process,) = told.job.place_on(H3).ranks
    ranks, machine, signs = told.job.carried_by([process]), Hangs(told.queue), RankSigns(told.queue, H3)
    told.scale(4)
    (stacks, _, hangs) = machine.handle(RanksAwaited(told.id, 1, tuple(ranks), 31.0), 100.0)
    assert isinstance(stacks.message, StacksWanted)
    assert (hangs.to, hangs.message) == (H3, RankHangs(told.id, 1, process, 31.0, ""))
    signs.second(100.0, {(told.id, 1): {process: 9}}, True)
    assert [rank.rank for rank in signs.now(told.job.as_sure(), [process], 101.0).ranks] == [process]
    stays(told, H1)
    assert not machine.handle(RanksAwaited(told.id, 1, tuple(ranks), 61.0), 200.0)


def test_places_left_earlier_are_left_while_others_wait() -> None:
    told = Elastic()
    told.grow(h3=1, h4=1)
    told.scale(5)
    (earlier,) = (place.host for place in told.job.healing.leaving)
    stays(told, H1)
    told.scale(4)
    assert [place.host for place in told.job.as_sure().healing.leaving] == [earlier]
    told.left(earlier)
    assert told.job.healing.sure is not None and not told.job.as_sure().healing.leaving


def test_a_process_stays_where_it_keeps_its_name_and_its_gpus() -> None:
    told = Elastic(gpus_per_worker=1)
    here = told.job.place_on(H1)
    known = ranks_spec(told.job, here, {})
    assert staying(known, here, 1) == {0, 1}
    assert staying(known, Place(H1, (0, 5), here.gpus), 1) == {0}
    assert staying(known, Place(H1, (0, 1), (here.gpus[0], "another")), 1) == {0}


# ---- on a rack of fakes ----------------------------------------------------------------------------------------------


def without_state(rack: Rack, *ranks: int) -> None:
    for host in rack.hosts.values():
        host.machine.without_state = set(ranks)


def running(rack: Rack) -> int:
    return sum(len(spec.ranks) for host in rack.hosts.values() for spec in host.machine.ranks.values())


@on_a_rack()
async def test_processes_run_on_while_none_of_those_that_stay_has_the_state(rack: Rack) -> None:
    """They died before the log heard of it, and those that are to end are the last that have it."""
    id, at = await elastic(rack), first(rack)
    await at.call("scale", id=id, workers=4)
    await heal(rack, id)
    await until(lambda: running(rack) == 4)
    before = {name: host.machine.ranks.get((id, 1)) for name, host in rack.hosts.items()}
    without_state(rack, *range(8))
    await at.call("scale", id=id, workers=2)
    await asyncio.sleep(20.0)
    assert rack.job(id).processes == 2 and rack.job(id).healing.leaving
    assert {name: host.machine.ranks.get((id, 1)) for name, host in rack.hosts.items()} == before
    (gone,) = (place.host for place in rack.job(id).healing.leaving)
    said = f"its processes on {gone} run until one that stays says that it has the job's state"
    assert (await at.call("job", id=id)).elastic.to_end == said
    placed = [fact for fact in at.told if isinstance(fact, JobPlaced) and fact.job == id]
    assert sum(len(place.ranks) for place in placed[-1].places) == 4
    without_state(rack)
    stayed = next(place for place in rack.job(id).start.places if place.ranks)
    rack.hosts[stayed.host].publish(RanksHeal(id, 1, stayed.since, True, stayed.ranks))
    await until(lambda: not rack.job(id).healing.leaving)
    assert running(rack) == 2 and not (await at.call("job", id=id)).elastic.to_end


@on_a_rack()
async def test_the_end_of_a_process_that_was_yet_to_end_is_told(rack: Rack) -> None:
    """Nobody else has its ranks yet, and nobody will: the others would wait for it for ever."""
    id, at = await elastic(rack, fewest=1), first(rack)
    await at.call("scale", id=id, workers=4)
    await heal(rack, id)
    await until(lambda: running(rack) == 4)
    without_state(rack, *range(8))
    was = rack.job(id).start.places
    await at.call("scale", id=id, workers=3)
    now = {place.host: place.ranks for place in rack.job(id).start.places}
    ((host, process),) = ((place.host, p) for place in was for p in place.ranks if p not in now.get(place.host, ()))
    assert len(now[host]) == 1
    rack.hosts[host].publish(RankEndedHere(id, 1, process, 0))
    await until(lambda: rack.job(id).healing.gone)
    assert (rack.job(id).healing.sure, rack.job(id).start.places) == (None, was)


@on_a_rack()
async def test_processes_that_are_yet_to_end_are_given_their_environment(rack: Rack) -> None:
    """They may not have begun there, and the others wait for them."""
    id, at = await elastic(rack, env={"API_KEY": "secret"}), first(rack)
    await at.call("scale", id=id, workers=4)
    await heal(rack, id)
    await until(lambda: running(rack) == 4)
    without_state(rack, *range(8))
    await at.call("scale", id=id, workers=2)
    env, (gone,) = rack.job(id).env, (place.host for place in rack.job(id).healing.leaving)
    holder = next(host for host in env.holders if host not in (gone, rack.job(id).grant.coordinator))
    answer = await rack.hosts[holder].service.envs.give(gone, EnvOf(id, 1, env.digest))
    assert answer.data


@on_a_rack()
async def test_a_job_without_gpus_is_served_by_processes_that_are_yet_to_end(rack: Rack) -> None:
    at, id = first(rack), (await submit(rack, workers=2, workers_max=8, gpus_per_worker=0)).id
    await until(lambda: rack.job(id).state == "running")
    await heal(rack, id)
    await at.call("scale", id=id, workers=4)
    await heal(rack, id)
    await until(lambda: running(rack) == 4)
    without_state(rack, *range(8))

    async def served() -> float:
        before = sum(host.service.ranks.service_gpu_s.get(id, 0.0) for host in rack.hosts.values())
        await asyncio.sleep(10.0)
        return sum(host.service.ranks.service_gpu_s.get(id, 0.0) for host in rack.hosts.values()) - before

    assert await served() == pytest.approx(40.0, abs=4.1)
    await at.call("scale", id=id, workers=2)
    assert await served() == pytest.approx(40.0, abs=4.1)


@on_a_rack()
async def test_a_job_keeps_processes_that_were_yet_to_end_when_its_others_are_lost(rack: Rack) -> None:
    id, at = await elastic(rack), first(rack)
    await at.call("scale", id=id, workers=4)
    await heal(rack, id)
    await until(lambda: running(rack) == 4)
    without_state(rack, *range(8))
    await at.call("scale", id=id, workers=2)
    (last,), (lost,) = rack.job(id).healing.leaving, rack.job(id).start.places
    assert len(last.ranks) == len(lost.ranks) == 2
    leader = next(host for host in rack.hosts if host not in (last.host, lost.host))
    rack.lead(leader)
    rack.cut_off(lost.host)
    await until(lambda: rack.job(id, leader).healing.sure is None)
    job = rack.job(id, leader)
    assert (job.state, job.grant.epoch, job.start.places) == ("running", 1, (last,))
