"""The jitted function that is the training step is recognised by how much of its own results it is handed."""

from covey.hooks.jitted import CALLS_LOOKED_AT, FUNCTIONS_MAX, RETURNED_ENOUGH, SILENT_AFTER, JittedCalls
from covey.hooks.reports.steps import JITTED_CALL, OPTIMIZER, StepCounter

TRAIN, EVALUATE, OTHER = 1, 2, 3


def test_the_function_that_takes_its_own_result_counts_from_its_second_call() -> None:
    calls = JittedCalls()
    assert [calls.called(TRAIN, taken, 100) for taken in (0, 100, 100, 0)] == [0, 2, 3, 4]


def test_an_evaluation_counts_nothing_however_often_it_runs() -> None:
    """An evaluation that hands on its sums does not count either."""
    calls = JittedCalls()
    for taken in (0, 100):
        calls.called(TRAIN, taken, 100)
    assert [calls.called(EVALUATE, 8, 8) for _ in range(50)] == [0] * 50
    assert calls.called(TRAIN) == 3


def test_an_evaluation_before_the_training_steps_aside() -> None:
    calls = JittedCalls()
    for _ in range(20):
        calls.called(EVALUATE, 0, 1000)
    calls.called(TRAIN, 0, 100)
    assert calls.called(TRAIN, 100, 100) == 2
    assert calls.called(EVALUATE, 0, 1000) == 0


def test_an_update_after_accumulated_gradients_is_the_mini_batch() -> None:
    calls = JittedCalls()
    ended = []
    for at in range(40):
        calls.called(OTHER, 100 if at else 0, 100)
        if at % 4 == 3:
            ended.append(calls.called(TRAIN, 100 if at > 4 else 0, 100))
    assert ended == [0, *range(2, 11)]


def test_two_networks_of_one_size_take_turns_and_one_counts() -> None:
    calls = JittedCalls()
    ended = [(calls.called(TRAIN, 100, 100), calls.called(OTHER, 100, 100)) for _ in range(20)]
    assert ended == [(at + 1, 0) for at in range(20)]


def test_a_second_phase_with_a_function_of_its_own_counts_on() -> None:
    calls = JittedCalls()
    for _ in range(10):
        calls.called(TRAIN, 100, 100)
    ended = [calls.called(OTHER, 60, 60) for _ in range(5)]
    assert ended == [0] * (SILENT_AFTER - 1) + [3, 4, 5]
    assert calls.called(TRAIN) == 11, "it goes on"


def test_without_any_the_largest_result_counts() -> None:
    """In this script only the gradients are jitted."""
    calls = JittedCalls()
    ended = [(calls.called(TRAIN, 0, 100), calls.called(EVALUATE, 0, 4)) for _ in range(RETURNED_ENOUGH + 2)]
    assert [train for train, _ in ended] == [0] * (RETURNED_ENOUGH - 1) + [8, 9, 10]
    assert {evaluated for _, evaluated in ended} == {0}


def test_a_function_that_was_collected_counts_no_more() -> None:
    calls = JittedCalls()
    assert calls.called(TRAIN, 100, 100) == 1
    calls.gone(TRAIN)
    calls.gone(EVALUATE)
    assert calls.called(EVALUATE, 8, 8) == 1


def test_arrays_are_looked_at_in_the_first_calls_of_a_bounded_number_of_functions() -> None:
    calls = JittedCalls()
    for _ in range(CALLS_LOOKED_AT):
        assert calls.looks_at(TRAIN)
        calls.called(TRAIN)
    assert not calls.looks_at(TRAIN)
    for function in range(2, 2 * FUNCTIONS_MAX):
        calls.called(function, 0, 10)
    assert not calls.looks_at(2 * FUNCTIONS_MAX) and calls.called(2 * FUNCTIONS_MAX, 100, 100) == 0


def test_steps_of_jitted_calls_are_numbered_by_the_calls_and_know_the_devices_part() -> None:
    counter = StepCounter()
    first = counter.jit_called(2, 1.0)
    assert first is not None and (first.number, first.step_s) == (1, 0.0)
    counter.device_waited(0.25)
    counter.batch_fetched(0.125, True, 1.5)
    step = counter.jit_called(3, 2.0)
    assert step is not None and step.boundary == JITTED_CALL
    assert (step.number, step.step_s, step.device_s, step.input_s) == (2, 1.0, 0.25, 0.125)
    assert all(counter.batch_fetched(0.1, True, 3.0 + at) is None for at in range(20)), "the loader counts no more"


def test_an_optimizer_counts_rather_than_a_jitted_call() -> None:
    counter = StepCounter()
    counter.jit_called(1, 1.0)
    step = counter.optimizer_stepped(5, 2.0)
    assert step is not None and (step.number, step.boundary) == (1, OPTIMIZER)
    assert counter.jit_called(2, 3.0) is None
