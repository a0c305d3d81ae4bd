"""A guaranteed job that lacks memory: the others stop and give way, the largest first (AntMan §3.3, figure 7a)."""

from covey.core.units import GIB
from plugins.sharing.machine.events import TimePassed
from tests.plugins.sharing.gpu_rack import Rack, said, state


def test_a_surge_of_memory_takes_from_the_others_and_gives_to_the_guaranteed_job() -> None:
    """Reference: §3.3 and figure 7a."""
    rack = Rack()
    rack.steady()
    rack.step("g", peak=8 * GIB, spill=4 * GIB)
    assert state(rack) == "surge" and rack.stopped("o")
    assert rack.gib("o") == 20 and rack.gib("g") == 12
    rack.step("g", peak=12 * GIB)
    assert state(rack) == "baseline"
    rack.step("g", peak=12 * GIB, spill=8 * GIB)
    assert rack.gib("o") == 12 and rack.gib("g") == 12, "not before the other has let go"
    rack.step("o", peak=12 * GIB)
    assert rack.gib("g") == 20


def test_a_surge_takes_from_the_largest_first_and_spares_what_cannot_be_given_back() -> None:
    """Introspective scaling makes the opportunistic jobs give way; that the largest does so first is Covey's own.
    Reference: §3.3 and figure 7a."""
    rack = Rack()
    for job, gib in (("small", 4), ("large", 16), ("middle", 4)):
        rack.hold(job, gib)
    rack.arrive("g", "guaranteed", 8)
    everybody = ("small", "middle", "large")
    for _ in range(200):
        for job in everybody:
            rack.step(job, peak=int(rack.gib(job) * GIB))
        if "g" in rack.limits:
            rack.step("g", peak=8 * GIB)
        if state(rack) == "run":
            break
    assert state(rack) == "run"
    assert [rack.gib(job) for job in everybody] == [4, 4, 16]
    rack.step("g", peak=8 * GIB, spill=6 * GIB)
    assert state(rack) == "surge" and rack.gib("g") == 8, "not before the other has let go"
    assert [rack.gib(job) for job in everybody] == [4, 4, 10], "one job is disturbed, not three"
    rack.step("large", peak=10 * GIB)
    assert rack.gib("g") == 14
    rack.step("g", peak=14 * GIB, spill=9 * GIB)
    assert [rack.gib(job) for job in everybody] == [3, 3, 3]


def test_allocations_that_fail_take_memory_from_the_others_before_anything_spills() -> None:
    """Reference: §3.3."""
    rack = Rack()
    rack.steady()
    rack.step("g", peak=8 * GIB, retries=3)
    assert state(rack) == "surge" and rack.stopped("o")
    rack.step("o", peak=20 * GIB)
    assert rack.gib("g") == 8.5
    rack.step("g", peak=8 * GIB)
    assert state(rack) == "baseline"


def test_a_job_that_wants_more_than_the_device_has_goes_on_with_what_there_is() -> None:
    rack = Rack()
    rack.steady()
    rack.step("g", peak=8 * GIB, spill=40 * GIB)
    rack.step("o", peak=0)
    assert rack.gib("g") == 32 and rack.gib("o") == 0
    rack.step("g", peak=32 * GIB, spill=16 * GIB)
    assert state(rack) != "surge"


def test_who_owes_memory_is_not_stopped_before_the_boundary_where_it_gives_it() -> None:
    """A job that is held before it can give memory back would be pressed for what it may not do. Reference: §3.1.1."""
    rack = Rack()
    rack.steady()
    rack.deaf.add("o")
    for _ in range(40):
        rack.step("g", peak=8 * GIB, spill=8 * GIB)
        assert state(rack) == "surge" and rack.limits["o"].busy == 1
    rack.deaf.clear()
    rack.step("o", peak=8 * GIB)
    rack.step("g", peak=16 * GIB)
    assert rack.stopped("o") and rack.gib("g") == 16


def test_a_job_may_lack_memory_before_it_runs_steadily() -> None:
    """Reference: §3.3 and figure 7a."""
    rack = Rack()
    rack.hold("o", 20)
    rack.arrive("g", "guaranteed", 8)
    rack.step("o", peak=20 * GIB)
    assert state(rack) == "init"
    assert "g placed 8 GiB in host memory: the other jobs stop and free memory" in said(
        rack.step("g", peak=8 * GIB, spill=8 * GIB)
    )
    assert state(rack) == "surge"
    assert said(rack.step("g", peak=8 * GIB, spill=8 * GIB)) == "", "told once"
    rack.tell(TimePassed(busy=True), 125)
    assert state(rack) == "stuck", "but not taken as it is"
    rack.step("g", peak=8 * GIB, spill=8 * GIB)
    assert state(rack) == "surge"
    rack.step("o", peak=16 * GIB)
    assert said(rack.step("g", peak=16 * GIB)) == "g has all its memory on the device again"
    assert state(rack) == "init"


def test_the_story_of_a_surge_says_what_failed_and_how_it_ended() -> None:
    """Reference: §3.3 and figure 7a."""
    rack = Rack()
    rack.steady()
    assert (
        said(rack.step("g", peak=8 * GIB, retries=3))
        == "g failed to allocate 3 times: the other jobs stop and free memory"
    )
    assert "all its memory" in said(rack.step("g", peak=8 * GIB)) and state(rack) == "baseline", "it lacks nothing now"
    rack.step("g", peak=8 * GIB, spill=40 * GIB)
    rack.step("o", peak=0)
    assert said(rack.step("g", peak=32 * GIB, spill=16 * GIB)).startswith("g wants more than the device has")
