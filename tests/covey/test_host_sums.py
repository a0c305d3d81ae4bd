"""Rounds that the ranks of a host begin with sums that they have made among themselves: threads as ranks, a memory for
each host, real aggregators. `covey.frameworks.torch.gpu_sums` makes such sums on GPUs."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from covey.job.tensors import TensorClient, TensorError
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.sum_order import Node, last_addition
from covey.tensors.numbers.tensor_wire import Type
from covey.tensors.numbers.types import NUMBERS
from tests.covey.played_ranks import Script
from tests.covey.test_host_rounds import gang
from tests.families import in_gate

ROUNDS = 6


def given(rank: int, round: int, size: int, type: Type) -> Array:
    wide = np.random.default_rng(100 * rank + round).standard_normal(size).astype(NUMBERS[type].wide)
    return NUMBERS[type].narrow(wide)


def summed(node: Node, each: Callable[[int], Array]) -> Array:
    last = last_addition(node, "tree")
    if last is None:
        return each(node[0])
    total: Array = summed(last.left, each) + summed(last.right, each)
    return total


def wanted(ranks: int, round: int, size: int, type: Type) -> Array:
    numbers = NUMBERS[type]
    found = summed((0, ranks), lambda rank: numbers.widen(given(rank, round, size, type)))
    return numbers.narrow(found / numbers.wide.type(ranks))


def sums_of(client: TensorClient, name: str, members: range, round: int, size: int, type: Type) -> list[Array]:
    """What a GPU would have: for each node, its sum over the elements that this rank speaks for."""
    parts, numbers = client.host_parts(name), NUMBERS[type]
    assert parts is not None
    found = []
    for node in parts.nodes:
        alone = node[1] - node[0] == 1
        widen = (lambda array: array) if alone else numbers.widen
        whole = summed(node, lambda rank, widen=widen: widen(given(rank, round, size, type)))  # type: ignore[misc]
        own = [whole[here] for here in parts.elements[client.rank - members.start]]
        found.append(np.concatenate(own) if own else whole[:0])
    return found


def script(hosts: Sequence[range], size: int, type: Type, by_hand: Sequence[int] = ()) -> Script:
    """Rounds of one tensor; on the hosts `by_hand`, each rank pushes on its own."""
    ranks = hosts[-1].stop
    bits: Type | None = "bfloat16" if type == "bfloat16" else None

    def run(rank: int, client: TensorClient) -> None:
        at = next(at for at, members in enumerate(hosts) if rank in members)
        for round in range(1, ROUNDS + 1):
            should = wanted(ranks, round, size, type)
            if round in (1, 4) or at in by_hand:  # a round of the usual kind in between does no harm
                handle = client.push("g", given(rank, round, size, type), mean=True, type=bits)
                if round == 1:
                    assert client.host_parts("g") is None, "a rank may still refuse to share memory"
                assert handle.wait().tobytes() == should.tobytes(), (rank, round)
                continue
            taken = client.push_sums("g", sums_of(client, "g", hosts[at], round, size, type))()
            parts = client.host_parts("g")
            assert parts is not None
            mine = parts.elements[rank - hosts[at].start]
            assert [each.tobytes() for each in taken] == [should[here].tobytes() for here in mine], (rank, round)

    return run


@pytest.mark.parametrize("type", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("hosts", in_gate(1, [((3, 1, 2),), ((2, 2),), ((1, 4),)]), ids=str)
def test_sums_of_a_host_give_the_bits_of_contributions(tmp_path: Path, hosts: tuple[int, ...], type: Type) -> None:
    with gang(tmp_path, *hosts) as job:
        job.serve()
        job.share()
        job.play(script(job.members, 150_001, type, by_hand=[at for at, count in enumerate(hosts) if count == 1]))


def test_a_small_tensor_has_one_rank_that_speaks_and_others_with_nothing(tmp_path: Path) -> None:
    with gang(tmp_path, 2, 3) as job:
        job.serve()
        job.share()
        job.play(script(job.members, 7, "float32"))


def test_owners_that_are_replaced_lose_no_round_of_sums(tmp_path: Path) -> None:
    with gang(tmp_path, 2, 2) as job:
        job.serve()
        job.share()
        threads = job.start(script(job.members, 150_001, "float32"))
        for _ in range(3):
            job.replace_owners()
        job.end(threads)


def test_contributions_and_sums_in_one_round_are_refused_by_name(tmp_path: Path) -> None:
    """A rank that goes another way than its neighbours: nothing is summed wrong."""
    heard: list[str] = []

    def push(rank: int, client: TensorClient) -> None:
        client.push_pull("g", given(rank, 1, 150_001, "float32"))
        if rank == 2:
            return
        with pytest.raises(TensorError) as raised:
            if rank == 1:
                client.push_sums("g", sums_of(client, "g", range(2), 2, 150_001, "float32"))()
            else:
                client.push_pull("g", given(rank, 2, 150_001, "float32"))
        heard.append(str(raised.value))

    with gang(tmp_path, 2, 1) as job:
        job.serve()
        job.share()
        job.play(push)
    assert heard == ["tensor 'g': rank 0 pushed its contribution in round 2, and rank 1 sums of GPUs"] * 2
