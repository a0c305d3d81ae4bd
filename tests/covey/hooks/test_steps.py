"""Mini-batches of scripts that do not report them, for every way in which scripts step their optimizers."""

import pytest

from covey.hooks.reports.steps import BATCHES_ENOUGH, DATA_LOADER, OPTIMIZER, REPLACED_AFTER, StepCounter


def test_one_optimizer_ends_a_step_each_time_and_waiting_for_input_is_told_apart() -> None:
    """There is a report for each mini-batch. Reference: AntMan §3.3."""
    counter = StepCounter()
    found = []
    for number in range(4):
        began_s = float(number)
        counter.batch_fetched(0.25, True, began_s + 0.25)
        found.append(counter.optimizer_stepped(1, began_s + 1.0))
    steps = [step for step in found if step is not None]
    assert [step.number for step in steps] == [0, 1, 2, 3] and {step.boundary for step in steps} == {OPTIMIZER}
    assert [(step.step_s, step.input_s) for step in steps] == [(1.0, 0.25)] * 4


def test_the_first_step_has_no_time_if_nobody_saw_it_begin() -> None:
    step = StepCounter().optimizer_stepped(1, 5.0)
    assert step is not None and step.step_s == 0.0


def test_of_several_optimizers_in_a_mini_batch_the_first_counts() -> None:
    """A script may train two networks, or have one optimizer for each parameter."""
    counter = StepCounter()
    ended = [counter.optimizer_stepped(optimizer, 1.0) for _ in range(5) for optimizer in range(200)]
    assert sum(step is not None for step in ended) == counter.count == 5


def test_an_optimizer_that_is_replaced_stops_counting() -> None:
    counter = StepCounter()
    for _ in range(3):
        counter.optimizer_stepped(1, 1.0)
    ended = [counter.optimizer_stepped(2, 2.0) for _ in range(10)]
    assert [step is not None for step in ended] == [False] * (REPLACED_AFTER - 1) + [True] * (11 - REPLACED_AFTER)


def test_an_identity_that_is_used_again_is_another_optimizer() -> None:
    counter = StepCounter()
    counter.optimizer_stepped(1, 1.0)
    counter.optimizer_gone(1)
    assert counter.optimizer_stepped(2, 2.0) is not None


def test_batches_count_only_where_no_optimizer_ever_steps() -> None:
    counter = StepCounter()
    ended = [counter.batch_fetched(0.1, True, float(at)) for at in range(BATCHES_ENOUGH + 3)]
    steps = [step for step in ended if step is not None]
    assert len(steps) == 3 and {step.boundary for step in steps} == {DATA_LOADER}
    assert [step.step_s for step in steps] == pytest.approx([1.0] * 3)
    assert steps[0].input_s == pytest.approx(0.1)
    assert counter.optimizer_stepped(1, 20.0) is not None
    assert counter.batch_fetched(0.1, True, 21.0) is None, "from now on the optimizer counts"


def test_an_evaluation_is_no_training() -> None:
    counter = StepCounter()
    assert all(counter.batch_fetched(0.1, False, float(at)) is None for at in range(100))


def test_the_time_waited_is_never_more_than_the_step() -> None:
    counter = StepCounter()
    counter.optimizer_stepped(1, 1.0)
    counter.batch_fetched(50.0, True, 1.5)  # several threads wait at once
    step = counter.optimizer_stepped(1, 2.0)
    assert step is not None and (step.step_s, step.input_s) == (1.0, 1.0)
