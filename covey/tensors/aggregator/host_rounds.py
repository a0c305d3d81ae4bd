"""Rounds of tensors of a job on several hosts: ranks of one host first add their contributions in shared memory.

Each Block has a *speaker* on every host, one of the host's ranks, so that all of them share the work. When all ranks of
the host have pushed, the speaker adds the Block for the host (whole sums of the tree of additions, mostly one:
`covey.tensors.numbers.spoken`), pushes that to the Block's owner, and receives the result into memory that all ranks of
the host read:

    rank 0   copy in | add Block 0 of ranks 0 and 1, push --> table 0 --> result of Block 0 |            | copy out
    rank 1   copy in | add Block 1 of ranks 0 and 1, push --> table 1 --> result of Block 1 | all Blocks | copy out
    (the other host)   add Block 0 of ranks 2 and 3, ...

Where ranks have added already, each what it speaks for (GPUs of one host: `covey.frameworks.torch.gpu_sums`), they
begin a round with these sums instead of contributions (`begin_sums`), and take the Blocks that they speak for.

So a network card carries a Block once for a host, not once for each of its ranks. To an aggregator the speaker is a
rank that pushes for several ranks; it is lost and recovered like any other. Memory has room for two results, used in
turn: the result of round 9 overwrites that of round 7, which all ranks have copied out before they pushed round 8. So
the last whole result is there for an aggregator that asks for it.
"""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from covey.tensors.aggregator.aggregator_rounds import AggregatorRounds
from covey.tensors.aggregator.block_rounds import BlockRounds
from covey.tensors.aggregator.rounds import Superseded
from covey.tensors.numbers.additions import Contribution, add, tree_of
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.blocks import Block, speaker
from covey.tensors.numbers.pieces import pieces
from covey.tensors.numbers.sum_order import Node, nodes_of
from covey.tensors.numbers.tensor_wire import Declared, key_of
from covey.tensors.same_host.memory import TensorRange
from covey.tensors.same_host.shared_rounds import SharedTensor


class _SpokenBlock(NamedTuple):
    """One Block for which this rank speaks."""

    declared: Declared
    at: AggregatorRounds
    elements: slice
    """The elements of the tensor that form the Block."""
    own: slice
    """Its place among all elements for which this rank speaks."""
    sums: tuple[Array, ...]
    """For each node, the sum of its ranks' contributions, or the contribution itself when the node is one rank."""

    @property
    def label(self) -> str:
        return self.declared.label


SUMMED = -1.0
"""The learning rate that a rank shows in a round that it begins with sums; real ones are not negative."""


class HostParts(NamedTuple):
    """How the ranks of a host divide a tensor among themselves."""

    nodes: tuple[Node, ...]
    """The sums that they make, lowest ranks first."""
    elements: tuple[tuple[slice, ...], ...]
    """By rank of the host, the elements that it speaks for, in order."""


class HostTensor(SharedTensor):
    """One tensor of one rank of a job on several hosts; used like any `SharedTensor`."""

    def __init__(self, declared: Declared, range_: TensorRange, far: BlockRounds) -> None:
        super().__init__(declared, range_)
        memory, cut = range_.memory, far.cut(declared)
        self._far, self._members = far, memory.members
        self._nodes = nodes_of(memory.members, memory.world_size, declared.order)
        if any(end - first == 1 for first, end in self._nodes):
            self._lent = None  # a rank's own push stays in its slot, since another owner may ask for it
        self._trees = {node: tree_of(node, declared.order, self._first) for node in self._nodes}
        key = key_of(declared.name)
        said: list[list[int]] = [[] for _ in range(memory.ranks)]
        for at in range(len(cut.blocks)):
            said[speaker(key, at, far.tables, memory.ranks)].append(at)
        self.parts = HostParts(
            self._nodes, tuple(tuple(slice(cut.blocks[at].first, cut.blocks[at].end) for at in mine) for mine in said)
        )
        mine = said[memory.at]
        ends = list(accumulate(cut.blocks[at].end - cut.blocks[at].first for at in mine))
        owns = {at: slice(start, end) for at, start, end in zip(mine, [0, *ends], ends, strict=False)}
        self._mine = [self._spoken(cut.block(at), cut.blocks[at], owns[at]) for at in far.in_turn(cut, mine)]
        self._given: Sequence[Array] | None = None
        """In a round that was begun with sums: for each node, its sum over the elements that this rank speaks for."""
        self._here = self._said = 0
        """Number of this rank's Blocks with the result of this round; the last round that was announced as added."""

    def begin_sums(self, sums: Sequence[Array]) -> None:
        """Begin the next round, as all ranks of this host do, with what they have added among themselves: for each node
        of `parts`, its sum over the elements that this rank speaks for, in the type of additions; the stored one where
        the node is one rank. `sums` are read until the result is there. Never a tensor's first round, in which a rank
        may refuse. ValueError as of `begin`."""
        with self._lock:
            if self.taken != self.round or self.round == 0 or self.declared.kind != "grad":
                raise ValueError(f"tensor {self.declared.name!r} cannot begin round {self.round + 1} with sums")
            self._given = sums
            self._rates[self._rank] = SUMMED
            self.round += 1
            self._words[self._rank, 0] = self.round
        self._range.memory.ring()

    def take_sums(self) -> list[Array]:
        """The result, once it is there, of the elements that this rank speaks for: views that are valid until this rank
        begins the round after the next."""
        result = self._results[self.round % len(self._results)]
        self._given = None
        self.taken = self.round
        return [result[elements] for elements in self.parts.elements[self._rank]]

    def why(self) -> str:
        missing = self.missing()
        if missing:
            return super().why()
        waits = ", ".join(map(str, self.late()))
        whys = dict.fromkeys(spoken.at.why() for spoken in self._mine[self._here :])
        return "; ".join(whys) or f"rank {waits} of this host waits for the sum of all hosts"

    # ---- inside ----

    def _own_part(self) -> bool:
        if self._far.fatal is not None:
            return False  # waiting threads get the error
        if self._added < self.round:
            self._here = 0
            with contextlib.suppress(Superseded):
                if self._given is not None:
                    self._push(())
                elif not self._add_lent(self._push):
                    return False
                self._added = self.round
        while self._here < len(self._mine):
            spoken = self._mine[self._here]
            fault, in_vain = spoken.at.fault(spoken.label)
            if fault and not self.fault:
                self._range.say_fault(fault, in_vain)
            if not spoken.at.has_result(spoken.label):
                return False
            self._here += 1
        if self._said < self.round:
            self._said = self.round
            self._say_added()
        return True

    def _push(self, slots: Sequence[Contribution]) -> None:
        """Add this host's part of each Block, and push it to its owner. May begin again after an interruption."""
        rate, given = self._rate(), self._given
        for spoken in self._mine:
            begun = spoken.at.round(spoken.label)
            if begun is None:
                begun = self._declare(spoken)
            if begun == (self.round if self.declared.kind == "grad" else self.round - 1):
                continue
            if given is None:
                for node, into in zip(self._nodes, spoken.sums, strict=True):
                    self._add_node(slots, node, spoken.elements, into)
            else:
                for sums, into in zip(given, spoken.sums, strict=True):
                    np.copyto(into, sums[spoken.own])
            spoken.at.push(spoken.label, *spoken.sums, blocks=False, rate=rate)

    def _rate(self) -> float:
        summed = self._rates == SUMMED
        if summed.any():
            if not summed.all():
                each = [f"rank {self._first + at}" for at in (int(np.argmin(summed)), int(np.argmax(summed)))]
                raise ValueError(f"{each[0]} pushed its contribution in round {self.round}, and {each[1]} sums of GPUs")
            return 0.0
        return super()._rate()

    def _add_node(self, slots: Sequence[Contribution], node: Node, elements: slice, into: Array) -> None:
        if node[1] - node[0] == 1:
            return  # it is that rank's own contribution, in place
        with np.errstate(all="ignore"):  # whatever a script asks of numpy
            for here in pieces(elements.start, elements.stop):
                found = into[here.start - elements.start : here.stop - elements.start]
                add(self._trees[node], slots, self._numbers, here, found)

    def _declare(self, spoken: _SpokenBlock) -> int:
        """Declare the Block at its owner. Returns the number of its last round: 0."""
        if self._is_initial(1) and self._first == 0:
            np.copyto(self._results[0][spoken.elements], self._slots[0][0][spoken.elements])
        first, end = self._members
        moments = self._moments
        if not first <= spoken.declared.keeper < end:  # other hosts keep them, but for the first ones
            moments = [self._moments[0] if first == 0 and self.declared.steps else [], []]
        each = [[result, *kept] for result, kept in zip(self._results, moments, strict=True)]
        spoken.at.speak(
            spoken.declared, self._members, [[array[spoken.elements] for array in arrays] for arrays in each]
        )
        return 0

    def kept(self) -> Iterator[tuple[int, list[Array]]]:
        for spoken in self._mine:
            if moments := spoken.at.moments(spoken.label):
                yield spoken.elements.start, moments

    def own_state(self) -> Iterator[tuple[int, list[Array]]]:
        for spoken in self._mine:
            if arrays := spoken.at.own_state(spoken.label):
                yield spoken.elements.start, arrays

    def _spoken(self, declared: Declared, block: Block, own: slice) -> _SpokenBlock:
        elements = slice(block.first, block.end)
        sums = tuple(
            self._slots[first - self._first][0][elements]
            if end - first == 1
            else np.empty(block.end - block.first, self._numbers.wide)
            for first, end in self._nodes
        )
        return _SpokenBlock(declared, self._far.table(block.table), elements, own, sums)

    @property
    def _first_moments(self) -> Sequence[Array]:
        return self._moments[0]
