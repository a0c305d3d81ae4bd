"""How numbers of each type are stored in memory, and in which type they are added.

    type       stored as  added in
    float32    float32    float32
    float64    float64    float64
    float16    float16    float32, rounded once
    bfloat16   uint16     float32, rounded once (numpy has no such type; JAX's `ml_dtypes` has)

Rounded once: contributions are widened, added and divided in float32, and only the result is rounded, to the nearest
and to even. So a sum of 16-bit numbers does not lose precision in each addition, and does not overflow on its way to an
average.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from covey.tensors.numbers.tensor_wire import Type

Stored = npt.NDArray[Any]
"""Numbers as they are stored in memory."""
Wide = npt.NDArray[Any]
"""Numbers in the type in which they are added."""


class Numbers(NamedTuple):
    """How one type is stored and added."""

    stored: np.dtype[Any]
    wide: np.dtype[Any]
    widen: Callable[[Stored], Wide]
    """Converts to the type of additions; returns the array itself where both types are equal."""
    narrow: Callable[[Wide], Stored]
    """Converts to the stored type; returns the array itself where both types are equal."""

    @property
    def rounds(self) -> bool:
        """Whether a sum is rounded at its end."""
        return self.stored != self.wide


def _same(array: Stored) -> Stored:
    return array


def _widen_half(array: Stored) -> Wide:
    return array.astype("<f4")


def _narrow_half(array: Wide) -> Stored:
    with np.errstate(over="ignore"):  # too large a sum is infinite, as everywhere
        return array.astype("<f2")


def _widen_bfloat(array: Stored) -> Wide:
    return (array.astype("<u4") << 16).view("<f4")


def _narrow_bfloat(array: Wide) -> Stored:
    bits: npt.NDArray[np.uint32] = array.view("<u4")
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    if bool(np.isnan(array).any()):  # a NaN with only low bits set would become infinity
        rounded = np.where(np.isnan(array), (bits >> 16) | 0x40, rounded)
    found: Stored = rounded.astype("<u2")
    return found


_F2, _F4, _F8, _U2 = np.dtype("<f2"), np.dtype("<f4"), np.dtype("<f8"), np.dtype("<u2")
NUMBERS: dict[Type, Numbers] = {
    "float32": Numbers(_F4, _F4, _same, _same),
    "float64": Numbers(_F8, _F8, _same, _same),
    "float16": Numbers(_F2, _F4, _widen_half, _narrow_half),
    "bfloat16": Numbers(_U2, _F4, _widen_bfloat, _narrow_bfloat),
}
