"""The random generators of one rank: PyTorch's of the CPU, Python's and numpy's, which are its own.

Numbers drawn elsewhere (by a `torch.Generator` of the script, by the workers of a DataLoader) are not kept: let them
follow from the step, or from the sample.
"""

import base64
import ctypes
import random
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from covey.errors import CoveyError

PYTHON_VERSION = 3
"""Of what `random.getstate` gives."""
WORDS_BYTES = 4 * 625
"""Of numpy's generator in memory: its words, and the place among them."""
COUNTED_BYTES = 16
"""Of an object, its count of references and its type; a normal number that is left over lies behind them."""
HEAD, TAIL = 24, 40
"""Bytes of PyTorch's generator before and after its words: seed, place, and what is left of a normal number."""


class Generators(NamedTuple):
    """As they are at one moment; equal when nothing was drawn between two."""

    torch: bytes
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]

    def as_json(self) -> dict[str, Any]:
        """About 10 kB. What a few draws change lies together, at its beginning."""
        _, words, gauss = self.python
        _, keys, at, has_gauss, cached = self.numpy
        head, bulk, tail = self.torch[:HEAD], self.torch[HEAD:-TAIL], self.torch[-TAIL:]
        return {
            "at": [_packed(head + tail), words[-1], gauss, at, has_gauss, cached],
            "torch": _bulk_of_torch(bulk),
            "numpy": _bulk_of_numpy(keys),
            "python": _bulk_of_python(words[:-1]),
        }


def generators() -> Generators:
    """Now."""
    return Generators(torch.get_rng_state().numpy().tobytes(), random.getstate(), _numpy.now())


class _OfNumpy:
    """numpy's generator, which takes 30 us to say its state, and is asked twice a step: the memory in which that lies
    is compared with what it was."""

    def __init__(self) -> None:
        self._here: Any = getattr(np.random.get_state, "__self__", None)
        self._places: list[tuple[int, int]] = []
        """In memory: address and bytes."""
        self._memory: list[bytes] = []
        self._words: Any = None
        self._state: tuple[Any, ...] = ()

    def now(self) -> tuple[Any, ...]:
        words: Any = np.random.get_bit_generator()
        if not isinstance(words, np.random.MT19937):
            what, why = "the state of numpy's random generator cannot be kept", f"it is a {type(words).__qualname__}"
            raise CoveyError(what, why, "use numpy.random.default_rng in place of set_bit_generator")
        memory = self._read() if words is self._words else []
        if not memory or memory != self._memory:
            kind, keys, *rest = np.random.get_state(legacy=True)
            self._state, self._words = (kind, np.asarray(keys, "<u4").tobytes(), *rest), words
            if isinstance(self._here, np.random.RandomState):
                size = type(self._here).__basicsize__ - COUNTED_BYTES
                self._places = [(words.ctypes.state_address, WORDS_BYTES), (id(self._here) + COUNTED_BYTES, size)]
            self._memory = self._read()
        return self._state

    def _read(self) -> list[bytes]:
        return [ctypes.string_at(*place) for place in self._places]


_numpy = _OfNumpy()


def set_generators(kept: Any) -> None:
    """To what `as_json` wrote."""
    ends, place, gauss, *rest = kept["at"]
    head, tail = _unpacked(ends)[:HEAD], _unpacked(ends)[HEAD:]
    whole = head + _whole(kept["torch"]) + tail
    torch.set_rng_state(torch.frombuffer(bytearray(whole), dtype=torch.uint8))
    words = np.frombuffer(_unpacked(kept["python"]), "<u4").tolist()
    random.setstate((PYTHON_VERSION, (*words, place), gauss))
    np.random.set_state(("MT19937", np.frombuffer(_unpacked(kept["numpy"]), "<u4"), *rest))


@lru_cache(2)
def _bulk_of_torch(bulk: bytes) -> list[str]:
    """Its words have eight bytes, of which the upper four are zero as PyTorch draws today."""
    halves = np.frombuffer(bulk, "<u4") if len(bulk) % 8 == 0 else np.ones(1, "<u4")
    if len(halves) % 2 or halves[1::2].any():
        return ["whole", _packed(bulk)]
    return ["lower", _packed(halves[::2].tobytes())]


def _whole(packed: list[str]) -> bytes:
    """What `_bulk_of_torch` was given."""
    kind, text = packed
    if kind == "whole":
        return _unpacked(text)
    lower = np.frombuffer(_unpacked(text), "<u4")
    return np.stack([lower, np.zeros_like(lower)], 1).tobytes()


@lru_cache(2)
def _bulk_of_numpy(keys: bytes) -> str:
    return _packed(keys)


@lru_cache(2)
def _bulk_of_python(words: tuple[int, ...]) -> str:
    return _packed(np.array(words, "<u4").tobytes())


def _packed(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _unpacked(text: str) -> bytes:
    return base64.b64decode(text)
