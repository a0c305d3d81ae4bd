"""Moments of optimizers that run where gradients are summed (`covey.tensors.numbers.updates`): writing them to
checkpoints, and reading them back.

Each rank keeps at most some of them. `gathered` gives all moments to all ranks by ordinary rounds: for each number, the
rank that keeps it pushes it, and the others push -0.0, which changes nothing in a sum.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from covey.tensors.numbers.arrays import Array, GivenArray
from covey.tensors.numbers.types import NUMBERS
from covey.tensors.numbers.updates import Update

AT_A_TIME = 256 << 10
"""Numbers in one round."""
NAME = "covey/moments"


class Moments(NamedTuple):
    """What an optimizer remembers of one tensor beside its parameters."""

    steps: int
    """Number of steps that the optimizer has made."""
    arrays: tuple[Array, ...]
    """Arrays of the tensor's shape and the type in which it is added (float32 for 16-bit parameters): for SGD with
    momentum the velocity, for Adam the first and the second moment."""


def check_moments(given: GivenArray, update: Update | None, moments: Moments | None) -> Sequence[Array]:
    """The arrays with which an optimizer begins; none: it begins with zeros. TypeError, ValueError."""
    if update is None:
        if moments is not None:
            raise ValueError("moments are given without an update that uses them; give both or neither")
        return ()
    if moments is None or not moments.steps:
        return ()
    if moments.steps < 0 or len(moments.arrays) != update.moments:
        had = f"{len(moments.arrays)} after {moments.steps} steps"
        raise ValueError(f"{update} has {update.moments} moments, not {had}")
    arrays = [np.ascontiguousarray(each).reshape(np.shape(each)) for each in moments.arrays]
    for each in arrays:
        wide = NUMBERS[given.type].wide
        if each.shape != given.data.shape or each.dtype != wide:
            was, now = f"{each.dtype} {each.shape}", f"{given.type} {given.data.shape}"
            also = f", whose moments are {wide}" if NUMBERS[given.type].rounds else ""
            raise ValueError(f"a moment is {was}, and the parameters are {now}{also}")
    return arrays


def gathered(
    like: Array,
    count: int,
    kept: Iterable[tuple[int, Sequence[Array]]],
    add: Callable[[Array], Array],
) -> tuple[Array, ...]:
    """All moments of a tensor, each with the shape of `like`. `kept`: the moments that this rank keeps, with their
    first element; `add`: does one round, whose result may be in the array of the contribution."""
    found = tuple(np.full(like.shape, -0.0, like.dtype) for _ in range(count))
    for first, arrays in kept:
        for into, array in zip(found, arrays, strict=True):
            into.reshape(-1)[first : first + len(array)] = array
    spare = np.empty(AT_A_TIME, like.dtype)
    for each in found:
        flat = each.reshape(-1)
        for first in range(0, len(flat), AT_A_TIME):
            here = flat[first : first + AT_A_TIME]
            spare[: len(here)], spare[len(here) :] = here, 0.0
            here[:] = add(spare)[: len(here)]
    return found
