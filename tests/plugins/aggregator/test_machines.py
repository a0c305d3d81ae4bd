"""Coordinator and owner by story: events in, actions out. (Messages to ranks: test_directory.)"""

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.core.events import Heard, LogEvent, Send, SetTimer, Undelivered
from covey.core.ids import HostId, JobId
from plugins.aggregator.machine.coordinator import AGAIN_S, COMPLAINTS_S, Expired, JobCoordinator
from plugins.aggregator.machine.directory import Directory, RankJoined, RankLost
from plugins.aggregator.machine.events import (
    AskQuestion,
    GangPlaced,
    Keep,
    QuestionAnswered,
    RackUpdated,
    TellRanks,
    Unplaced,
)
from plugins.aggregator.machine.owner import LEAVE_S, OVER_MAX, Owner
from plugins.aggregator.machine.process_words import ForgetJob, LoadChanged, ProcessDown, ProcessUp, Served, ServeJob
from plugins.aggregator.machine.served_job import ServedJob
from plugins.aggregator.machine.tracked_job import Away, Summed
from plugins.aggregator.messages import (
    Accepted,
    AggregatorSettings,
    Assigned,
    AssignmentDropped,
    AssignmentKept,
    Coordinates,
    Declined,
    Demand,
    GetOwner,
    KnownOwner,
    LossReport,
    Lost,
    Offer,
    OwnerWanted,
    Probe,
    Profiled,
    Retire,
    Serving,
    WorkCounters,
    WorkOf,
)
from tests.families import examples
from tests.plugins.aggregator.play import (
    G1,
    HIGH,
    JOB,
    LOW,
    PLACED,
    PLACES,
    SECRET,
    A,
    B,
    C,
    D,
    Play,
    directory,
    promising,
    rack,
    sends,
)

NEVER = 'direct = "never" is set in [aggregator] of a'


def coordinating(sums: Sequence[HostId] = (C, D)) -> Play:
    """A machine on host a, which coordinates a job; everybody knows nothing yet; the first offer is out."""
    play = Play(JobCoordinator(A, lambda size: bytes(size)))
    play(rack(sums=sums))
    assert [(a.to, a.question) for a in play(PLACED)] == [(A, GetOwner(JOB)), (B, GetOwner(JOB))]
    assert play(QuestionAnswered(A, GetOwner(JOB), KnownOwner(None))) == []
    play(QuestionAnswered(B, GetOwner(JOB), None))  # did not answer in time
    return play


def coordinating_assigned() -> tuple[Play, Assigned]:
    play = coordinating()
    ((to, offer),) = sends(play.actions)
    play(Heard(to, Accepted(JOB, offer.epoch, "10.0.0.3:9")))
    return play, Assigned(JOB, offer.epoch, to, "10.0.0.3:9", SECRET)


# ---- Coordinator -----------------------------------------------------------------------------------------------------


def test_a_coordinator_asks_who_sums_the_job_then_offers_it_to_the_least_loaded() -> None:
    play = coordinating()
    assert sends(play.actions) == [(C, Offer(JOB, G1 + 2, 2, SECRET, not_direct=NEVER))]
    assert any(isinstance(action, SetTimer) and action.event == Expired(JOB, G1 + 2) for action in play.actions)


def test_an_accepted_offer_is_told_to_this_host_first_then_to_all_hosts_of_the_job() -> None:
    play, assigned = coordinating_assigned()
    assert sends(play.actions)[1:] == [(A, assigned), (B, assigned)]
    assert [a.event for a in play.actions if isinstance(a, LogEvent)] == ["tensors offered", "tensors assigned"]


def test_a_declined_offer_goes_to_the_next_under_an_epoch_above_any_that_was_seen() -> None:
    play = coordinating()
    found = play(Heard(C, Declined(JOB, G1 + 2, "full", known=G1 + 7)))
    assert sends(found) == [(D, Offer(JOB, G1 + 8, 2, SECRET, refused="c: full", not_direct=NEVER))]


def test_a_refusal_of_an_earlier_epoch_does_not_refuse_the_offer_that_is_open() -> None:
    play = coordinating()
    assert play(Heard(C, Declined(JOB, G1 + 1, "not kept"))) == []
    found = play(Heard(C, Accepted(JOB, G1 + 2, "10.0.0.3:9")))
    assert any(isinstance(message, Assigned) for _, message in sends(found))


def test_an_offer_that_nobody_answers_goes_to_the_next() -> None:
    play = coordinating()
    ((to, offer),) = sends(play.actions)
    assert [host for host, _ in sends(play(Undelivered(to, offer)))] == [D]
    assert play(Expired(JOB, offer.epoch)) == [], "the timer of an offer that is over"
    play = coordinating()
    assert [host for host, _ in sends(play(Expired(JOB, G1 + 2)))] == [D]


def test_an_acceptance_that_comes_too_late_is_given_back() -> None:
    play = coordinating()
    play(Expired(JOB, G1 + 2))
    ((to, message),) = sends(play(Heard(C, Accepted(JOB, G1 + 2, "10.0.0.3:9"))))
    assert (to, message) == (C, Retire(JOB, G1 + 2, 0, "another host was found meanwhile"))


def test_an_acceptance_that_is_said_twice_does_not_end_what_it_began() -> None:
    play, assigned = coordinating_assigned()
    assert play(Heard(C, Accepted(JOB, assigned.epoch, "10.0.0.3:9"))) == []
    assert play.machine.jobs[JOB].assigned == assigned


def test_when_nobody_takes_it_this_is_said_once_and_tried_again_each_second() -> None:
    play = coordinating(sums=())
    (note,) = [action for action in play.actions if isinstance(action, LogEvent)]
    assert (note.event, note.reason) == (
        "no host sums its tensors",
        "no host offered; the hosts are asked again each second",
    )
    assert play(rack(sums=())) == []
    assert [host for host, _ in sends(play(rack(sums=(D,))))] == [D]


def test_when_all_declined_each_of_them_is_quoted_and_then_asked_again() -> None:
    play = coordinating()
    ((to, offer),) = sends(play.actions)
    ((then, again),) = sends(play(Heard(to, Declined(JOB, offer.epoch, "full"))))
    found = play(Heard(then, Declined(JOB, again.epoch, "busy")))
    assert sends(found) == []
    said = [action.reason for action in found if isinstance(action, LogEvent)]
    assert said == ["by d: busy", "c: full; d: busy; the hosts are asked again each second"]
    assert [host for host, _ in sends(play(rack()))] == [C]


def test_a_coordinator_that_starts_again_takes_the_highest_epoch_that_a_host_knows() -> None:
    play = Play(JobCoordinator(A, lambda size: bytes(size)))
    play(rack())
    play(PLACED)
    old, new = (Assigned(JOB, G1 + n, host, "10.0.0.3:9", SECRET) for n, host in ((2, C), (4, D)))
    play(QuestionAnswered(A, GetOwner(JOB), KnownOwner(old)))
    assert sends(play(QuestionAnswered(B, GetOwner(JOB), KnownOwner(new)))) == [
        (A, new),
        (B, new),
        (D, Coordinates(JOB, new.epoch)),
    ], "its aggregator hears who speaks for the job now"


def test_an_aggregator_whose_host_is_gone_is_replaced_and_told_when_it_is_back() -> None:
    play, assigned = coordinating_assigned()
    ((to, offer),) = sends(play(rack(C)))
    assert to == D and offer.epoch > assigned.epoch
    play(Heard(D, Accepted(JOB, offer.epoch, "10.0.0.4:9")))
    found = sends(play(rack()))
    assert found == [(C, Retire(JOB, assigned.epoch, offer.epoch, "d sums it"))]
    assert play(rack()) == []


def test_an_aggregator_that_dropped_the_job_is_asked_again_only_after_the_others() -> None:
    play, assigned = coordinating_assigned()
    ((to, _),) = sends(play(Heard(C, AssignmentDropped(JOB, assigned.epoch, "its process died"))))
    assert to == D
    assert play(Heard(C, AssignmentDropped(JOB, assigned.epoch, "its process died"))) == []
    play(Heard(D, Accepted(JOB, play.machine.jobs[JOB].epoch, "10.0.0.4:9")))
    assert play(Heard(C, AssignmentDropped(JOB, assigned.epoch, "its process died"))) == [], "another one sums it"


def test_when_a_rank_lost_its_aggregator_the_coordinator_asks_it_and_may_replace_it() -> None:
    for answer, replaced in ((Serving(True), False), (Serving(False), True), (None, True)):
        play, assigned = coordinating_assigned()
        lost = Heard(B, Lost(JOB, assigned.epoch, "closed the connection"))
        (ask,) = play(lost)
        assert isinstance(ask, AskQuestion) and (ask.to, ask.question) == (C, Probe(JOB, assigned.epoch))
        assert play(lost) == [], "asked already"
        found = play(QuestionAnswered(C, Probe(JOB, assigned.epoch), answer))
        assert bool(sends(found)) == replaced


def test_an_aggregator_that_says_it_serves_but_cannot_be_used_for_long_is_replaced() -> None:
    play, assigned = coordinating_assigned()
    lost = Heard(B, Lost(JOB, assigned.epoch, "timed out"))
    for _ in range(10):
        found = play(lost)
        if sends(found):
            break
        play(QuestionAnswered(C, Probe(JOB, assigned.epoch), Serving(True)))
        play.now_s += 1.0
    assert sends(found)[0][0] == D and COMPLAINTS_S < play.now_s - 100.0 < COMPLAINTS_S + 2


def test_complaints_far_apart_do_not_add_up() -> None:
    play, assigned = coordinating_assigned()
    for _ in range(10):
        assert not sends(play(Heard(B, Lost(JOB, assigned.epoch, "reset"))))
        play(QuestionAnswered(C, Probe(JOB, assigned.epoch), Serving(True)))
        play.now_s += 60.0


def test_the_next_host_is_the_coordinator_while_the_first_is_gone_and_gives_it_back() -> None:
    play = Play(JobCoordinator(B, lambda size: bytes(size)))
    play(rack())
    assert play(PLACED) == []
    found = play(rack(A))
    assert [(a.to, a.question) for a in found] == [(B, GetOwner(JOB))]
    ((_, offer),) = sends(play(QuestionAnswered(B, GetOwner(JOB), KnownOwner(None))))
    assert offer.epoch == G1 + 1, "a number that only rank 1's coordinator may use"
    assert sends(play(rack(C))) == [], "that one finds it another aggregator"
    assert play.machine.jobs[JOB].state == Away(offered=(C, G1 + 1))


def test_who_gives_a_job_back_says_who_sums_it_and_retires_former_owners() -> None:
    play = Play(JobCoordinator(B, lambda size: bytes(size)))
    play(rack(A))
    play(PLACED)
    ((_, offer),) = sends(play(QuestionAnswered(B, GetOwner(JOB), KnownOwner(None))))
    play(Heard(C, Accepted(JOB, offer.epoch, "10.0.0.3:9")))
    ((_, higher),) = sends(play(rack(A, C)))
    play(Heard(D, Accepted(JOB, higher.epoch, "10.0.0.4:9")))
    now = Assigned(JOB, higher.epoch, D, "10.0.0.4:9", SECRET)
    assert sends(play(rack())) == [(A, now), (C, Retire(JOB, offer.epoch, higher.epoch, "d sums it"))]
    assert play.machine.jobs[JOB].state == Away()


def test_a_higher_assignment_of_another_coordinator_is_taken_over() -> None:
    play, assigned = coordinating_assigned()
    higher = Assigned(JOB, assigned.epoch + 1, D, "10.0.0.4:9", SECRET)
    assert sends(play(Heard(B, higher))) == [(A, higher), (B, higher), (D, Coordinates(JOB, higher.epoch))]
    assert play(Heard(B, assigned)) == []


def test_a_job_that_runs_again_is_offered_under_epochs_of_its_new_grant() -> None:
    play, assigned = coordinating_assigned()
    assert play(PLACED) == [] and play.machine.jobs[JOB].assigned == assigned, "the same run, said again"
    play(GangPlaced(JOB, 2, 2, PLACES))
    play(QuestionAnswered(A, GetOwner(JOB), KnownOwner(assigned)))
    ((_, offer),) = sends(play(QuestionAnswered(B, GetOwner(JOB), KnownOwner(assigned))))
    assert offer.epoch == (2 << 32) + 2
    play(Unplaced(JOB, 1, False))
    assert JOB in play.machine.jobs
    play(Unplaced(JOB, 2, True))
    assert not play.machine.jobs


def test_an_owner_that_does_not_know_of_a_promise_is_told_again_what_the_job_needs() -> None:
    """An `AssignmentKept` may have been overtaken by the answer to the next demand."""
    play, assigned = coordinating_assigned()
    demand, asked = Demand(100_000, 10_000), WorkOf(JOB, assigned.epoch)
    play(QuestionAnswered(C, asked, WorkCounters(True, demand=demand)))
    assert play.machine.jobs[JOB].state == Summed(assigned, promised=True)
    play(QuestionAnswered(C, asked, WorkCounters(True)))
    play.now_s += AGAIN_S
    assert (C, Profiled(JOB, assigned.epoch, demand)) in sends(play(rack()))
    play(Heard(C, AssignmentKept(JOB, assigned.epoch - 2)))
    assert play.machine.jobs[JOB].state == Summed(assigned, promised=False), "of an epoch that is over"
    play(Heard(C, AssignmentKept(JOB, assigned.epoch)))
    play.now_s += AGAIN_S
    assert not sends(play(rack()))


# ---- Owner -----------------------------------------------------------------------------------------------------------

OFFER = Offer(JOB, G1 + 2, 2, SECRET)
HELD = ServedJob(JOB, G1 + 2, 2, SECRET, A)


def owner(*held: ServedJob, **changes: Any) -> Play:
    play = Play(Owner(msgspec.structs.replace(AggregatorSettings(), **changes), held))
    play(ProcessUp("10.0.0.3:9", {one.job: one.epoch for one in held}))
    return play


def test_an_offer_is_accepted_once_the_process_serves_it() -> None:
    play = owner()
    assert play(Heard(A, OFFER)) == [ServeJob(msgspec.structs.replace(HELD, order=1))]
    assert not play.machine.serves(JOB, OFFER.epoch)
    assert sends(play(Served(JOB, OFFER.epoch))) == [(A, Accepted(JOB, OFFER.epoch, "10.0.0.3:9"))]
    assert sends(play(Heard(A, OFFER))) == [(A, Accepted(JOB, OFFER.epoch, "10.0.0.3:9"))]


def declined(actions: Sequence[Any]) -> str:
    ((_, message),) = sends(actions)
    assert isinstance(message, Declined)
    return message.reason


def test_an_offer_is_declined_with_a_reason() -> None:
    assert "serve = false" in declined(owner(serve=False)(Heard(A, OFFER)))
    down = Play(Owner(AggregatorSettings()))
    assert "not up" in declined(down(Heard(A, OFFER)))
    full = owner(ServedJob(JobId("j2"), G1, 1, SECRET, B), jobs_max=1)
    assert "jobs_max" in declined(full(Heard(A, OFFER)))
    busy = owner()
    busy(LoadChanged(0.99))
    assert "busy 99%" in declined(busy(Heard(A, OFFER)))
    over = owner()
    over(Unplaced(JOB, 1, True))
    assert "has ended" in declined(over(Heard(A, OFFER)))
    newer = owner(ServedJob(JOB, G1 + 5, 2, SECRET, A))
    ((_, message),) = sends(newer(Heard(B, OFFER)))
    assert isinstance(message, Declined) and message.known == G1 + 5


def test_one_epoch_is_never_two_assignments() -> None:
    """An epoch stays one assignment even when another coordinator or another secret comes with it."""
    for other in (Heard(B, OFFER), Heard(A, msgspec.structs.replace(OFFER, secret=b"x" * 16))):
        assert declined(owner(HELD)(other)) == "it knows epoch 1.2"


def test_ends_of_many_jobs_are_remembered_and_not_of_all_there_ever_were() -> None:
    play = owner()
    for at in range(1, OVER_MAX + 2):
        play(Unplaced(JobId(f"j{at}"), 1, True))
    assert "has ended" in declined(play(Heard(A, msgspec.structs.replace(OFFER, job=JobId("j2")))))
    assert isinstance(play(Heard(A, OFFER))[0], ServeJob), "the oldest is forgotten"


def test_a_job_offered_again_under_a_higher_epoch_is_begun_anew_even_when_full() -> None:
    play = owner(HELD, jobs_max=1)
    higher = Offer(JOB, G1 + 4, 2, SECRET)
    assert play(Heard(B, higher)) == [ServeJob(ServedJob(JOB, G1 + 4, 2, SECRET, B, order=1))]
    assert not play.machine.serves(JOB, OFFER.epoch)


def test_when_its_process_dies_every_coordinator_is_told_and_nothing_is_kept() -> None:
    play = owner(HELD)
    found = play(ProcessDown("killed"))
    assert sends(found) == [(A, AssignmentDropped(JOB, G1 + 2, "killed"))] and Keep() in found
    assert LogEvent(JOB, "tensors dropped", "killed") in found
    assert not play.machine.jobs and "not up" in declined(play(Heard(A, OFFER)))


def test_a_restarted_agent_keeps_what_both_its_disk_and_its_process_know() -> None:
    play = Play(Owner(AggregatorSettings(), [HELD, ServedJob(JobId("j2"), G1, 1, SECRET, B)]))
    found = play(ProcessUp("10.0.0.3:9", {JOB: G1 + 2, JobId("j3"): G1}))
    assert ForgetJob(JobId("j3"), G1, 0) in found
    assert sends(found) == [(B, AssignmentDropped(JobId("j2"), G1, "its process does not know the job"))]
    assert play.machine.serves(JOB, G1 + 2) and list(play.machine.jobs) == [JOB]
    play = Play(Owner(AggregatorSettings(), [HELD]))
    found = play(ProcessUp("10.0.0.3:9", {JOB: G1 + 1}))
    assert ForgetJob(JOB, G1 + 1, 0) in found, "it knows an older assignment"
    assert sends(found) == [(A, AssignmentDropped(JOB, G1 + 2, "its process does not know the job"))]


def test_retired_jobs_are_forgotten_unless_their_epoch_is_higher_by_now() -> None:
    play = owner(HELD)
    assert play(Heard(A, Retire(JOB, G1 + 1, 0, "another"))) == []
    assert ForgetJob(JOB, G1 + 2, G1 + 4) in play(Heard(A, Retire(JOB, G1 + 2, G1 + 4, "another")))


def test_a_run_that_is_over_or_taken_back_is_forgotten() -> None:
    play = owner(HELD)
    assert play(GangPlaced(JOB, 1, 2, PLACES)) == []
    assert ForgetJob(JOB, G1 + 2, 2 << 32) in play(GangPlaced(JOB, 2, 2, PLACES))
    play = owner(HELD)
    assert ForgetJob(JOB, G1 + 2, 0) in play(Unplaced(JOB, 1, True))
    play(Unplaced(JOB, 2, True))
    play(Unplaced(JOB, 1, True))
    assert "has ended" in declined(play(Heard(A, msgspec.structs.replace(OFFER, epoch=(2 << 32) + 2)))), "said late"


def again(play: Play, job: str, epoch: int = G1 + 3) -> Any:
    """Offer the same job once more with its demand; return why it is not served, or that it is."""
    (answer,) = play(Heard(A, Offer(JobId(job), epoch, 2, SECRET, Demand(100_000, 10_000))))
    if isinstance(answer, Send):
        assert isinstance(answer.message, Declined)
        return answer.message.reason
    return type(answer)


def test_who_hurt_another_may_come_back_only_once_one_that_was_there_has_left() -> None:
    """The assignment that is taken back is the newest one. Reference: §4.5.2.3."""
    play = promising("j1", "j2", "j3")
    asked = sends(play(Heard(A, LossReport(JobId("j1"), G1 + 1, 100, 150, True))))
    assert [(to, message.job, message.to) for to, message in asked] == [(A, "j3", None)]
    play(Heard(A, Retire(JobId("j3"), G1 + 1, G1 + 2, "d sums it")))
    assert sorted(play.machine.jobs) == ["j1", "j2"]
    assert play.machine.promised().barred == ["j3"], "it is told to whoever wants to empty itself into this one"
    assert again(play, "j3") == "it was slowed, or slowed others, there"
    play(Unplaced(JobId("j2"), 1, True))
    assert play.machine.promised().barred == []
    assert again(play, "j3") is ServeJob


def test_one_job_at_a_time_is_asked_to_leave_and_none_for_a_loss_below_the_limit() -> None:
    """Reference: §4.5.2.3."""
    play = promising("j1", "j2", "j3")
    assert play(Heard(A, LossReport(JobId("j1"), G1 + 1, 100, 90, False))) == []
    assert play.machine.judged == {"j1": 0.09}
    assert len(sends(play(Heard(A, LossReport(JobId("j1"), G1 + 1, 100, 150, True))))) == 1
    assert play(Heard(A, LossReport(JobId("j2"), G1 + 1, 100, 150, True))) == []
    play.now_s += LEAVE_S
    play(rack())
    assert len(sends(play(Heard(A, LossReport(JobId("j2"), G1 + 1, 100, 150, True))))) == 1


def test_a_job_that_outgrew_its_promise_goes_on_without_one_until_it_fits() -> None:
    """The exact check is of the jobs here already; what a job was promised is not what it needs. Reference:
    §4.3.3.1."""
    play, job = promising("j1", "j2"), JobId("j2")

    def profiled(work_us: int) -> list[Any]:
        return play(Heard(A, Profiled(job, G1 + 1, Demand(100_000, work_us))))

    assert play(Heard(A, Profiled(job, G1, Demand(100_000, 20_000)))) == [], "another epoch"
    for found in (profiled(95_000), profiled(95_000)):
        assert "us free" in declined(found[:1])
        assert play.machine.jobs[job].demand is None and play.machine.ledger.demands.keys() == {"j1"}
        assert "us free" in play.machine.refused[job]
    assert Keep() not in found, "nothing changed the second time"
    found = profiled(30_000)
    assert sends(found) == [(A, AssignmentKept(job, G1 + 1))] and Keep() in found
    assert play.machine.jobs[job].demand == play.machine.ledger.demands[job] == Demand(100_000, 30_000)
    assert play.machine.refused == {}
    assert Keep() in profiled(95_000), "that it is promised nothing any more"


def test_what_was_promised_before_a_restart_of_the_agent_is_promised_after_it() -> None:
    promised = [msgspec.structs.replace(HELD, job=JobId(f"j{at}"), demand=Demand(100_000, 60_000)) for at in (1, 2)]
    owner = Owner(AggregatorSettings(), promised, C)
    owner.check()
    assert owner.ledger.cycle.used_us == 60_000 and owner.jobs[JobId("j1")].demand == Demand(100_000, 60_000)
    assert owner.jobs[JobId("j2")].demand is None, "what does not fit any more is not promised, and summed all the same"


# ---- all three, in any order -----------------------------------------------------------------------------------------

HOSTS = st.sampled_from([A, B, C, D])
EPOCHS = st.integers(G1, G1 + 9)
EVENTS = st.one_of(
    st.builds(GangPlaced, st.just(JOB), st.integers(1, 2), st.just(2), st.just(PLACES)),
    st.builds(Unplaced, st.just(JOB), st.integers(1, 2), st.booleans()),
    st.builds(lambda gone: rack(*gone), st.sets(HOSTS)),
    st.builds(
        Heard,
        HOSTS,
        st.one_of(
            st.builds(Offer, st.just(JOB), EPOCHS, st.just(2), st.just(SECRET)),
            st.builds(Accepted, st.just(JOB), EPOCHS, st.just("10.0.0.3:9")),
            st.builds(Declined, st.just(JOB), EPOCHS, st.just("no"), EPOCHS),
            st.builds(Assigned, st.just(JOB), EPOCHS, HOSTS, st.just("10.0.0.3:9"), st.just(SECRET)),
            st.builds(Retire, st.just(JOB), EPOCHS, EPOCHS, st.just("no")),
            st.builds(AssignmentDropped, st.just(JOB), EPOCHS, st.just("no")),
            st.builds(Lost, st.just(JOB), EPOCHS, st.just("no")),
            st.builds(OwnerWanted, st.just(JOB), EPOCHS),
        ),
    ),
)


def heard_by(kind: type[JobCoordinator] | type[Owner] | type[Directory]) -> st.SearchStrategy[Any]:
    """The `EVENTS` without messages for the other machines, which the service does not hand to it."""
    return EVENTS.filter(lambda event: not isinstance(event, Heard) or isinstance(event.message, kind.takes))


COORDINATOR = st.one_of(
    heard_by(JobCoordinator),
    st.builds(
        QuestionAnswered,
        HOSTS,
        st.just(GetOwner(JOB)),
        st.sampled_from([None, KnownOwner(None), KnownOwner(LOW), KnownOwner(HIGH)]),
    ),
    st.builds(QuestionAnswered, HOSTS, st.builds(Probe, st.just(JOB), EPOCHS), st.sampled_from([None, Serving(True)])),
    st.builds(Expired, st.just(JOB), EPOCHS),
)


@given(st.lists(COORDINATOR, max_size=40))
@settings(max_examples=examples(150), deadline=None)
def test_whatever_happens_a_coordinator_is_sound_and_offers_rising_epochs_of_its_own(events: list[Any]) -> None:
    play, last = Play(JobCoordinator(A, lambda size: bytes(size))), 0
    for event in events:
        play.now_s += 1.0
        for _, message in sends(play(event)):
            if isinstance(message, Offer):
                assert message.epoch % 2 == 0, "rank 0's coordinator uses even ballots of two"
                assert message.epoch > last, "an epoch stood for two assignments"
                last = message.epoch
        if isinstance(event, Unplaced) or (isinstance(event, RackUpdated) and A in event.gone):
            last = 0  # the job, or our being its coordinator, is over: the survey of a next time finds what is known


@given(
    st.lists(
        st.one_of(heard_by(Owner), st.builds(Served, st.just(JOB), EPOCHS), st.just(ProcessDown("x"))), max_size=40
    )
)
@settings(max_examples=examples(100), deadline=None)
def test_an_owner_is_always_sound_and_never_serves_a_lower_epoch_after_a_higher(events: list[Any]) -> None:
    play, served = owner(), 0
    for event in events:
        if isinstance(event, RackUpdated):
            event = ProcessUp("10.0.0.3:9", {JOB: G1 + len(event.gone)})
        for action in play(event):
            if isinstance(action, ServeJob):
                assert action.held.epoch > served
                served = action.held.epoch
        if JOB not in play.machine.jobs:
            served = 0


@given(
    st.lists(
        st.one_of(
            heard_by(Directory), st.just(RankJoined(JOB)), st.builds(RankLost, st.just(JOB), EPOCHS, st.just("x"))
        )
    )
)
@settings(max_examples=examples(100), deadline=None)
def test_whatever_happens_ranks_are_told_of_rising_epochs_only(events: list[Any]) -> None:
    play, told = directory(), 0
    for event in events:
        play.now_s += 1.0
        if isinstance(event, Unplaced):
            continue
        for action in play(event):
            if isinstance(action, TellRanks):
                assert action.assigned.epoch >= told
                told = action.assigned.epoch
