"""Tables that ranks on a host own, by story: what the machine hears of them, and what it says and orders."""

from typing import Any

import msgspec
import pytest

from covey.core.events import Heard, LogEvent, SetTimer, Undelivered
from covey.core.ids import HostId, JobId
from covey.wire.sums import NextOwner
from plugins.aggregator.machine.coordinator import JobCoordinator
from plugins.aggregator.machine.direct_tables import (
    BACK_S,
    NO_RANKS,
    NONE_CAN,
    WAIT_S,
    DirectTable,
    DirectTables,
    ForgetByRank,
    RankFailed,
    RankSaid,
    RankServes,
    RanksMayOwn,
    ServeByRank,
    WaitOver,
)
from plugins.aggregator.machine.events import GangPlaced, Keep, QuestionAnswered, Unplaced
from plugins.aggregator.machine.owner import Owner
from plugins.aggregator.machine.process_words import ForgetJob, ProcessUp, Served
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
from plugins.facts import TensorsSeen
from tests.plugins.aggregator.play import G1, JOB, PLACES, SECRET, A, B, C, D, Play, rack, sends

T1 = JobId("j1/1")
OFFER = Offer(T1, G1 + 2, 2, SECRET, stays=True, direct=True)
AT = "10.0.0.2:9"
TABLE = DirectTable(T1, G1 + 2, 2, SECRET, A, 1)


def tables(*held: DirectTable, **changes: Any) -> Play:
    return Play(DirectTables(msgspec.structs.replace(AggregatorSettings(), **changes), B, held))


def may(*ranks: int, others: bool = False, grant: int = 1) -> RanksMayOwn:
    """Rank r is process 10 + r."""
    return RanksMayOwn(JOB, grant, {rank: 10 + rank for rank in ranks}, others)


def owning(rank: int = 1) -> Play:
    """A machine whose rank 1 owns table 1."""
    play = tables()
    play(may(rank, 3))
    play(Heard(A, OFFER))
    play(RankServes(T1, G1 + 2, 10 + rank, AT))
    return play


def said(process: int = 11, first: bool = False, **serves: int) -> RankSaid:
    found = {JobId(job.replace("_", "/")): epoch for job, epoch in serves.items()}
    return RankSaid(JOB, 1, process - 10, process, AT if found else "", found, first)


def declined(actions: Any) -> Declined:
    ((_, message),) = sends(actions)
    assert isinstance(message, Declined)
    return message


def test_a_table_is_accepted_once_it_is_on_disk_and_the_lowest_rank_serves_it() -> None:
    play = tables()
    play(may(3, 1))
    assert play(Heard(A, OFFER)) == [ServeByRank(TABLE, 11)]
    assert not play.machine.serves(T1, G1 + 2) and play(Heard(A, OFFER)) == []
    found = play(RankServes(T1, G1 + 2, 11, AT))
    assert sends(found) == [(A, Accepted(T1, G1 + 2, AT))]
    assert play.machine.serves(T1, G1 + 2) and play.machine.process_of(T1) == 11
    assert sends(play(Heard(A, OFFER))) == [(A, Accepted(T1, G1 + 2, AT))], "said twice"
    assert sends(play(Undelivered(A, Accepted(T1, G1 + 2, AT)))) == [(A, Accepted(T1, G1 + 2, AT))]


def test_an_offer_to_an_aggregator_is_not_for_ranks_and_the_other_way_round() -> None:
    play = tables()
    play(may(1))
    assert play(Heard(A, msgspec.structs.replace(OFFER, direct=False))) == []
    aggd = Play(Owner(AggregatorSettings(), me=B))
    aggd(ProcessUp("10.0.0.2:1", {}))
    assert aggd(Heard(A, OFFER)) == []


def test_an_offer_to_the_tables_home_waits_for_its_first_rank() -> None:
    play = tables()
    assert play(Heard(A, OFFER)) == [SetTimer(WAIT_S, WaitOver(T1, G1 + 2))]
    assert play(Heard(A, OFFER)) == [], "said twice"
    assert play(may(1)) == [ServeByRank(TABLE, 11)]
    assert play(WaitOver(T1, G1 + 2)) == [], "it does not wait any more"


def test_an_offer_that_no_rank_comes_for_is_declined_as_one_that_nobody_there_needs() -> None:
    play = tables()
    play(Heard(A, OFFER))
    later = msgspec.structs.replace(OFFER, epoch=G1 + 4)
    play(Heard(A, later))
    assert play(WaitOver(T1, G1 + 2)) == [], "the timer of an earlier offer"
    found = declined(play(WaitOver(T1, G1 + 4)))
    assert (found.epoch, found.reason, found.no_ranks, found.known) == (G1 + 4, NO_RANKS, True, G1 + 4)


def test_an_offer_to_another_host_than_the_tables_home_does_not_wait() -> None:
    found = declined(tables()(Heard(A, msgspec.structs.replace(OFFER, stays=False))))
    assert (found.reason, found.no_ranks) == (NO_RANKS, True)


def test_ranks_that_cannot_own_make_it_a_matter_of_aggregators() -> None:
    play = tables()
    play(Heard(A, OFFER))
    found = declined(play(may(others=True)))
    assert (found.reason, found.no_ranks) == (NONE_CAN, False)
    play(may())
    assert declined(play(Heard(A, msgspec.structs.replace(OFFER, epoch=G1 + 4)))).no_ranks, "they have ended"


def test_no_offer_is_declined_for_load() -> None:
    play = tables(serve=False, jobs_max=1, load_max=0.1)
    play(may(1))
    for table in range(1, 5):
        play(Heard(A, msgspec.structs.replace(OFFER, job=JobId(f"j1/{table}"), demand=Demand(10, 10))))
        play(RankServes(JobId(f"j1/{table}"), G1 + 2, 11, AT))
    assert len(play.machine.tables) == 4


def test_offers_are_declined_for_what_holds_of_them_alone() -> None:
    assert "never" in declined(tables(direct="never")(Heard(A, OFFER))).reason
    over = tables()
    over(may(1))
    over(Unplaced(JOB, 1, True))
    over(Unplaced(T1, 1, True))
    assert "has ended" in declined(over(Heard(A, OFFER))).reason
    play = owning()
    for other in (Heard(B, OFFER), Heard(A, msgspec.structs.replace(OFFER, secret=b"x" * 16))):
        found = declined(play(other))
        assert (found.reason, found.known) == ("it knows epoch 1.2", G1 + 2), "one epoch is one assignment"


def test_the_end_of_the_ranks_process_is_told_at_once_and_that_of_another_is_not() -> None:
    play = owning()
    assert play(RankFailed(13, "rank 3 has ended")) == []
    found = play(RankFailed(11, "rank 1 has ended"))
    assert sends(found) == [(A, AssignmentDropped(T1, G1 + 2, "rank 1 has ended"))] and Keep() in found
    assert not play.machine.tables


def test_a_rank_that_ends_while_it_is_told_to_serve_declines() -> None:
    play = tables()
    play(may(1))
    play(Heard(A, OFFER))
    found = declined(play(RankFailed(11, "rank 1 has ended")))
    assert (found.epoch, found.no_ranks) == (G1 + 2, False)
    assert play(RankServes(T1, G1 + 2, 11, AT)) == [], "an answer that came too late"


def test_a_rank_that_failed_is_not_asked_again_until_it_speaks() -> None:
    play = owning()
    play(RankFailed(11, "rank 1 did not answer"))
    again = msgspec.structs.replace(OFFER, epoch=G1 + 4)
    (serve,) = play(Heard(A, again))
    assert isinstance(serve, ServeByRank) and serve.process == 13, "the next rank"
    play(RankFailed(13, "rank 3 sums no table", cannot=True))
    assert declined(play(Heard(A, msgspec.structs.replace(OFFER, epoch=G1 + 6)))).reason == NONE_CAN
    play(said(13))
    assert declined(play(Heard(A, msgspec.structs.replace(OFFER, epoch=G1 + 8)))).reason == NONE_CAN, "it cannot"
    play(said(11))
    (serve,) = play(Heard(A, msgspec.structs.replace(OFFER, epoch=G1 + 10)))
    assert isinstance(serve, ServeByRank) and serve.process == 11


def test_a_silent_rank_is_told_to_drop_its_table_for_when_it_is_back() -> None:
    orders = [each for each in owning()(RankFailed(11, "silent")) if isinstance(each, ForgetByRank)]
    assert orders == [ForgetByRank(11, ForgetJob(T1, G1 + 2, 0))]


def test_a_rank_that_no_longer_sums_its_table_has_dropped_it() -> None:
    play = owning()
    assert play(said(j1_1=G1 + 2)) == []
    assert play(said(13)) == [], "another rank"
    moved = msgspec.structs.replace(said(j1_1=G1 + 2), address="10.0.0.2:8")
    for event in (said(), said(j1_1=G1 + 1), moved):
        play = owning()
        assert [message for _, message in sends(play(event))] == [
            AssignmentDropped(T1, G1 + 2, "rank 1 no longer sums it")
        ]


def test_after_a_restart_the_rank_goes_on_under_its_epoch() -> None:
    play = tables(TABLE)
    assert play.machine.missing == {(JOB, 1, 1)} and not play.machine.serves(T1, G1 + 2)
    play(rack())
    assert play(said(12, first=True)) == [], "rank 2"
    other = msgspec.structs.replace(said(first=True, j1_1=G1 + 2), grant=0)
    assert not sends(play(other)), "a rank of an older run"
    assert play(said(first=True, j1_1=G1 + 2)) == []
    assert play.machine.serves(T1, G1 + 2) and not play.machine.missing
    play.now_s += 2 * BACK_S
    assert play(rack()) == []


def test_after_a_restart_a_rank_that_is_back_without_its_table_has_lost_it() -> None:
    for event in (said(first=True), said(first=True, j1_1=G1 + 1)):
        play = tables(TABLE)
        found = play(event)
        assert [type(message) for _, message in sends(found)] == [AssignmentDropped]
        assert not play.machine.tables


def test_after_a_restart_a_rank_is_waited_for_ten_seconds() -> None:
    play = tables(TABLE)
    assert play(rack()) == []
    play.now_s += BACK_S
    assert play(rack()) == []
    play.now_s += 1
    ((to, message),) = sends(play(rack()))
    assert to == A and isinstance(message, AssignmentDropped) and "within 10 s" in message.reason


def test_what_a_process_sums_that_nobody_asked_for_is_ended_once() -> None:
    play = tables()
    play(may(1))
    strange = said(first=True, j1_1=G1 + 2, j1_2=G1 + 4)
    assert play(strange) == [
        ForgetByRank(11, ForgetJob(T1, G1 + 2, 0)),
        ForgetByRank(11, ForgetJob(JobId("j1/2"), G1 + 4, 0)),
    ]
    assert play(msgspec.structs.replace(strange, first=False)) == []


def test_a_table_that_is_being_served_is_not_judged_by_what_its_rank_said_before() -> None:
    play = tables()
    play(may(1))
    play(Heard(A, OFFER))
    assert play(said()) == []
    assert sends(play(RankServes(T1, G1 + 2, 11, AT)))


def test_a_higher_epoch_replaces_a_table_and_another_rank_is_told_to_end_it() -> None:
    play = owning()
    play(may(0, 1, 3))
    later = msgspec.structs.replace(OFFER, epoch=G1 + 4)
    ends, serve = play(Heard(A, later))
    assert ends == ForgetByRank(11, ForgetJob(T1, G1 + 2, G1 + 4))
    assert isinstance(serve, ServeByRank) and serve.process == 10
    assert play(said()) == [], "the rank before owns nothing"


def test_a_retired_table_is_brought_to_its_next_owner() -> None:
    play, to = owning(), NextOwner("10.0.0.9:1", SECRET)
    assert play(Heard(A, Retire(T1, G1 + 1, G1 + 3, "older"))) == []
    found = play(Heard(A, Retire(T1, G1 + 2, G1 + 4, "moved", True, to)))
    assert ForgetByRank(11, ForgetJob(T1, G1 + 2, G1 + 4, True, to)) in found and Keep() in found
    assert not play.machine.tables


def test_an_offer_that_waits_ends_with_its_run_or_its_coordinator() -> None:
    for event in (Heard(A, Retire(T1, G1 + 2, 0, "given back")), Unplaced(T1, 1, True)):
        play = tables()
        play(Heard(A, OFFER))
        play(event)
        assert play(WaitOver(T1, G1 + 2)) == [] and play(may(1)) == []


def test_tables_of_a_run_that_was_taken_back_end_with_it() -> None:
    play = owning()
    found = play(GangPlaced(T1, 2, 2, PLACES))
    assert ForgetByRank(11, ForgetJob(T1, G1 + 2, 2 << 32)) in found and not play.machine.tables


def test_a_new_coordinator_is_told_what_becomes_of_the_table() -> None:
    play = owning()
    assert play(Heard(C, Coordinates(T1, G1 + 2))) == [Keep()] and play(Heard(C, Coordinates(T1, G1 + 2))) == []
    assert sends(play(RankFailed(11, "ended")))[0][0] == C


def test_a_person_may_move_a_table() -> None:
    play = owning()
    assert play(Heard(D, MoveTensors(T1, G1 + 1, C))) == play(Heard(D, MoveTensors(T1, G1 + 2, B))) == []
    ((to, message),) = sends(play(Heard(D, MoveTensors(T1, G1 + 2, C))))
    assert (to, message) == (A, Handover(T1, G1 + 2, C, "moved by request to c", wished=True))


# ---- its coordinator -------------------------------------------------------------------------------------------------

DIRECT = GangPlaced(JOB, 1, 2, PLACES, A, True, True)


def coordinating() -> Play:
    """A machine on host a, which coordinates a job of ranks on a and b; c and d offer to sum."""
    play = Play(JobCoordinator(A, lambda size: bytes(size)))
    play(rack())
    play(DIRECT)
    for host in (A, B):
        play(QuestionAnswered(host, GetOwner(JOB), KnownOwner(None)))
    return play


def assigned(play: Play, host: HostId = A) -> Assigned:
    epoch = play.machine.jobs[JOB].epoch
    found = sends(play(Heard(host, Accepted(JOB, epoch, AT))))
    (told,) = {message for _, message in found if isinstance(message, Assigned)}
    return told


def test_ranks_are_asked_before_aggregators_their_tables_home_first() -> None:
    play = coordinating()
    assert sends(play.actions) == [(A, Offer(JOB, G1 + 2, 2, SECRET, stays=True, direct=True))]
    told = assigned(play)
    assert told == Assigned(JOB, G1 + 2, A, AT, SECRET, direct=True)


def test_an_aggregator_is_asked_once_no_rank_can_own_and_people_are_told_why() -> None:
    play = coordinating()
    ((to, again),) = sends(play(Heard(A, Declined(JOB, G1 + 2, NONE_CAN))))
    assert to == B and again.direct and not again.stays
    ((to, offer),) = sends(play(Heard(B, Declined(JOB, again.epoch, NO_RANKS, no_ranks=True))))
    assert (to, offer.direct, offer.not_direct) == (C, False, f"a: {NONE_CAN}; b: {NO_RANKS}")
    assert not assigned(play, C).direct


def test_no_aggregator_is_started_for_a_job_whose_ranks_have_all_ended() -> None:
    play = coordinating()
    play(Heard(A, Declined(JOB, G1 + 2, NO_RANKS, no_ranks=True)))
    found = play(Heard(B, Declined(JOB, play.machine.jobs[JOB].epoch, NO_RANKS, no_ranks=True)))
    assert sends(found) == []
    assert [action.event for action in found if isinstance(action, LogEvent)][-1] == "no host sums its tensors"
    ((to, offer),) = sends(play(rack()))
    assert to == A and offer.direct, "each second, ranks are asked again"


def test_a_host_that_does_not_answer_may_have_ranks() -> None:
    play = coordinating()
    ((_, offer),) = sends(play.actions)
    ((to, again),) = sends(play(Undelivered(A, offer)))
    assert to == B
    ((to, last),) = sends(play(Heard(B, Declined(JOB, again.epoch, NO_RANKS, no_ranks=True))))
    assert to == C and not last.direct


def test_nothing_is_measured_or_promised_for_a_direct_table_but_its_size_counts() -> None:
    play = coordinating()
    told = assigned(play)
    work = WorkCounters(True, 5_000, 100, 4, 8, demand=Demand(100_000, 10_000))
    (seen,) = play(QuestionAnswered(A, WorkOf(JOB, told.epoch), work))
    assert seen.fact == TensorsSeen(JOB, 1, 4, 8)
    assert play(QuestionAnswered(A, WorkOf(JOB, told.epoch), work)) == []
    assert play.machine.jobs[JOB].gauge.demand is None
    play.machine.jobs[JOB].gauge.demand = Demand(100_000, 10_000)  # of an aggregator before
    play.now_s += 60
    assert not [message for _, message in sends(play(rack())) if isinstance(message, Profiled)]


def test_a_table_that_a_rank_dropped_goes_to_another_rank_of_its_host_first() -> None:
    play = coordinating()
    told = assigned(play)
    ((to, offer),) = sends(play(Heard(A, AssignmentDropped(JOB, told.epoch, "rank 0 has ended"))))
    assert to == A and offer.direct and offer.epoch > told.epoch
    ((to, _),) = sends(play(Heard(A, Declined(JOB, offer.epoch, NO_RANKS, no_ranks=True))))
    assert to == B


def test_a_table_comes_home_from_another_rank_and_stays_there_when_home_has_none() -> None:
    play = coordinating()
    play(Heard(A, Declined(JOB, G1 + 2, NO_RANKS, no_ranks=True)))
    told = assigned(play, B)
    play.now_s += 11
    ((to, offer),) = [each for each in sends(play(rack())) if isinstance(each[1], Offer)]
    assert to == A and offer.direct and offer.stays
    assert sends(play(Heard(A, Declined(JOB, offer.epoch, NONE_CAN)))) == [], "its rank goes on, and no aggd is asked"
    assert play.machine.jobs[JOB].assigned == told


@pytest.mark.parametrize("aggd", [A, C])
def test_a_table_at_an_aggregator_comes_to_a_rank_at_home_even_on_the_same_host(aggd: HostId) -> None:
    play = coordinating()
    play(rack(sums=(aggd,)))
    play(Heard(A, Declined(JOB, G1 + 2, NONE_CAN)))
    play(Heard(B, Declined(JOB, play.machine.jobs[JOB].epoch, NONE_CAN)))
    told = assigned(play, aggd)
    assert (told.owner, told.direct) == (aggd, False)
    play.now_s += 11
    ((to, offer),) = [each for each in sends(play(rack(sums=(aggd,)))) if isinstance(each[1], Offer)]
    assert to == A and offer.direct
    found = sends(play(Heard(A, Accepted(JOB, offer.epoch, AT))))
    now = Assigned(JOB, offer.epoch, A, AT, SECRET, handed_over=True, direct=True)
    assert (A, now) in found
    retired = Retire(JOB, told.epoch, now.epoch, "a sums it", True, NextOwner(AT, SECRET))
    assert (aggd, retired) in found, "the aggd of the same host brings its parameters too"


def test_an_aggd_and_a_rank_of_one_host_hear_the_end_of_their_own_assignments_alone() -> None:
    aggd = Play(Owner(AggregatorSettings(), me=B))
    aggd(ProcessUp("10.0.0.2:1", {}))
    aggd(Heard(A, Offer(T1, G1 + 1, 2, SECRET)))
    aggd(Served(T1, G1 + 1))
    direct, ends = owning(), Heard(A, Retire(T1, G1 + 1, G1 + 2, "b sums it", True, NextOwner(AT, SECRET)))
    assert direct(ends) == [] and direct.machine.serves(T1, G1 + 2)
    assert ForgetJob(T1, G1 + 1, G1 + 2, True, NextOwner(AT, SECRET)) in aggd(ends)


def test_a_person_moves_a_direct_table_to_a_rank_else_to_an_aggregator() -> None:
    play = coordinating()
    told = assigned(play)
    ((to, offer),) = sends(play(Heard(A, Handover(JOB, told.epoch, B, "moved by request to b", wished=True))))
    assert to == B and offer.direct
    play(rack(sums=(B, C)))
    ((to, offer),) = sends(play(Heard(B, Declined(JOB, offer.epoch, NO_RANKS, no_ranks=True))))
    assert to == B and not offer.direct
    moved = assigned(play, B)
    assert not moved.direct
    play.now_s += 60
    assert not [each for each in sends(play(rack(sums=(B, C)))) if isinstance(each[1], Offer)], (
        "where a person wants it"
    )
