"""Optimizers at the aggregator (AutoPS §4.3.1): the bits of the same lines in numpy, in any order of arrivals and with
any deaths, and moments that are never lost."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.tensors.numbers.tensor_wire import Declared, Type, key_of
from covey.tensors.numbers.updates import SGD, Adam, Update
from covey.tensors.owner.speakers import Violation
from covey.tensors.owner.sums import StateTransfer, TensorSum
from tests.families import examples
from tests.plugins.aggregator.harness import Bench, Tensor

UPDATES: tuple[Update, ...] = (
    SGD(0.1),
    SGD(0.1, weight_decay=0.01),
    SGD(0.1, momentum=0.9),
    SGD(0.1, momentum=0.9, weight_decay=0.01),
    Adam(),
    Adam(beta1=0.5, weight_decay=0.1),
    Adam(weight_decay=0.1, decoupled=True),
)
MOMENTUM, ADAM = UPDATES[2], UPDATES[4]


@given(
    seed=st.integers(0, 2**32),
    update=st.sampled_from(UPDATES),
    hosts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    keeper=st.integers(0, 20),
    part_bytes=st.sampled_from([4, 12, 16, 1 << 19]),
    kills=st.lists(st.integers(0, 300), max_size=5),
    breaks=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3)), max_size=4),
    type=st.sampled_from(("float32", "float16", "bfloat16")),
)
@settings(max_examples=examples(150), deadline=None)
def test_any_optimizer_any_arrival_and_any_deaths_give_the_bits_of_the_same_lines(
    seed: int,
    update: Update,
    hosts: list[int],
    keeper: int,
    part_bytes: int,
    kills: list[int],
    breaks: list[tuple[int, int]],
    type: Type,
) -> None:
    """The aggregator dies after any step, and connections break, the keeper's included. With 16 bits the number of
    parameters is odd, and moments of 32 bits lie behind them."""
    tensors = (Tensor("w", "model", (7, 3), update, keeper, type), Tensor("g", "grad", (5,)))
    bench = Bench(seed, sum(hosts), tensors, rounds=3, part_bytes=part_bytes, hosts=hosts)
    for steps in kills:
        for _ in range(steps):
            if not bench.step():
                break
        bench.new_owner()
    for steps, which in breaks:
        for _ in range(steps):
            bench.step()
        bench.workers[which % len(bench.workers)].move(bench.owner)
    bench.run()
    bench.check_results()


@pytest.mark.parametrize("update", [MOMENTUM, ADAM])
@pytest.mark.parametrize("keeper", [0, 1, 2])
def test_nobody_has_a_result_before_the_keeper_has_its_moments(update: Update, keeper: int) -> None:
    """Otherwise an owner that dies after it told another rank leaves parameters whose moments nobody has."""
    bench = Bench(keeper, 3, (Tensor("w", "model", (7, 3), update, keeper),), rounds=4)
    for _ in range(2000):
        if not bench.step():
            break
        known = [worker.rounds.tensors["w"] for worker in bench.workers if "w" in worker.rounds.tensors]
        versions = [tensor.version for tensor in known]
        assert len(known) < 3 or versions[keeper] == max(versions)
    bench.check_results()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("has", [False, True])
def test_the_keepers_connection_breaks_while_all_wait_for_it(seed: int, has: bool) -> None:
    """The connection breaks before the keeper has the moments of round 2, or before it could say so."""
    bench = Bench(seed, 3, (Tensor("w", "model", (7, 3), ADAM, 1),), rounds=3)
    key, keeper = key_of("w"), bench.workers[1]
    bench.run(until=lambda: (key, 2, 1) in bench.owner.answered)
    if has:
        while keeper.rounds.tensors["w"].version < 2:
            keeper.hear()
    assert not any(rank != 1 for _, round, rank in bench.owner.answered if round == 2)
    keeper.move(bench.owner)
    bench.run()
    bench.check_results()


def test_a_result_that_was_promised_twice_is_not_the_next_one() -> None:
    """Rank 1 is owed a result, gets it, and pushes the next round before the result that it is owed once more goes
    out."""
    tensor = learning()
    for rank in range(2):
        tensor.push(rank, 1, 0, np.float32(1).tobytes())
    tensor.work()
    tensor.kept(0, 1)
    assert tensor.lend_to(1) is not None
    for rank in range(2):
        tensor.learn(rank, 2, 0.5)
        tensor.push(rank, 2, 0, np.float32(1).tobytes())
    tensor.work()
    assert tensor.lend_to(1) is None and tensor.lend_to(0) is not None
    assert tensor.kept(0, 2) == [StateTransfer("give", 1)]


def test_a_rank_that_is_further_does_not_go_back() -> None:
    tensor = learning()
    with pytest.raises(Violation, match="which is over already"):
        tensor.learn(0, 0, 0.5)


def test_moments_are_asked_of_the_keeper_and_of_nobody_else() -> None:
    tensor = TensorSum(Declared("w", "model", (2,), 8, update=ADAM, keeper=1), 3)
    assert not tensor.open(0, 5, False) and not tensor.open(2, 5, False)
    assert tensor.open(1, 5, False) == (StateTransfer("ask", 1),)
    assert not tensor.gone(1), "nobody else has them"
    assert tensor.open(1, 5, False) == (StateTransfer("ask", 1),)
    for part in range(3):
        assert tensor.version is None
        tensor.state_part(1, 5, part, np.full(2, part, np.float32).tobytes())
    assert tensor.version == 5 and tensor.lend()[1].tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("steps", [0, 7])
def test_the_beginning_is_rank_0s_and_moments_are_zero_or_its_own(steps: int) -> None:
    tensor = TensorSum(Declared("w", "model", (2,), 8, update=ADAM, keeper=1, steps=steps), 2)
    tensor.open(1, 0, True)
    assert tensor.open(0, 0, True) == (StateTransfer("ask", 0),)
    for part in range(3 if steps else 1):
        actions = tensor.state_part(0, 0, part, np.full(2, 1 + part, np.float32).tobytes())
    assert sorted(actions) == [StateTransfer("give", 0), StateTransfer("give", 1)]
    assert tensor.lend()[1].tolist() == ([1, 1, 2, 2, 3, 3] if steps else [1, 1, 0, 0, 0, 0])
    assert [tensor.parts_for(rank) for rank in range(2)] == [1, 3]


def test_a_keeper_that_is_behind_the_others_cannot_be() -> None:
    tensor = TensorSum(Declared("w", "model", (2,), 8, update=ADAM, keeper=1), 2)
    tensor.open(0, 5, False)
    with pytest.raises(Violation, match="rank 1 keeps moments of version 4, and another rank holds 5"):
        tensor.open(1, 4, False)


def learning(rates: bool = True) -> TensorSum:
    """A tensor of two ranks, at version 0, that say at which rate to learn."""
    tensor = TensorSum(Declared("w", "model", (1,), update=MOMENTUM), 2)
    tensor.open(0, 0, True)
    tensor.open(1, 0, True)
    tensor.state_part(0, 0, 0, bytes(4))
    if rates:
        tensor.learn(0, 1, 0.5)
        tensor.learn(1, 1, 0.5)
    return tensor


def test_ranks_that_learn_at_different_rates_are_told_so() -> None:
    tensor = learning(rates=False)
    tensor.learn(0, 1, 0.5)
    with pytest.raises(Violation, match=r"rank 1 has learning rate 0.25 in round 1, and rank 0 has 0.5"):
        tensor.learn(1, 1, 0.25)
    tensor.learn(0, 1, 0.125)  # a rank that says something else is not another one
    tensor.learn(1, 1, 0.125)


@pytest.mark.parametrize(("rank", "round"), [(0, 3), (0, -1), (2, 1)])
def test_a_rate_that_no_correct_worker_says_is_refused(rank: int, round: int) -> None:
    with pytest.raises(Violation):
        learning().learn(rank, round, 0.5)


def test_a_rate_for_what_does_not_learn_is_refused() -> None:
    tensor = TensorSum(Declared("w", "model", (1,)), 1)
    tensor.open(0, 0, True)
    with pytest.raises(Violation, match="says at which rate to learn"):
        tensor.learn(0, 1, 0.5)


def test_a_push_without_a_rate_is_refused() -> None:
    with pytest.raises(Violation, match="sent no learning rate"):
        learning(rates=False).push(0, 1, 0, bytes(4))


def test_who_keeps_nothing_cannot_say_that_it_does() -> None:
    with pytest.raises(Violation, match="rank 1 keeps no moments"):
        learning().kept(1, 1)


def test_the_last_word_of_the_keeper_lets_the_others_have_it_once() -> None:
    tensor = learning()
    for rank in range(2):
        actions = tensor.push(rank, 1, 0, np.float32(1).tobytes())
    actions = tensor.work()
    assert actions == [StateTransfer("give", 0)] and tensor.under_way
    assert tensor.push(1, 1, 0, np.float32(1).tobytes()) == (), "the keeper does not have it yet"
    assert not tensor.kept(0, 0) and tensor.under_way, "of the round before, said late"
    assert tensor.kept(0, 1) == [StateTransfer("give", 1)] and not tensor.under_way
    assert not tensor.kept(0, 1) and not tensor.kept(0, 0)
    assert tensor.push(1, 1, 0, np.float32(1).tobytes()) == [StateTransfer("give", 1)]


@given(rank=st.integers(0, 3), round=st.integers(0, 3), part=st.integers(0, 6), data=st.binary(max_size=12))
@settings(max_examples=examples(200), deadline=None)
def test_whatever_a_worker_says_an_optimizer_stays_sound(rank: int, round: int, part: int, data: bytes) -> None:
    tensor = TensorSum(Declared("w", "model", (4,), 8, update=ADAM, keeper=2), 3)
    for other in (0, 2):
        tensor.open(other, 1, False)
    calls: list[Callable[[], object]] = [
        lambda: tensor.learn(rank, round, 0.5),
        lambda: tensor.push(rank, round, part, data),
        lambda: tensor.state_part(rank, round, part, data),
        lambda: tensor.kept(rank, round),
        lambda: tensor.open(1, round, False),
    ]
    for call in calls + calls:
        try:
            call()
        except Violation:
            pass
        while tensor.busy:
            tensor.work()
        tensor.check()
