"""The additions of a round over arrays, in the order of `covey.tensors.numbers.sum_order`, a piece at a time so that it
stays in a cache."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.peer_memory import LentArray
from covey.tensors.numbers.pieces import PIECE
from covey.tensors.numbers.sum_order import Node, Order, last_addition
from covey.tensors.numbers.types import Numbers, Wide

Tree = Any
"""A tree of additions: the place of one contribution, or the pair of what is on the left and on the right."""

Contribution = Array | LentArray
_of_thread = threading.local()


def tree_of(node: Node, order: Order, first: int = 0) -> Tree:
    """The tree that makes `node`; contributions are numbered from rank `first` on."""
    last = last_addition(node, order)
    if last is None:
        return node[0] - first
    return tree_of(last.left, order, first), tree_of(last.right, order, first)


def add(tree: Tree, contributions: Sequence[Contribution], numbers: Numbers, here: slice, into: Wide) -> None:
    """Add one piece of the sum. `into` has its length, and the type in which numbers are added. Unreadable when another
    process's contribution cannot be read."""
    spare = [array[: here.stop - here.start] for array in _spare(tree, numbers.wide)]
    _sum(tree, lambda at: numbers.widen(contributions[at][here]), spare, into)


def _needed(tree: Tree) -> int:
    """Number of spare arrays that `_sum` needs at once."""
    if isinstance(tree, int):
        return 0
    left, right = tree
    return max(1, _needed(left), _needed(right) + (not isinstance(left, int)))


def _spare(tree: Tree, wide: np.dtype[Any]) -> list[Array]:
    """Spare arrays of this thread, for `_sum`."""
    arrays: list[Array] = _of_thread.__dict__.setdefault(wide.name, [])
    while len(arrays) < _needed(tree):
        arrays.append(np.empty(PIECE, wide))
    return arrays


def _sum(tree: Tree, side: Callable[[int], Array], spare: list[Array], out: Array | None) -> tuple[Array, bool]:
    """The sum in `out` or a spare array; and whether it is a spare one, which the caller gives back."""
    if isinstance(tree, int):
        if out is None:
            return side(tree), False
        np.copyto(out, side(tree))
        return out, False
    (left, left_spare), (right, right_spare) = _sum(tree[0], side, spare, None), _sum(tree[1], side, spare, None)
    if out is not None:
        into = out
    elif left_spare or right_spare:
        into = left if left_spare else right
    else:
        into = spare.pop()
    np.add(left, right, out=into)
    spare.extend(each for each, is_spare in ((left, left_spare), (right, right_spare)) if is_spare and each is not into)
    return into, out is None
