"""One addition of one part of a tensor: this process or a lane (`lane`) does it with the same lines.

Two sums of neighbouring ranks become one, or the last of them a part of the result: divided, counted, added to the
parameters or made a step of their optimizer, and rounded once. Nothing here knows of rounds or ranks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from covey.tensors.numbers.pieces import not_finite
from covey.tensors.numbers.sum_order import Node
from covey.tensors.numbers.tensor_wire import Payload, Type
from covey.tensors.numbers.types import NUMBERS, Wide
from covey.tensors.numbers.update_steps import take_step
from covey.tensors.numbers.updates import Update

Array = npt.NDArray[Any]


class LastAddition(msgspec.Struct, frozen=True, array_like=True):
    """The last step of a part: the use of the sum of all ranks."""

    workers: int = 0
    """Number by which the sum is divided; 0: it is not."""
    is_model: bool = False
    """The sum is added to the parameters, or makes a step of their optimizer."""
    update: Update | None = None
    step: int = 0
    rate: float = 0.0


class PartAddition(NamedTuple):
    """An addition that `sums.TensorSum` has begun: nothing else uses these arrays until it is ended."""

    part: int
    node: Node
    """Ranks whose sum it makes."""
    type: Type
    single: tuple[bool, ...]
    """For each side: True for one rank's contribution, in the tensor's type; False for a sum, in the type used for
    additions."""
    sides: Sequence[Payload]
    into: Payload | None
    """Array for the sum, in the type in which it is added; None: it is the last addition, and makes `new`."""
    last: LastAddition | None
    old: Sequence[Array]
    """The parameters of this part and their moments, before this round."""
    new: Sequence[Array]
    used: Sequence[Payload]
    """Buffers that are not needed any more afterwards."""

    def run(self) -> int:
        """Do the addition; returns the count of numbers in the result that are not finite, for the last addition
        alone."""
        return add_part(self.type, self.single, self.sides, self.into, self.last, self.old, self.new)


def add_part(
    type: Type,
    single: Sequence[bool],
    sides: Sequence[Payload | Array],
    into: Payload | Array | None,
    last: LastAddition | None,
    old: Sequence[Array],
    new: Sequence[Array],
) -> int:
    """Add one part; arguments as in `PartAddition`. ArithmeticError, MemoryError, ValueError: some of `into` or `new`
    may be written."""
    numbers = NUMBERS[type]
    wide: list[Wide] = [
        numbers.widen(np.frombuffer(each, numbers.stored)) if alone else np.frombuffer(each, numbers.wide)
        for alone, each in zip(single, sides, strict=True)
    ]
    with np.errstate(all="ignore"):  # what is not finite is counted
        if into is not None:
            np.add(wide[0], wide[1], out=np.frombuffer(into, numbers.wide))
            return 0
        if last is None:
            raise ValueError("an addition that makes nothing")
        return _finish(type, wide, last, old, new)


def _finish(type: Type, sides: Sequence[Wide], last: LastAddition, old: Sequence[Array], new: Sequence[Array]) -> int:
    """Do the last addition of a part; if there is one rank, its contribution is the sum."""
    numbers, whole = NUMBERS[type], new[0]
    into = np.empty(len(whole), numbers.wide) if numbers.rounds else whole
    if len(sides) == 1:
        into[:] = sides[0]
    else:
        np.add(sides[0], sides[1], out=into)
    if last.workers:
        np.divide(into, numbers.wide.type(last.workers), out=into)
    count = not_finite(into)
    if last.update is not None:
        take_step(last.update, last.step, last.rate, [numbers.widen(old[0]), *old[1:]], [into, *new[1:]])
    elif last.is_model:
        np.add(numbers.widen(old[0]), into, out=into)
    if numbers.rounds:
        whole[:] = numbers.narrow(into)
    return count
