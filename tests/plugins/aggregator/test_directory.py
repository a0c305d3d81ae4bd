"""The directory by story: the messages to the ranks of a host about the owner that sums their tensors."""

import msgspec

from covey.core.events import Heard, Send, Undelivered
from plugins.aggregator.machine.directory import ASK_S, Directory, RankJoined, RankLost
from plugins.aggregator.machine.events import GangPlaced, Keep, TellRanks, Unplaced
from plugins.aggregator.messages import Lost, OwnerWanted
from plugins.facts import Place
from tests.plugins.aggregator.play import HIGH, JOB, LOW, PLACED, PLACES, A, B, C, Play, directory, rack, sends


def test_ranks_are_told_of_a_higher_epoch_and_the_sender_of_a_lower_one_is_put_right() -> None:
    play = directory()
    assert play(Heard(A, LOW)) == [Keep(), TellRanks(LOW)]
    assert play(Heard(A, HIGH)) == [Keep(), TellRanks(HIGH)]
    assert sends(play(Heard(A, LOW))) == [(A, HIGH)]
    assert play(Heard(A, HIGH)) == []


def test_a_rank_that_joins_is_told_or_the_coordinator_is_asked() -> None:
    assert directory(LOW)(RankJoined(JOB)) == [TellRanks(LOW)]
    assert sends(directory()(RankJoined(JOB))) == [(A, OwnerWanted(JOB, 0))]


def test_ranks_that_join_before_the_log_tells_of_their_run_are_told_when_it_does() -> None:
    """An agent that starts again knows from its disk which host sums; its ranks come back before its log does."""
    coordinator, other = Play(Directory(A, [LOW])), Play(Directory(B, [LOW]))
    for play in (coordinator, other):
        assert play(RankJoined(JOB)) == [], "which run they are of is not known yet"
    assert coordinator(PLACED) == [TellRanks(LOW)]
    assert other(PLACED) == [TellRanks(LOW), Send(A, OwnerWanted(JOB, LOW.epoch), ASK_S)], (
        "and there may be a newer one"
    )
    assert coordinator(PLACED) == other(PLACED) == []


def test_ranks_that_come_to_a_host_under_the_same_grant_are_told_who_sums() -> None:
    play = Play(Directory(C))
    assert play(PLACED) == [], "none of its ranks is here"
    moved = msgspec.structs.replace(PLACED, places=(*PLACES[:-1], Place(C, PLACES[-1].ranks, (), since=1)))
    play.now_s += 10
    assert sends(play(moved)) == [(A, OwnerWanted(JOB, 0))]
    assert play(moved) == [] and sends(play(RankJoined(JOB))) == [(A, OwnerWanted(JOB, 0))]
    assert play(Heard(A, LOW)) == [Keep(), TellRanks(LOW)]


def test_an_owner_that_another_host_names_is_made_known_to_the_coordinator() -> None:
    """A coordinator that was cut off named that owner before it heard that it coordinates no more: the ranks would go
    to two owners."""
    play = directory(LOW)
    asks = Send(A, OwnerWanted(JOB, HIGH.epoch), ASK_S)
    assert play(Heard(C, HIGH)) == [Keep(), TellRanks(HIGH), asks]
    assert play(Heard(A, OwnerWanted(JOB, LOW.epoch))) == [Send(A, HIGH)], "which asks back, and is told"


def test_a_new_coordinator_is_asked_by_every_host_that_stays() -> None:
    """A host may have been asked by the new coordinator before the one before it named another owner."""
    play = directory(HIGH)
    moved = msgspec.structs.replace(PLACED, places=(Place(C, PLACES[0].ranks, (), since=1), *PLACES[1:]))
    assert sends(play(moved)) == [(C, OwnerWanted(JOB, HIGH.epoch))]
    assert play(moved) == []


def test_while_nothing_is_known_the_coordinator_is_asked_every_two_seconds() -> None:
    play = directory()
    asked = 0
    for _ in range(20):
        asked += len(sends(play(rack())))
        play.now_s += 0.5
    assert asked == 5


def test_a_rank_that_lost_its_aggregator_is_told_the_newer_else_coordinator_hears() -> None:
    play = directory(HIGH)
    assert play(RankLost(JOB, LOW.epoch, "reset")) == [TellRanks(HIGH)]
    assert sends(play(RankLost(JOB, HIGH.epoch, "reset"))) == [(A, Lost(JOB, HIGH.epoch, "reset"))]
    play(rack(A))
    assert sends(play(RankLost(JOB, HIGH.epoch, "reset"))) == [(B, Lost(JOB, HIGH.epoch, "reset"))]


def test_whoever_knows_less_is_told() -> None:
    play = directory(HIGH)
    assert sends(play(Heard(A, OwnerWanted(JOB, LOW.epoch)))) == [(A, HIGH)]
    assert sends(play(Heard(A, Lost(JOB, LOW.epoch, "reset")))) == [(A, HIGH)]
    assert not play(Heard(A, OwnerWanted(JOB, HIGH.epoch)))


def test_whoever_is_asked_and_knows_less_asks_back() -> None:
    """A coordinator that stood still hears from a host of the job that there is a newer owner."""
    play = directory(LOW)
    assert sends(play(Heard(B, OwnerWanted(JOB, HIGH.epoch)))) == [(B, OwnerWanted(JOB, LOW.epoch))]
    assert not play(Heard(B, OwnerWanted(JOB, LOW.epoch)))
    assert not play(Heard(B, OwnerWanted(JOB, (2 << 32) + 1))), "of a run that the log has not told of"


def test_a_coordinator_that_is_back_is_asked_until_it_has_heard() -> None:
    play = Play(Directory(B, [HIGH]))
    play(rack(A))
    play(PLACED)
    asked = OwnerWanted(JOB, HIGH.epoch)
    assert sends(play(rack())) == [(A, asked)]
    assert sends(play(Undelivered(A, asked))) == [(A, asked)]
    assert not play(rack()), "once is enough when it was heard"
    play(rack(A))
    assert not play(Undelivered(A, asked)), "it is gone again"


def test_assignments_of_an_earlier_run_are_not_told_to_a_later_one() -> None:
    play = directory(LOW)
    play(GangPlaced(JOB, 2, 2, PLACES))
    assert play.machine.current(JOB) is None
    assert play(Heard(A, HIGH)) == []
    assert sends(play(RankJoined(JOB))) == [(A, OwnerWanted(JOB, 0))]


def test_the_end_of_a_job_is_the_end_of_what_is_known_of_it() -> None:
    play = directory(LOW)
    assert play(Unplaced(JOB, 1, True)) == [Keep()]
    assert not play.machine.known and not play(RankJoined(JOB))
