"""The order in which contributions are added: whole, fixed, and the same wherever ranks are."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.tensors.numbers.sum_order import ORDERS, Node, Order, addition, nodes_of


def expression(ranks: int, order: Order, arrive: list[int]) -> str:
    """The expression of the sum, when contributions arrive in this order."""
    held: dict[Node, str] = {}
    waiting = [((rank, rank + 1), str(rank)) for rank in reversed(arrive)]
    while waiting:
        node, text = waiting.pop()
        held[node] = text
        now = addition(node, ranks, order)
        if now is not None and now.left in held and now.right in held:
            waiting.append((now.sum, f"({held.pop(now.left)}+{held.pop(now.right)})"))
    (whole,) = held.values()
    assert list(held) == [(0, ranks)]
    return whole


@given(ranks=st.integers(1, 40), order=st.sampled_from(ORDERS), seed=st.integers(0, 1000))
def test_the_order_of_arrival_does_not_matter(ranks: int, order: Order, seed: int) -> None:
    arrive = list(range(ranks))
    random.Random(seed).shuffle(arrive)
    assert expression(ranks, order, arrive) == expression(ranks, order, list(range(ranks)))


@pytest.mark.parametrize(
    ("ranks", "tree"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (4, "((0+1)+(2+3))"),
        (5, "(((0+1)+(2+3))+4)"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
    ],
)
def test_the_tree_is_as_drawn(ranks: int, tree: str) -> None:
    assert expression(ranks, "tree", list(range(ranks))) == tree


def test_by_rank_it_is_a_plain_loop() -> None:
    assert expression(4, "rank", [3, 1, 0, 2]) == "(((0+1)+2)+3)"


@given(ranks=st.integers(2, 64), seed=st.integers(0, 1000))
def test_a_host_with_neighbouring_ranks_sends_few_sums(ranks: int, seed: int) -> None:
    """Wherever the ranks are, what a host can add on its own leaves at most two sums for each doubling of its ranks."""
    rng = random.Random(seed)
    first = rng.randrange(ranks)
    end = rng.randrange(first, ranks) + 1
    held: set[Node] = set()
    waiting = [(rank, rank + 1) for rank in range(first, end)]
    while waiting:
        node = waiting.pop()
        held.add(node)
        now = addition(node, ranks, "tree")
        if now is not None and now.left in held and now.right in held:
            held -= {now.left, now.right}
            waiting.append(now.sum)
    assert sorted(rank for node in held for rank in range(*node)) == list(range(first, end))
    assert len(held) <= 2 * (end - first).bit_length()
    assert nodes_of((first, end), ranks, "tree") == tuple(sorted(held))


def test_by_rank_only_who_has_rank_0_adds_anything_alone() -> None:
    assert nodes_of((0, 3), 8, "rank") == ((0, 3),)
    assert nodes_of((3, 6), 8, "rank") == ((3, 4), (4, 5), (5, 6))
