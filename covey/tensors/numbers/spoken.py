"""The ranks for which one rank pushes, and the pieces in which it pushes: for itself, or for all ranks of its host,
whose contributions it has added first (`covey.tensors.aggregator.host_rounds`).

A host's ranks make few whole sums of the tree of additions, mostly one. These are sent one after the other, each in the
parts of its tensor, with consecutive numbers: with two parts and two sums, pieces 0 and 1 are the first sum, 2 and 3
the other.

    ranks 2 to 5 of 8, 2 parts     | 2+3, part 0 | 2+3, part 1 | 4+5, part 0 | 4+5, part 1 |

A sum of several ranks has the type in which numbers are added, and is rounded only at the aggregator. A rank on the
aggregator's host may put the pieces of a round into memory that both see: one sum after the other, each from a cache
line on.
"""

from typing import NamedTuple

from covey.tensors.numbers.sum_order import Node, nodes_of
from covey.tensors.numbers.tensor_wire import ADDED_AS, PART_BYTES_MAX, PARTS_MAX, TYPES, Declared, Type

_LINE_BYTES = 64


class Piece(NamedTuple):
    """The piece that one PUSH carries."""

    node: Node
    """The ranks whose contributions were added."""
    part: int
    """Number of the tensor's part."""
    type: int
    """Number of the elements' type, as in a header."""
    first: int
    """Byte of the sum of `node` with which the piece begins."""
    end: int

    @property
    def size(self) -> int:
        return self.end - self.first


class Spoken:
    """What a rank pushes of one Block. ValueError for too many or too long pieces, or when there are no such ranks."""

    def __init__(self, declared: Declared, ranks: Node, world_size: int) -> None:
        """`ranks`: from the first up to, and without, the second."""
        if not 0 <= ranks[0] < ranks[1] <= world_size:
            raise ValueError(f"ranks {ranks[0]} to {ranks[1] - 1} of {world_size} cannot be represented by this rank")
        self.declared, self.ranks = declared, ranks
        self.nodes = nodes_of(ranks, world_size, declared.order)
        self._added = ADDED_AS[declared.type]
        if self.count > PARTS_MAX or self._wider(declared.part_bytes, self.nodes[0]) > PART_BYTES_MAX:
            raise ValueError(f"{len(self.nodes)} sums of {declared.name!r} take too many pieces, or too long ones")

    @property
    def count(self) -> int:
        """Number of pieces in a round."""
        return len(self.nodes) * self.declared.parts

    def piece(self, number: int) -> Piece | None:
        """The piece with this number; None when there is no such piece."""
        if number >= self.count:
            return None
        at, part = divmod(number, self.declared.parts)
        node = self.nodes[at]
        first, end = (self._wider(offset, node) for offset in self.declared.span(part))
        return Piece(node, part, TYPES[self._type(node)][0], first, end)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory in which the pieces of a round lie."""
        return self._place_of(len(self.nodes))

    def place(self, number: int) -> tuple[int, int]:
        """The first byte of a piece in that memory, and the byte after its last."""
        at, part = divmod(number, self.declared.parts)
        first, end = (self._wider(offset, self.nodes[at]) for offset in self.declared.span(part))
        begin = self._place_of(at)
        return begin + first, begin + end

    def size_of(self, node: Node) -> int:
        """Bytes of a whole sum."""
        return self._wider(self.declared.size_bytes, node)

    def _place_of(self, at: int) -> int:
        """Place of the sum with this number."""
        return sum(-(-self.size_of(node) // _LINE_BYTES) * _LINE_BYTES for node in self.nodes[:at])

    def _type(self, node: Node) -> Type:
        return self._added if node[1] - node[0] > 1 else self.declared.type

    def _wider(self, size: int, node: Node) -> int:
        return size // self.declared.element_bytes * TYPES[self._type(node)][1]
