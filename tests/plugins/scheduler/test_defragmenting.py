"""Gangs that heal make room for one that waits: which of them, and what the leader asks for."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.msgpack import encode

from covey.core.ids import HostId, JobId
from plugins.facts import HostView, Place
from plugins.gossiped import GpusNow
from plugins.scheduler.machine.leader.defragmenting import AGAIN_S, LASTS_S, SETTLES_S, TOGETHER_AGAIN_S
from plugins.scheduler.machine.leader.leader import QUIET_S, RackHost, ScheduleTick
from plugins.scheduler.machine.log.models import StepHistory, gang_of
from plugins.scheduler.machine.log.queue import apply
from plugins.scheduler.machine.log.replacing import taken_over
from plugins.scheduler.messages.commands import (
    CancelAsked,
    Command,
    GpusKept,
    Granted,
    HostDrained,
    MoveAsked,
    Replaced,
    TakenBack,
)
from plugins.scheduler.policy.defragment import (
    MOVES_MAX,
    PAUSE_S,
    RUN_LEAST_S,
    STARTS_LATER_S,
    TOGETHER_MAX,
    Apart,
    Departure,
    Movable,
    departures,
    gains,
    merging,
    merging_gains,
    pays,
    together,
)
from plugins.scheduler.policy.eligible import GangShape
from plugins.scheduler.policy.packing import PACKLIMIT, TOLERATED, loss
from plugins.scheduler.service import views
from tests.plugins.scheduler.test_leader import Led

H1, H2, H3, H4 = (HostId(f"h{n}") for n in range(1, 5))
PLACES = st.lists(
    st.tuples(st.integers(1, 6), st.sampled_from([H1, H2, H3, H4]), st.integers(1, 4)),
    max_size=8,
    unique_by=lambda place: place[:2],
)
"""Places: job, host and GPUs of each: a gang has one place on a host."""
PACKS: list[Any] = ["few", "any", "host", "apart"]


def at(job: str, host: HostId, gpus: int, width: int | None = None, *others: HostId) -> Movable:
    return Movable(JobId(job), host, gpus, gpus if width is None else width, frozenset((host, *others)))


# ---- which -----------------------------------------------------------------------------------------------------------


def test_the_cheapest_place_moves_to_the_tightest_gap() -> None:
    free = {H1: 1, H2: 2, H3: 3}
    movable = [at("j1", H1, 3), at("j2", H2, 2), at("j3", H3, 1, 8)]
    found = departures(GangShape(1, 4, "few"), free, movable)
    assert found == [Departure(movable[1], H3)], "two GPUs stand still instead of eight, and h3 has room for them"


def test_a_gang_does_not_move_to_a_host_that_it_is_on() -> None:
    free = {H1: 2, H2: 2, H3: 0}
    assert departures(GangShape(1, 4, "few"), free, [at("j1", H1, 2, 4, H2)]) is None
    assert departures(GangShape(1, 4, "few"), {**free, H3: 2}, [at("j1", H1, 2, 4, H2)]) == [
        Departure(at("j1", H1, 2, 4, H2), H3)
    ]


def test_one_host_is_cleared_for_a_gang_that_wants_one() -> None:
    free = {H1: 2, H2: 1, H3: 1}
    small = [at("j1", H1, 1), at("j2", H1, 1), at("j3", H2, 3)]
    found = departures(GangShape(4, 1, "host"), free, small)
    assert found is not None and {step.place.job for step in found} == {"j1", "j2"}
    assert sorted(step.to for step in found) == [H2, H3]


def test_hosts_of_their_own_are_found_for_workers_that_lie_apart() -> None:
    found = departures(GangShape(3, 2, "apart"), {H1: 4, H2: 2, H3: 1, H4: 1}, [at("j1", H3, 1)])
    assert found == [Departure(at("j1", H3, 1), H4)]


def test_what_moves_makes_room_and_takes_none() -> None:
    assert departures(GangShape(2, 2, "few"), {H1: 1, H2: 2}, [at("j1", H1, 1)]) is None, "h2 would lose its own"
    assert departures(GangShape(2, 2, "few"), {H1: 1, H2: 3}, [at("j1", H1, 1)]) == [Departure(at("j1", H1, 1), H2)]
    found = departures(GangShape(3, 2, "few"), {H1: 1, H2: 2, H3: 3}, [at("j1", H1, 1)])
    assert found == [Departure(at("j1", H1, 1), H3)], "h2 is tighter, and would lose its own"


@given(
    free=st.dictionaries(st.sampled_from([H1, H2, H3, H4]), st.integers(0, 6), min_size=1),
    places=PLACES,
    shape=st.tuples(st.integers(1, 6), st.integers(1, 4), st.sampled_from(PACKS)),
)
def test_after_its_moves_a_gang_fits_and_no_host_has_less_than_nothing(
    free: dict[HostId, int], places: list[tuple[int, HostId, int]], shape: tuple[int, int, Any]
) -> None:
    wanted = GangShape(*shape)
    movable = [at(f"j{job}", host, gpus, 4) for job, host, gpus in places]
    found = departures(wanted, free, movable)
    if found is None:
        return
    left = dict(free)
    for place, to in found:
        assert place in movable and to != place.host
        left[place.host] += place.gpus
        left[to] -= place.gpus
    assert min(left.values()) >= 0 and sum(map(wanted.slots, left.values())) >= wanted.workers
    assert len(found) <= MOVES_MAX
    jobs = [step.place.job for step in found]
    assert len(jobs) == len(set(jobs)), "one place of a gang at a time"
    fits_now = sum(map(wanted.slots, free.values())) >= wanted.workers
    assert (found == []) == fits_now, "nobody moves for a gang that fits"


def test_it_pays_for_whoever_waits_longer_than_others_stand() -> None:
    steps = [Departure(at("j1", H1, 2, 64), H2)]
    assert pays(8, 0.0, steps), "eight GPUs for half a minute, sixty-four for three seconds"
    assert not pays(4, 0.0, steps)
    assert pays(4, 60.0, steps), "it has waited longer, and will"


@given(
    free=st.dictionaries(st.sampled_from([H1, H2, H3, H4]), st.integers(0, 6), min_size=2),
    places=PLACES,
    workers=st.integers(2, 6),
)
def test_a_gang_lies_on_one_host_after_few_moves_and_one_that_would_do_is_found(
    free: dict[HostId, int], places: list[tuple[int, HostId, int]], workers: int
) -> None:
    movable = [at(f"j{job}", host, gpus, 4) for job, host, gpus in places if host in free]
    found = together(workers, 1, free, movable)
    alone = [
        (place, to)
        for place in movable
        for to in free
        if to not in place.hosts and free[to] >= place.gpus and free[place.host] + place.gpus >= workers
    ]
    if max(free.values()) >= workers:
        assert found is None, "it lies on one as it is"
    elif found is None:
        assert not alone, "every single move that would do"
    else:
        left = dict(free)
        for place, to in found:
            left[place.host] += place.gpus
            left[to] -= place.gpus
        assert len(found) <= TOGETHER_MAX and min(left.values()) >= 0 and max(left.values()) >= workers


def test_a_gang_minds_being_spread_by_what_it_lost_or_by_its_skew() -> None:
    assert loss(0.9, None, PACKLIMIT) == TOLERATED and loss(0.2, None, PACKLIMIT) == 0.0
    assert loss(None, None, PACKLIMIT) == 0.0, "nobody knows"
    assert loss(0.1, 0.4, PACKLIMIT) == 0.4 and loss(0.9, 0.04, PACKLIMIT) == 0.0, "measured, so its skew is no matter"


def test_it_is_moved_for_where_it_would_lose_more_than_stands_still() -> None:
    steps = [Departure(at("j1", H1, 2, 8), H2)]
    assert gains(8, 0.0, TOLERATED, steps), "5 % of five minutes, and all stand for three seconds"
    assert not gains(2, 0.0, TOLERATED, steps)
    assert gains(2, 0.0, 0.5, steps) and gains(2, 2000.0, TOLERATED, steps), "it loses more, or longer"
    assert not gains(8, 0.0, (STARTS_LATER_S + PAUSE_S) / RUN_LEAST_S, steps), "just as much is not more"


# ---- the leader ------------------------------------------------------------------------------------------------------

RACK = (RackHost(H1, 4), RackHost(H2, 4), RackHost(H3, 4))


class Gaps:
    """A rack where j1 heals, and has two GPUs on each of h1 and h2; j2 does not, and has two on h3. The other six are
    in gaps."""

    WAITS: dict[str, Any] = {"pack": "host"}

    def __init__(self, healing: tuple[HostId, ...] = (H1, H2), stays: str = "guaranteed", **settings: Any) -> None:
        self.led = Led(**settings)
        self.heals = self.led.run(4, host=H1)
        self.stays = self.led.run(2, host=H2, **{"class": stays})
        self.job(self.heals).start.places = (Place(H1, (0, 1), ("a0", "a1")), Place(H2, (2, 3), ("b0", "b1")))
        self.job(self.stays).start.places = (Place(H3, (0, 1), ("c0", "c1")),)
        self.job(self.heals).healing.may_be_lost = healing
        self.led.queue.rebuild()
        self.led.leader.forget()
        self.waits = self.led.submit(4, tenant="bob", **self.WAITS)

    def job(self, id: JobId) -> Any:
        return self.led.queue.jobs[id]

    def look(self, after_s: float = 1.0, rack: tuple[RackHost, ...] = RACK) -> Sequence[Command]:
        self.led.now_s += after_s
        found = [action.command for action in self.led.leader.handle(ScheduleTick(rack, 1.0), self.led.now_s)]
        self.led.leader.check()
        kinds = MoveAsked | GpusKept | Granted | TakenBack
        told = [command for command in found if isinstance(command, kinds)]
        for command in told:
            self.led.say(command)
        return told


def test_a_part_of_a_gang_moves_so_that_another_one_fits() -> None:
    it = Gaps()
    moved, kept = it.look()
    assert isinstance(moved, MoveAsked) and (moved.job, moved.host, moved.to) == (it.heals, H1, H3)
    assert "so that j3 (tenant bob, 4 GPUs) fits" in moved.by
    assert isinstance(kept, GpusKept) and kept.gpus == {H1: 2}, "nobody else gets them meanwhile"
    assert it.look() == [], "it waits for that"
    epoch, places = it.job(it.heals).grant.epoch, {H1: Place(H3, (0, 1), ("c2", "c3"), 1)}
    it.led.say(Replaced(wall_s=1.0, job=it.heals, epoch=epoch, places=places))
    assert it.look() == [], "what was there is not over yet"
    it.job(it.heals).healing.leaving = ()
    it.led.queue.rebuild()
    it.led.leader.forget()
    (granted,) = it.look()
    assert isinstance(granted, Granted) and granted.job == it.waits


def test_nobody_moves_who_would_begin_anew_or_where_people_want_none() -> None:
    for gaps in (Gaps(healing=()), Gaps(healing=(H1,)), Gaps(defragment=False)):
        assert not [command for command in gaps.look() if isinstance(command, MoveAsked)]


def test_a_gang_whose_moves_come_to_nothing_is_treated_as_any_other_for_a_while() -> None:
    it = Gaps()
    it.look()
    it.job(it.heals).healing.moving = {}
    it.led.queue.rebuild()
    told = it.look(2.0)
    assert not [command for command in told if isinstance(command, MoveAsked)]
    assert [command for command in it.look(AGAIN_S) if isinstance(command, MoveAsked)]


def test_a_gang_waits_for_moves_only_so_long() -> None:
    it = Gaps()
    it.look()
    assert it.led.leader.defragmenting.kept_by(it.job(it.waits)) == {H1: 4}
    it.look(LASTS_S)
    assert it.led.leader.defragmenting.kept_by(it.job(it.waits)) is None


def test_where_a_part_can_move_no_job_is_stopped() -> None:
    told = Gaps(stays="opportunistic").look()
    assert [type(command) for command in told if isinstance(command, MoveAsked | TakenBack)] == [MoveAsked]
    told = Gaps(stays="opportunistic", defragment=False).look()
    assert [type(command) for command in told if isinstance(command, MoveAsked | TakenBack)] == [TakenBack]


def test_nobody_else_gets_the_gap_that_a_part_is_about_to_move_to() -> None:
    it = Gaps()
    it.look()
    it.look()
    assert it.led.leader.capacity.free == {H1: 2, H2: 2}, "h3's two are as good as held"
    rack = [
        HostView(host=host, state="alive", since_s=0.0, values={"gpus": encode(GpusNow(4, 2, "", True))})
        for host in (H1, H2, H3)
    ]
    queue = it.led.queue
    assert views.free_of(rack, queue, it.job(it.waits)) == {H1: 2, H2: 2, H3: 0}
    assert views.free_of(rack, queue, it.job(it.heals)) == {H1: 2, H2: 2, H3: 2}, (
        "for the gang that moves they are free"
    )


# ---- a gang that could start on several hosts ------------------------------------------------------------------------


class Spread(Gaps):
    """A rack where two GPUs are free on each host, and j3, which wants four, has one huge tensor."""

    WAITS = {"skew": 0.7}

    def moves(self, after_s: float = 1.0, rack: tuple[RackHost, ...] = RACK) -> list[MoveAsked]:
        return [command for command in self.look(after_s, rack) if isinstance(command, MoveAsked)]

    def moved(self) -> None:
        """Let happen what was asked for."""
        job = self.job(self.heals)
        (host, to), *_ = job.healing.moving.items()
        place = job.place_on(host)
        gpus = tuple(f"{to}-new-{n}" for n in range(len(place.gpus)))
        places = {host: Place(to, place.ranks, gpus, job.healing.healed + 1)}
        self.led.say(Replaced(wall_s=1.0, job=job.id, epoch=job.grant.epoch, places=places))
        job.healing.leaving, job.healing.may_be_lost = (), tuple(place.host for place in job.start.places)
        self.led.queue.rebuild()
        self.led.leader.feed.everything()


def test_a_part_of_a_gang_moves_so_that_one_that_minds_lies_on_one_host() -> None:
    it = Spread()
    moved, kept = it.look()
    assert isinstance(moved, MoveAsked) and (moved.job, moved.host, moved.to) == (it.heals, H1, H3)
    assert "so that j3 (tenant bob, 4 GPUs) lies on one host, not on 2" in moved.by and moved.gang == it.waits
    assert isinstance(kept, GpusKept) and kept.gpus == {H1: 2}
    assert it.look() == [], "it waits for that"
    it.moved()
    (kept,) = it.look()
    assert isinstance(kept, GpusKept) and kept.gpus == {H1: 4}
    assert it.look() == [], "its coordinator may not have heard yet that h1 is free, and would spread it"
    (granted,) = it.look(SETTLES_S)
    assert isinstance(granted, Granted) and granted.job == it.waits
    assert it.led.leader.capacity.free == {H1: 4, H2: 2}


def test_events_of_both_say_so() -> None:
    it = Spread()
    found = [action.command for action in it.led.leader.handle(ScheduleTick(RACK, 1.0), it.led.now_s + 1.0)]
    (asked,) = [command for command in found if isinstance(command, MoveAsked)]
    _, notes = apply(it.led.queue, it.led.queue.index + 1, asked)
    said = {(note.subject, note.event): note.reason for note in notes}
    by = "the leader, so that j3 (tenant bob, 4 GPUs) lies on one host, not on 2,"
    assert said[it.heals, "to move"] == f"{by} moves its ranks on h1 to h3"
    assert said[it.waits, "other jobs move for it"] == f"{by} first moves ranks of j1 from h1 to h3"


def test_a_gang_that_does_not_mind_or_of_which_nothing_is_known_starts_at_once() -> None:
    for waits in ({"skew": 0.1}, {}, {"skew": 0.7, "pack": "any"}):
        it = Spread()
        it.job(it.waits).spec = msgspec.structs.replace(
            it.job(it.waits).spec, skew=waits.get("skew", 0.0), pack=waits.get("pack", "few")
        )
        (granted,) = it.look()
        assert isinstance(granted, Granted), waits


def test_what_was_measured_counts_before_the_skew() -> None:
    it = Spread()
    it.led.queue.models.steps[gang_of(it.job(it.waits).spec)] = StepHistory(1.0, 1.01)
    assert isinstance(it.look()[0], Granted)
    it = Spread()
    spec = it.job(it.waits).spec = msgspec.structs.replace(it.job(it.waits).spec, skew=0.0)
    it.led.queue.models.steps[gang_of(spec)] = StepHistory(1.0, 1.5)
    assert len(it.moves()) == 1


def test_nobody_moves_for_so_little() -> None:
    it = Spread()
    it.job(it.heals).spec = msgspec.structs.replace(it.job(it.heals).spec, gpus_per_worker=8)
    assert isinstance(it.look()[0], Granted)


@pytest.mark.parametrize(
    "trouble", ["drained", "gone", "away", "suspect", "another moves", "it placed badly", "defragment"]
)
def test_nor_where_something_else_is_going_on(trouble: str) -> None:
    it = Spread(defragment=trouble != "defragment")
    rack = (*RACK, RackHost(H4, 0))
    if trouble == "drained":
        it.led.say(HostDrained(wall_s=1.0, host=H4, by="ann"))
    elif trouble == "gone":
        rack = (*RACK, RackHost(H4, 4, gone_s=10.0))
    elif trouble == "away":
        rack = (*RACK, RackHost(H4, 0, gone_s=1.0, away=True))
    elif trouble == "suspect":
        rack = (*RACK, RackHost(H4, 0, suspect=True))
    elif trouble == "another moves":
        it.job(it.heals).healing.moving = {H2: HostId("")}
        it.led.queue.rebuild()
    elif trouble == "it placed badly":
        it.job(it.waits).tally.place_failures = 1
        it.led.leader.feed.everything()
    told = it.look(1.0, rack) or it.look(1.0, rack)
    assert [type(command) for command in told] == [Granted], told
    if trouble == "gone":
        assert len(Spread().moves(1.0, (*RACK, RackHost(H4, 4, gone_s=QUIET_S)))) == 1, "as good as none by then"


def test_moves_that_come_to_nothing_cost_a_gang_its_place_no_more_than_once() -> None:
    it = Spread()
    assert len(it.moves()) == 1
    it.job(it.heals).healing.moving = {}
    it.led.queue.rebuild()
    it.led.leader.feed.everything()
    it.look(2.0)
    (granted,) = it.look(SETTLES_S)
    assert isinstance(granted, Granted), "it starts where there is room"


def test_one_gang_moves_for_such_a_gain_once_in_some_minutes() -> None:
    it = Spread()
    assert len(it.moves()) == 1
    it.led.say(CancelAsked(wall_s=1.0, job=it.waits))
    it.job(it.heals).healing.moving = {}
    it.led.queue.rebuild()
    it.led.leader.feed.everything()
    it.waits = it.led.submit(4, tenant="bob", skew=0.7)
    assert it.led.leader.defragmenting.rests_until_s
    assert isinstance(it.look(AGAIN_S)[0], Granted)
    it.led.say(CancelAsked(wall_s=1.0, job=it.waits))
    it.waits = it.led.submit(4, tenant="bob", skew=0.7)
    assert len(it.moves(TOGETHER_AGAIN_S)) == 1


# ---- a gang that runs on several hosts -------------------------------------------------------------------------------


def test_a_gang_goes_to_that_of_its_hosts_that_has_most_of_it() -> None:
    gang = Apart(((H1, 1), (H2, 2), (H3, 1)))
    assert merging(gang, {H1: 4, H2: 2, H3: 4, H4: 9}) == [(H1, H2), (H3, H2)]
    assert merging(gang, {H1: 3, H2: 1, H3: 4}) == [(H2, H1), (H3, H1)], "the other has no room"
    assert merging(gang, {H1: 2, H2: 1, H3: 2, H4: 9}) is None, "none of its own has"
    assert merging(gang, {H2: 9}) is not None and merging(gang, {}) is None, "hosts that take no jobs"
    assert merging(Apart(((H1, 4),)), {H1: 4}) is None
    assert merging(Apart(tuple((HostId(f"x{n}"), 1) for n in range(TOGETHER_MAX + 2))), {HostId("x0"): 99}) is None


def test_it_moves_where_it_would_lose_more_than_it_stands_still() -> None:
    gang = Apart(((H1, 1), (H2, 1)))
    assert merging_gains(gang, 0.0, TOLERATED, 1) and not merging_gains(gang, 0.0, PAUSE_S / RUN_LEAST_S, 1)
    assert not merging_gains(gang, 0.0, 0.015, 2) and merging_gains(gang, 1000.0, 0.015, 2)


class Wide(Spread):
    """A rack where no job waits; j1, which runs on h1 and h2, has one huge tensor, and two GPUs are free on each
    host."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.led.say(CancelAsked(wall_s=1.0, job=self.waits))
        self.minds(skew=0.7)

    def minds(self, **spec: Any) -> None:
        self.job(self.heals).spec = msgspec.structs.replace(self.job(self.heals).spec, **spec)

    def joined(self) -> None:
        job = self.job(self.heals)
        ((host, to),) = job.healing.moving.items()
        left = job.place_on(host)
        new = taken_over(Place(to, left.ranks, ("n0", "n1"), job.healing.healed + 1), job.place_on(to))
        self.led.say(Replaced(wall_s=1.0, job=job.id, epoch=job.grant.epoch, places={host: new}))
        assert new in job.start.places
        job.healing.leaving = ()
        self.led.queue.rebuild()
        self.led.leader.feed.everything()


def test_a_gang_that_runs_on_several_hosts_goes_on_on_one_once_there_is_room() -> None:
    it = Wide()
    (asked,) = it.moves()
    assert (asked.job, asked.host, asked.to, asked.coordinator) == (it.heals, H2, H1, H1)
    assert asked.by == "the leader, so that it lies on one host, not on 2," and asked.gang is None
    assert it.moves() == []
    it.joined()
    assert [place.host for place in it.job(it.heals).start.places] == [H1]
    assert it.moves(TOGETHER_AGAIN_S) == []


def test_a_move_that_fails_is_tried_again_after_a_while() -> None:
    it = Wide()
    assert len(it.moves()) == 1
    it.job(it.heals).healing.moving = {}
    it.led.queue.rebuild()
    it.led.leader.feed.everything()
    assert it.moves() == [] and len(it.moves(AGAIN_S)) == 1


@pytest.mark.parametrize(
    "but",
    ["it does not mind", "any", "apart", "another starts", "suspect", "no room", "one stays", "parts", "as set"],
)
def test_it_stays_where_it_is(but: str) -> None:
    it = Wide(defragment=but != "as set")
    rack: tuple[RackHost, ...] = RACK
    match but:
        case "it does not mind":
            it.minds(skew=0.0)
        case "any" | "apart":
            it.minds(pack=but)
        case "another starts":
            it.led.submit(6, tenant="bob")
        case "suspect":
            rack = (*RACK, RackHost(H4, 0, suspect=True))
        case "no room":
            rack = (RackHost(H1, 3), RackHost(H2, 3), RackHost(H3, 4))
        case "one stays":
            it.job(it.heals).healing.may_be_lost = (H1,)
            it.led.queue.rebuild()
        case "parts":
            it.job(it.heals).start.places = (Place(H1, (0, 1), ("a0+1", "a1")), it.job(it.heals).start.places[1])
            it.led.queue.rebuild()
        case _:
            assert but == "as set"
    it.led.leader.feed.everything()
    assert it.moves(1.0, rack) == [] == it.moves(1.0, rack)
