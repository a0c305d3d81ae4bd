"""Who may come to a GPU, who may become guaranteed there, and what the story says of it."""

from typing import Any

from covey.core import JobId, LogEvent
from covey.units import GIB
from plugins.sharing.machine.events import (
    DeviceDraining,
    DeviceLost,
    Found,
    Freed,
    RankEnded,
    Refuse,
    Retagged,
    StartRank,
    Suspended,
    Terminate,
    TimePassed,
    UpgradeAnswer,
    UpgradeAsked,
)
from tests.plugins.sharing.gpu_rack import Rack, kinds, state

OTHER, MORE, G = JobId("o"), JobId("p"), JobId("g")


def answers(actions: list[Any]) -> list[str]:
    return [action.answer.refused for action in actions if isinstance(action, UpgradeAnswer)]


def test_once_a_guaranteed_job_ends_the_others_are_free_and_the_next_may_come() -> None:
    """Its memory is handed on later, when the device shows it free. Reference: §3.3, Local coordinator."""
    rack = Rack()
    rack.steady()
    rack.tell(RankEnded(G))
    assert state(rack) == "alone"
    assert rack.limits["o"].busy == 1 and rack.limits["o"].head_s is None and rack.gib("o") == 24
    assert kinds(rack.arrive("h", "guaranteed", 16)) == []
    assert state(rack) == "arrival" and rack.gib("o") == 16
    rack.step("o", peak=16 * GIB)
    assert state(rack) == "arrival", "8 of the 16 are still charged to the one that ended"
    assert StartRank in kinds(rack.tell(Freed(G)))


def test_an_opportunistic_job_beside_a_guaranteed_one_leaves_its_measurement_alone() -> None:
    rack = Rack()
    rack.steady()
    ladder = rack.gpu.ladder
    rack.arrive("p", "opportunistic", 4)
    assert state(rack) == "run" and rack.gpu.ladder is ladder


def test_a_guaranteed_job_ends_the_trial_of_memory_among_the_others() -> None:
    """Reference: §3.3: it comes first."""
    rack = Rack(gib=24)
    for job in ("o", "p"):
        rack.arrive(job, "opportunistic", 16)
    rack.steps(3, "o", "p", peak=8 * GIB, stable=0)
    assert rack.gpu.trial.search is not None
    rack.arrive("g", "guaranteed", 4)
    assert rack.gpu.trial.search is None
    assert state(rack) == "arrival"


def test_only_a_guaranteed_job_needs_to_fit_whole() -> None:
    """An opportunistic one lives with what there is; what exceeds its limit goes to host memory. Reference: §3.1."""
    rack = Rack()
    assert kinds(rack.arrive("big", "guaranteed", 33)) == [Refuse]
    assert kinds(rack.arrive("o", "opportunistic", 40)) == [StartRank] and rack.gib("o") == 32
    rack = Rack()
    assert kinds(rack.arrive("g", "guaranteed", 32)) == [StartRank] and rack.gib("g") == 32


def test_nobody_comes_twice_and_nobody_comes_to_a_lost_device() -> None:
    rack = Rack()
    rack.arrive("o", "opportunistic", 8)
    assert "on GPU-0 already" in str(rack.arrive("o", "opportunistic", 8))
    assert kinds(rack.tell(Found(OTHER, "opportunistic", GIB, GIB, 3))) == [Terminate]
    assert state(rack) == "alone"
    rack.tell(DeviceLost("XID 79"))
    assert kinds(rack.arrive("p", "opportunistic", 8)) == [Refuse]
    assert kinds(rack.tell(Found(MORE, "opportunistic", GIB, GIB, 3))) == [Terminate]
    assert list(rack.gpu.members) == [OTHER]


def test_a_promise_keeps_away_a_guaranteed_job_but_no_opportunistic_or_present_one() -> None:
    rack = Rack()
    rack.arrive("o", "opportunistic", 8)
    rack.step("o", peak=8 * GIB)
    assert answers(rack.tell(UpgradeAsked(OTHER, 7))) == [""]
    assert answers(rack.tell(UpgradeAsked(OTHER, 8))) == [""], "the same job may ask again"
    assert kinds(rack.arrive("g", "guaranteed", 8)) == [Refuse]
    assert kinds(rack.arrive("p", "opportunistic", 8)) != [Refuse]
    rack.step("o", peak=8 * GIB)
    assert kinds(rack.tell(Found(JobId("f"), "guaranteed", GIB, 0, 3))) == []
    assert "guaranteed job already, f" in answers(rack.tell(Retagged(OTHER, "guaranteed", 8)))[0]


def test_who_does_not_run_or_wants_more_than_there_is_cannot_become_guaranteed() -> None:
    """All ranks must be ready. Reference: §3.3, Job upgrade."""
    rack = Rack()
    rack.arrive("o", "opportunistic", 32)
    assert rack.gpu.can_upgrade(OTHER) == ""
    rack.step("o", peak=20 * GIB, spill=13 * GIB)
    assert "it wants 33 GiB of 32 GiB" in rack.gpu.can_upgrade(OTHER)
    rack.arrive("p", "opportunistic", 8)
    assert "does not run" in rack.gpu.can_upgrade(MORE), "it waits for memory"
    rack.tell(RankEnded(OTHER))
    assert "does not run" in rack.gpu.can_upgrade(OTHER)
    assert "does not run" in rack.gpu.can_upgrade(JobId("x"))


def test_a_guaranteed_job_that_is_asked_whether_it_could_be_says_yes() -> None:
    rack = Rack()
    rack.steady()
    assert answers(rack.tell(UpgradeAsked(G, 1))) == [""]
    assert rack.tell(Retagged(G, "guaranteed", 1)) == [] and state(rack) == "run"


def test_a_suspended_job_is_not_asked_for_an_upgrade() -> None:
    rack = Rack()
    rack.arrive("o", "opportunistic", 30)
    rack.step("o", peak=30 * GIB, stable=30 * GIB)
    rack.deaf.add("o")
    rack.arrive("g", "guaranteed", 20)
    rack.tell(TimePassed(True), 6)
    rack.tell(TimePassed(True), 2)
    rack.tell(Suspended(OTHER, ok=True))
    assert "does not run" in rack.gpu.can_upgrade(OTHER)


def test_the_story_says_who_came_for_how_much_and_why_the_others_stop() -> None:
    rack = Rack()
    rack.arrive("o", "opportunistic", 30)
    rack.step("o", peak=30 * GIB)
    (note,) = [each for each in rack.arrive("g", "guaranteed", 8) if isinstance(each, LogEvent)]
    assert (note.subject, note.event) == ("gpu/GPU-0", "arrival")
    assert note.reason.startswith("guaranteed job g arrived, asking for 8 GiB: the others stop and make room")


# ---- found, ended, gone ----------------------------------------------------------------------------------------------


def test_a_job_that_is_found_is_watched_from_then_on_and_measured_like_one_that_came() -> None:
    """Neither stuck nor taken as it is, however long the device's clock has run."""
    rack = Rack()
    rack.now_s = 1000.0
    (note,) = [each for each in rack.tell(Found(G, "guaranteed", 8 * GIB, 8 * GIB, 41)) if isinstance(each, LogEvent)]
    assert note.reason == "guaranteed job g was here before the agent; it keeps its limit"
    rack.tell(TimePassed(busy=True), 1)
    assert state(rack) == "init"
    rack.step("g", peak=8 * GIB)
    assert state(rack) == "init", "one mini-batch says nothing"
    rack.steps(40, "g", peak=8 * GIB)
    assert state(rack) in ("baseline", "run")


def test_an_opportunistic_job_that_is_found_changes_nothing_for_a_guaranteed_one() -> None:
    rack = Rack()
    rack.steady()
    ladder = rack.gpu.ladder
    rack.tell(RankEnded(OTHER))
    rack.tell(Freed(OTHER))
    rack.tell(Found(MORE, "opportunistic", GIB, GIB, 3))
    assert state(rack) == "run" and rack.gpu.ladder is ladder


def test_only_who_has_ended_is_gone_and_nobody_ends_twice() -> None:
    rack = Rack()
    rack.arrive("o", "opportunistic", 8)
    assert rack.tell(Freed(OTHER)) == [] and state(rack) == "alone"
    assert "o ended" in str(rack.tell(RankEnded(OTHER)))
    assert rack.tell(RankEnded(OTHER)) == []
    assert rack.step("o", peak=8 * GIB) == [], "a report that was under way"
    assert "o is gone" in str(rack.tell(Freed(OTHER)))
    assert rack.gpu.members == {}


def test_a_lost_device_asks_nobody_to_end_who_has_ended_and_is_not_emptied_any_more() -> None:
    rack = Rack()
    rack.steady()
    rack.tell(RankEnded(OTHER))
    assert [a.job for a in rack.tell(DeviceLost("XID 79")) if isinstance(a, Terminate)] == ["g"]
    assert rack.tell(DeviceDraining("rows to remap")) == [] and state(rack) == "lost"


def test_an_ended_opportunistic_job_is_not_asked_to_leave_a_device_to_be_emptied() -> None:
    rack = Rack()
    rack.steady()
    rack.tell(RankEnded(OTHER))
    assert not any(isinstance(a, Terminate) for a in rack.tell(DeviceDraining("rows to remap")))


# ---- up and down -----------------------------------------------------------------------------------------------------


def test_a_job_that_was_upgraded_is_measured_anew_and_its_silence_counts_from_then() -> None:
    """Reference: §3.3, Job upgrade."""
    rack = Rack()
    for job in ("o", "p"):
        rack.arrive(job, "opportunistic", 8)
    rack.steps(40, "o", "p", peak=8 * GIB)
    rack.steps(40, "p", peak=8 * GIB, step_s=2.0)
    rack.tell(Retagged(OTHER, "guaranteed", 3))
    rack.tell(TimePassed(busy=True), 29)
    assert state(rack) == "init", "not stuck: it has half a minute from its upgrade"
    rack.step("o", peak=8 * GIB)
    assert state(rack) == "init", "what it did before does not count"
    assert rack.gpu.members[MORE].steps.count > 0


def test_a_job_that_was_downgraded_shares_with_the_others_at_once() -> None:
    rack = Rack()
    rack.steady()
    told = rack.tell(Retagged(G, "opportunistic", 1))
    assert ("job/g", "downgraded") in [(each.subject, each.event) for each in told if isinstance(each, LogEvent)]
    assert state(rack) == "together" and rack.limits["o"].busy == rack.limits["g"].busy == 1
    assert rack.gpu.members[G].steps.count > 0


def test_a_downgrade_on_a_device_to_be_emptied_is_done_and_the_job_goes() -> None:
    rack = Rack()
    rack.steady()
    rack.tell(DeviceDraining("rows to remap"))
    told = rack.tell(Retagged(G, "opportunistic", 1))
    assert answers(told) == [] and kinds(told) == [Terminate]
    assert rack.gpu.members[G].kind == "opportunistic"


def test_a_promise_lasts_until_its_job_is_told_what_it_is_whatever_befalls_others() -> None:
    rack = Rack()
    for job in ("o", "p", "q"):
        rack.arrive(job, "opportunistic", 8)
    rack.steps(5, "o", "p", "q", peak=8 * GIB)
    rack.tell(UpgradeAsked(OTHER, 7))
    rack.tell(Retagged(MORE, "opportunistic", 1))
    rack.tell(RankEnded(JobId("q")))
    assert "promised to o" in answers(rack.tell(UpgradeAsked(MORE, 1)))[0]
    rack.tell(Retagged(OTHER, "opportunistic", 7))
    assert answers(rack.tell(UpgradeAsked(MORE, 2))) == [""]


def test_an_order_under_an_older_epoch_is_not_obeyed_whether_one_asked_before_or_not() -> None:
    rack = Rack()
    rack.arrive("o", "opportunistic", 8)
    rack.step("o", peak=8 * GIB)
    rack.tell(Retagged(OTHER, "guaranteed", 5))
    rack.tell(Retagged(OTHER, "opportunistic", 4))
    assert rack.gpu.members[OTHER].guaranteed
    rack.tell(Retagged(OTHER, "opportunistic", 5))
    assert not rack.gpu.members[OTHER].guaranteed
    rack.tell(Retagged(OTHER, "guaranteed", 4))
    assert not rack.gpu.members[OTHER].guaranteed
