"""The results that one connection of a rank carries, in frames: each part of a round once, whether it was sent as soon
as it was added or with the whole result.

Every way to a rank uses this: the connections of an `aggd`, those of a rank that owns a table, and that rank's own way
to it. A new connection begins with nothing sent, and the rank forgets the parts that came over the older one.
"""

from typing import NamedTuple

from covey.tensors.numbers.tensor_wire import TYPES, Frame, TensorOp, frame
from covey.tensors.owner.sums import LentResult, TensorSum


class Giving(NamedTuple):
    """The parts of one result that are to be sent now. `RankResults.over` must follow, also when sending fails."""

    key: int
    tensor: TensorSum
    lent: LentResult
    parts: list[int]


class RankResults:
    """What one rank was sent of the results of its tensors over one connection."""

    def __init__(self, rank: int, job_hash: int, epoch: int, near: bool) -> None:
        """`near`: the rank is on this host, so numbers are not checked against bits that a wire has changed."""
        self._rank, self._hash, self._epoch, self._near = rank, job_hash, epoch, near
        self._sent: dict[int, tuple[int, set[int]]] = {}
        """Tensor -> the round of which some parts were sent, and these."""
        self._owed: set[int] = set()
        """Tensors that were promised, and not begun yet."""

    def owe(self, key: int) -> bool:
        """A result of this tensor was given to the rank. True: the caller queues that; False: an earlier one still
        waits in the queue, and takes along whatever is there when its turn comes."""
        if key in self._owed:
            return False
        self._owed.add(key)
        return True

    def begin(self, key: int, tensor: TensorSum) -> Giving | None:
        """What this rank is to be sent of a tensor that was given to it; None: nothing, at present. The caller sends
        it, or ends the connection."""
        self._owed.discard(key)
        lent = tensor.lend_to(self._rank)
        if lent is None:
            return None
        round, sent = self._sent.pop(key, (lent.round, set()))
        if round != lent.round:
            sent = set()
        parts = [part for part in lent.parts if part not in sent]
        if not lent.is_whole:
            self._sent[key] = lent.round, sent.union(parts)
        if parts:
            return Giving(key, tensor, lent, parts)
        tensor.give_back(lent.array)
        return None

    def frame(self, giving: Giving, part: int) -> Frame:
        """The frame of one part; its payload refers to the numbers themselves."""
        declared, lent = giving.tensor.declared, giving.lent
        start, end = declared.state_span(part)
        payload = memoryview(lent.array.view("u1").data)[start:end]
        kept = ~part if self._near else part  # unlike checksums
        head = lent.heads.get(kept)
        if head is None:
            head, _ = frame(
                TensorOp.RESULT,
                self._hash,
                self._epoch,
                key=giving.key,
                part=part,
                round=lent.round,
                type=TYPES[declared.type][0],
                payload=payload,
                near=self._near,
            )
            lent.heads[kept] = head
        return head, payload

    def over(self, giving: Giving) -> None:
        """The frames were sent, or never will be."""
        giving.tensor.give_back(giving.lent.array)
