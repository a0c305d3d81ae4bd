"""The order in which the contributions of a job's ranks are added. It is fixed, whatever arrives first, since floating
point addition is not associative: another order gives other bits.

tree    rank 0 with 1, 2 with 3, ..., then these sums two by two, and so on; one without a partner moves up alone. Any
        contiguous run of ranks is made of few whole sums of this tree, so wherever the ranks of a job are, a host adds
        what it has and sends little, and the bits are the same for every such placement.
rank    rank 0's, rank 1's added to it, then rank 2's, and so on: what a plain loop does.
"""

from typing import Literal, NamedTuple, get_args

Order = Literal["tree", "rank"]
ORDERS: tuple[Order, ...] = get_args(Order)
Node = tuple[int, int]
"""The sum of the contributions of ranks from the first up to, and without, the second."""


class Addition(NamedTuple):
    """An addition of two sums of neighbouring ranks, the lower ranks on the left."""

    left: Node
    right: Node

    @property
    def sum(self) -> Node:
        return self.left[0], self.right[1]


def addition(node: Node, ranks: int, order: Order) -> Addition | None:
    """The one addition in which `node` is used; None when it is the sum of all `ranks`. `node` is one rank, or the
    result of an addition of this order."""
    first, end = node
    if (first, end) == (0, ranks):
        return None
    if order == "rank":
        return Addition(node, (end, end + 1)) if first == 0 else Addition((0, first), node)
    width = 1
    while width < end - first:
        width *= 2
    while True:
        if first // width % 2:
            return Addition((first - width, first), node)
        if end < ranks:
            return Addition(node, (end, min(end + width, ranks)))
        width *= 2  # no partner: it moves up alone


def nodes_of(ranks: Node, world_size: int, order: Order) -> tuple[Node, ...]:
    """The fewest sums of this order that these neighbouring ranks make among themselves, lowest first; the rest of the
    job needs nothing else of them. With "rank", only ranks that include rank 0 make a sum."""
    at, end = ranks
    if order == "rank":
        return (ranks,) if at == 0 else tuple((rank, rank + 1) for rank in range(at, end))
    found = []
    while at < end:
        width = 1
        while width < world_size and at % (2 * width) == 0 and min(at + 2 * width, world_size) <= end:
            width *= 2
        found.append((at, min(at + width, world_size)))
        at += width
    return tuple(found)


def last_addition(node: Node, order: Order) -> Addition | None:
    """The one addition that makes `node`; None when it is one rank's contribution."""
    first, end = node
    if end - first == 1:
        return None
    if order == "rank":
        return Addition((first, end - 1), (end - 1, end))
    width = 1
    while 2 * width < end - first:
        width *= 2
    return Addition((first, first + width), (first + width, end))
