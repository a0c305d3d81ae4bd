"""The random generators of one rank, a part of its own state: PyTorch's for the CPU, Python's and numpy's, and those of
the accelerators that the model is on, in the order of its parameters: a successor may have a GPU of another number.

Generators elsewhere (a `torch.Generator` of the script, the workers of a DataLoader) are not kept: seed them from the
step, or from the sample.
"""

import base64
import ctypes
import json
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from covey.core.errors import CoveyError
from covey.healing.owns import JsonText

numpy_random: Any = np.random
PYTHON_VERSION = 3
"""Version of the state that `random.getstate` returns."""
WORDS_BYTES = 4 * 625
"""Bytes of numpy's generator in memory: its words, and the place among them."""
COUNTED_BYTES = 16
"""Bytes of an object's count of references and type; behind them is a normal number that is left over."""
HEAD, TAIL = 24, 40
"""Bytes of PyTorch's generator before and after its words: seed, place, and what is left of a normal number."""


class Generators(NamedTuple):
    """The state of the generators at one moment; two states are equal when nothing was drawn in between."""

    torch: bytes
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    devices: tuple[bytes, ...] = ()

    def as_json(self) -> JsonText:
        """The state as JSON of about 10 kB. What a few draws change is together, at its beginning."""
        _, words, gauss = self.python
        _, keys, at, has_gauss, cached = self.numpy
        head, bulk, tail = self.torch[:HEAD], self.torch[HEAD:-TAIL], self.torch[-TAIL:]
        places = f'["{(head + tail).hex()}", {words[-1]}, {_number(gauss)}, {at}, {has_gauss}, {_number(cached)}]'
        bulks = f'"torch": {_bulk_of_torch(bulk)}, "numpy": {_bulk_of_numpy(keys)}, "python": {_bulk_of_python(words)}'
        devices = json.dumps([_packed(each) for each in self.devices])
        return JsonText(f'{{"at": {places}, "devices": {devices}, {bulks}}}')


def generators(devices: Sequence[Any] = ()) -> Generators:
    """The state now, with the generators of these accelerators."""
    there = tuple(torch.get_device_module(each).get_rng_state(each).numpy().tobytes() for each in devices)
    return Generators(_torch_state().numpy().tobytes(), _of_python.now(), _of_numpy.now(), there)


class _OfObject:
    """A generator that is slow to return its state and is asked twice a step: the memory of its state is compared with
    what it was."""

    def __init__(self, here: Any, ask: Callable[[], tuple[Any, ...]]) -> None:
        """`here`: the generator's object; `ask` returns its state."""
        self._here, self._ask = here, ask
        self._place = id(here) + COUNTED_BYTES, type(here).__basicsize__ - COUNTED_BYTES
        self._state: tuple[Any, ...] = ()
        self._memory: list[Any] = []

    def now(self) -> tuple[Any, ...]:
        memory = self._read()
        if memory != self._memory or not self._state:
            self._state, self._memory = self._ask(), memory
        return self._state

    def _read(self) -> list[Any]:
        return [ctypes.string_at(*self._place)]


class _OfPython(_OfObject):
    """Python's generator: its words are in the object, a normal number that is left over in an attribute."""

    def _read(self) -> list[Any]:
        return [*super()._read(), self._here.gauss_next]


class _OfNumpy(_OfObject):
    """Numpy's generator: its words are in another object, a normal number that is left over in this one."""

    def __init__(self, here: Any, ask: Callable[[], tuple[Any, ...]]) -> None:
        super().__init__(here, ask)
        self._words: Any = None
        self._words_place = 0, 0

    def _read(self) -> list[Any]:
        words = numpy_random.get_bit_generator()
        if words is not self._words:
            if not isinstance(words, np.random.MT19937):
                what = "the state of numpy's random generator cannot be kept"
                why = f"it is a {type(words).__qualname__}"
                raise CoveyError(what, why, "use numpy.random.default_rng in place of set_bit_generator")
            self._words, self._words_place = words, (words.ctypes.state_address, WORDS_BYTES)
        return [*super()._read(), ctypes.string_at(*self._words_place)]


def _numpy_state() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return (kind, np.asarray(keys, "<u4").tobytes(), *rest)


_torch_state: Any = torch.default_generator.get_state
_of_python = _OfPython(getattr(random.getstate, "__self__"), random.getstate)  # noqa: B009
_of_numpy = _OfNumpy(getattr(np.random.get_state, "__self__"), _numpy_state)  # noqa: B009


def set_generators(kept: Any, devices: Sequence[Any] = ()) -> None:
    """Set the generators, with those of these accelerators, to the state that `as_json` wrote."""
    for device, packed in zip(devices, kept["devices"], strict=True):
        state = torch.frombuffer(bytearray(_unpacked(packed)), dtype=torch.uint8)
        torch.get_device_module(device).set_rng_state(state, device)
    ends, place, gauss, *rest = kept["at"]
    head, tail = bytes.fromhex(ends)[:HEAD], bytes.fromhex(ends)[HEAD:]
    whole = head + _whole(kept["torch"]) + tail
    torch.set_rng_state(torch.frombuffer(bytearray(whole), dtype=torch.uint8))
    words = np.frombuffer(_unpacked(kept["python"]), "<u4").tolist()
    random.setstate((PYTHON_VERSION, (*words, place), gauss))
    np.random.set_state(("MT19937", np.frombuffer(_unpacked(kept["numpy"]), "<u4"), *rest))


@lru_cache(2)
def _bulk_of_torch(bulk: bytes) -> str:
    """The generator's words as JSON. They have eight bytes, of which the upper four are zero in today's PyTorch."""
    halves = np.frombuffer(bulk, "<u4") if len(bulk) % 8 == 0 else np.ones(1, "<u4")
    if len(halves) % 2 or halves[1::2].any():
        return json.dumps(["whole", _packed(bulk)])
    return json.dumps(["lower", _packed(halves[::2].tobytes())])


def _whole(packed: list[str]) -> bytes:
    """The bytes that `_bulk_of_torch` was given."""
    kind, text = packed
    if kind == "whole":
        return _unpacked(text)
    lower = np.frombuffer(_unpacked(text), "<u4")
    return np.stack([lower, np.zeros_like(lower)], 1).tobytes()


@lru_cache(2)
def _bulk_of_numpy(keys: bytes) -> str:
    return json.dumps(_packed(keys))


class _BulkOfPython:
    """The words of Python's newest state as JSON. An unchanged state is the same object, so it is not hashed."""

    def __init__(self) -> None:
        self._words: tuple[int, ...] = ()
        self._text = ""

    def __call__(self, words: tuple[int, ...]) -> str:
        if words is not self._words:
            self._words, self._text = words, json.dumps(_packed(np.array(words[:-1], "<u4").tobytes()))
        return self._text


_bulk_of_python = _BulkOfPython()


def _number(value: float | None) -> str:
    return "null" if value is None else repr(value)


def _packed(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _unpacked(text: str) -> bytes:
    return base64.b64decode(text)
