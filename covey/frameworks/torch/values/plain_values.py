"""State dicts of PyTorch as JSON and tensors, the same for equal values: what a rank gives to another process.

    {"step": 3, "exp_avg": tensor}      {"dict": [["step", 3], ["exp_avg", {"tensor": ["optimizer/exp_avg", ..]}]]}
                                        and {"optimizer/exp_avg": tensor}

Pickle would depend on which parts are one object, which differs once a rank has loaded it.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from covey.core.errors import CoveyError
from covey.frameworks.torch.devices import why_not
from covey.frameworks.torch.types import tensor_of_array
from covey.tensors.numbers.arrays import Array

NOT_SENT = "the state of this training cannot be sent to another process"


def plain(value: Any, path: str, tensors: dict[str, Any]) -> Any:
    """The value as JSON, the same for equal values; its tensors go to `tensors`. CoveyError where a part of it is
    neither."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case torch.Tensor():
            check_place(path, value)
            tensors[path] = value
            return {"tensor": [path, str(value.dtype).removeprefix("torch.")]}
        case list():
            return [plain(each, f"{path}/{at}", tensors) for at, each in enumerate(value)]
        case tuple():
            return {"tuple": plain(list(value), path, tensors)}
        case Counter():
            return {"counter": [[key, count] for key, count in value.items()]}
        case Mapping():
            return {"dict": [[_key(key, path), plain(each, f"{path}/{key}", tensors)] for key, each in value.items()]}
        case _:
            why = f"{path} is a {type(value).__qualname__}"
            raise CoveyError(NOT_SENT, why, "keep numbers, texts, lists, dicts and tensors in its state_dict")


def _key(key: Any, path: str) -> Any:
    if not isinstance(key, (int, str)):
        why = f"{path} has a {type(key).__qualname__} as a key"
        raise CoveyError(NOT_SENT, why, "name it by a text or a number")
    return key


def whole(plain: Any, arrays: Mapping[str, Array]) -> Any:
    """The value that `plain` was given."""
    match plain:
        case list():
            return [whole(each, arrays) for each in plain]
        case {"tensor": [path, dtype]}:
            return tensor_of_array(arrays[path], getattr(torch, dtype))
        case {"tuple": parts}:
            return tuple(whole(parts, arrays))
        case {"counter": pairs}:
            return Counter(dict(pairs))
        case {"dict": pairs}:
            return {key: whole(each, arrays) for key, each in pairs}
        case _:
            return plain


def check_place(what: str, tensor: Any) -> None:
    """CoveyError where the tensor cannot be read by numpy, or from the model's devices."""
    if (why := why_not(tensor.device)) or tensor.layout != torch.strided:
        came = f"{what} is a {tensor.layout} tensor on {tensor.device}".replace("torch.", "")
        next_ = "keep it in dense tensors, in host memory or on the model's accelerators, or attach(ddp)"
        raise CoveyError(NOT_SENT, f"{came}; {why}" if why else came, next_)


def check_also(also: Any) -> None:
    """CoveyError where one of these objects has no state that can be saved and loaded."""
    for at, each in enumerate(also):
        if lacks := [name for name in ("state_dict", "load_state_dict") if not hasattr(each, name)]:
            why = f"also[{at}] is a {type(each).__qualname__}, which has no {' and no '.join(lacks)}"
            raise CoveyError(NOT_SENT, why, "give it both methods, or leave it out: it is not held then")


def bytes_array(text: str) -> Array:
    """The text as an array."""
    return np.frombuffer(text.encode(), np.uint8)


def difference(own: Any, theirs: Any) -> str:
    """The first difference, for people."""
    if isinstance(own, list) and isinstance(theirs, list):
        for mine, other in zip(own, theirs, strict=False):
            if mine != other:
                return f"here has {mine}, and there {other}"
        return f"here has {len(own)} parts, and there {len(theirs)}"
    return f"here is {own}, and there {theirs}"


def shapes(named: Any) -> list[str]:
    """Names, shapes and types of named tensors, for comparison and for people."""
    return [f"{name} {tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}" for name, each in named]
