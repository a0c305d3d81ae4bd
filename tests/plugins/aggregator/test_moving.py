"""A coordinator moves a job from an owner that can go on to another one: event by event. (Whole racks: test_live.)"""

from itertools import pairwise
from typing import Any

import msgspec

from covey.core.events import Heard, LogEvent, Publish, SetTimer, Undelivered
from covey.core.ids import HostId, JobId
from covey.wire.sums import NextOwner
from plugins.aggregator.machine.coordinator import AGAIN_S, OFFER_S, Expired, JobCoordinator, JobStepped
from plugins.aggregator.machine.events import AskQuestion, GangPlaced, Keep, QuestionAnswered, RackUpdated
from plugins.aggregator.machine.owner import Owner
from plugins.aggregator.machine.process_words import ProcessUp
from plugins.aggregator.machine.tracked_job import HOME_S, Offering, OwnerSearch, Summed
from plugins.aggregator.messages import (
    Accepted,
    AggregatorSettings,
    Assigned,
    AssignmentDropped,
    Coordinates,
    Declined,
    Demand,
    GetOwner,
    Handover,
    KnownOwner,
    MoveTensors,
    Offer,
    Profiled,
    Retire,
    WorkCounters,
    WorkOf,
)
from plugins.aggregator.policy import Candidate
from plugins.facts import Place, TensorsSeen
from tests.plugins.aggregator.play import G1, JOB, PLACED, SECRET, A, B, C, D, Play, promising, sends

E = HostId("e")
DEMAND = Demand(100_000, 30_000)


def seen(*gone: HostId, **used_us: int) -> RackUpdated:
    """A view in which c, d and e sum, each with a cycle of 100 ms of which it uses `used_us` microseconds; those
    without a figure are idle."""
    hosts = [host for host in (C, D, E) if host not in gone]
    return RackUpdated(
        frozenset(gone),
        tuple(
            Candidate(host, False, 0.0, 1, 0.0, 100_000 if host in used_us else 0, used_us.get(host, 0))
            for host in hosts
        ),
    )


def summed(profiled: bool = True) -> tuple[Play, Assigned]:
    """A machine on host a, which coordinates a job that c sums, and has promised what it needs."""
    play = Play(JobCoordinator(A, lambda size: bytes(size)))
    play(RackUpdated(frozenset(), (Candidate(C, False, 0.0, 0, 0.0),)))
    play(PLACED)
    play(QuestionAnswered(A, GetOwner(JOB), KnownOwner(None)))
    ((_, offer),) = sends(play(QuestionAnswered(B, GetOwner(JOB), KnownOwner(None))))
    assigned = next(message for _, message in sends(play(Heard(C, Accepted(JOB, offer.epoch, "10.0.0.3:9")))))
    if profiled:
        play(QuestionAnswered(C, WorkOf(JOB, assigned.epoch), WorkCounters(True, demand=DEMAND)))
    play(seen())
    return play, assigned


def offered(actions: list[Any]) -> tuple[HostId, Offer]:
    ((to, offer),) = [(to, message) for to, message in sends(actions) if isinstance(message, Offer)]
    return to, offer


def notes(actions: list[Any]) -> list[tuple[str, str]]:
    return [(action.event, action.reason) for action in actions if isinstance(action, LogEvent)]


def given_away(to: HostId | None, play: Play, assigned: Assigned, why: str = "c empties itself") -> list[Any]:
    return play(Heard(C, Handover(JOB, assigned.epoch, to, why)))


def test_a_host_that_declines_its_table_is_asked_less_and_less_often() -> None:
    play = Play(JobCoordinator(A, lambda size: bytes(size)))
    play(RackUpdated(frozenset(), (Candidate(C, False, 0.0, 0, 0.0),)))
    play(msgspec.structs.replace(PLACED, prefers=E, stays=True))
    play(QuestionAnswered(A, GetOwner(JOB), KnownOwner(None)))
    ((to, first),) = sends(play(QuestionAnswered(B, GetOwner(JOB), KnownOwner(None))))
    assert (to, first.stays) == (C, False), "gossip has not told of e yet"
    play(Heard(C, Accepted(JOB, first.epoch, "10.0.0.3:9")))
    asked_s: list[float] = []
    for _ in range(7200):
        play.now_s += 1
        for host, message in sends(play(seen())):
            if isinstance(message, Offer):
                assert (host, message.stays) == (E, True)
                asked_s.append(play.now_s)
                play(Heard(E, Declined(JOB, message.epoch, "busy")))
    pauses = [after - before for before, after in pairwise([100.0, *asked_s])]
    assert pauses[:4] == [10, 20, 40, 80] and max(pauses) == HOME_S[1] and len(pauses) < 15
    play.now_s += HOME_S[1]
    to, offer = offered(play(seen()))
    play(Heard(to, Accepted(JOB, offer.epoch, "10.0.0.5:9")))
    assert play.machine.jobs[JOB].assigned.owner == E
    for _ in range(100):
        play.now_s += 1
        assert not [message for _, message in sends(play(seen())) if isinstance(message, Offer)]


def test_a_job_goes_to_who_holds_room_and_its_owner_ends_after_the_new_one_accepted() -> None:
    """Reference: §4.3.3.3."""
    play, assigned = summed()
    found = given_away(E, play, assigned)
    to, offer = offered(found)
    assert (to, offer.demand) == (E, DEMAND) and offer.epoch > assigned.epoch and len(sends(found)) == 1
    assert [action for action in found if isinstance(action, SetTimer)] == [
        SetTimer(OFFER_S, Expired(JOB, offer.epoch))
    ]
    told = sends(play(Heard(E, Accepted(JOB, offer.epoch, "10.0.0.5:9"))))
    now = Assigned(JOB, offer.epoch, E, "10.0.0.5:9", SECRET, handed_over=True)
    assert told == [
        (A, now),
        (B, now),
        (C, Retire(JOB, assigned.epoch, offer.epoch, "e sums it", True, NextOwner("10.0.0.5:9", SECRET))),
    ]
    assert play.machine.jobs[JOB].state == Summed(now, promised=True)


def test_only_the_owner_that_goes_on_until_then_brings_what_it_has() -> None:
    """Another owner that was asked before, and may have accepted, brings nothing."""
    play, assigned = summed()
    play(seen(c=60_000, d=10_000, e=20_000))
    first, offer = offered(given_away(None, play, assigned, "j2 lost 15 % of its speed"))
    second, again = offered(play(Expired(JOB, offer.epoch)))
    told = sends(play(Heard(second, Accepted(JOB, again.epoch, "10.0.0.9:9"))))
    brings = {to: message.to for to, message in told if isinstance(message, Retire)}
    assert brings == {C: NextOwner("10.0.0.9:9", SECRET), first: None} and first != second


def test_where_a_person_wants_it_there_it_stays() -> None:
    """This holds also for a table that is to stay on another host; a host that declines is asked again."""
    owner = Play(Owner(AggregatorSettings(), me=C))
    owner(ProcessUp("10.0.0.3:9", {}))
    play = Play(JobCoordinator(A, lambda size: bytes(size)))
    play(seen())
    play(msgspec.structs.replace(PLACED, prefers=C, stays=True))
    play(QuestionAnswered(A, GetOwner(JOB), KnownOwner(None)))
    to, first = offered(play(QuestionAnswered(B, GetOwner(JOB), KnownOwner(None))))
    owner(Heard(A, first))
    play(Heard(to, Accepted(JOB, first.epoch, "10.0.0.3:9")))
    assert owner(Heard(D, MoveTensors(JOB, first.epoch - 1, E))) == [], "another owner was meant"
    assert owner(Heard(D, MoveTensors(JOB, first.epoch, C))) == [], "it is there"
    ((coordinator, wish),) = sends(owner(Heard(D, MoveTensors(JOB, first.epoch, E))))
    assert coordinator == A
    to, offer = offered(play(Heard(C, wish)))
    assert (to, offer.stays) == (E, True)
    play(Heard(E, Declined(JOB, offer.epoch, "busy")))
    play.now_s += HOME_S[0]
    to, again = offered(play(seen()))
    assert to == E
    play(Heard(E, Accepted(JOB, again.epoch, "10.0.0.5:9")))
    for _ in range(100):
        play.now_s += 1
        assert not [message for _, message in sends(play(seen())) if isinstance(message, Offer)]


def test_an_order_to_move_under_an_epoch_that_is_over_moves_nothing() -> None:
    play, assigned = summed()
    _, offer = offered(given_away(E, play, assigned))
    assert given_away(D, play, assigned) == [], "it moves already"
    play(Heard(E, Accepted(JOB, offer.epoch, "10.0.0.5:9")))
    assert given_away(D, play, assigned) == [], "c is its former owner"


def test_when_the_only_host_that_holds_room_declines_the_job_stays_and_looks_later() -> None:
    play, assigned = summed()
    _, offer = offered(given_away(E, play, assigned))
    found = play(Heard(E, Declined(JOB, offer.epoch, "it is full")))
    assert ("tensors stay", "on c: e: it is full") in notes(found) and sends(found) == []
    assert play.machine.jobs[JOB].state == Summed(assigned, promised=False)
    play.now_s += AGAIN_S
    assert (C, Profiled(JOB, assigned.epoch, DEMAND)) in sends(play(seen()))
    _, offer = offered(play(Heard(C, AssignmentDropped(JOB, assigned.epoch, "its process died"))))
    assert offer.demand == DEMAND, "who has lost its owner asks for what it needs first"


def test_a_host_that_is_gone_is_not_offered_what_it_held_room_for() -> None:
    for rack in (seen(E), RackUpdated(frozenset(), seen(E).candidates)):
        play, assigned = summed()
        play(rack)
        assert given_away(E, play, assigned) == [], "and nothing is said: nobody was asked"
        assert play.machine.jobs[JOB].state == Summed(assigned, promised=True)


def test_a_host_that_goes_while_it_is_asked_leaves_the_job_where_it_was() -> None:
    for lost in (seen(E), None):
        play, assigned = summed()
        to, offer = offered(given_away(E, play, assigned))
        found = play(lost) if lost is not None else play(Undelivered(to, offer))
        why = "it is gone" if lost is not None else f"no answer within {OFFER_S:g} s"
        assert ("tensors stay", f"on c: e: {why}") in notes(found)
        assert play.machine.jobs[JOB].state == Summed(assigned, promised=False)


def test_one_that_accepts_too_late_is_told_that_the_job_stayed() -> None:
    play, assigned = summed()
    _, offer = offered(given_away(E, play, assigned))
    found = play(Expired(JOB, offer.epoch))
    assert (E, Retire(JOB, offer.epoch, assigned.epoch, "c sums it")) in sends(found)
    late = sends(play(Heard(E, Accepted(JOB, offer.epoch, "10.0.0.5:9"))))
    assert late == [(E, Retire(JOB, offer.epoch, assigned.epoch, "another host was found meanwhile"))]


def test_an_owner_that_goes_or_drops_the_job_while_it_moves_is_replaced_by_anybody() -> None:
    for lost in (lambda epoch: seen(C), lambda epoch: Heard(C, AssignmentDropped(JOB, epoch, "its process died"))):
        play, assigned = summed()
        _, offer = offered(given_away(E, play, assigned))
        to, again = offered(play(lost(assigned.epoch)))
        assert to != C and again.epoch > offer.epoch and again.demand == DEMAND
        state = play.machine.jobs[JOB].state
        assert isinstance(state, Offering) and state.search == OwnerSearch(True, C), "nobody goes on with it"


def test_who_is_asked_to_leave_goes_to_an_aggregator_with_little_to_do() -> None:
    """Reference: §4.5.2.3."""
    play, assigned = summed()
    play(seen(c=60_000, d=50_000, e=20_000))
    to, _ = offered(given_away(None, play, assigned, "j2 lost 15 % of its speed"))
    assert to == E
    play, assigned = summed()
    play(seen(c=60_000, d=50_000, e=40_000))
    assert given_away(None, play, assigned) == []
    assert play.machine.jobs[JOB].state == Summed(assigned, promised=True), "its owner still keeps its promise"


def test_a_job_on_trial_goes_only_where_room_is_held_for_it() -> None:
    play, assigned = summed(profiled=False)
    assert given_away(None, play, assigned) == []
    to, offer = offered(given_away(E, play, assigned))
    assert to == E and offer.demand is None


def test_an_owner_without_room_for_what_was_measured_is_left_for_one_with_room() -> None:
    """The hosts with room are known by gossip. Best fit comes first; no host is asked that has none. Reference:
    Pseudocode 3, 16-24."""
    play, assigned = summed()
    play(seen(c=90_000, d=80_000, e=40_000))
    refused = Declined(JOB, assigned.epoch, "30000 us of work and 10000 us free", assigned.epoch)
    found = play(Heard(C, refused))
    to, offer = offered(found)
    assert (to, offer.demand, offer.refused) == (E, DEMAND, "c: 30000 us of work and 10000 us free")
    assert ("tensors without a reserved share", "c: 30000 us of work and 10000 us free") in notes(found)
    found = play(Heard(E, Declined(JOB, offer.epoch, "full by now")))
    assert ("tensors stay", "on c: e: full by now") in notes(found)
    play(seen(c=90_000, d=80_000, e=80_000))
    first, second = (play(Heard(C, refused)) for _ in range(2))
    assert notes(first) == [("tensors without a reserved share", "c: 30000 us of work and 10000 us free")]
    assert second == [], "the same words once"


def test_a_job_without_owner_that_fits_nowhere_is_summed_unpromised_and_told_why() -> None:
    play, assigned = summed()
    play(seen(c=90_000, d=80_000, e=80_000))
    found = play(Heard(C, AssignmentDropped(JOB, assigned.epoch, "its process died")))
    asked = []
    for _ in range(3):
        to, offer = offered(found)
        asked.append((to, offer.demand))
        found = play(Heard(to, Declined(JOB, offer.epoch, "full")))
    assert sorted(asked) == [(C, DEMAND), (D, DEMAND), (E, DEMAND)] and asked[-1][0] == C, "who dropped it comes last"
    to, offer = offered(found)
    assert offer.demand is None and offer.refused == "c: full"
    assert any(reason.endswith("no host has room for it (c: full), and one must sum it") for _, reason in notes(found))
    play(Heard(to, Accepted(JOB, offer.epoch, "10.0.0.9:9")))
    assert not play.machine.jobs[JOB].state.promised


def test_a_job_that_runs_again_needs_what_it_needed_if_it_has_as_many_ranks() -> None:
    for size, needs in ((2, DEMAND), (3, None)):
        play, _ = summed()
        places = (Place(A, tuple(range(size - 1)), ()), Place(B, (size - 1,), ()))
        play(GangPlaced(JOB, 2, size, places))
        play(QuestionAnswered(A, GetOwner(JOB), KnownOwner(None)))
        _, offer = offered(play(QuestionAnswered(B, GetOwner(JOB), KnownOwner(None))))
        assert (offer.workers, offer.demand) == (size, needs)


def test_what_another_coordinator_assigned_is_promised_only_once_its_owner_says_so() -> None:
    play, assigned = summed()
    higher = Assigned(JOB, assigned.epoch + 1, D, "10.0.0.4:9", SECRET)
    play(Heard(B, higher))
    play.now_s += AGAIN_S
    assert (D, Profiled(JOB, higher.epoch, DEMAND)) in sends(play(seen()))
    play(QuestionAnswered(D, WorkOf(JOB, higher.epoch), WorkCounters(True, demand=DEMAND)))
    play.now_s += AGAIN_S
    assert not any(isinstance(message, Profiled) for _, message in sends(play(seen())))


def test_what_an_owner_was_told_before_is_not_taken_for_what_the_job_needs_now() -> None:
    play, assigned = summed()
    play(QuestionAnswered(C, WorkOf(JOB, assigned.epoch), WorkCounters(True, demand=Demand(100_000, 20_000))))
    assert play.machine.jobs[JOB].gauge.demand == DEMAND


def test_counters_of_two_owners_are_never_one_window() -> None:
    play, assigned = summed(profiled=False)
    play(QuestionAnswered(C, WorkOf(JOB, assigned.epoch), WorkCounters(True, 1_000, 10)))
    higher = Assigned(JOB, assigned.epoch + 1, D, "10.0.0.4:9", SECRET)
    play(Heard(B, higher))
    play.now_s += 100
    found = play(QuestionAnswered(D, WorkOf(JOB, higher.epoch), WorkCounters(True, 900_000, 500)))
    assert sends(found) == [] and play.machine.jobs[JOB].gauge.demand is None
    assert play(QuestionAnswered(C, WorkOf(JOB, assigned.epoch), WorkCounters(True, 950_000, 600))) == [], (
        "what a former owner counted"
    )
    play.now_s += 100
    found = play(QuestionAnswered(D, WorkOf(JOB, higher.epoch), WorkCounters(True, 1_400_000, 1_000)))
    assert sends(found) == [(D, Profiled(JOB, higher.epoch, Demand(200_000, 1_000)))]


def test_only_steps_of_the_present_run_while_somebody_sums_it_are_counted() -> None:
    def step(play: Play, job: JobId = JOB, grant: int = 1) -> list[HostId]:
        return [action.to for action in play(JobStepped(job, grant, 1, 100_000)) if isinstance(action, AskQuestion)]

    play, assigned = summed()
    play.now_s += 100
    assert step(play, JobId("j9")) == step(play, grant=2) == []
    assert step(play) == [C], "its counters are where a window begins"
    play.now_s += 100
    given_away(E, play, assigned)
    assert step(play) == [], "while it moves"
    play.now_s += AGAIN_S
    assert play(seen()) == []


def test_a_former_owner_that_gets_the_job_back_is_not_told_to_end_it() -> None:
    play, _ = summed()
    to, offer = offered(play(seen(C, E)))
    assert to == D
    play(Heard(D, Accepted(JOB, offer.epoch, "10.0.0.4:9")))
    to, again = offered(play(RackUpdated(frozenset({D, E}), (Candidate(C, False, 0.0, 1, 0.0),))))
    told = sends(play(Heard(C, Accepted(JOB, again.epoch, "10.0.0.3:9"))))
    assert [(host, type(message)) for host, message in told] == [(A, Assigned), (B, Assigned)]
    assert sends(play(seen())) == [(D, Retire(JOB, offer.epoch, again.epoch, "c sums it"))], "when d is back"


def test_other_plugins_are_told_the_tensors_sizes_once_and_again_when_they_change() -> None:
    play, assigned = summed()

    def told(largest: int, total: int) -> list[Any]:
        work = WorkCounters(True, largest_bytes=largest, total_bytes=total, demand=DEMAND)
        found = play(QuestionAnswered(C, WorkOf(JOB, assigned.epoch), work))
        return [action.fact for action in found if isinstance(action, Publish)]

    assert told(0, 0) == [], "no tensor was pushed yet"
    assert told(4, 8) == [TensorsSeen(JOB, 1, 4, 8)]
    assert told(4, 8) == []
    assert told(4, 12) == [TensorsSeen(JOB, 1, 4, 12)]


# ---- a host that is drained ------------------------------------------------------------------------------------------


def drained(*sums: HostId) -> RackUpdated:
    return RackUpdated(frozenset(), tuple(Candidate(host, False, 0.0, 0, 0.0) for host in sums), drained=True)


def test_all_that_a_drained_host_sums_goes_elsewhere_and_nothing_new_comes() -> None:
    play = promising("j1", "j2")
    asked = sends(play(drained(C, D)))
    assert [(to, message.job, message.to) for to, message in asked] == [(A, "j1", D), (A, "j2", D)]
    assert all(isinstance(message, Handover) and message.reason == "c is drained" for _, message in asked)
    assert sends(play(drained(C, D))) == [], "each is asked once, and again only after a while"
    ((_, declined),) = sends(play(Heard(A, Offer(JobId("j3"), G1 + 1, 2, SECRET))))
    assert isinstance(declined, Declined) and declined.reason == "it is drained"
    assert not play.machine.promised().takes
    play.now_s += 20.0
    assert len(sends(play(drained(C, D)))) == 2


def test_what_no_other_host_sums_stays_on_a_drained_one() -> None:
    assert sends(promising("j1")(drained(C))) == []


def test_whoever_took_over_as_coordinator_hears_that_a_job_must_leave() -> None:
    play = promising("j1")
    play(drained(C, D))
    assert any(isinstance(action, Keep) for action in play(Heard(B, Coordinates(JobId("j1"), G1 + 1))))
    ((to, message),) = sends(play(drained(C, D)))
    assert to == B and isinstance(message, Handover), "at once: the one before may never have heard"
    assert play(Heard(A, Coordinates(JobId("j1"), G1))) == [], "of an older epoch"
    assert play.machine.jobs["j1"].coordinator == B
