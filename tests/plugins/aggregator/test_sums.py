"""Rounds of workers against sums of aggregators, in every order a seed can think of, with owners that die."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.tensors.numbers.sum_order import ORDERS, Order
from covey.tensors.numbers.tensor_wire import Declared, key_of
from covey.tensors.numbers.updates import SGD
from covey.tensors.owner.results import RankResults
from covey.tensors.owner.speakers import Violation
from covey.tensors.owner.sums import StateTransfer, TensorSum
from tests.families import examples
from tests.plugins.aggregator.harness import Bench, Tensor, contribution, reference

MODEL = Tensor("w", "model", (7, 3))
GRAD = Tensor("g", "grad", (5,))
BOTH = (MODEL, GRAD)


def answered(bench: Bench, name: str, round: int) -> list[int]:
    return [rank for key, given, rank in bench.owner.answered if key == key_of(name) and given == round]


@given(
    seed=st.integers(0, 2**32),
    hosts=st.lists(st.integers(1, 5), min_size=1, max_size=5) | st.integers(1, 7).map(lambda count: [1] * count),
    part_bytes=st.sampled_from([4, 12, 16, 64, 1 << 20]),
    kills=st.lists(st.integers(0, 400), max_size=4),
    order=st.sampled_from(ORDERS),
)
@settings(max_examples=examples(100), deadline=None)
def test_any_arrival_any_part_size_and_any_deaths_give_the_same_bits(
    seed: int, hosts: list[int], part_bytes: int, kills: list[int], order: Order
) -> None:
    """Some ranks speak for themselves; on other hosts one rank speaks for all."""
    bench = Bench(seed, sum(hosts), BOTH, rounds=3, part_bytes=part_bytes, order=order, hosts=hosts)
    for steps in kills:
        for _ in range(steps):
            if not bench.step():
                break
        bench.new_owner()
    bench.run()
    bench.check_results()


@given(seed=st.integers(0, 2**32), breaks=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2)), max_size=8))
@settings(max_examples=examples(40), deadline=None)
def test_connections_that_break_and_come_back_change_no_bit(seed: int, breaks: list[tuple[int, int]]) -> None:
    bench = Bench(seed, 3, BOTH, rounds=3)
    for steps, rank in breaks:
        for _ in range(steps):
            bench.step()
        bench.workers[rank].move(bench.owner)
    bench.run()
    bench.check_results()


def test_contributions_of_single_bits_are_each_counted_exactly_once() -> None:
    """Rank r adds 2**r: a lost or doubled push would show as another number."""
    declared = Declared("ids", "model", (10,), 8)
    tensor = TensorSum(declared, 6)
    data = {rank: np.full(10, 2.0**rank, np.float32).tobytes() for rank in range(6)}
    for rank in range(6):
        asks = tensor.open(rank, 0, want=True)
    assert asks == (StateTransfer("ask", 0),)
    for part in range(declared.parts):
        start, end = declared.span(part)
        tensor.state_part(0, 0, part, bytes(end - start))
    for rank in (3, 5, 3, 0, 0, 1, 5, 4, 2, 1):
        for part in range(declared.parts):
            start, end = declared.span(part)
            tensor.push(rank, 1, part, data[rank][start:end])
            while tensor.busy:
                tensor.work()
            tensor.check()
    version, state, _ = tensor.lend()
    assert version == 1 and state.tolist() == [63.0] * 10
    assert tensor.duplicates > 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("first", [0, 1, 2])
def test_owner_killed_after_answering_only_one_worker(seed: int, first: int) -> None:
    bench = Bench(seed, 3, (MODEL,), rounds=4)
    others = [rank for rank in range(3) if rank != first]

    def news(what: str, which: int) -> bool:
        """Whether a step may happen: the others' results of round 2 stay on the way."""
        holding = bench.workers[which].rounds.tensors.get("w") if what == "worker hears" else None
        return holding is None or which == first or holding.version < 1 or not holding.agreed

    while bench.workers[first].rounds.tensors.get("w") is None or bench.workers[first].rounds.tensors["w"].version < 2:
        assert bench.step(news)
    assert all(bench.workers[rank].rounds.tensors["w"].version == 1 for rank in others)
    bench.new_owner()
    bench.run()
    bench.check_results()


@pytest.mark.parametrize("seed", range(5))
def test_owner_killed_before_answering_anybody(seed: int) -> None:
    bench = Bench(seed, 3, (MODEL,), rounds=3)
    bench.run(until=lambda: any(tensor.version == 2 for tensor in bench.owner.tensors.values()))
    bench.new_owner()  # the last part of round 2 was given to nobody
    assert all(worker.rounds.tensors["w"].version == 1 for worker in bench.workers)
    bench.run()
    bench.check_results()


@pytest.mark.parametrize("seed", range(5))
def test_owner_killed_between_two_tensors(seed: int) -> None:
    bench = Bench(seed, 3, BOTH, rounds=3)
    bench.run(until=lambda: all(w.round == 2 and w.at == 1 for w in bench.workers))
    bench.new_owner()
    bench.run()
    bench.check_results()


@pytest.mark.parametrize("seed", range(3))
def test_owners_that_die_at_every_round_one_after_another(seed: int) -> None:
    bench = Bench(seed, 4, BOTH, rounds=6)
    for round in range(6):
        bench.run(until=lambda round=round: any(w.round > round for w in bench.workers))  # type: ignore[misc]
        bench.new_owner()
        bench.new_owner()
    bench.run()
    bench.check_results()


@pytest.mark.parametrize("steps", range(0, 60, 3))
def test_new_owner_killed_while_it_fetches_the_state(steps: int) -> None:
    bench = Bench(steps, 3, (MODEL,), rounds=3, part_bytes=4)
    bench.run(until=lambda: all(w.round == 2 for w in bench.workers))
    bench.new_owner()
    for _ in range(steps):
        bench.step()
    bench.new_owner()
    bench.run()
    bench.check_results()


def test_when_the_holder_that_was_asked_goes_away_another_of_its_version_is_asked() -> None:
    tensor = TensorSum(Declared("w", "model", (4,), 8), 3)
    assert tensor.open(0, 4, False) == ()
    assert tensor.open(2, 5, False) == ()
    assert tensor.open(1, 5, False) == (StateTransfer("ask", 1),)
    tensor.state_part(1, 5, 0, b"\1" * 8)
    assert tensor.gone(1) == (StateTransfer("ask", 2),)
    tensor.state_part(1, 5, 1, b"\1" * 8)  # too late, from the one that left
    assert tensor.version is None
    tensor.state_part(2, 5, 0, b"\2" * 8)
    tensor.state_part(2, 5, 1, b"\2" * 8)
    assert tensor.version == 5 and tensor.lend()[1].tobytes() == b"\2" * 16


def test_a_rank_that_has_not_opened_the_tensor_on_this_connection_is_given_no_result() -> None:
    """A successor is connected before it knows any tensor, and takes such a result for an error of the owner."""
    tensor, data = TensorSum(Declared("g", "grad", (1,)), 2), bytes(4)
    tensor.open(0, 0, False)
    tensor.open(1, 0, False)
    tensor.push(1, 1, 0, data)
    tensor.gone(1)
    tensor.push(0, 1, 0, data)
    while tensor.busy:
        given = tensor.work()
    assert given == [StateTransfer("give", 0)]
    assert tensor.open(1, 0, False) == ()
    assert tensor.push(1, 1, 0, data) == [StateTransfer("give", 1)], "it pushes again, and has it then"


def test_each_rank_brings_a_part_of_the_blocks_that_all_of_them_hold() -> None:
    """Otherwise a model that moves comes from one rank, whose link and process all wait for."""
    asked = []
    for block in range(30):
        declared = Declared("w", "model", (300,), block=block, elements=(10 * block, 10 * block + 10))
        tensor = TensorSum(declared, 3)
        tensor.open(0, 5, False)
        tensor.open(1, 5, False)
        (ask,) = tensor.open(2, 5, False)
        asked.append(ask.rank)
        assert tensor.gone(ask.rank)[0].rank != ask.rank
    assert min(asked.count(rank) for rank in range(3)) > 4


def test_the_beginning_of_a_model_is_rank_0s_even_while_rank_0_is_away() -> None:
    tensor = TensorSum(Declared("w", "model", (1,)), 3)
    tensor.open(0, 0, True)
    tensor.open(1, 0, True)
    assert tensor.open(2, 0, True) == (StateTransfer("ask", 0),)
    assert not tensor.gone(0), "rank 1's own idea of the beginning would be taken"
    assert tensor.open(1, 0, False) == (StateTransfer("ask", 1),), "rank 1 was given rank 0's by an earlier aggregator"


def test_the_beginning_of_a_model_is_asked_of_who_speaks_for_rank_0() -> None:
    tensor = TensorSum(Declared("w", "model", (1,)), 5)
    assert tensor.open(3, 0, True, (2, 5)) == () and tensor.missing() == [0, 1]
    assert tensor.open(1, 0, True, (0, 2)) == (StateTransfer("ask", 1),)
    assert sorted(tensor.state_part(1, 0, 0, bytes(4))) == [StateTransfer("give", 1), StateTransfer("give", 3)]


@pytest.mark.parametrize(
    ("rank", "ranks", "why"),
    [
        (0, (0, 3), "and rank 2 for rank 2"),
        (4, (4, 7), "ranks 4 to 6 of 6 cannot"),
        (4, (0, 2), "rank 4 speaks for ranks 0 to 1"),
        (2, (2, 3), "rank 2 speaks for ranks 2 to 2, and rank 2 for rank 2"),
        (3, None, "and rank 2 for rank 3"),
    ],
)
def test_two_do_not_speak_for_one_rank(rank: int, ranks: tuple[int, int] | None, why: str) -> None:
    tensor = TensorSum(Declared("g", "grad", (1,)), 6)
    tensor.open(2, 0, False, (2, 4))
    with pytest.raises(Violation, match=why):
        tensor.open(rank, 0, False, ranks)
    assert tensor.missing() == [0, 1, 4, 5]


def test_nobody_is_asked_before_all_ranks_have_said_which_version_they_hold() -> None:
    tensor = TensorSum(Declared("w", "model", (4,)), 3)
    assert not tensor.open(0, 4, False) and not tensor.open(2, 4, False)
    assert tensor.missing() == [1]
    assert tensor.open(1, 5, False) == (StateTransfer("ask", 1),)


def test_a_sum_that_everybody_holds_is_not_fetched() -> None:
    tensor = TensorSum(Declared("g", "grad", (4,)), 2)
    tensor.open(0, 7, False)
    assert tensor.open(1, 7, False) == []
    assert tensor.version == 7


def test_a_sum_that_one_rank_still_waits_for_is_fetched_from_one_that_has_it() -> None:
    tensor = TensorSum(Declared("g", "grad", (1,)), 2)
    tensor.open(0, 6, False)
    assert tensor.open(1, 7, False) == (StateTransfer("ask", 1),)
    tensor.push(0, 7, 0, b"\0\0\0\0")
    assert tensor.state_part(1, 7, 0, b"\0\0\x80?") == [StateTransfer("give", 0)]
    assert tensor.lend()[1].tolist() == [1.0]


def test_a_rank_whose_word_is_two_rounds_old_is_awaited_as_its_next_process_is() -> None:
    """It pushed the round between to an earlier owner, by a process that comes here later."""
    tensor = TensorSum(Declared("w", "model", (1,), update=SGD(rate=0.5)), 2)
    tensor.open(1, 3, False)
    tensor.learn(1, 4, 0.5)
    tensor.push(1, 4, 0, b"\0\0\0\0")
    assert not tensor.open(0, 5, False) and tensor.missing() == [1] and not tensor.said().pushed
    tensor.learn(1, 4, 0.5)  # the older process goes on for a moment
    assert not tensor.push(1, 4, 0, b"\0\0\0\0") and tensor.version is None
    assert not tensor.open(1, 3, False) and tensor.missing() == [1], "and so it does when it connects again"
    assert tensor.open(1, 5, False) == (StateTransfer("ask", 0),) and not tensor.missing()
    tensor.learn(1, 6, 0.5)
    tensor.push(1, 6, 0, np.float32(2.0).tobytes())
    tensor.state_part(0, 5, 0, np.float32(1.0).tobytes())
    tensor.learn(0, 6, 0.5)
    tensor.push(0, 6, 0, np.float32(4.0).tobytes())
    tensor.work()
    assert tensor.version == 6 and tensor.lend()[1].tolist() == [1.0 - 0.5 * 6.0]


@pytest.mark.parametrize("round", [0, 1, 2, 5])
def test_a_push_that_no_correct_worker_makes_is_refused(round: int) -> None:
    tensor = TensorSum(Declared("g", "grad", (1,)), 1)
    tensor.open(0, 3, False)
    with pytest.raises(Violation):
        tensor.push(0, round, 0, b"\0\0\0\0")


def test_an_array_that_is_being_sent_is_not_written_again() -> None:
    tensor = TensorSum(Declared("g", "grad", (1,)), 1)
    tensor.open(0, 0, False)
    lent = []
    for round in range(1, 5):
        tensor.push(0, round, 0, np.float32(round).tobytes())
        tensor.work()
        lent.append(tensor.lend()[1])
    assert [float(array[0]) for array in lent] == [1.0, 2.0, 3.0, 4.0]


def test_an_array_that_two_workers_are_sent_stays_until_both_have_it() -> None:
    tensor = TensorSum(Declared("g", "grad", (1,)), 1)
    tensor.open(0, 0, False)

    def play(round: int) -> None:
        tensor.push(0, round, 0, np.float32(round).tobytes())
        tensor.work()

    play(1)
    first, again = tensor.lend()[1], tensor.lend()[1]
    assert first is again
    tensor.give_back(first)
    play(2)
    play(3)
    assert float(again[0]) == 1.0, "the second worker is still being sent it"
    tensor.give_back(again)


def test_the_headers_of_a_round_are_not_those_of_the_round_before() -> None:
    """The headers hold checksums of the parts."""
    tensor = TensorSum(Declared("g", "grad", (1,)), 1)
    tensor.open(0, 0, False)
    for round in (1, 2):
        tensor.push(0, round, 0, np.float32(round).tobytes())
        tensor.work()
        version, array, heads = tensor.lend()
        assert (version, heads) == (round, {})
        heads[0] = b"a header of this round"
        tensor.give_back(array)


def test_what_is_not_finite_is_added_as_numpy_does_and_counted() -> None:
    """An infinity that results from finite numbers counts too; parameters to which the sum is added do not."""
    tensor = TensorSum(Declared("w", "model", (5,), 8), 2)
    for rank in range(2):
        tensor.open(rank, 0, True)
    for part in range(3):
        tensor.state_part(0, 0, part, b"\0" * (4 if part == 2 else 8))
    given = [[1, np.nan, np.inf, 3e38, 1], [1, 1, -np.inf, 3e38, 1]]
    for round, wanted in ((1, 3), (2, 3)):
        for rank in range(2):
            values = np.array(given[rank] if round == 1 else [1] * 5, np.float32)
            for part in range(3):
                tensor.push(rank, round, part, values[2 * part : 2 * part + 2].tobytes())
        with np.errstate(over="ignore", invalid="ignore"):
            while tensor.busy:
                tensor.work()
        assert tensor.not_finite == wanted
    state = tensor.lend()[1]
    assert [float(state[0]), float(state[3]), float(state[4])] == [4, np.inf, 4] and np.isnan(state[1:3]).all()


def test_contributions_are_such_that_another_order_would_show() -> None:
    """Otherwise the tests above could not fail."""
    parts = [contribution(MODEL, rank, 1) for rank in range(3)]
    assert (parts[0] + parts[1] + parts[2]).tobytes() != (parts[2] + parts[1] + parts[0]).tobytes()
    assert reference(MODEL, 4, 1, "tree")[0].tobytes() != reference(MODEL, 4, 1, "rank")[0].tobytes()


@given(rank=st.integers(0, 4), version=st.integers(0, 3), part=st.integers(0, 6), data=st.binary(max_size=12))
@settings(max_examples=examples(200), deadline=None)
def test_whatever_a_worker_says_a_sum_stays_sound(rank: int, version: int, part: int, data: bytes) -> None:
    tensor = TensorSum(Declared("w", "model", (4,), 8), 5)
    for other in range(4):
        tensor.open(other, 1, False)
    calls: list[Callable[[], object]] = [
        lambda: tensor.push(rank, version, part, data),
        lambda: tensor.state_part(rank, version, part, data),
        lambda: tensor.open(4, version, False),
    ]
    for call in calls + calls:
        try:
            call()
        except Violation:
            pass
        tensor.check()


# ---- parts of a result are given as soon as they are added ----


def in_parts(ranks: int = 2) -> TensorSum:
    """A tensor of three parts, which all ranks have opened."""
    tensor = TensorSum(Declared("g", "grad", (3,), 4), ranks)
    for rank in range(ranks):
        tensor.open(rank, 0, False)
    return tensor


def pushed(tensor: TensorSum, rank: int, part: int, round: int = 1) -> list[StateTransfer]:
    actions = [*tensor.push(rank, round, part, np.float32(rank + 10 * part + 100 * round).tobytes())]
    while tensor.busy:
        actions += tensor.work()
    tensor.check()
    return actions


def sent(results: RankResults, tensor: TensorSum) -> tuple[int, dict[int, float]] | None:
    """The round and parts that a connection sends when a result that was given has its turn."""
    giving = results.begin(1, tensor)
    if giving is None:
        return None
    found = {part: float(np.frombuffer(results.frame(giving, part)[1], np.float32)[0]) for part in giving.parts}
    results.over(giving)
    return giving.lent.round, found


def test_a_part_is_given_while_others_are_awaited_and_the_rest_at_the_end() -> None:
    tensor, results = in_parts(), [RankResults(rank, 7, 1, near=False) for rank in range(2)]
    assert pushed(tensor, 0, 2) == pushed(tensor, 0, 1) == []
    assert pushed(tensor, 1, 1) == [StateTransfer("give", 0), StateTransfer("give", 1)]
    assert tensor.version == 0 and tensor.missing() == [1]
    assert sent(results[0], tensor) == (1, {1: 221.0})
    assert sent(results[0], tensor) is None, "each part once"
    pushed(tensor, 1, 2)
    assert sent(results[1], tensor) == (1, {1: 221.0, 2: 241.0})
    pushed(tensor, 0, 0)
    assert pushed(tensor, 1, 0) == [StateTransfer("give", 0), StateTransfer("give", 1)]
    assert sent(results[0], tensor) == (1, {0: 201.0, 2: 241.0}) and sent(results[1], tensor) == (1, {0: 201.0})
    assert sent(results[0], tensor) == (1, {0: 201.0, 1: 221.0, 2: 241.0}), "who asks again gets all"


def test_a_rank_that_has_not_pushed_on_this_connection_is_given_no_parts() -> None:
    """It would ignore them: a successor, say, whose predecessor had pushed. It gets all when it pushes."""
    tensor = in_parts()
    for part in range(3):
        pushed(tensor, 0, part)
    tensor.gone(0)
    assert pushed(tensor, 1, 0) == [StateTransfer("give", 1)]
    tensor.open(0, 0, False)
    results = RankResults(0, 7, 1, near=False)
    assert pushed(tensor, 1, 1) == [StateTransfer("give", 1)] and sent(results, tensor) is None
    assert pushed(tensor, 0, 0) == [StateTransfer("give", 0)] and tensor.duplicates == 1
    assert sent(results, tensor) == (1, {0: 201.0, 1: 221.0})
    assert pushed(tensor, 0, 1) == [], "it is given what there is once"


def test_parts_that_are_being_sent_stay_while_others_of_the_round_are_added() -> None:
    tensor = in_parts()
    early = []
    for part in range(3):
        pushed(tensor, 0, part)
        pushed(tensor, 1, part)
        early.append(tensor.lend_to(0))
    assert [lent.array.tolist() for lent in early if lent is not None] == [[201.0, 221.0, 241.0]] * 3
    for round in (2, 3):
        for rank, part in ((rank, part) for part in range(3) for rank in range(2)):
            pushed(tensor, rank, part, round)
    assert early[0] is not None and early[0].array.tolist() == [201.0, 221.0, 241.0], "it is still being sent"


def test_results_that_wait_for_a_slow_rank_are_one_result() -> None:
    tensor, results, queued = in_parts(), RankResults(0, 7, 1, near=True), 0
    for part in range(3):
        pushed(tensor, 1, part)
        queued += sum(results.owe(1) for given in pushed(tensor, 0, part) if given.rank == 0)
    assert queued == 1 and sent(results, tensor) == (1, {0: 201.0, 1: 221.0, 2: 241.0})
    assert results.owe(1)


@pytest.mark.parametrize("whole", [True, False])
def test_a_result_that_waits_is_not_given_once_the_tensor_is_over(whole: bool) -> None:
    """Its memory is gone by then: a rank that owns the table itself would get a header without numbers."""
    tensor, results = in_parts(), RankResults(0, 7, 1, near=True)
    for part in range(3 if whole else 2):
        pushed(tensor, 0, part)
        pushed(tensor, 1, part)
    results.owe(1)
    tensor.let_go()
    assert sent(results, tensor) is None


def test_only_the_keeper_has_the_last_part_before_the_moments_are_kept() -> None:
    """Parts may come early to others: a rank holds a version only with all of them."""
    declared = Declared("w", "model", (2,), 4, update=SGD(1.0, momentum=0.9), keeper=1)
    tensor = TensorSum(declared, 2)
    for rank in range(2):
        tensor.open(rank, 0, True)
    for part in range(2):
        tensor.state_part(0, 0, part, b"\0" * 4)
    results = [RankResults(rank, 7, 1, near=False) for rank in range(2)]
    for rank in range(2):
        tensor.learn(rank, 1, 1.0)
        pushed(tensor, rank, 0)
    assert [sent(each, tensor) for each in results] == [(1, {0: -201.0})] * 2
    pushed(tensor, 0, 1)
    assert pushed(tensor, 1, 1) == [StateTransfer("give", 1)]
    assert sent(results[0], tensor) is None
    assert sent(results[1], tensor) == (1, {1: -221.0, 2: 201.0, 3: 221.0})
    assert tensor.kept(1, 1) == [StateTransfer("give", 0)] and sent(results[0], tensor) == (1, {1: -221.0})


def test_the_orders_above_do_give_parts_early() -> None:
    """Otherwise owners that die, and connections that break, would not have been tried with them."""
    bench = Bench(1, 3, BOTH, rounds=3, part_bytes=4)
    bench.run()
    bench.check_results()
    assert bench.owner.early > 20


def test_what_a_connection_sent_of_a_round_says_nothing_of_the_next() -> None:
    """A rank that pushes the next round has all parts of the last one, whatever this connection carried of it."""
    tensor, results = in_parts(1), RankResults(0, 7, 1, near=False)
    pushed(tensor, 0, 0)
    assert sent(results, tensor) == (1, {0: 100.0})
    pushed(tensor, 0, 1)
    pushed(tensor, 0, 2)
    pushed(tensor, 0, 0, round=2)
    assert sent(results, tensor) == (2, {0: 200.0})
