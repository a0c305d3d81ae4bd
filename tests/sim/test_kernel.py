"""The kernel of `covey-sim`: events in order of time, ties in a stable order, cancelled events that do not happen."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sim
from sim.kernel import Kernel, PackedEvents


def kernel_of(*events: tuple[int, str]) -> Kernel[int, str]:
    kernel: Kernel[int, str] = Kernel(0)
    for at, event in events:
        kernel.post(at, event)
    return kernel


def test_events_happen_in_order_of_time_whatever_the_order_of_posting() -> None:
    kernel = kernel_of((30, "c"), (10, "a"), (20, "b"))
    happened: list[tuple[int, str]] = []
    kernel.run_until(25, lambda event: happened.append((kernel.now, event)))
    assert happened == [(10, "a"), (20, "b")]
    assert (kernel.now, kernel.next_at(), len(kernel)) == (25, 30, 1)


def test_events_of_one_time_happen_in_order_of_posting() -> None:
    names = [f"{n}" for n in (3, 1, 2, 9, 8)]
    kernel = kernel_of(*((5, name) for name in names))
    assert [kernel.pop() for _ in names] == names


def test_a_lower_rank_goes_ahead_of_what_was_posted_before() -> None:
    kernel = kernel_of((5, "first"))
    kernel.post(5, "last", rank=1)
    kernel.post(5, "second")
    kernel.post(5, "ahead", rank=-1)
    assert [kernel.pop() for _ in range(4)] == ["ahead", "first", "second", "last"]


def test_events_that_cannot_be_compared_may_have_one_time() -> None:
    kernel: Kernel[float, object] = Kernel(0.0)
    events = [object(), {}, object()]
    for event in events:
        kernel.post(1.5, event)
    assert [kernel.pop() for _ in events] == events


def test_run_until_takes_events_at_its_end_and_those_posted_meanwhile() -> None:
    kernel = kernel_of((10, "seed"))
    happened: list[str] = []

    def happens(event: str) -> None:
        happened.append(event)
        if event == "seed":
            kernel.post(10, "at once")
            kernel.post(11, "too late")

    kernel.run_until(10, happens)
    assert happened == ["seed", "at once"]
    assert kernel.now == 10


def test_time_passes_to_the_end_of_a_run_without_events() -> None:
    kernel = kernel_of()
    kernel.run_until(7, lambda event: pytest.fail("there is no event"))
    assert (kernel.now, kernel.next_at(), len(kernel)) == (7, None, 0)


def test_run_while_stops_at_its_condition_with_the_rest_still_due() -> None:
    kernel = kernel_of((1, "a"), (2, "b"), (3, "c"))
    happened: list[str] = []
    kernel.run_while(lambda: len(happened) < 2, happened.append)
    assert happened == ["a", "b"]
    assert (kernel.now, kernel.next_at()) == (2, 3)


def test_run_while_stops_when_no_event_is_left() -> None:
    kernel = kernel_of((1, "a"))
    happened: list[str] = []
    kernel.run_while(lambda: True, happened.append)
    assert (happened, kernel.now) == (["a"], 1)


def test_a_cancelled_event_does_not_happen_and_is_not_the_next() -> None:
    kernel = kernel_of((2, "b"))
    number = kernel.post(1, "a")
    assert kernel.next_at() == 1
    kernel.cancel(number)
    assert (kernel.next_at(), len(kernel), kernel.pop(), kernel.now) == (2, 1, "b", 2)


def test_an_event_may_cancel_another_of_the_same_time() -> None:
    kernel: Kernel[int, Callable[[], None]] = Kernel(0)
    happened: list[str] = []
    numbers: list[int] = []
    kernel.post(4, lambda: kernel.cancel(numbers[0]))
    numbers.append(kernel.post(4, lambda: happened.append("cancelled")))
    kernel.post(4, lambda: happened.append("kept"))
    kernel.run_until(4, lambda event: event())
    assert happened == ["kept"]


def test_cancelling_what_has_happened_or_was_cancelled_changes_nothing() -> None:
    kernel = kernel_of((3, "c"))
    done, gone = kernel.post(1, "a"), kernel.post(2, "b")
    assert kernel.pop() == "a"
    for number in (done, gone, gone, 0):
        kernel.cancel(number)
    assert (len(kernel), kernel.pop()) == (1, "c")


def test_nothing_is_posted_into_the_past() -> None:
    kernel = kernel_of((5, "now"))
    kernel.pop()
    kernel.post(5, "still now")
    with pytest.raises(ValueError, match="in the past"):
        kernel.post(4, "too late")
    assert len(kernel) == 1


def test_a_time_that_is_no_number_is_refused() -> None:
    kernel: Kernel[float, str] = Kernel(0.0)
    with pytest.raises(ValueError, match="in the past"):
        kernel.post(float("nan"), "never")


def test_an_event_at_infinity_waits_behind_all_others() -> None:
    kernel: Kernel[float, str] = Kernel(0.0)
    kernel.post(float("inf"), "never")
    kernel.post(1e9, "late")
    kernel.run_until(1e12, lambda event: None)
    assert (len(kernel), kernel.next_at()) == (1, float("inf"))


def test_time_advances_up_to_the_next_event_and_not_over_it() -> None:
    kernel = kernel_of((5, "next"))
    kernel.advance(5)
    assert (kernel.now, len(kernel)) == (5, 1)
    for to in (6, 4):
        with pytest.raises(ValueError, match="time cannot pass"):
            kernel.advance(to)


def test_a_kernel_without_events_has_nothing_to_pop() -> None:
    kernel = kernel_of((1, "a"))
    kernel.pop()
    with pytest.raises(IndexError, match="no event is left"):
        kernel.pop()


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(-1, 2), st.booleans()), max_size=30),
    st.integers(0, 7),
)
def test_any_events_happen_as_a_stable_sort_would_have_them(posted: list[tuple[int, int, bool]], end: int) -> None:
    kernel: Kernel[int, int] = Kernel(0)
    numbers = [kernel.post(at, place, rank) for place, (at, rank, _) in enumerate(posted)]
    for number, (_, _, kept) in zip(numbers, posted, strict=True):
        if not kept:
            kernel.cancel(number)
    wanted = [(at, rank, place) for place, (at, rank, kept) in enumerate(posted) if kept and at <= end]
    happened: list[tuple[int, int]] = []
    kernel.run_until(end, lambda place: happened.append((kernel.now, place)))
    assert happened == [(at, place) for at, _, place in sorted(wanted)]
    assert kernel.now == end


# ---- packed ----


def test_packed_events_of_one_second_come_by_kind_and_then_by_job() -> None:
    events = PackedEvents(4)
    for job, at, kind in ((3, 9, 5), (1, 9, 2), (2, 9, 5), (0, 8, 7)):
        events.post(job, at, kind)
    assert events.next_at() == 8
    assert list(events.due(8)) == [(7, 0)]
    assert list(events.due(9)) == [(2, 1), (5, 2), (5, 3)]
    assert events.next_at() is None


def test_a_packed_event_replaces_the_one_before_it() -> None:
    events = PackedEvents(1)
    events.post(0, 5, 2)
    events.post(0, 9, 3)
    assert events.next_at() == 9
    assert list(events.due(8)) == []
    assert list(events.due(9)) == [(3, 0)]


def test_a_cancelled_packed_event_is_neither_due_nor_the_next() -> None:
    events = PackedEvents(2)
    events.post(0, 5, 2)
    events.post(1, 6, 2)
    events.cancel(0)
    assert events.next_at() == 6
    assert list(events.due(6)) == [(2, 1)]


def test_a_packed_event_posted_again_as_it_was_happens_once() -> None:
    events = PackedEvents(1)
    events.post(0, 5, 2)
    events.cancel(0)
    events.post(0, 5, 2)
    assert list(events.due(5)) == [(2, 0)]


def test_what_is_posted_for_this_second_while_it_is_taken_is_taken_too() -> None:
    events = PackedEvents(2)
    events.post(0, 5, 3)
    taken = []
    for kind, job in events.due(5):
        taken.append((kind, job))
        if kind == 3:
            events.post(0, 5, 4)
            events.post(1, 6, 2)
    assert taken == [(3, 0), (4, 0)]
    assert events.next_at() == 6


@pytest.mark.parametrize("seed", range(20))
def test_packed_events_come_as_the_kernel_orders_them(seed: int) -> None:
    """Packed events are compared with the kernel that has the kind and the job as rank, and in which replaced events
    are cancelled."""
    rng, jobs, seconds = random.Random(seed), 12, 60
    packed, kernel = PackedEvents(jobs), Kernel[int, tuple[int, int]](0)
    numbers = [0] * jobs

    def post(at: int) -> None:
        job, kind = rng.randrange(jobs), rng.randrange(1, 8)
        packed.post(job, at, kind)
        kernel.cancel(numbers[job])
        numbers[job] = kernel.post(at, (kind, job), rank=kind << 8 | job)

    for now in range(seconds):
        for _ in range(rng.randrange(4)):
            post(now + rng.randrange(20))
        if rng.random() < 0.3:
            job = rng.randrange(jobs)
            packed.cancel(job)
            kernel.cancel(numbers[job])
        assert packed.next_at() == kernel.next_at()
        due: list[tuple[int, int]] = []
        kernel.run_until(now, due.append)
        assert list(packed.due(now)) == due
    assert kernel.now == seconds - 1


def test_queues_of_events_live_in_the_kernel_alone() -> None:
    """No other module of `sim` keeps a heap; one that needs it for a pick by priority is named here, and says so."""
    folder = Path(sim.__file__).parent
    using = [path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if "heapq" in path.read_text()]
    assert using == ["kernel.py"]
