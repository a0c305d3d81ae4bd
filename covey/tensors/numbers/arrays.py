"""Checks of the arrays that a script hands over as tensors, and messages about unsuitable ones."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from covey.tensors.numbers.tensor_wire import TYPES, Payload, Type
from covey.tensors.numbers.types import NUMBERS

Array = npt.NDArray[Any]
"""An array with one of the types of `covey.tensors.numbers.types`."""
BITS = ("uint16", "int16")
"""Types in which a script may hold the bits of a number type that numpy does not have."""


class GivenArray(NamedTuple):
    """An array that a script handed over."""

    data: Array
    """The contiguous array, with the type in which it is stored."""
    type: Type
    dtype: np.dtype[Any]
    """The script's own dtype, in the byte order of results."""


def checked(name: str, array: Array, type: Type | None = None) -> GivenArray:
    """The array, checked. `type`: what it holds, if its dtype does not say so: bits of bfloat16. TypeError."""
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
    """A view of the same memory with the type in which it is stored."""
    stored = NUMBERS[type].stored
    return array if array.dtype == stored else array.view(stored)


def check_out(name: str, out: object, given: GivenArray) -> None:
    """TypeError or ValueError when the result cannot go into `out`."""
    if not isinstance(out, np.ndarray) or out.dtype != given.dtype or not out.flags.c_contiguous:
        raise TypeError(f"the result of tensor {name!r} goes into a contiguous {given.dtype} array, not {_kind(out)}")
    shape = given.data.shape
    if out.shape != shape or not out.flags.writeable:
        how = f"has shape {out.shape}, not {shape}" if out.shape != shape else "cannot be written"
        raise ValueError(f"the array for the result of tensor {name!r} {how}")


def _kind(out: object) -> str:
    return f"{out.dtype} of strides {out.strides}" if isinstance(out, np.ndarray) else type(out).__name__


def bytes_in(data: Payload) -> npt.NDArray[np.uint8]:
    """An array of these bytes, in place."""
    return np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)


def copy_bytes(into: memoryview, data: Payload) -> None:
    """Copy as many bytes as `into` has; other threads run meanwhile."""
    np.copyto(bytes_in(into), bytes_in(data))


def bytes_of(data: Array) -> memoryview:
    return data.reshape(-1).view(np.uint8).data
