"""What a script may hand over as a tensor, and what is said of the rest."""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


def checked(name: str, array: Array) -> Array:
    data = np.asarray(array)
    if data.dtype != np.float32:
        raise TypeError(f"tensor {name!r} is {data.dtype}; convert it first: array.astype(numpy.float32)")
    return np.ascontiguousarray(data, dtype="<f4").reshape(data.shape)


def check_out(name: str, out: object, shape: tuple[int, ...]) -> None:
    if not isinstance(out, np.ndarray) or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise TypeError(f"the result of tensor {name!r} goes into a contiguous float32 array, not {_kind(out)}")
    if out.shape != shape or not out.flags.writeable:
        how = f"has shape {out.shape}, not {shape}" if out.shape != shape else "cannot be written"
        raise ValueError(f"the array for the result of tensor {name!r} {how}")


def _kind(out: object) -> str:
    return f"{out.dtype} of strides {out.strides}" if isinstance(out, np.ndarray) else type(out).__name__


def bytes_of(data: Array) -> memoryview:
    return data.reshape(-1).view(np.uint8).data
