"""A plugin wishes elastic jobs to be arranged anew: hosts are asked where processes begin, and the log takes all or
nothing; on a rack of fakes too."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from covey.core.events import Fact, Heard, Send, SetTimer, Undelivered
from covey.core.ids import HostId, JobId
from plugins.facts import ArrangementsAnswered, ArrangementsWanted, JobPlaced, WantedArrangement
from plugins.scheduler.machine.gang.gang import ATTEMPTS
from plugins.scheduler.machine.gang.wishes import (
    Action,
    AnswerWish,
    Event,
    PlannedJob,
    ProposeWish,
    Wishes,
    WishLate,
    WishProposed,
    WishRefused,
    WishSeen,
    planned,
)
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.commands import Applied, Arranged, HostDrained, NotApplied
from plugins.scheduler.messages.wire import NotReserved, Release, Reserve, Reserved
from plugins.scheduler.policy.settings import SchedulerSettings
from tests.plugins.scheduler.rack import Rack, on_a_rack, operator, refused, submit, until
from tests.plugins.scheduler.test_arranging import H1, H2, H3, H4, Elastic
from tests.plugins.scheduler.test_growing import elastic, first, heal


def wish(job: Job, **more: Any) -> WantedArrangement:
    return WantedArrangement(**{"epoch": job.grant.epoch, "replaces": job.healing.healed, **more})


class Wished:
    """A host where somebody wishes, and the log that it knows: a job of 4 to 16, two processes on h1 and on h2."""

    def __init__(self) -> None:
        self.told = Elastic()
        self.wishes = Wishes(SchedulerSettings())

    def feed(self, event: Event) -> list[Action]:
        actions = list(self.wishes.handle(event, 0.0))
        self.wishes.check()
        return actions

    def seen(self, *jobs: PlannedJob, ask: str = "w1") -> list[Action]:
        return self.feed(WishSeen(ask, jobs or (self.plan(processes={H1: 2, H2: 1, H3: 2}),), "the tuner", "faster"))

    def plan(self, job: Job | None = None, number: int = 5, **more: Any) -> PlannedJob:
        job = job or self.told.job
        return planned(job, wish(job, **more), number)

    def yes(self, host: HostId, ask: Reserve) -> list[Action]:
        gpus = tuple(f"{host}-{n}" for n in range(ask.workers * ask.gpus_per_worker))
        return self.feed(Heard(host, Reserved(ask.job, ask.epoch, ask.attempt, gpus, "", 0)))


def asks(actions: list[Action]) -> dict[HostId, Reserve]:
    sends = [action for action in actions if isinstance(action, Send)]
    return {send.to: send.message for send in sends if isinstance(send.message, Reserve)}


def released(actions: list[Action]) -> set[HostId]:
    return {action.to for action in actions if isinstance(action, Send) and isinstance(action.message, Release)}


def proposed(actions: list[Action]) -> list[Arranged]:
    return [action.command for action in actions if isinstance(action, ProposeWish)]


def answers(actions: list[Action]) -> list[AnswerWish]:
    return [action for action in actions if isinstance(action, AnswerWish)]


# ---- what a wish means for a job -------------------------------------------------------------------------------------


def test_processes_end_where_there_are_too_many_and_begin_where_there_are_too_few() -> None:
    plan = Wished().plan(processes={H1: 2, H2: 1, H3: 2})
    assert [(place.host, place.ranks) for place in plan.stay] == [(H1, (0, 1)), (H2, (2,))]
    assert {host: len(names) for host, names in plan.names.items()} == {H3: 2}
    assert plan.joins == {H1, H2}


def test_processes_that_are_not_named_stay_as_they_are() -> None:
    told = Wished()
    plan = told.plan(shares={H1: 11, H2: 5})
    assert plan.stay == told.told.job.start.places and not plan.names


def test_of_a_host_those_that_came_last_end_and_never_the_one_that_carries_rank_0() -> None:
    told = Wished()
    told.told.grow(h1=2)
    assert told.told.names[H1][:2] == (0, 1)
    plan = told.plan(processes={H1: 1, H2: 4})
    assert [place.ranks for place in plan.stay] == [(0,), (2, 3)]
    with pytest.raises(WishRefused, match="the process on h1 that carries rank 0 ends only with its host"):
        told.plan(processes={H2: 4})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda job: {"replaces": 4}, "its configuration is 0 by now, and not 4"),
        (lambda job: {"epoch": 7}, "it is running under epoch 1, and does not run under 7"),
        (lambda job: {"processes": {H1: 2}}, "it has 4..16 processes, and would have 2"),
        (lambda job: {"processes": {H1: 20}}, "it has 4..16 processes, and would have 20"),
        (lambda job: {"processes": {H1: 2, H2: 2, H3: 10**12}}, f"it has 4..16 processes, and would have {10**12 + 4}"),
        (lambda job: {"processes": {H1: 2, H2: 2, H3: -1}}, "-1 is not a number of processes"),
        (lambda job: {"shares": {H1: 11, H2: 4}}, "the shares of the hosts are 15 ranks together"),
        (lambda job: {"shares": {H1: 11, H3: 5}}, "h3 is to carry 5 ranks and has no process of the job"),
        (lambda job: {"owners": (H1,)}, "the owners of 1 tables are said, and it has 4"),
    ],
)
def test_what_cannot_be_is_refused_in_words_before_any_host_is_asked(
    change: Callable[[Job], dict[str, Any]], why: str
) -> None:
    it = Wished()
    with pytest.raises(WishRefused, match=why):
        it.plan(**change(it.told.job))


def test_a_job_whose_coordinator_looks_for_hosts_is_not_arranged_meanwhile() -> None:
    it = Wished()
    it.told.scale(9)
    with pytest.raises(WishRefused, match="h1 looks for hosts for it already"):
        it.plan(shares={H1: 11, H2: 5})


def test_ranks_without_state_are_not_given_to_others_and_their_tables_move() -> None:
    it = Wished()
    it.told.job.healing.may_be_lost = ()
    with pytest.raises(WishRefused, match="have not registered their state"):
        it.plan(shares={H1: 11, H2: 5})
    assert it.plan(owners=(H1,) * 4).wanted.owners == (H1,) * 4


# ---- asking hosts ----------------------------------------------------------------------------------------------------


def test_where_nothing_begins_the_log_is_asked_at_once() -> None:
    it = Wished()
    (command,) = proposed(it.seen(it.plan(shares={H1: 11, H2: 5}, owners=(H3,) * 4)))
    assert it.told.say(command) == Applied()
    assert it.told.job.reason == ("the tuner, faster: ranks by host are h1 11, h2 5; tables 0 1 2 3 on h3")
    assert it.feed(WishProposed("w1", Applied())) == [AnswerWish("w1")] and not it.wishes.wishes


def test_each_host_where_processes_begin_is_asked_and_all_is_proposed_at_once() -> None:
    it = Wished()
    actions = it.seen(it.plan(processes={H1: 3, H2: 2, H3: 2}, shares={H1: 3, H2: 3, H3: 10}))
    asked = asks(actions)
    assert {host: (ask.workers, ask.joins) for host, ask in asked.items()} == {H1: (1, True), H3: (2, False)}
    assert [action for action in actions if isinstance(action, SetTimer)]
    assert it.yes(H3, asked[H3]) == []
    (command,) = proposed(it.yes(H1, asked[H1]))
    assert it.told.say(command) == Applied()
    assert {host: len(ranks) for host, ranks in it.told.names.items()} == {H1: 3, H2: 2, H3: 2}
    assert it.told.job.place_on(H3).gpus == ("h3-0", "h3-1")
    assert it.yes(H1, asked[H1]) == [], "said twice"


@pytest.mark.parametrize("what", ["no", "silence", "unreachable", "too few"])
def test_one_host_without_room_refuses_the_whole_wish_and_nothing_is_held(what: str) -> None:
    it = Wished()
    asked = asks(it.seen(it.plan(processes={H1: 2, H2: 2, H3: 1, H4: 1})))
    assert it.yes(H3, asked[H3]) == []
    ask = asked[H4]
    event: dict[str, Event] = {
        "no": Heard(H4, NotReserved(ask.job, ask.epoch, ask.attempt, 0, "taken")),
        "silence": WishLate("w1"),
        "unreachable": Undelivered(H4, ask),
        "too few": Heard(H4, Reserved(ask.job, ask.epoch, ask.attempt, (), "", 0)),
    }
    actions = it.feed(event[what])
    assert released(actions) == {H3, H4} and not proposed(actions)
    (answer,) = answers(actions)
    assert "h4" in answer.refused and not it.wishes.wishes
    assert answer.full == (H4 if what == "no" else "")
    assert it.yes(H4, ask) == [] and it.feed(WishLate("w1")) == [], "what comes later changes nothing"


def test_a_host_that_answers_while_the_log_is_asked_changes_nothing() -> None:
    it = Wished()
    (ask,) = asks(it.seen(it.plan(processes={H1: 2, H2: 2, H3: 1}))).values()
    assert proposed(it.yes(H3, ask))
    no = Heard(H3, NotReserved(ask.job, ask.epoch, ask.attempt, 0, "taken"))
    assert it.feed(no) == it.feed(WishLate("w1")) == it.feed(Undelivered(H3, ask)) == []


@pytest.mark.parametrize("result", [NotApplied(4, "no", "its configuration is 6 by now", "none"), "no leader is known"])
def test_what_the_log_refuses_is_said_in_its_words_and_nothing_is_held(result: Any) -> None:
    it = Wished()
    (ask,) = asks(it.seen(it.plan(processes={H1: 2, H2: 2, H3: 1}))).values()
    it.yes(H3, ask)
    actions = it.feed(WishProposed("w1", result))
    assert released(actions) == {H3}
    why, code = (result, 75) if isinstance(result, str) else (result.why, result.code)
    assert answers(actions) == [AnswerWish("w1", why, code)]


def test_of_two_wishes_for_one_job_the_second_is_refused_and_those_for_others_go_on() -> None:
    it = Wished()
    other = it.told.run(4, workers_max=8, base=10)
    it.told[other].healing.may_be_lost, it.told[other].healing.have = (H1, H2), {H1: (0,)}
    (ask,) = asks(it.seen(it.plan(processes={H1: 2, H2: 2, H3: 1}))).values()
    both = it.plan(owners=(H1,) * 4), it.plan(it.told[other], owners=(H1,) * 4)
    (answer,) = answers(it.seen(*both, ask="w2"))
    assert answer == AnswerWish("w2", "j1 is being arranged anew already, by the tuner")
    assert proposed(it.seen(it.plan(it.told[other], owners=(H1,) * 4), ask="w3"))
    assert it.seen(ask="w1") == [], "said twice"
    assert proposed(it.yes(H3, ask))


def test_all_jobs_of_a_wish_are_proposed_once_the_last_host_said_yes() -> None:
    it = Wished()
    other = it.told.run(4, workers_max=8, base=10)
    it.told[other].healing.may_be_lost, it.told[other].healing.have = (H1, H2), {H1: (0,)}
    jobs = it.plan(processes={H1: 2, H2: 2, H3: 1}), it.plan(it.told[other], processes={H1: 2, H2: 2, H3: 1})
    sends = [action for action in it.seen(*jobs) if isinstance(action, Send)]
    one, two = (send.message for send in sends)
    assert isinstance(one, Reserve) and isinstance(two, Reserve) and (one.job, two.job) == (it.told.id, other)
    assert it.yes(H3, one) == []
    (command,) = proposed(it.feed(Heard(H3, Reserved(two.job, two.epoch, two.attempt, ("h3-x",), "", 0))))
    assert set(command.jobs) == {it.told.id, other} and it.told.say(command) == Applied()
    assert (it.told.job.processes, it.told[other].processes) == (5, 5)


def test_reservations_of_a_wish_are_between_those_of_searches_before_and_after_it() -> None:
    it = Wished()
    it.told.job.healing.sought = 3
    numbers = [it.plan(number=number).attempt for number in (1, 2, 1 << 40)]
    assert numbers == sorted(numbers) and numbers[0] > 3 * ATTEMPTS + 1000 and numbers[-1] < 4 * ATTEMPTS


# ---- on a rack of fakes ----------------------------------------------------------------------------------------------


QUIET = SchedulerSettings(elastic_grow_after_s=0.0)
"""The leader lets no job grow by itself."""


async def wished(rack: Rack, on: HostId, jobs: dict[JobId, WantedArrangement], ask: str = "w1") -> str:
    """Wish at this host, and return why it was refused; empty: it is in force."""
    host = rack.hosts[on]
    host.publish(ArrangementsWanted(ask, jobs, "a test", "why not"))
    return await answered(rack, on, ask)


async def answered(rack: Rack, on: HostId, ask: str) -> str:
    def found() -> list[ArrangementsAnswered]:
        told = rack.hosts[on].told
        return [fact for fact in told if isinstance(fact, ArrangementsAnswered) and fact.ask == ask]

    await until(found)
    assert len(found()) == 1, "a wish is answered once"
    return found()[0].refused


def owned(told: list[Fact], owners: tuple[HostId, ...]) -> bool:
    """Whether the newest word about the job was that these hosts are to own its tables."""
    return [fact for fact in told if isinstance(fact, JobPlaced)][-1].owners == owners


def held(rack: Rack) -> list[Any]:
    """What hosts hold for ranks that have not started."""
    return [hold for host in rack.hosts.values() for hold in host.service.ranks.reservations.all() if not hold.started]


def counts(rack: Rack, id: JobId) -> dict[HostId, int]:
    return {place.host: len(place.ranks) for place in rack.job(id).start.places}


@on_a_rack(settings=QUIET)
async def test_a_wish_at_any_host_begins_and_ends_processes_there_and_nowhere_else(rack: Rack) -> None:
    id = await elastic(rack)
    has = counts(rack, id)
    (home,), hosts = has, list(rack.hosts)
    other = next(host for host in hosts if host != home)
    for on in hosts:
        wanted = wish(rack.job(id), processes={home: 2, other: 1}, shares={home: 2, other: 6}, owners=(other,) * 4)
        assert await wished(rack, on, {id: wanted}, f"{on}.grow") == ""
        assert counts(rack, id) == {home: 2, other: 1} and not held(rack)
        await heal(rack, id)
        await until(functools.partial(owned, rack.hosts[on].told, (other,) * 4))
        assert await wished(rack, on, {id: wish(rack.job(id), processes={home: 2})}, f"{on}.shrink") == ""
        assert counts(rack, id) == {home: 2}
        await until(lambda: not rack.job(id).healing.leaving)
        await heal(rack, id)


@on_a_rack(settings=QUIET)
async def test_a_wish_that_is_refused_says_why_and_holds_nothing(rack: Rack) -> None:
    id, at = await elastic(rack), first(rack)
    (home,) = counts(rack, id)
    free = [host for host in rack.hosts if host != home]
    gpus = len(rack.hosts[free[0]].machine.probes.gpus())
    too_many, room = {home: 2, free[0]: gpus + 1}, f"{gpus + 1} GPUs are needed and {gpus} are free"
    nowhere = HostId("h9")
    plain = await submit(rack, workers=1, gpus_per_worker=0)
    await until(lambda: rack.job(plain.id).state == "running")
    job = rack.job(id)
    for at_number, (wanted, why) in enumerate(
        [
            (
                {id: wish(job, processes=too_many)},
                f"{id}: {free[0]} has no room: {room}",
            ),
            ({id: wish(job, processes={home: 2, nowhere: 1})}, f"{id}: h9 is not known as a host"),
            ({id: wish(job, owners=(nowhere,) * 4)}, f"{id}: h9 is not known as a host"),
            ({id: wish(job, replaces=7)}, f"{id}: its configuration is 0 by now, and not 7"),
            (
                {plain.id: wish(rack.job(plain.id))},
                f"{plain.id}: it was submitted with 1 workers",
            ),
            ({JobId("j99"): wish(job)}, "j99: there is no such job"),
            ({}, "0 jobs are to be arranged at once"),
            ({id: wish(job)}, f"{id}: its processes stay as they are"),
        ]
    ):
        said = await wished(rack, at.id, wanted, f"w{at_number}")
        assert said.startswith(why), said
    full = {fact.ask: fact.full for fact in rack.hosts[at.id].told if isinstance(fact, ArrangementsAnswered)}
    assert full["w0"] == free[0] and not any(full[f"w{number}"] for number in (1, 2, 3, 4, 5, 6, 7))
    assert counts(rack, id) == {home: 2} and rack.job(id).healing.healed == 0 and not held(rack)
    rack.lead(None)
    assert await wished(rack, at.id, {id: wish(job, owners=(home,) * 4)}, "no leader")
    no = await refused(at.call("arrange", id=id, owners=[home] * 4))
    assert no.code == 75 and no.next.startswith("try again")
    rack.lead(str(at.id))


@on_a_rack(settings=QUIET)
async def test_no_wish_ends_processes_while_another_host_of_the_job_is_away(rack: Rack) -> None:
    """The others may be the last that have its state."""
    id, at = await elastic(rack), first(rack)
    await at.call("scale", id=id, workers=4)
    await heal(rack, id)
    away = next(place.host for place in rack.job(id).start.places if place.host != at.id)
    rack.states[away] = ("suspect", 0.0)
    fewer = {place.host: 2 if place.host == away else 1 for place in rack.job(id).start.places}
    said = await refused(at.call("arrange", id=id, processes=fewer))
    assert said.code == 75 and said.why.startswith(f"{id}: {away} is not alive"), said
    assert rack.job(id).processes == 4
    assert (await at.call("arrange", id=id, owners=[at.id] * 4)).elastic.owners == (at.id,) * 4, "nothing ends"
    rack.states[away] = ("alive", 0.0)
    assert (await at.call("arrange", id=id, processes=fewer)).elastic.processes == sum(fewer.values())


@on_a_rack(settings=QUIET)
async def test_a_host_that_takes_no_jobs_is_named_so_also_where_no_gpus_are_wanted(rack: Rack) -> None:
    view, at = await submit(rack, workers=2, workers_max=8, gpus_per_worker=0), first(rack)
    id = JobId(view.id)
    await until(lambda: rack.job(id).state == "running")
    await heal(rack, id)
    has = counts(rack, id)
    other = next(host for host in rack.hosts if host not in has or host != at.id)
    await at.service.queue_log.insist(HostDrained(wall_s=1.0, host=other, by="ann"))
    said = await refused(at.call("arrange", id=id, processes={**has, other: has.get(other, 0) + 1}))
    assert (said.code, said.why) == (4, f"{id}: {other} is drained, by ann")


@on_a_rack(settings=QUIET)
async def test_a_host_that_cannot_be_reached_refuses_the_wish_and_the_others_hold_nothing(rack: Rack) -> None:
    id, at = await elastic(rack), first(rack)
    (home,) = counts(rack, id)
    far, near = [host for host in rack.hosts if host not in (home, at.id)][:2] if home == at.id else (None, None)
    assert far is not None and near is not None
    rack.cut.add(far)  # gossip has not noticed
    wanted = {id: wish(rack.job(id), processes={home: 2, near: 1, far: 1})}
    assert await wished(rack, at.id, wanted) in (f"{far} could not be reached", f"no answer from {far} in 3 s")
    rack.heal(str(far))
    await until(lambda: not held(rack))
    assert counts(rack, id) == {home: 2}


@on_a_rack(settings=QUIET)
async def test_of_two_hosts_that_wish_at_once_one_gets_its_wish(rack: Rack) -> None:
    id = await elastic(rack)
    (home,), hosts = counts(rack, id), list(rack.hosts)
    others = [host for host in hosts if host != home]
    for on, to, ask in ((hosts[0], others[0], "one"), (hosts[1], others[1], "two")):
        wanted = wish(rack.job(id), processes={home: 2, to: 1})
        rack.hosts[on].publish(ArrangementsWanted(ask, {id: wanted}, "a test", "both"))
    said = [await answered(rack, hosts[0], "one"), await answered(rack, hosts[1], "two")]
    assert sorted(map(bool, said)) == [False, True], said
    assert "its configuration is 1 by now, and not 0" in "".join(said)
    assert rack.job(id).processes == 3
    await until(lambda: not held(rack))


@on_a_rack(settings=QUIET)
async def test_a_reservation_of_a_wish_outlives_looks_at_the_log_and_not_its_lease(rack: Rack) -> None:
    """Whoever asked for it is gone."""
    id = await elastic(rack)
    (home,) = counts(rack, id)
    other, gone = [host for host in rack.hosts if host != home][:2]
    ask = Reserve(id, 1, ATTEMPTS // 2 + 7, 1, 1, False, 15.0)
    host = rack.hosts[other]
    rack.cut.add(gone)
    await host.service.on_message(gone, ask)
    before_s = host.env.clock.now_s()
    assert [hold.job for hold in held(rack)] == [id]
    await heal(rack, id)
    await until(lambda: host.env.clock.now_s() > before_s + 10.0)
    assert held(rack)
    await until(lambda: not held(rack), 20.0)
    rack.heal(str(gone))


@on_a_rack(settings=QUIET)
async def test_owners_of_a_drained_host_are_forgotten_and_all_hosts_hear_of_it(rack: Rack) -> None:
    id, at = await elastic(rack), first(rack)
    (home,) = counts(rack, id)
    other = next(host for host in rack.hosts if host != home)
    assert await wished(rack, at.id, {id: wish(rack.job(id), owners=(other, home) * 2)}) == ""
    await at.service.queue_log.insist(HostDrained(wall_s=1.0, host=other))
    await until(functools.partial(owned, at.told, (HostId(""), home) * 2))


@on_a_rack(settings=QUIET)
async def test_what_a_killed_coordinator_had_reserved_is_free_after_its_lease(rack: Rack) -> None:
    """Hosts kept GPUs for whoever had asked first and was gone, as long as people asked again for more processes."""
    id = await elastic(rack)
    other = next(host for host in rack.hosts if host not in counts(rack, id))
    ranks = rack.hosts[other].service.ranks
    job = ranks.queue.jobs[id]
    await ranks.dispatch(Heard(first(rack).id, Reserve(id, job.grant.epoch, 7, 1, 1, False, 15.0)))
    until_s = dict(ranks.reservations.lease_until_s)
    job.healing.wanted = job.processes + 1
    assert job.seeks and len(held(rack)) == 1
    await ranks._reservations_of(id)
    assert len(held(rack)) == 1 and ranks.reservations.lease_until_s == until_s
    job.healing.wanted = 0


@on_a_rack(settings=QUIET)
async def test_processes_that_leave_before_they_started_are_reported_by_their_host(rack: Rack) -> None:
    """Their lease had not come yet."""
    id, at = await elastic(rack), first(rack)
    (home,) = counts(rack, id)
    other = next(host for host in rack.hosts if host != home)
    for number in range(4):
        wanted = wish(rack.job(id), processes={home: 2, other: 1})
        assert await wished(rack, at.id, {id: wanted}, f"grow {number}") == ""
        await heal(rack, id)
        assert await wished(rack, at.id, {id: wish(rack.job(id), processes={home: 2})}, f"shrink {number}") == ""
        await until(lambda: not rack.job(id).healing.leaving, 20.0)
        assert not held(rack) and len(rack.hosts[other].service.ranks.reservations.free()) == 2
        await heal(rack, id)


@on_a_rack(settings=QUIET)
async def test_people_say_the_same_of_one_job_and_are_told_what_came_of_it(rack: Rack) -> None:
    id, at = await elastic(rack), first(rack)
    (home,) = counts(rack, id)
    other = next(host for host in rack.hosts if host != home)
    given: dict[str, Any] = {"processes": {home: 2, other: 1}, "shares": {home: 2, other: 6}, "by": "root"}
    view = await at.call("arrange", id=id, asker=operator("ann"), **given)
    assert view.elastic.shares == {home: 2, other: 6} and not view.elastic.equal and view.elastic.config == 1
    assert view.reason == f"ann: from 2 to 3 processes: 1 more on {other}; ranks by host are {home} 2, {other} 6"
    await heal(rack, id)
    view = await at.call("arrange", id=id, owners=[other] * 4, why="it has the faster card")
    assert view.elastic.owners == (other,) * 4 and view.elastic.tables == 4
    assert view.reason.startswith("root, it has the faster card: ")
    said = await refused(at.call("arrange", id=id, shares={home: 9}))
    assert (said.code, said.what, said.next) == (4, f"{id} was not arranged anew", f"agentctl job {id}")
    said = await refused(at.call("arrange", id=id, shares={home: "many"}))
    assert said.code == 2 and "numbers by host" in said.next
