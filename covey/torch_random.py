"""The random generators of one rank: PyTorch's of the CPU, Python's and numpy's, which are its own.

Numbers drawn elsewhere (by a `torch.Generator` of the script, by the workers of a DataLoader) are not kept: let them
follow from the step, or from the sample.
"""

import base64
import random
import zlib
from typing import Any, NamedTuple

import numpy as np
import torch

PYTHON_VERSION = 3
"""Of what `random.getstate` gives."""


class Generators(NamedTuple):
    """As they are at one moment; equal when nothing was drawn between two."""

    torch: bytes
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]

    def as_json(self) -> dict[str, Any]:
        """About 10 kB."""
        _, words, gauss = self.python
        _, keys, at, has_gauss, cached = self.numpy
        return {
            "torch": _packed(self.torch),
            "python": [_packed(np.array(words, "<u4").tobytes()), gauss],
            "numpy": [_packed(keys), at, has_gauss, cached],
        }


def generators() -> Generators:
    """Now."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return Generators(
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        (kind, np.asarray(keys, "<u4").tobytes(), *rest),
    )


def set_generators(kept: Any) -> None:
    """To what `as_json` wrote."""
    torch.set_rng_state(torch.frombuffer(bytearray(_unpacked(kept["torch"])), dtype=torch.uint8))
    words, gauss = kept["python"]
    random.setstate((PYTHON_VERSION, tuple(np.frombuffer(_unpacked(words), "<u4").tolist()), gauss))
    keys, *rest = kept["numpy"]
    np.random.set_state(("MT19937", np.frombuffer(_unpacked(keys), "<u4"), *rest))


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 1)).decode()


def _unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))
