"""PyTorch's tensors as Covey adds them: gradients by type, and other tensors bit by bit.

Integers, and all else that must arrive unchanged, travel as halves: two bytes as one float32, which holds them exactly.
Ranks that give nothing push zeros, so a sum of halves is what one rank gave.
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
"""Types of gradients that Covey averages."""


def in_host_memory(tensor: Any) -> bool:
    """Whether numpy can use the tensor's own memory: it is the host's, dense, and holds the tensor's numbers."""
    return bool(tensor.device.type == "cpu" and tensor.layout == torch.strided)


def on_host(tensor: Any) -> Any:
    """The tensor in host memory: itself where it is there, else a copy, for which this thread and the device's current
    stream wait."""
    return tensor.detach() if in_host_memory(tensor) else tensor.detach().to("cpu")


def bits(tensor: Any) -> Any:
    """A view of the tensor with a type that numpy has (bfloat16 as int16)."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def array_of_tensor(tensor: Any) -> Array:
    """An array in the tensor's own memory, or, for a tensor of a device, in a copy."""
    array: Array = bits(on_host(tensor)).numpy()
    return array


def tensor_of_array(array: Array, dtype: Any) -> Any:
    """A tensor in the array's own memory."""
    found = torch.from_numpy(array)
    return found.view(dtype) if dtype == torch.bfloat16 else found


def bytes_of_tensor(tensor: Any) -> bytes:
    flat = on_host(tensor).contiguous().reshape(-1)
    data: bytes = flat.view(torch.uint8).numpy().tobytes()
    return data


def halves_of(tensors: Sequence[Any]) -> Array:
    """The tensors' bytes, one after the other, two in each float32."""
    data = b"".join(map(bytes_of_tensor, tensors))
    return np.frombuffer(data + bytes(len(data) % 2), "<u2").astype(np.float32)


def halves_count(tensors: Sequence[Any]) -> int:
    size: int = sum(each.numel() * each.element_size() for each in tensors)
    return (size + 1) // 2


def fill(tensors: Sequence[Any], halves: Array) -> None:
    """Fill the tensors with the halves that `halves_of` made of such tensors."""
    data, at = halves.astype("<u2").tobytes(), 0
    with torch.no_grad():
        for each in tensors:
            size = each.numel() * each.element_size()
            if size:
                own = torch.frombuffer(bytearray(data[at : at + size]), dtype=each.dtype)
                each.copy_(own.reshape(each.shape))
            at += size
