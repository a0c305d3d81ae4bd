"""Jobs that do not let go of memory that others wait for: pressed by the driver, suspended, and taken back."""

from itertools import pairwise
from typing import Any

from covey.core.ids import JobId
from covey.core.units import GIB
from plugins.sharing.machine.events import (
    Freed,
    HardLimit,
    HardLimited,
    Kill,
    RankEnded,
    Resume,
    SetLimits,
    StartRank,
    Suspend,
    Suspended,
    Terminate,
    TimePassed,
)
from tests.plugins.sharing.gpu_rack import Rack, kinds, state

OTHER, G = JobId("o"), JobId("g")


def deaf(wanted: int = 20) -> Rack:
    """A GPU on which `o` holds 30 of 32 GiB and does not listen; `g` waits for `wanted`."""
    rack = Rack()
    rack.hold("o", 30, stable=30 * GIB)
    rack.deaf.add("o")
    rack.arrive("g", "guaranteed", wanted)
    return rack


def suspended() -> Rack:
    rack = deaf()
    rack.tell(TimePassed(True), 6)
    rack.tell(TimePassed(True), 2)
    told = rack.tell(Suspended(OTHER, ok=True))
    assert "o is suspended to host memory" in str(told) and StartRank in kinds(told)
    return rack


def told_limits(actions: list[Any]) -> list[str]:
    return [each.limits.job for each in actions if isinstance(each, SetLimits)]


def test_the_drivers_word_counts_only_for_who_is_pressed_and_only_for_what_it_has() -> None:
    rack = deaf()
    assert rack.gpu.ledger.accounts[OTHER].charged_bytes == 32 * GIB
    rack.tell(HardLimited(OTHER, 12 * GIB, ok=True))
    assert state(rack) == "arrival", "nobody asked the driver yet"
    assert kinds(rack.tell(TimePassed(True), 6)) == [HardLimit]
    rack.tell(HardLimited(OTHER, 33 * GIB, ok=True))
    assert rack.gpu.ledger.accounts[OTHER].charged_bytes == 32 * GIB
    assert Suspend in kinds(rack.tell(TimePassed(True), 2))
    rack.tell(HardLimited(OTHER, 12 * GIB, ok=True))
    assert state(rack) == "arrival", "too late: it is being suspended"


def test_who_still_loads_and_named_no_memory_is_queued_again_not_suspended() -> None:
    """If it were suspended, it would come back when all of the device is free: when the guaranteed job ends."""
    for began_s, wanted, means in ((0, 0, Terminate), (60, 0, Suspend), (0, 30, Suspend)):
        rack = Rack()
        rack.arrive("o", "opportunistic", wanted)
        rack.tell(TimePassed(True), began_s)
        rack.arrive("g", "guaranteed", 20)
        assert kinds(rack.tell(TimePassed(True), 6)) == [HardLimit]
        assert means in kinds(rack.tell(TimePassed(True), 2)), (began_s, wanted)


def test_who_waits_in_vain_for_memory_beside_a_guaranteed_job_is_queued_again() -> None:
    """A script of no framework neither shows what it needs nor runs with less."""
    rack = Rack()
    rack.deaf.add("g")
    rack.arrive("g", "guaranteed", 0)
    told = rack.arrive("o", "opportunistic", 0)
    for _ in range(59):
        told += rack.tell(TimePassed(True), 1)
    assert kinds(told).count(StartRank) + kinds(told).count(Terminate) == 0
    told = rack.tell(TimePassed(True), 1) + rack.tell(TimePassed(True), 1) + rack.tell(TimePassed(True), 1)
    assert [each.job for each in told if isinstance(each, Terminate)] == [OTHER], "once"


def test_who_was_limited_by_the_driver_is_limited_by_it_again_the_next_time() -> None:
    rack = deaf()
    rack.tell(TimePassed(True), 6)
    assert StartRank in kinds(rack.tell(HardLimited(OTHER, 12 * GIB, ok=True)))
    rack.step("g", peak=20 * GIB, spill=4 * GIB)
    assert kinds(rack.tell(TimePassed(True), 6)) == [HardLimit]


def test_a_suspension_that_failed_or_that_nobody_asked_for_frees_nothing() -> None:
    rack = deaf()
    rack.tell(Suspended(OTHER, ok=True))
    rack.tell(TimePassed(True), 6)
    rack.tell(Suspended(OTHER, ok=True))
    assert rack.gpu.members[OTHER].stage == "running", "the driver is asked first"
    rack.tell(TimePassed(True), 2)
    rack.tell(Suspended(OTHER, ok=False))
    assert state(rack) == "arrival" and rack.gpu.members[OTHER].stage == "running"


def test_nothing_is_sent_to_who_is_suspended_or_has_ended() -> None:
    rack = suspended()
    for _ in range(8):
        assert "o" not in told_limits(rack.tell(TimePassed(True), 1))
    rack.tell(RankEnded(G))
    for _ in range(8):
        assert told_limits(rack.tell(TimePassed(True), 1)) == []


def test_the_suspended_come_back_exactly_when_what_they_cannot_do_without_fits() -> None:
    rack = suspended()
    rack.tell(RankEnded(G))
    assert Resume not in kinds(rack.tell(TimePassed(True), 1)), "12 GiB are free; it needs 30"
    rack.tell(Freed(G))
    assert rack.gpu.members[OTHER].stage == "running" and rack.gib("o") == 32


def test_limits_are_sent_anew_only_when_their_lease_is_half_over() -> None:
    rack = Rack()
    rack.steady()
    sent = [told_limits(rack.tell(TimePassed(True), 0.25)) for _ in range(40)]
    assert 9 <= sum("o" in each for each in sent) <= 11, "every second, not every event"


def test_only_an_opportunistic_job_that_does_not_let_go_is_pressed_ever_harder() -> None:
    rack = deaf()
    pressed = []
    for _ in range(60):
        pressed += kinds(rack.tell(TimePassed(True), 1))
    assert pressed[:4] == [HardLimit, Suspend, Terminate, Kill]
    assert state(rack) == "arrival"
    rack.tell(RankEnded(OTHER))
    assert state(rack) == "arrival", "its memory is not free before the device shows it"
    assert StartRank in kinds(rack.tell(Freed(OTHER)))


def test_each_way_of_pressing_has_its_time_before_the_next_and_killing_is_repeated() -> None:
    rack = deaf()
    begun_s, pressed = rack.now_s, []
    for _ in range(120):
        pressed += [(round(rack.now_s - begun_s, 1), kind) for kind in kinds(rack.tell(TimePassed(True), 0.5))]
    assert [kind for _, kind in pressed[:5]] == [HardLimit, Suspend, Terminate, Kill, Kill]
    assert [round(at_s - before_s) for (before_s, _), (at_s, _) in pairwise(pressed[:5])] == [1, 10, 10, 10]
    assert 5 <= pressed[0][0] <= 6, "a limit may take 5 s to be applied"


def test_who_has_let_go_once_is_asked_gently_the_next_time() -> None:
    rack = Rack()
    rack.hold("o", 30)
    rack.arrive("g", "guaranteed", 8)
    assert kinds(rack.tell(TimePassed(True), 6)) == [HardLimit]
    assert StartRank in kinds(rack.step("o", peak=24 * GIB)), "late, but it has applied its limit"
    rack.tell(RankEnded(G))
    rack.tell(Freed(G))
    rack.step("o", peak=30 * GIB)
    rack.arrive("h", "guaranteed", 8)
    assert kinds(rack.tell(TimePassed(True), 6)) == [HardLimit]


def test_a_limit_that_the_driver_enforces_counts_as_applied() -> None:
    rack = deaf()
    rack.tell(TimePassed(True), 6)
    rack.tell(HardLimited(OTHER, 12 * GIB, ok=False))
    assert state(rack) == "arrival"
    rack.tell(HardLimited(OTHER, 12 * GIB, ok=True))
    assert state(rack) == "init"


def test_a_suspended_job_comes_back_when_there_is_room() -> None:
    rack = suspended()
    rack.tell(RankEnded(G))
    assert Resume in kinds(rack.tell(Freed(G)))
    assert rack.gpu.state == "alone"
