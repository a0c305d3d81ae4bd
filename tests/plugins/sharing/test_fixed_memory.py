"""Jobs that keep the memory they took at their start (JAX): given room, never tried, stopped only where it is
needed."""

from covey.core.ids import JobId
from covey.core.units import GIB
from plugins.sharing.machine.events import (
    HardLimit,
    Kill,
    RankArrived,
    StartRank,
    Suspend,
    Suspended,
    Terminate,
    TimePassed,
)
from tests.plugins.sharing.gpu_rack import Rack, kinds, state

J = JobId("j")


def beside(took: int, wanted: int) -> Rack:
    """A GPU on which `j` took `took` of 32 GiB, and `g`, which is guaranteed, asks for `wanted`."""
    rack = Rack()
    rack.keeps["j"] = took * GIB
    rack.arrive("j", "opportunistic", took)
    rack.step("j")
    assert rack.limits["j"].memory_bytes == 32 * GIB, "alone it has no limit but the device"
    rack.arrive("g", "guaranteed", wanted)
    return rack


def test_a_limit_that_leaves_it_what_it_took_lets_a_guaranteed_job_start() -> None:
    rack = beside(20, 12)
    assert rack.gib("j") == 20
    assert StartRank in kinds(rack.step("j")) and state(rack) == "init"


def test_what_does_not_fit_beside_it_is_not_waited_for_at_the_drivers_limit() -> None:
    """Under a smaller limit the job would fail, which would count as its own failure."""
    rack = beside(20, 16)
    pressed = []
    for _ in range(60):
        rack.step("j")
        pressed += kinds(rack.tell(TimePassed(True), 1))
    assert HardLimit not in pressed and pressed[:3] == [Suspend, Terminate, Kill]
    assert state(rack) == "arrival"


def test_once_suspended_it_comes_back_when_what_it_took_fits() -> None:
    rack = beside(20, 16)
    while Suspend not in kinds(rack.tell(TimePassed(True), 1)):
        rack.step("j")
    assert StartRank in kinds(rack.tell(Suspended(J, ok=True)))
    assert rack.gpu.members[J].stage == "suspended"
    rack.tell(TimePassed(True), 60)
    assert rack.gpu.members[J].stage == "suspended", "12 of its 20 GiB are there"


def test_it_is_not_pressed_for_a_split_among_opportunistic_jobs() -> None:
    rack = Rack()
    rack.keeps["j"] = 20 * GIB
    rack.arrive("j", "opportunistic", 20)
    rack.step("j")
    rack.arrive("a", "opportunistic", 10)
    rack.arrive("b", "opportunistic", 10)
    pressed = []
    for _ in range(3000):
        for job in ("j", "a", "b"):
            rack.step(job, stable=0)
        pressed += kinds(rack.tell(TimePassed(True), 0.1))
        assert rack.gib("j") >= 20
    assert not {HardLimit, Suspend, Terminate, Kill} & set(pressed)
    assert rack.gpu.trial.search is not None and rack.gpu.trial.search.over
    assert rack.gib("a") + rack.gib("b") <= 12


def test_while_a_guaranteed_job_lacks_memory_it_is_stopped_for_it_has_none_to_give() -> None:
    """Other jobs that owe memory run on until they gave it."""
    rack = Rack()
    rack.keeps["o"] = 20 * GIB
    rack.steady()
    for _ in range(40):
        rack.step("g", peak=8 * GIB, spill=8 * GIB)
        rack.step("o")
    assert state(rack) == "surge" and rack.stopped("o")


def test_a_guaranteed_job_keeps_what_it_took_and_is_never_pressed() -> None:
    rack = Rack()
    rack.keeps["g"] = 24 * GIB
    rack.arrive("g", "guaranteed", 24)
    for _ in range(200):
        rack.step("g")
    rack.tell(RankArrived(J, "opportunistic", 20 * GIB))
    pressed = []
    for _ in range(60):
        rack.steps(1, "g", "j")
        pressed += kinds(rack.tell(TimePassed(True), 1))
    assert pressed == [] and rack.gib("g") == 24 and rack.gib("j") == 8
