"""The ranks for which each rank speaks at a Block's aggregator: itself, or all ranks of its host
(`covey.tensors.numbers.spoken`)."""

from collections.abc import Collection, Iterable

from covey.tensors.numbers.spoken import Piece, Spoken
from covey.tensors.numbers.sum_order import Node
from covey.tensors.numbers.tensor_wire import Declared


class Violation(Exception):
    """A worker said what no correct worker says; its connection is closed."""


class Speakers(dict[int, Spoken]):
    """The speakers of one Block: rank that speaks -> ranks for which it does."""

    def __init__(self, declared: Declared, workers: int) -> None:
        super().__init__()
        self._declared, self._workers = declared, workers

    def say(self, rank: int, ranks: Node) -> None:
        """Let a rank speak for these. Violation when it said otherwise before, or another rank speaks for one of
        them."""
        known = self.get(rank)
        if known is not None and known.ranks == ranks:
            return
        others = {each: by for by, spoken in self.items() for each in range(*spoken.ranks)}
        taken = next((each for each in range(*ranks) if each in others), None)
        if taken is not None or not ranks[0] <= rank < ranks[1]:
            also = f", and rank {others[taken]} for rank {taken}" if taken is not None else ""
            raise Violation(f"rank {rank} speaks for ranks {ranks[0]} to {ranks[1] - 1}{also}")
        try:
            self[rank] = Spoken(self._declared, ranks, self._workers)
        except ValueError as error:
            raise Violation(str(error)) from error

    def piece(self, rank: int, number: int) -> Piece:
        """The piece that a PUSH of this rank carries. Violation."""
        spoken = self.get(rank)
        if spoken is None:
            raise Violation(f"rank {rank} pushed before it said which version it holds")
        piece = spoken.piece(number)
        if piece is None:
            raise Violation(f"piece {number} of a tensor with {spoken.count}")
        return piece

    def for_whom(self, but: Collection[int] = ()) -> set[int]:
        """All ranks that some rank speaks for, other than these."""
        return {rank for by, spoken in self.items() if by not in but for rank in range(*spoken.ranks)}

    def firsts(self, speakers: Iterable[int]) -> frozenset[int]:
        """The first ranks of all the ranges for which these speak."""
        return frozenset(self[rank].ranks[0] for rank in speakers)

    def keepers(self) -> frozenset[int]:
        """Ranks that are given the moments of an optimizer: one, once it speaks."""
        return frozenset(rank for rank in self if self.keeps(rank))

    def keeps(self, rank: int) -> bool:
        """Is this rank given the moments of an optimizer too?"""
        ranks = self[rank].ranks if rank in self else (rank, rank)
        return bool(self._declared.moments) and ranks[0] <= self._declared.keeper < ranks[1]
