"""Which jobs may come to a GPU, which may become guaranteed there, and what the story says about it."""

from covey.core.events import LogEvent
from covey.core.ids import JobId
from covey.core.units import GIB
from plugins.sharing.machine.events import (
    DeviceDraining,
    DeviceLost,
    Found,
    Freed,
    RankEnded,
    Refuse,
    Retagged,
    StartRank,
    Terminate,
    TimePassed,
)
from tests.plugins.sharing.gpu_rack import Rack, kinds, state

OTHER, MORE, G = JobId("o"), JobId("p"), JobId("g")


def test_once_a_guaranteed_job_ends_the_others_are_free_and_the_next_may_come() -> None:
    """The ended job's memory is handed on later, when the device shows it free. Reference: §3.3, Local coordinator."""
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
    """Reference: §3.3: the guaranteed job comes first."""
    rack = Rack(gib=24)
    for job in ("o", "p"):
        rack.arrive(job, "opportunistic", 16)
    rack.steps(3, "o", "p", peak=8 * GIB, stable=0)
    assert rack.gpu.trial.search is not None
    rack.arrive("g", "guaranteed", 4)
    assert rack.gpu.trial.search is None
    assert state(rack) == "arrival"


def test_only_a_guaranteed_job_needs_to_fit_whole() -> None:
    """An opportunistic job lives with what there is; what exceeds its limit lies in host memory. Reference: §3.1."""
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


def test_the_story_says_who_came_for_how_much_and_why_the_others_stop() -> None:
    rack = Rack()
    rack.hold("o", 30)
    (note,) = [each for each in rack.arrive("g", "guaranteed", 8) if isinstance(each, LogEvent)]
    assert (note.subject, note.event) == ("gpu/GPU-0", "arrival")
    assert note.reason.startswith("guaranteed job g arrived, asking for 8 GiB: the others stop and make room")


# ---- found, ended, gone ----------------------------------------------------------------------------------------------


def test_a_job_that_is_found_is_watched_from_then_on_and_measured_like_one_that_came() -> None:
    """The job is neither stuck nor taken as it is, however long the device's clock has run."""
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
    assert kinds(told) == [Terminate]
    assert rack.gpu.members[G].kind == "opportunistic"


def test_an_order_of_an_older_log_index_is_not_obeyed() -> None:
    rack = Rack()
    rack.hold("o", 8)
    rack.tell(Retagged(OTHER, "guaranteed", 5))
    rack.tell(Retagged(OTHER, "opportunistic", 4))
    assert rack.gpu.members[OTHER].guaranteed
    rack.tell(Retagged(OTHER, "opportunistic", 6))
    assert not rack.gpu.members[OTHER].guaranteed
    rack.tell(Retagged(OTHER, "guaranteed", 4))
    assert not rack.gpu.members[OTHER].guaranteed


def test_an_upgrade_waits_for_the_guaranteed_job_before_it_to_end_here() -> None:
    """The log may give the place of one job to the other before this host has seen the first one end. Reference: §3.3,
    Job upgrade."""
    rack = Rack()
    rack.steady()
    told = rack.tell(Retagged(OTHER, "guaranteed", 9))
    assert kinds(told) == [] and rack.gpu.guaranteed is rack.gpu.members[G]
    told = rack.tell(RankEnded(G))
    assert ("job/o", "upgraded") in [(each.subject, each.event) for each in told if isinstance(each, LogEvent)]
    assert rack.gpu.guaranteed is rack.gpu.members[OTHER] and state(rack) == "init"


def test_a_downgrade_calls_off_an_upgrade_that_waits() -> None:
    rack = Rack()
    rack.steady()
    rack.tell(Retagged(OTHER, "guaranteed", 9))
    rack.tell(Retagged(OTHER, "opportunistic", 10))
    rack.tell(RankEnded(G))
    assert rack.gpu.guaranteed is None and state(rack) == "alone"


# ---- who cannot be held back, who does not say what memory it wants --------------------------------------------------


def test_who_cannot_be_held_back_is_not_left_beside_a_guaranteed_job() -> None:
    """The job has half a minute to load what holds it back; alone it may stay. Reference: §3.2."""
    rack = Rack()
    rack.arrive("o", "opportunistic", 8)
    assert kinds(rack.tell(TimePassed(True), 100)) == []
    rack.arrive("g", "guaranteed", 8)
    rack.step("o", gate=False)
    assert kinds(rack.tell(TimePassed(True), 29)) == []
    told = rack.tell(TimePassed(True), 2)
    assert [(each.job, "cannot be throttled" in each.why) for each in told if isinstance(each, Terminate)] == [
        ("o", True)
    ]
    assert kinds(rack.tell(TimePassed(True), 2)) == [], "once"


def test_who_has_a_gate_stays() -> None:
    rack = Rack()
    rack.steady()
    assert Terminate not in kinds(rack.tell(TimePassed(True), 100))


def test_a_guaranteed_job_that_asks_for_no_memory_has_all_until_it_shows_its_need() -> None:
    rack = Rack()
    rack.hold("o", 20)
    rack.arrive("g", "guaranteed", 0)
    rack.step("o", peak=0)
    assert rack.gib("g") == 32 and rack.gib("o") == 0
    rack.steps(30, "g", "o", peak=6 * GIB)
    assert rack.gib("g") == 6 and rack.gib("o") == 20
