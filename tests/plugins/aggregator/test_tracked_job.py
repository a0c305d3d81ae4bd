"""The states of a job at its coordinator: each keeps the facts known in it and forgets those known before."""

from collections.abc import Callable
from typing import Any

import pytest

from covey.core.events import Heard
from covey.core.ids import HostId
from plugins.aggregator.machine.coordinator import Expired, JobCoordinator
from plugins.aggregator.machine.events import AskQuestion, QuestionAnswered, RackUpdated
from plugins.aggregator.machine.tracked_job import (
    Away,
    ChangingOwner,
    MoveSearch,
    Nobody,
    Offering,
    OwnerSearch,
    State,
    Summed,
    Surveying,
)
from plugins.aggregator.messages import (
    Accepted,
    Assigned,
    AssignmentDropped,
    Declined,
    Demand,
    GetOwner,
    Handover,
    KnownOwner,
    Lost,
    Probe,
    Retire,
    WorkCounters,
    WorkOf,
)
from tests.plugins.aggregator.play import G1, JOB, PLACED, SECRET, A, B, C, D, Play, loaded, rack, sends

E = HostId("e")
DEMAND = Demand(100_000, 30_000)
FIRST = Assigned(JOB, G1 + 1, C, "10.0.0.3:9", SECRET)
"""The first assignment; rank 1 has odd epochs of two."""


def state(play: Play) -> State:
    found: State = play.machine.jobs[JOB].state
    return found


def surveying() -> Play:
    """A machine on host b, which coordinates the job while a is gone; c and d offer to sum it."""
    play = Play(JobCoordinator(B, lambda size: bytes(size)))
    play(rack(A))
    play(PLACED)
    assert state(play) == Surveying([B])
    return play


def offering() -> Play:
    play = surveying()
    play(QuestionAnswered(B, GetOwner(JOB), KnownOwner(None)))
    assert state(play) == Offering(OwnerSearch(promised=False), C, G1 + 1, SECRET)
    return play


def summed() -> Play:
    play = offering()
    play(Heard(C, Accepted(JOB, G1 + 1, "10.0.0.3:9")))
    assert state(play) == Summed(FIRST, promised=False)
    return play


def promised() -> Play:
    play = summed()
    play(QuestionAnswered(C, WorkOf(JOB, FIRST.epoch), WorkCounters(True, demand=DEMAND)))
    assert state(play) == Summed(FIRST, promised=True)
    return play


def changing_owner() -> Play:
    """A machine that looks for a new owner: c wants the job to leave; d and e have room, and e is asked, the fuller
    one."""
    play = promised()
    play(RackUpdated(frozenset({A}), (loaded(C, 90_000), loaded(D, 10_000), loaded(E, 20_000))))
    play(Heard(C, Handover(JOB, FIRST.epoch, None, "it hurts j2")))
    assert state(play) == ChangingOwner(MoveSearch(FIRST, True, None, True), E, G1 + 3, SECRET)
    return play


def nobody() -> Play:
    play = summed()
    play(rack(A, sums=()))
    play(Heard(C, AssignmentDropped(JOB, FIRST.epoch, "its process died")))
    assert state(play) == Nobody()
    return play


@pytest.mark.parametrize("begin", [surveying, offering, summed, changing_owner, nobody])
def test_in_every_state_a_job_is_given_back_when_its_coordinator_is_back(begin: Callable[[], Play]) -> None:
    play = begin()
    play(rack())
    job = play.machine.jobs[JOB]
    assert isinstance(job.state, Away) and job.gauge.demand is None
    assert (job.epoch, job.newest_epoch, job.superseded, job.refused) == (0, None, {}, "")


@pytest.mark.parametrize(("begin", "asked", "epoch"), [(offering, C, G1 + 1), (changing_owner, E, G1 + 3)])
def test_who_accepts_after_the_job_was_given_back_sums_it_no_more(
    begin: Callable[[], Play], asked: HostId, epoch: int
) -> None:
    """The coordinator that is back knows nothing of that offer."""
    play = begin()
    play(rack())
    assert sends(play(Heard(asked, Accepted(JOB, epoch, "10.0.0.5:9")))) == [
        (asked, Retire(JOB, epoch, 0, "another host is its coordinator now"))
    ]


def test_an_acceptance_that_is_said_again_after_the_job_was_given_back_ends_nothing() -> None:
    play = summed()
    play(rack())
    assert play(Heard(C, Accepted(JOB, FIRST.epoch, "10.0.0.3:9"))) == []


@pytest.mark.parametrize("begin", [surveying, offering, summed, changing_owner, nobody])
def test_in_every_state_a_newer_owner_that_a_host_knows_is_taken_over(begin: Callable[[], Play]) -> None:
    play, newer = begin(), Assigned(JOB, G1 + 6, D, "10.0.0.4:9", SECRET)
    assert (B, newer) in sends(play(Heard(B, newer)))
    assert state(play) == Summed(newer, promised=False)


def test_its_owner_goes_on_while_one_host_after_the_other_declines() -> None:
    play = changing_owner()
    found = play(Heard(E, Declined(JOB, G1 + 3, "full by now")))
    assert [to for to, _ in sends(found)] == [D]
    assert state(play) == ChangingOwner(
        MoveSearch(FIRST, True, None, True, declined={E: "full by now"}), D, G1 + 5, SECRET
    )
    play(Heard(D, Accepted(JOB, G1 + 5, "10.0.0.4:9")))
    assert state(play) == Summed(Assigned(JOB, G1 + 5, D, "10.0.0.4:9", SECRET, handed_over=True), promised=True)


@pytest.mark.parametrize("begin", [summed, changing_owner])
def test_an_owner_that_goes_when_no_host_can_be_asked_leaves_nobody(begin: Callable[[], Play]) -> None:
    play = begin()
    play(rack(A, C, sums=()))
    assert state(play) == Nobody() and play.machine.jobs[JOB].superseded == {C: FIRST.epoch}


def test_complaints_about_an_owner_are_not_counted_against_the_next() -> None:
    """The next owner is asked anew whether it serves the job, also if the earlier one was being asked."""
    play = summed()
    assert len(play(Heard(B, Lost(JOB, FIRST.epoch, "reset")))) == 1
    assert state(play) == Summed(FIRST, promised=False, complaints=(play.now_s, play.now_s), checking=True)
    newer = Assigned(JOB, G1 + 6, D, "10.0.0.4:9", SECRET)
    play(Heard(B, newer))
    play.now_s += 6.0
    (ask,) = play(Heard(B, Lost(JOB, newer.epoch, "reset")))
    assert isinstance(ask, AskQuestion) and (ask.to, ask.question) == (D, Probe(JOB, newer.epoch))


@pytest.mark.parametrize(
    ("answer", "asked"),
    [
        (Heard(C, Accepted(JOB, G1 + 1, "10.0.0.3:9")), C),
        (Heard(C, Declined(JOB, G1 + 1, "full")), D),
        (Expired(JOB, G1 + 1), D),
    ],
)
def test_an_offer_below_an_epoch_heard_meanwhile_is_followed_by_one_above(answer: Any, asked: HostId) -> None:
    """Hosts that know the higher epoch would not push their tensors under the lower one."""
    play = offering()
    assert play(Heard(E, Declined(JOB, G1 - 1, "it knows epoch 1.7", known=G1 + 7))) == []
    ((to, offer),) = sends(play(answer))
    assert (to, offer.epoch) == (asked, G1 + 9)
    told = sends(play(Heard(to, Accepted(JOB, offer.epoch, "10.0.0.5:9"))))
    former = [] if to == C or isinstance(answer, Heard) else [(C, Retire(JOB, G1 + 1, G1 + 9, "d sums it"))]
    assert [sent for sent in told if isinstance(sent[1], Retire)] == former, "its answer may be on the way"
