"""PyTorch's tensors as Covey adds them: the types of gradients, and anything else without a change of a bit.

Integers, and whatever must arrive as it left, travel as halves: each two bytes as one float32, which holds
them exactly. Ranks that have nothing to say give zeros, so a sum of halves is what one rank gave.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.tensor_wire import Type

TYPES: dict[torch.dtype, Type] = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
"""Of gradients that Covey averages."""


def check_gradients(name: str, tensor: Any) -> None:
    """TypeError where gradients like this parameter cannot be averaged."""
    if tensor.dtype not in TYPES or tensor.device.type != "cpu":
        came = f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
        raise TypeError(f"gradients of {name!r} are {came}; Covey averages {', '.join(TYPES.values())} on cpu")


def bits(tensor: Any) -> Any:
    """As numpy can hold it, which has no bfloat16."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def array_of_tensor(tensor: Any) -> Array:
    """In the tensor's own memory."""
    array: Array = bits(tensor.detach()).numpy()
    return array


def tensor_of_array(array: Array, dtype: Any) -> Any:
    """In the array's own memory."""
    found = torch.from_numpy(array)
    return found.view(dtype) if dtype == torch.bfloat16 else found


def bytes_of_tensor(tensor: Any) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    data: bytes = flat.view(torch.uint8).numpy().tobytes()
    return data


def halves_of(tensors: Sequence[Any]) -> Array:
    """Their bytes, one after the other, two in each float32."""
    data = b"".join(map(bytes_of_tensor, tensors))
    return np.frombuffer(data + bytes(len(data) % 2), "<u2").astype(np.float32)


def halves_count(tensors: Sequence[Any]) -> int:
    size: int = sum(each.numel() * each.element_size() for each in tensors)
    return (size + 1) // 2


def fill(tensors: Sequence[Any], halves: Array) -> None:
    """What `halves_of` made of such tensors goes into these."""
    data, at = halves.astype("<u2").tobytes(), 0
    with torch.no_grad():
        for each in tensors:
            size = each.numel() * each.element_size()
            if size:
                own = torch.frombuffer(bytearray(data[at : at + size]), dtype=each.dtype)
                each.copy_(own.reshape(each.shape))
            at += size
