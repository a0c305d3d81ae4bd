"""A rank that took over from one that was lost has rounds behind it whose results its process never saw."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from covey.core.ids import JobId
from covey.tensors.direct.owned_table import OwnedTable
from covey.tensors.numbers.tensor_wire import Declared, Header, TensorOp, key_of, pack_declared, pack_opening
from covey.tensors.owner.memory import Buffers, Memory
from covey.tensors.owner.speakers import Violation
from covey.tensors.owner.sums import StateTransfer, TensorSum
from covey.wire.sums import Serve
from plugins.aggregator.datapath.job_sums import Counters, JobSums, SharedByJobs
from plugins.aggregator.datapath.lanes.addition_queue import AdditionQueue
from tests.plugins.aggregator.loopback import SECRET

ONES = np.ones(4, np.float32).tobytes()
SERVE = Serve(JobId("j1"), 1 << 32, 2, SECRET)


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


def test_a_result_that_each_rank_in_turn_lost_is_added_again() -> None:
    """Ranks 0 and 1 took over from rank 2 while that was in the round, and then it was lost with its result."""
    made = tensor()
    for rank in range(3):
        made.open(rank, 4, False)
    for rank in range(2):
        made.gone(rank)
        made.open(rank, 3, False, hollow=True)
        made.push(rank, 4, 0, ONES)
    assert not made.is_lost, "rank 2 holds it"
    made.gone(2)
    assert not made.is_lost, "its process may come back"
    made.open(2, 3, False, hollow=True)
    assert made.is_lost


def test_an_owner_that_lost_a_result_lets_all_ranks_connect_and_push_again() -> None:
    env = cast(Any, SimpleNamespace(clock=SimpleNamespace(now_s=lambda: 0.0, cpu_s=lambda: 0.0)))
    env.spawn, env.log = lambda name, work: work.close(), SimpleNamespace(warning=lambda *words, **more: None)
    shared = SharedByJobs(Memory(1 << 20), Counters(), Buffers(), AdditionQueue(env))
    job, closed = JobSums(env, SERVE, shared), list[int]()
    made = job.declare(7, Declared("g", "grad", (4,)))
    assert isinstance(made, TensorSum)
    for rank in range(2):
        job.links[rank] = cast(Any, SimpleNamespace(rank=rank, close=lambda rank=rank: closed.append(rank)))
        job.heard(7, made, made.open(rank, 4, False))
    job.heard(7, made, made.open(0, 3, False))
    assert job.tensors[7] is made and not closed
    job.heard(7, made, made.open(1, 3, False))
    assert job.tensors[7].version is None and closed == [0, 1]


def test_a_rank_that_owns_a_table_does_so_too() -> None:
    table, closed = OwnedTable(SERVE, Memory(1 << 20), Buffers()), list[int]()
    declared = Declared("g", "grad", (4,))
    key, payload = key_of(declared.label), pack_opening(pack_declared(declared), None)
    links = [cast(Any, SimpleNamespace(rank=rank, close=lambda rank=rank: closed.append(rank))) for rank in range(2)]
    for rank, version in ((0, 4), (1, 4), (0, 3), (1, 3)):
        assert not closed
        table.links[rank] = links[rank]
        header = Header(TensorOp.OPEN, 0, table.hash, key, 0, rank, version, table.epoch, len(payload), 0)
        table.heard(links[rank], header, payload, 0.0)
    assert table.tensors[key].version is None and closed == [0, 1]


def test_a_result_that_some_rank_is_past_is_not_added_again() -> None:
    made = tensor(2)
    for rank in range(2):
        made.open(rank, 4, False)
    made.open(0, 3, False)
    made.open(1, 4, False, hollow=True)
    assert not made.is_lost


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
