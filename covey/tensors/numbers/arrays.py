"""What a script may hand over as a tensor, and what is said of the rest."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from covey.tensors.numbers.tensor_wire import TYPES, Type
from covey.tensors.numbers.types import NUMBERS

Array = npt.NDArray[Any]
"""Of one of the types of `covey.tensors.numbers.types`."""
BITS = ("uint16", "int16")
"""In which a script may hold numbers of a type that numpy has not."""


class GivenArray(NamedTuple):
    """An array that a script handed over."""

    data: Array
    """Contiguous, as it lies in memory."""
    type: Type
    dtype: np.dtype[Any]
    """The script's own, but for the order of bytes, which results have."""


def checked(name: str, array: Array, type: Type | None = None) -> GivenArray:
    """`type`: what the array holds, if its dtype does not say so: the bits of bfloat16. TypeError."""
    data = np.asarray(array)
    found = type if type is not None and data.dtype.name in BITS else data.dtype.name
    if found not in TYPES or type not in (None, found) or NUMBERS[found].stored.itemsize != data.itemsize:
        asked = f", not {type}" if type is not None else ""
        raise TypeError(
            f"tensor {name!r} is {data.dtype}{asked}; Covey adds {', '.join(TYPES)}: convert it first, as by "
            "array.astype(numpy.float32)"
        )
    of: Type = found
    order = NUMBERS[of].stored if data.dtype.kind == "f" else data.dtype  # of bytes; numpy may keep them in another
    whole = np.ascontiguousarray(data, dtype=order).reshape(data.shape)
    return GivenArray(as_stored(whole, of), of, whole.dtype)


def as_stored(array: Array, type: Type) -> Array:
    """The same memory, in the type in which it is stored."""
    stored = NUMBERS[type].stored
    return array if array.dtype == stored else array.view(stored)


def check_out(name: str, out: object, given: GivenArray) -> None:
    """TypeError, ValueError when the result cannot go there."""
    if not isinstance(out, np.ndarray) or out.dtype != given.dtype or not out.flags.c_contiguous:
        raise TypeError(f"the result of tensor {name!r} goes into a contiguous {given.dtype} array, not {_kind(out)}")
    shape = given.data.shape
    if out.shape != shape or not out.flags.writeable:
        how = f"has shape {out.shape}, not {shape}" if out.shape != shape else "cannot be written"
        raise ValueError(f"the array for the result of tensor {name!r} {how}")


def _kind(out: object) -> str:
    return f"{out.dtype} of strides {out.strides}" if isinstance(out, np.ndarray) else type(out).__name__


def bytes_of(data: Array) -> memoryview:
    return data.reshape(-1).view(np.uint8).data
