"""A rank that took over from one that was lost has rounds behind it whose results its process never saw."""

import numpy as np
import pytest

from covey.tensors.numbers.tensor_wire import Declared
from covey.tensors.owner.speakers import Violation
from covey.tensors.owner.sums import StateTransfer, TensorSum

ONES = np.ones(4, np.float32).tobytes()


def tensor(workers: int = 3) -> TensorSum:
    return TensorSum(Declared("g", "grad", (4,)), workers)


def test_who_has_no_copy_of_a_result_is_not_asked_for_it() -> None:
    made = tensor()
    made.open(0, 4, False, hollow=True)
    made.open(2, 3, False)
    assert made.open(1, 4, False) == (StateTransfer("ask", 1),)


def test_an_owner_without_state_waits_for_one_that_has_a_copy() -> None:
    made = tensor()
    made.open(0, 4, False, hollow=True)
    made.open(1, 4, False)
    made.gone(1)
    assert made.open(2, 3, False) == ()
    assert made.open(1, 4, False) == (StateTransfer("ask", 1),)


def test_a_successor_that_pushes_a_round_again_gets_the_result_from_another_rank() -> None:
    """All ranks said to hold the result, so this owner never fetched it; then one of them was lost."""
    made = tensor()
    for rank in range(3):
        assert not made.open(rank, 4, False)
    made.gone(1)
    made.open(1, 3, False, hollow=True)
    assert list(made.push(1, 4, 0, ONES)) == [StateTransfer("ask", 0)]
    assert list(made.state_part(0, 4, 0, ONES)) == [StateTransfer("give", 1)]
    assert made.has_state and made.version == 4


def test_whoever_is_asked_for_it_may_be_lost_too() -> None:
    made = tensor()
    for rank in range(3):
        made.open(rank, 4, False)
    made.gone(1)
    made.open(1, 3, False, hollow=True)
    assert list(made.push(1, 4, 0, ONES)) == [StateTransfer("ask", 0)]
    assert list(made.gone(0)) == [StateTransfer("ask", 2)]
    for rank, version in ((0, 4), (2, 3), (2, 5)):
        assert not made.state_part(rank, version, 0, ONES), "not who was asked, or not what"
    assert list(made.state_part(2, 4, 0, ONES)) == [StateTransfer("give", 1)]


def test_a_successor_in_the_first_step_has_no_copy_either() -> None:
    """It holds version 0, which is no result."""
    made = tensor()
    for rank in range(3):
        made.open(rank, 1, False)
    made.gone(0)
    made.open(0, 0, False)
    assert list(made.push(0, 1, 0, ONES)) == [StateTransfer("ask", 1)], "and not the rank that asks"
    assert list(made.gone(1)) == [StateTransfer("ask", 2)]
    made.open(1, 0, False)
    made.push(1, 1, 0, ONES)
    assert list(made.state_part(2, 1, 0, ONES)) == [StateTransfer("give", 0), StateTransfer("give", 1)]


def test_once_it_has_a_result_of_its_own_it_is_asked_like_others() -> None:
    made = tensor(2)
    made.open(0, 4, False, hollow=True)
    made.open(1, 4, False)
    assert made._hollow == {0}
    made.push(0, 5, 0, ONES)
    made.push(1, 5, 0, ONES)
    while made.busy:
        made.work()
    made.open(0, 5, False)
    assert made._hollow == set()


def test_who_has_a_copy_and_asks_again_for_what_all_hold_is_told_that_it_may_not() -> None:
    made = tensor(2)
    for rank in range(2):
        made.open(rank, 4, False)
    with pytest.raises(Violation, match="every rank said to hold"):
        made.push(0, 4, 0, ONES)


def test_what_a_lost_process_pushed_does_not_bind_its_successor_in_a_later_step() -> None:
    """The first successor stood a step behind when it was lost too; the second got its state from a rank that is
    further. Its owner is new, and waits for rank 2 to say which round it holds."""
    made = tensor()
    made.open(1, 3, False, hollow=True)
    made.push(1, 4, 0, ONES)
    made.open(0, 4, False)
    made.gone(1)
    made.open(1, 4, False, hollow=True)
    made.push(1, 5, 0, ONES)
    made.push(0, 5, 0, ONES)
    made.open(2, 4, False)
    made.push(2, 5, 0, ONES)
    while made.busy:
        made.work()
    assert made.version == 5 and (made.lend()[1] == 3).all(), "each rank once"


def test_what_a_process_pushed_counts_for_one_that_follows_in_the_same_step() -> None:
    made = tensor(2)
    made.open(1, 3, False)
    made.push(1, 4, 0, ONES)
    made.gone(1)
    made.open(1, 3, False, hollow=True)
    made.open(0, 3, False)
    made.push(0, 4, 0, ONES)
    while made.busy:
        made.work()
    assert made.version == 4
