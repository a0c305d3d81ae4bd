"""An aggregator that empties itself, and the hosts that hold room for its jobs: by event. (All machines: test_live.)"""

from typing import Any

import msgspec
import pytest

from covey.core.events import Heard, LogEvent, SetTimer, Undelivered
from covey.core.ids import HostId, JobId
from plugins.aggregator.machine.consolidator import (
    HAND_S,
    PAUSE_S,
    SOON_S,
    EmptyingEnds,
    HandingOver,
    Resting,
)
from plugins.aggregator.machine.cycle_ledger import RESERVE_S
from plugins.aggregator.machine.events import AskQuestion, GangPlaced, QuestionAnswered, RackUpdated, Unplaced
from plugins.aggregator.machine.owner import Owner
from plugins.aggregator.machine.process_words import LoadChanged, ProcessDown, ProcessUp, Served, ServeJob
from plugins.aggregator.messages import (
    AggregatorSettings,
    CycleHere,
    CycleNotReserved,
    CycleNow,
    CycleReserved,
    Declined,
    Demand,
    Handover,
    JobDemand,
    LossReport,
    Offer,
    Profiled,
    ReleaseCycle,
    ReserveCycle,
    Retire,
)
from plugins.aggregator.policy import Candidate
from plugins.aggregator.policy.measured import BARRED
from tests.plugins.aggregator.play import G1, PLACES, SECRET, A, B, C, D, Play, loaded, promising, sends

ROOMY = CycleNow(True, 100_000, 1, 1, [JobDemand(JobId("x"), Demand(100_000, 45_000))])
DEMAND = Demand(100_000, 10_000)
J1, J2, IDLE = JobId("j1"), JobId("j2"), JobId("idle")


def begin(play: Play, *others: Candidate) -> list[HostId]:
    """Let seconds pass until it asks the others what they promised; return the hosts that it asks."""
    for _ in range(200):
        play.now_s += 1
        asked = [action.to for action in play(RackUpdated(frozenset(), others)) if isinstance(action, AskQuestion)]
        if asked:
            return asked
    raise AssertionError("it does not try")


def reserving(play: Play, *others: HostId) -> dict[JobId, tuple[HostId, ReserveCycle]]:
    """Bring it to ask the hosts with room to hold it; return for each job the host that is asked, and the message."""
    for host in begin(play, *(loaded(host, 45_000) for host in others or (D,))):
        found = play(QuestionAnswered(host, CycleHere(), ROOMY))
    return {message.job: (to, message) for to, message in sends(found)}


def comes(play: Play, job: JobId, epoch: int = G1 + 1, demand: Demand | None = None) -> None:
    """Let the job be summed here from now on."""
    assert any(isinstance(action, ServeJob) for action in play(Heard(A, Offer(job, epoch, 2, SECRET, demand))))
    play(Served(job, epoch))


def events(actions: list[Any]) -> list[str]:
    return [action.event for action in actions if isinstance(action, LogEvent)]


# ---- whether, and to whom --------------------------------------------------------------------------------------------


def test_a_table_that_stays_is_not_handed_over() -> None:
    play = Play(Owner(AggregatorSettings()))
    play(ProcessUp("1.1.1.1:1", {}))
    play(Heard(A, Offer(J1, G1 + 1, 2, SECRET, DEMAND)))
    play(Served(J1, G1 + 1))
    table = JobId("j2/1")
    play(Heard(A, Offer(table, G1 + 1, 2, SECRET, DEMAND, stays=True)))
    play(Served(table, G1 + 1))
    with pytest.raises(AssertionError, match="does not try"):
        begin(play, loaded(D, 45_000))
    play(Heard(A, Retire(table, G1 + 1, 0, "over")))
    assert begin(play, loaded(D, 45_000)) == [D]


def test_the_least_loaded_asks_only_hosts_that_are_there_whether_it_may_empty_itself() -> None:
    """Reference: §4.3.3.3."""
    for suspect, gone, asked in ((False, (), [B, D]), (True, (), [D]), (False, (B,), [D])):
        play = promising("j1")
        seen = RackUpdated(frozenset(gone), (loaded(B, 45_000, suspect), loaded(C, 10_000), loaded(D, 70_000)))
        found = []
        for _ in range(200):
            play.now_s += 1
            found += [action for action in play(seen) if isinstance(action, AskQuestion)]
        assert [action.to for action in found[: len(asked)]] == asked


def until_asked(play: Play, *others: Candidate, step_s: float = 0.25) -> float:
    """Let seconds pass until it asks the others."""
    began_s = play.now_s
    while not any(isinstance(action, AskQuestion) for action in play(RackUpdated(frozenset(), others))):
        play.now_s += step_s
        assert play.now_s < began_s + 1000
    return play.now_s - began_s


def test_it_tries_once_a_period_and_soon_after_promises_change_not_at_once_again() -> None:
    """Hosts do not all try in the same moment, and one that just tried lets others be heard first."""
    period_s, soon_s = AggregatorSettings().scale_s, (SOON_S[0], SOON_S[0] + SOON_S[1])
    firsts = set()
    for name in ("c", "e", "f", "g"):
        play = Play(Owner(AggregatorSettings(), me=HostId(name)))
        play(ProcessUp("10.0.0.3:9", {}))
        comes(play, J1, G1 + 1, DEMAND)
        first_s = until_asked(play, loaded(D, 45_000))
        assert 0.5 * period_s <= first_s <= 1.5 * period_s + 0.25
        firsts.add(first_s)
        play(QuestionAnswered(D, CycleHere(), None))
        assert until_asked(play, loaded(D, 45_000)) == period_s
        play(QuestionAnswered(D, CycleHere(), None))
        assert PAUSE_S + soon_s[0] <= until_asked(play, loaded(D, 61_000)) <= PAUSE_S + soon_s[1] + 0.25
        play(QuestionAnswered(D, CycleHere(), None))
        for _ in range(40):
            play.now_s += 1
            assert play(RackUpdated(frozenset(), (loaded(D, 61_000),))) == []
        assert soon_s[0] <= until_asked(play, loaded(D, 62_000)) <= soon_s[1] + 0.25
    assert len(firsts) == 4


def test_only_those_of_its_own_pool_that_sum_something_are_asked() -> None:
    """Reference: §4.3.3.4."""
    hosts = [HostId(f"a{at:03}") for at in range(100)]
    me, unused = hosts[70], hosts[71]
    play = Play(Owner(AggregatorSettings(), me=me))
    play(ProcessUp("10.0.0.3:9", {}))
    comes(play, J1, G1 + 1, DEMAND)
    seen = [loaded(host, 45_000) for host in hosts if host not in (me, unused)]
    asked = begin(play, *seen, Candidate(unused, False, 0.0, 0, 0.0))
    assert asked == [host for host in hosts[50:] if host not in (me, unused)], "two pools of 50"


def test_one_that_takes_no_jobs_now_gets_none() -> None:
    for said in (msgspec.structs.replace(ROOMY, takes=False), None):
        play = promising("j1")
        begin(play, loaded(B, 45_000), loaded(D, 45_000))
        play(QuestionAnswered(B, CycleHere(), said))
        assert [host for host, _ in sends(play(QuestionAnswered(D, CycleHere(), ROOMY)))] == [D]
        play = promising("j1")
        begin(play, loaded(B, 45_000))
        assert play(QuestionAnswered(B, CycleHere(), said)) == [] and not play.machine.emptier.busy


def test_why_nothing_moved_is_told_in_the_refusers_words_and_answers_count_once() -> None:
    """Nothing moves when any job does not fit. Reference: §4.3.3.3."""
    play = promising("j1", "j2")
    begin(play, loaded(B, 60_000), loaded(D, 45_000))
    said = {
        B: CycleNow(True, 100_000, 1, 1, [JobDemand(JobId("x"), Demand(100_000, 60_000))]),
        D: CycleNow(True, 100_000, 1, 1, [JobDemand(JobId("y"), Demand(100_000, 45_000))], [JobId("j1"), JobId("j2")]),
    }
    assert play(QuestionAnswered(B, CycleHere(), said[B])) == []
    assert play(QuestionAnswered(B, CycleHere(), said[B])) == [], "said twice"
    assert play(QuestionAnswered(A, CycleHere(), said[B])) == [], "not asked"
    notes = play(QuestionAnswered(D, CycleHere(), said[D]))
    assert [note.reason for note in notes] == ["d: it was slowed, or slowed others, there"] * 2
    assert play(QuestionAnswered(D, CycleHere(), said[D])) == [] and not play.machine.emptier.busy


def test_a_job_that_has_not_pushed_yet_goes_to_one_that_does_not_bar_it() -> None:
    barring = CycleNow(True, 100_000, 1, 1, ROOMY.jobs, [IDLE])
    for said, to in (({B: ROOMY, D: ROOMY}, B), ({B: barring, D: ROOMY}, D)):
        play = promising("j1")
        comes(play, IDLE)
        play(LoadChanged(0.0, frozenset({IDLE})))
        assert begin(play, loaded(B, 45_000), loaded(D, 45_000)) == [B, D]
        play(QuestionAnswered(B, CycleHere(), said[B]))
        asked = {message.job: host for host, message in sends(play(QuestionAnswered(D, CycleHere(), said[D])))}
        assert asked == {J1: B, IDLE: to}


def test_a_job_that_has_not_pushed_and_is_barred_everywhere_keeps_all_in_place() -> None:
    play = promising("j1")
    comes(play, IDLE)
    play(LoadChanged(0.0, frozenset({IDLE})))
    begin(play, loaded(D, 45_000))
    (note,) = play(QuestionAnswered(D, CycleHere(), CycleNow(True, 100_000, 1, 1, ROOMY.jobs, [IDLE])))
    assert (note.subject, note.reason) == (IDLE, "d: it was slowed, or slowed others, there")
    assert not play.machine.emptier.busy


def test_a_job_whose_trial_began_after_the_others_were_asked_keeps_all_in_place() -> None:
    """A job that is not measured yet cannot be promised a place: a plan made a moment ago is looked at again."""
    play = promising("j1")
    begin(play, loaded(D, 45_000))
    comes(play, J2)
    assert play(QuestionAnswered(D, CycleHere(), ROOMY)) == [] and not play.machine.emptier.busy


def test_a_job_that_first_pushed_while_the_others_were_asked_is_on_trial() -> None:
    play = promising("j1")
    comes(play, IDLE)
    play(LoadChanged(0.0, frozenset({IDLE})))
    begin(play, loaded(D, 45_000))
    play(LoadChanged(0.0, frozenset()))
    play(RackUpdated(frozenset(), (loaded(D, 45_000),)))
    assert play(QuestionAnswered(D, CycleHere(), ROOMY)) == [] and not play.machine.emptier.busy


def test_one_that_became_the_fuller_since_it_asked_does_not_empty_itself() -> None:
    play = promising("j1")
    begin(play, loaded(D, 45_000))
    less = CycleNow(True, 100_000, 1, 1, [JobDemand(JobId("x"), Demand(100_000, 5_000))])
    assert play(QuestionAnswered(D, CycleHere(), less)) == [] and not play.machine.emptier.busy


def test_jobs_that_change_while_room_is_asked_for_stay_and_the_room_is_given_back() -> None:
    """The room was reserved for the jobs as they were. A job more, one less, another epoch, another demand are tried.
    Reference: §4.3.3.3."""
    changes: list[list[Any]] = [
        [Heard(A, Offer(JobId("j3"), G1 + 1, 2, SECRET)), Served(JobId("j3"), G1 + 1)],
        [Heard(A, Retire(J2, G1 + 1, G1 + 2, "d sums it"))],
        [Heard(A, Offer(J1, G1 + 3, 2, SECRET, DEMAND)), Served(J1, G1 + 3)],
        [Heard(A, Profiled(J1, G1 + 1, Demand(100_000, 20_000)))],
    ]
    for change in changes:
        play = promising("j1", "j2")
        attempt = reserving(play)[J1][1].attempt
        for event in change:
            play(event)
        assert play(Heard(D, CycleReserved(J1, attempt))) == []
        found = play(Heard(D, CycleReserved(J2, attempt)))
        assert sends(found) == [(D, ReleaseCycle(J1, attempt)), (D, ReleaseCycle(J2, attempt))]
        assert events(found) == ["aggregator not emptied"] and not play.machine.emptier.busy


# ---- what was said of another attempt --------------------------------------------------------------------------------


def test_all_hold_room_then_each_coordinator_is_told_once_however_often_they_say_so() -> None:
    play = promising("j1", "j2")
    asked = reserving(play)
    attempt = asked[J1][1].attempt
    assert [message for _, message in asked.values()] == [
        ReserveCycle(job, G1 + 1, attempt, DEMAND) for job in (J1, J2)
    ]
    for _ in range(2):
        assert play(Heard(D, CycleReserved(J1, attempt))) == []
    found = play(Heard(D, CycleReserved(J2, attempt)))
    assert [(to, message.job, message.epoch, message.to) for to, message in sends(found)] == [
        (A, J1, G1 + 1, D),
        (A, J2, G1 + 1, D),
    ]
    for job in (J1, J2):
        assert play(Heard(D, CycleReserved(job, attempt))) == [], "said twice"


def test_room_held_for_an_attempt_that_is_over_is_given_back_and_does_not_count() -> None:
    play = promising("j1")
    before = reserving(play)[J1][1].attempt
    (released,) = sends(play(Heard(D, CycleNotReserved(J1, before, "no"))))
    assert released == (D, ReleaseCycle(J1, before))
    assert sends(play(Heard(D, CycleReserved(J1, before)))) == [(D, ReleaseCycle(J1, before))], "while it rests"
    now = reserving(play)[J1][1].attempt
    assert now > before
    assert sends(play(Heard(D, CycleReserved(J1, before)))) == [(D, ReleaseCycle(J1, before))], (
        "while the next one waits"
    )
    assert [type(message) for _, message in sends(play(Heard(D, CycleReserved(J1, now))))] == [Handover]


def test_only_who_was_asked_can_hold_room_or_refuse_it() -> None:
    play = promising("j1")
    attempt = reserving(play)[J1][1].attempt
    assert sends(play(Heard(B, CycleReserved(J1, attempt)))) == [(B, ReleaseCycle(J1, attempt))]
    assert play(Heard(B, CycleNotReserved(J1, attempt, "no"))) == [] and play.machine.emptier.busy


def test_a_refusal_of_an_attempt_that_is_over_does_not_end_the_next() -> None:
    play = promising("j1")
    before = reserving(play)[J1][1]
    play(Undelivered(D, before))
    assert play.machine.emptier.refused == {J1: "d: no answer"}
    now = reserving(play)[J1][1]
    assert play(Heard(D, CycleNotReserved(J1, before.attempt, "it empties itself"))) == []
    assert play(Undelivered(D, before)) == []
    assert play.machine.emptier.busy and play.machine.emptier.refused == {}
    assert [type(message) for _, message in sends(play(Heard(D, CycleReserved(J1, now.attempt))))] == [Handover]


def test_the_timer_of_an_attempt_that_is_over_does_not_end_the_next() -> None:
    play = promising("j1")
    reserving(play)
    (timer,) = [action for action in play.actions if isinstance(action, SetTimer)]
    found = play(timer.event)
    assert events(found) == ["aggregator not emptied"] and not play.machine.emptier.busy
    reserving(play)
    assert play(timer.event) == [] and play.machine.emptier.busy


def test_what_was_said_of_a_job_here_is_forgotten_when_it_leaves() -> None:
    play = promising("j1", "j2")
    attempt = reserving(play)[J1][1].attempt
    play(Heard(D, CycleNotReserved(J1, attempt, "it empties itself")))
    assert play.machine.emptier.refused == {J1: "d: it empties itself"}
    play(Heard(A, Retire(J1, G1 + 1, G1 + 2, "d sums it")))
    assert play.machine.emptier.refused == {}
    attempt = reserving(play)[J2][1].attempt
    play(Heard(A, Retire(J2, G1 + 1, G1 + 2, "d sums it")))
    play(Heard(D, CycleNotReserved(J2, attempt, "it empties itself")))
    assert play.machine.emptier.refused == {}, "nor is it told of one that has left"


# ---- who holds room --------------------------------------------------------------------------------------------------

NEED = Demand(100_000, 60_000)


def holder(epoch: int = G1 + 5, attempt: int = 50) -> Play:
    """A machine that holds room for j1, asked for by c."""
    play = Play(Owner(AggregatorSettings(), me=D))
    play(ProcessUp("10.0.0.4:9", {}))
    assert sends(play(Heard(C, ReserveCycle(J1, epoch, attempt, NEED)))) == [(C, CycleReserved(J1, attempt))]
    return play


def held(play: Play) -> tuple[HostId, int, int] | None:
    found = play.machine.ledger.reserved.get(J1)
    return (found.by, found.epoch, found.attempt) if found is not None else None


def test_room_is_held_for_the_latest_order_and_a_late_earlier_one_changes_nothing() -> None:
    """The late order comes from a former owner of the job (a lower epoch), or from an attempt of the same one that is
    over."""
    for late in (Heard(B, ReserveCycle(J1, G1 + 4, 99, NEED)), Heard(C, ReserveCycle(J1, G1 + 5, 49, NEED))):
        play = holder()
        until_s = play.machine.ledger.reserved[J1].until_s
        play.now_s += 1
        ((to, refused),) = sends(play(late))
        assert isinstance(refused, CycleNotReserved) and (to, refused.attempt) == (late.sender, late.message.attempt)
        assert refused.reason == "it has reserved room for it already, asked for later by c"
        assert held(play) == (C, G1 + 5, 50) and play.machine.ledger.reserved[J1].until_s == until_s
    for later in (Heard(B, ReserveCycle(J1, G1 + 6, 2, NEED)), Heard(C, ReserveCycle(J1, G1 + 5, 51, NEED))):
        play = holder()
        play.now_s += 1
        assert sends(play(later)) == [(later.sender, CycleReserved(J1, later.message.attempt))]
        assert held(play) == (later.sender, later.message.epoch, later.message.attempt)
        assert play.machine.ledger.reserved[J1].until_s == play.now_s + RESERVE_S, "as long as if it were the first"


def test_the_same_order_twice_holds_room_once() -> None:
    play = holder()
    assert sends(play(Heard(C, ReserveCycle(J1, G1 + 5, 50, NEED)))) == [(C, CycleReserved(J1, 50))]
    assert play.machine.ledger.cycle.used_us == NEED.work_us


def test_only_the_attempt_that_asked_for_room_can_release_it() -> None:
    play = holder()
    for sender, attempt in ((B, 50), (C, 49), (C, 51)):
        assert play(Heard(sender, ReleaseCycle(J1, attempt))) == []
        assert held(play) == (C, G1 + 5, 50)
    for _ in range(2):
        assert play(Heard(C, ReleaseCycle(J1, 50))) == []
    assert held(play) is None and play.machine.ledger.cycle.used_us == 0


def test_an_offer_older_than_what_room_is_held_for_is_declined_and_the_room_stays() -> None:
    for epoch in (G1 + 3, G1 + 5):
        play = holder()
        ((_, declined),) = sends(play(Heard(A, Offer(J1, epoch, 2, SECRET, NEED))))
        assert isinstance(declined, Declined) and declined.known == G1 + 5
        assert declined.reason == "it has reserved room for what comes after epoch 1.5"
        assert held(play) == (C, G1 + 5, 50)
    play = holder()
    comes(play, J1, G1 + 6, NEED)
    assert held(play) is None and play.machine.ledger.cycle.used_us == NEED.work_us


def test_an_offer_that_does_not_fit_the_room_held_for_it_ends_that() -> None:
    play = holder()
    ((_, declined),) = sends(play(Heard(A, Offer(J1, G1 + 6, 2, SECRET, Demand(100_000, 100_001)))))
    assert "us free" in declined.reason and held(play) is None


def test_an_offer_that_does_not_fit_leaves_a_job_that_is_here_what_it_was_promised() -> None:
    play = promising("j1")
    ((_, declined),) = sends(play(Heard(A, Offer(J1, G1 + 3, 2, SECRET, Demand(100_000, 100_001)))))
    assert "us free" in declined.reason and play.machine.ledger.demands == {J1: DEMAND}


@pytest.mark.parametrize("over", [Unplaced(J1, 1, True), GangPlaced(J1, 2, 2, PLACES)])
def test_no_room_is_held_for_a_run_that_is_over(over: Any) -> None:
    play = holder()
    play(over)
    assert held(play) is None
    ((_, refused),) = sends(play(Heard(C, ReserveCycle(J1, G1 + 5, 51, NEED))))
    assert refused == CycleNotReserved(J1, 51, "that run of the job has ended")
    assert sends(play(Heard(C, ReserveCycle(J1, (2 << 32) + 1, 52, NEED)))) == [(C, CycleReserved(J1, 52))], (
        "a later run"
    )


def test_an_earlier_run_that_is_over_does_not_end_what_is_held_for_a_later_one() -> None:
    play = holder(epoch=(2 << 32) + 1)
    play(Unplaced(J1, 1, False))
    assert held(play) == (C, (2 << 32) + 1, 50)


def test_room_that_nobody_comes_for_is_given_back_after_a_while() -> None:
    play = holder()
    play.now_s += RESERVE_S - 1
    play(RackUpdated(frozenset(), ()))
    assert held(play) is not None
    play.now_s += 1
    play(RackUpdated(frozenset(), ()))
    assert held(play) is None


def test_who_empties_itself_holds_no_room_and_who_holds_room_does_not_empty_itself() -> None:
    play = promising("j1")
    reserving(play)
    ((_, refused),) = sends(play(Heard(B, ReserveCycle(JobId("x"), G1 + 1, 9, None))))
    assert refused == CycleNotReserved(JobId("x"), 9, "it empties itself")
    assert not play.machine.promised().takes
    play = promising("j1")
    play(Heard(B, ReserveCycle(JobId("x"), G1 + 1, 9, None)))
    for _ in range(19):
        play.now_s += 1
        assert play(RackUpdated(frozenset(), (loaded(D, 45_000),))) == []


def test_an_aggregator_whose_process_died_gives_back_the_room_held_for_its_jobs() -> None:
    play = promising("j1")
    attempt = reserving(play)[J1][1].attempt
    found = play(ProcessDown("killed"))
    assert (D, ReleaseCycle(J1, attempt)) in sends(found) and not play.machine.emptier.busy
    assert play(EmptyingEnds(attempt, handing_over=False)) == []


def answer(play: Play, job: JobId, attempt: int = 1) -> str:
    """Why no room is held for a job that needs none; empty when it is held."""
    ((_, message),) = sends(play(Heard(C, ReserveCycle(job, G1 + 1, attempt, None))))
    return message.reason if isinstance(message, CycleNotReserved) else ""


def test_one_that_does_not_serve_or_is_down_or_full_holds_no_room() -> None:
    closed = Play(Owner(AggregatorSettings(serve=False), me=D))
    closed(ProcessUp("10.0.0.4:9", {}))
    assert "serve = false" in answer(closed, J1) and not closed.machine.promised().takes
    down = Play(Owner(AggregatorSettings(), me=D))
    assert answer(down, J1) == "its process is not up" and not down.machine.promised().takes
    full = Play(Owner(AggregatorSettings(jobs_max=2), me=D))
    full(ProcessUp("10.0.0.4:9", {}))
    comes(full, J1)
    assert answer(full, J1) == "it sums that job itself"
    assert [answer(full, J2), answer(full, J2)] == ["", ""], "asked twice for one job"
    assert "jobs_max" in answer(full, IDLE), "room that is held counts"
    for play in (closed, down):
        assert not play.machine.ledger.reserved
    ((_, declined),) = sends(full(Heard(A, Offer(IDLE, G1 + 1, 2, SECRET))))
    assert "jobs_max" in declined.reason
    comes(full, J2, G1 + 2)


def test_one_that_a_job_was_asked_to_leave_holds_no_room_for_it() -> None:
    play = promising("j1", "j2")
    play(Heard(A, LossReport(J1, G1 + 1, 100, 150, True)))
    play(Heard(A, Retire(J2, G1 + 1, G1 + 2, "d sums it")))
    assert answer(play, J2) == BARRED


def test_who_handed_over_rests_after_a_while_and_its_question_for_room_ends_nothing() -> None:
    play = promising("j1")
    attempt = reserving(play)[J1][1].attempt
    play(Heard(D, CycleReserved(J1, attempt)))
    asked, handed = [action for action in play.actions if isinstance(action, SetTimer)]
    assert handed.after_s == HAND_S > asked.after_s
    assert play(asked.event) == [] and play.machine.emptier.state == HandingOver({J1: D})
    assert play(handed.event) == [] and play.machine.emptier.state == Resting()
