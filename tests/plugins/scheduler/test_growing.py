"""Elastic jobs that grow: where their coordinator looks for room, and what a person is told; on a rack of fakes too."""

import asyncio
from typing import Any

import pytest

from covey.core.errors import Refused
from covey.core.events import Heard
from covey.core.ids import HostId, JobId
from plugins.facts import JobPlaced, Place
from plugins.scheduler.machine.gang.gang import GrantSeen, PlacementProposed, PlacesSought
from plugins.scheduler.messages.commands import Applied, Arranged, Attained, JobHeals, NotApplied, PlaceFailed
from plugins.scheduler.messages.spec import JobSpec
from plugins.scheduler.messages.wire import NotReserved
from plugins.scheduler.policy.carrying import first_carried
from plugins.scheduler.policy.leases import PAUSE_RENEWALS, terms
from plugins.scheduler.policy.place import grow
from tests.plugins.scheduler.rack import Rack, on_a_rack, operator, refused, submit, until
from tests.plugins.scheduler.test_gang import Coordinator, asks, proposals, timers

H1, H2, H3, H4 = HostId("h1"), HostId("h2"), HostId("h3"), HostId("h4")
J1 = JobId("j1")


def test_hosts_that_have_some_of_the_job_come_first_then_the_freest() -> None:
    room = {H1: 1, H2: 3, H3: 2, H4: 0}
    assert grow(room, 2, {H1, H4}) == {H1: 1, H2: 1}
    assert grow(room, 1, {H1}) == {H1: 1}
    assert grow(room, 9, {H1}) == {H1: 1, H2: 3, H3: 2}, "some are better than none"
    assert grow({H4: 0}, 2, {H4}) == {} and grow({}, 1, ()) == {}


def seek(
    more: int, free: dict[HostId, int] | None = None, left: tuple[HostId, ...] = (), **spec: Any
) -> tuple[Coordinator, list[Any]]:
    """The coordinator of a job of 4 to 16, two processes on each of h1 and h2, that is to grow by `more`."""
    it = Coordinator(free or {H1: 1, H2: 0, H3: 2, H4: 4})
    job = JobSpec.parse({"argv": ["x"], "workers": 4, "workers_max": 16, **spec})
    each = job.gpus_per_worker
    places = tuple(
        Place(host, ranks, tuple(f"{host}.{n}" for n in range(2 * each)))
        for host, ranks in ((H1, (0, 1)), (H2, (2, 3)))
    )
    sought = PlacesSought((), (H1, H2, *left), 5, 1, None, places, more, first_carried(16, 4))
    return it, it.dispatch(GrantSeen(J1, 1, job, sought=sought))


def test_hosts_are_asked_for_new_processes_and_all_places_are_proposed() -> None:
    it, actions = seek(3)
    asked = asks(actions)
    assert {host: (ask.workers, ask.joins, ask.master) for host, ask in asked.items()} == {
        H1: (1, True, False),
        H4: (2, False, False),
    }
    assert not proposals(it.yes(H4, asked[H4]))
    (command,) = proposals(it.yes(H1, asked[H1]))
    assert isinstance(command, Arranged)
    new = command.jobs[J1]
    assert (new.epoch, new.replaces) == (1, 4)
    assert new.places == (
        Place(H1, (0, 1, 10), ("h1.0", "h1.1", "h1-0"), 5),
        Place(H2, (2, 3), ("h2.0", "h2.1")),
        Place(H4, (12, 14), ("h4-0", "h4-1"), 5),
    )
    assert it.dispatch(PlacementProposed(command, Applied())) == [] and not it.gangs.searches


def test_fewer_are_taken_than_are_wanted_and_none_is_a_failure_in_words() -> None:
    _, actions = seek(9, {H3: 2}, gpus_per_worker=1)
    assert {host: ask.workers for host, ask in asks(actions).items()} == {H3: 2}
    it, actions = seek(2, {H1: 1, H3: 1}, gpus_per_worker=2)
    assert not asks(actions)
    for _ in range(2):
        actions = it.dispatch(timers(actions)[0])
    (command,) = proposals(actions)
    assert isinstance(command, PlaceFailed)
    assert command.reason == "free GPUs by host are h1 1, h3 1: no host has room for another process"


def test_a_host_that_the_job_is_leaving_is_not_asked() -> None:
    _, actions = seek(2, {H3: 4, H4: 2}, left=(H3,))
    assert list(asks(actions)) == [H4]


def test_a_refusal_and_a_stale_proposal_are_tried_again() -> None:
    it, actions = seek(2, {H3: 2, H4: 1})
    (ask,) = asks(actions).values()
    refusal = NotReserved(J1, 1, ask.attempt, 0, "taken")
    actions = it.dispatch(timers(it.dispatch(Heard(H3, refusal)))[0])
    ((host, ask),) = asks(actions).items()
    assert (host, ask.workers) == (H4, 1), "one has room, so it grows by one"
    (command,) = proposals(it.yes(H4, ask))
    again = it.dispatch(PlacementProposed(command, NotApplied(4, "no", "its configuration is 6 by now", "none")))
    assert timers(again) and not proposals(again)


def test_without_gpus_new_processes_go_where_the_fewest_are() -> None:
    _, actions = seek(4, {H1: 0, H2: 0, H3: 0, H4: 0}, gpus_per_worker=0)
    assert {host: ask.workers for host, ask in asks(actions).items()} == {H1: 1, H2: 1, H3: 1, H4: 1}


# ---- on a rack of fakes ----------------------------------------------------------------------------------------------


async def elastic(rack: Rack, *hosts: str, fewest: int = 2, most: int = 8, **more: Any) -> JobId:
    view = await submit(rack, workers=fewest, workers_max=most, gpus_per_worker=1, **more)
    await until(lambda: rack.job(view.id).state == "running")
    await heal(rack, view.id)
    return JobId(view.id)


async def heal(rack: Rack, id: JobId) -> None:
    """Let all hosts of a job say that its ranks there have registered their state."""
    job = rack.job(id)
    for place in job.start.places:
        said = {id: JobHeals(job.grant.epoch, place.since, True, place.ranks)}
        await rack.hosts[place.host].service.queue_log.insist(
            Attained(wall_s=1.0, host=place.host, service_gpu_s={}, heals=said)
        )


def first(rack: Rack) -> Any:
    return next(iter(rack.hosts.values()))


@on_a_rack()
async def test_a_person_scales_a_job_up_and_down_and_is_told_what_came(rack: Rack) -> None:
    id, at = await elastic(rack), first(rack)
    view = await at.call("scale", id=id, workers=4, asker=operator("ann"), why="the night is quiet \ud800")
    assert (view.elastic.processes, view.elastic.workers_max, view.elastic.config) == (4, 8, 1)
    assert (view.workers, view.gpus, view.elastic.wanted) == (2, 2, 0)
    assert sorted(rank for ranks in view.elastic.carried.values() for rank in ranks) == list(range(8))
    assert view.reason.startswith("ann, the night is quiet ?: from 2 to 4 processes: ")
    told = [fact for fact in at.told if isinstance(fact, JobPlaced) and fact.job == id]
    assert told[-1].world_size == 8 and sum(len(place.ranks) for place in told[-1].places) == 4
    await heal(rack, id)
    view = await at.call("scale", id=id, workers=2)
    assert (view.elastic.processes, view.elastic.config) == (2, 2)
    await until(lambda: not rack.job(id).healing.leaving)


@on_a_rack()
@pytest.mark.parametrize(("kind", "beyond"), [("guaranteed", (0, 2, 0)), ("opportunistic", (2, 4, 2))])
async def test_gpus_of_processes_over_the_lower_number_are_held_beyond_the_quota(
    rack: Rack, kind: str, beyond: tuple[int, int, int]
) -> None:
    given: dict[str, Any] = {"class": kind}
    id, at = await elastic(rack, **given), first(rack)

    async def shown() -> tuple[int, int]:
        (tenant,) = await at.call("quotas")
        return tenant.used, tenant.opportunistic

    used = 2 if kind == "guaranteed" else 0
    assert await shown() == (used, beyond[0])
    await at.call("scale", id=id, workers=4)
    assert await shown() == (used, beyond[1])
    await heal(rack, id)
    await at.call("scale", id=id, workers=2)
    assert await shown() == (used, beyond[2])


@on_a_rack({"gpu1": 4, "gpu2": 3, "gpu3": 1})
async def test_a_range_beyond_the_rack_runs_and_everybody_is_told_what_it_never_has(rack: Rack) -> None:
    at = first(rack)
    view = await submit(rack, workers=2, workers_max=64, gpus_per_worker=2)
    said = (
        "it was submitted with --workers 2..64, and the hosts that it may use have room for 3 processes "
        "with 2 GPUs each: it never has more than 3 here"
    )
    assert view.elastic.over_rack == said
    assert (view.id, "range over the rack", said) in [note[:3] for note in at.notes]
    await until(lambda: rack.job(view.id).state == "running")
    assert (await rack["gpu2"].call("job", id=view.id)).elastic.over_rack == said
    fits = await submit(rack, workers=1, workers_max=3, gpus_per_worker=2)
    assert fits.elastic.over_rack == "", "every GPU counts, whoever holds it now"
    none = await submit(rack, workers=1, workers_max=64, gpus_per_worker=0)
    assert none.elastic.over_rack == "", "processes without GPUs fit anywhere"
    assert (await submit(rack, workers=1)).elastic is None


@on_a_rack()
async def test_of_two_people_who_scale_a_job_at_once_one_is_told_to_look_again(rack: Rack) -> None:
    id, at = await elastic(rack), first(rack)
    asked = [at.call("scale", id=id, workers=workers, asker=operator(by)) for workers, by in ((4, "ann"), (6, "bob"))]
    said = await asyncio.gather(*asked, return_exceptions=True)
    (refusal,) = [each for each in said if isinstance(each, Refused)]
    assert refusal.what == "j1 was not scaled" and "was faster: it is to grow to " in refusal.why
    assert refusal.next == "look again: agentctl job j1"
    (view,) = [each for each in said if not isinstance(each, BaseException)]
    assert view.elastic.processes == rack.job(id).processes == rack.job(id).healing.at_most


@on_a_rack()
async def test_a_host_asks_for_processes_that_came_before_they_would_stand_still(rack: Rack) -> None:
    """A supervisor suspends ranks that came to a running job 4 s after the question that was answered last, however
    long they take to begin; each host asked every 5 s until they had the state."""
    id, at = await elastic(rack), first(rack)
    await at.call("scale", id=id, workers=8)
    came = {place.host for place in rack.job(id).start.places if place.since}
    await until(lambda: all((id, 1) in rack.hosts[host].machine.leases for host in came))
    assert came
    for _ in range(20):
        await asyncio.sleep(1.0)
        for host in map(rack.hosts.__getitem__, came):
            asked_s = host.env.clock.boot_s() - host.machine.leases[id, 1].asked_s
            assert asked_s <= terms(60.0).pause_s / PAUSE_RENEWALS + 1.0, f"{host} asked {asked_s:.1f} s ago"


@on_a_rack()
async def test_who_asks_for_more_than_there_is_gets_some_and_is_told_why_not_more(rack: Rack) -> None:
    id, at = await elastic(rack, most=16), first(rack)
    gpus = sum(len(host.machine.probes.gpus()) for host in rack.hosts.values())
    view = await at.call("scale", id=id, workers=16)
    assert view.elastic.processes == gpus < 16, "all that the rack has"
    assert f"it keeps {gpus} of 16 processes: free GPUs by host are" in view.reason
    await heal(rack, id)
    said = await refused(at.call("scale", id=id, workers=16))
    assert said.what == "j1 was not scaled" and "no host has room for another process" in said.why


@on_a_rack()
async def test_nobody_ends_processes_while_a_host_of_the_job_is_away(rack: Rack) -> None:
    id, at = await elastic(rack), first(rack)
    await at.call("scale", id=id, workers=4)
    away = next(place.host for place in rack.job(id).start.places if place.host != at.id)
    rack.states[away] = ("suspect", 0.0)
    said = await refused(at.call("scale", id=id, workers=2))
    assert said.code == 75 and said.why.startswith(f"{away} is not alive") and rack.job(id).processes == 4
    rack.states[away] = ("alive", 0.0)


@on_a_rack()
async def test_what_cannot_be_is_refused_in_three_lines(rack: Rack) -> None:
    id, at = await elastic(rack), first(rack)
    for workers, why in ((9, "9 is out of that range"), (1, "1 is out of that range"), (0, "is not a number")):
        said = await refused(at.call("scale", id=id, workers=workers))
        assert why in said.why and said.next.startswith("agentctl scale")
    said = await refused(at.call("scale", id=id, workers="many"))
    assert said.code == 2
    plain = await submit(rack, workers=1)
    await until(lambda: rack.job(plain.id).state == "running")
    said = await refused(at.call("scale", id=plain.id, workers=2))
    assert "and not with a range" in said.why and "--workers 4..16" in said.next
    waits = await submit(rack, workers=6)
    said = await refused(at.call("scale", id=waits.id, workers=2))
    assert said.why in ("j3 is queued", "j3 is placing")


@on_a_rack()
async def test_others_carry_the_ranks_of_a_lost_host_and_the_gang_grows_back(rack: Rack) -> None:
    id = await elastic(rack, fewest=4, most=8)
    lost = rack.job(id).start.places[-1].host
    rack.cut_off(lost)
    await until(lambda: rack.job(id).healing.healed >= 2)
    job, notes = rack.job(id), [note[1:3] for note in first(rack).notes if note[0] == id]
    assert job.state == "running" and job.tally.attempt == 1 and job.processes == 4
    assert lost not in [place.host for place in job.start.places] and not job.seeks
    lost_at = [event for event, _ in notes].index("hosts lost")
    assert "from 4 to 2 processes: 2 less on " in notes[lost_at][1] and "looks for 2 more" in notes[lost_at][1]
    assert "from 2 to 4 processes" in dict(notes[lost_at:])["grew"]
