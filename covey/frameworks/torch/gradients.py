"""Gradients of a DistributedDataParallel as tensors that are the same in each of its processes.

A DDP's buckets follow the order in which gradients came in its own first backward pass: a process that takes over has
other ones than those that have trained, at first. So parameters are divided once, by their order in the model and their
size alone: a large one is a tensor, small ones that follow one another are one together. A tensor is pushed once all of
it has come, in whichever buckets; a bucket is done when all tensors with a part in it are.

    model      a (2 MB), b (1 KB), c (40 KB), d (8 MB)
    tensors    "d"         "c .. b"         "a"               as gradients come, from the last one on
    buckets    d | c b a   or   d c | b a   or   any other

Where the parts of a tensor lie one after the other in one bucket it is pushed from there, and comes back there; else
its parts are copied out and in.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from covey.core.errors import CoveyError
from covey.frameworks.torch.types import TYPES, bits
from covey.job.tensors import TensorClient, TensorHandle
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.tensor_wire import Type

TOGETHER_BYTES = 1 << 20
"""Of a tensor of several parameters, at most: where they do not lie together, that much is copied twice, which costs as
much as another tensor would."""
CANNOT_HEAL = "ranks of this training cannot be replaced when they are lost"
NAME_CHARACTERS = 60
"""Of a parameter's name in that of a tensor."""


class GradientPlace(NamedTuple):
    """Of one or several gradients in their tensor."""

    tensor: int
    first: int
    end: int
    """Elements."""


class Cut(NamedTuple):
    """How a model's gradients are divided; the same for the same model."""

    names: list[str]
    """Of tensors."""
    places: dict[str, GradientPlace]
    """By the parameter's name."""
    sizes: list[int]
    """Of each tensor, elements."""


def cut_of(parameters: Sequence[tuple[str, int, int, object]]) -> Cut:
    """Of each parameter with a gradient, in the model's order: name, elements, bytes of one, and its type."""
    runs: list[list[tuple[str, int]]] = []
    room, last = 0, None
    for name, count, element_bytes, kind in reversed(parameters):
        size = count * element_bytes
        if not runs or kind != last or size > room:
            runs.append([])
            room = TOGETHER_BYTES
        runs[-1].append((name, count))
        room, last = room - size, kind
    places, sizes = dict[str, GradientPlace](), []
    for at, run in enumerate(runs):
        first = 0
        for name, count in run:
            places[name] = GradientPlace(at, first, first + count)
            first += count
        sizes.append(first)
    return Cut([_name(at, [name for name, _ in run]) for at, run in enumerate(runs)], places, sizes)


def _name(at: int, run: Sequence[str]) -> str:
    if len(run) == 1:
        return f"ddp/of {run[0]}"
    return f"ddp/{at} {run[0][:NAME_CHARACTERS]} .. {run[-1][:NAME_CHARACTERS]}"


class _Part(NamedTuple):
    """Of a tensor, in a bucket."""

    place: GradientPlace
    bucket: Array
    """Flat."""
    start: int
    """In the bucket."""

    @property
    def array(self) -> Array:
        return self.bucket[self.start : self.start + self.place.end - self.place.first]


class _Round:
    """A tensor in one backward pass."""

    def __init__(self, size: int) -> None:
        self.size, self.left = size, size
        self.parts: list[_Part] = []
        self._handle: TensorHandle | None = None
        self._copied: Array | None = None
        """Where its parts do not lie together."""

    @property
    def is_pushed(self) -> bool:
        return self._handle is not None

    def add(self, part: _Part) -> None:
        self.parts.append(part)
        self.left -= part.place.end - part.place.first

    def push(self, tensors: TensorClient, name: str, type: Type) -> None:
        """Once none is left."""
        array = self._together()
        if array is None:
            array = self._copied = np.empty(self.size, self.parts[0].bucket.dtype)
            for part in self.parts:
                array[part.place.first : part.place.end] = part.array
        self._handle = tensors.push(name, array, out=array, mean=True, type=type)

    def end(self) -> None:
        """Once the average is in the buckets. Again is harmless. Errors as of `TensorHandle.wait`."""
        assert self._handle is not None, "buckets end once all of their tensors are pushed"
        found = self._handle.wait()
        copied, self._copied = self._copied, None
        if copied is not None:
            for part in self.parts:
                part.array[:] = found[part.place.first : part.place.end]

    def _together(self) -> Array | None:
        """The tensor in the bucket, if it lies there as it is."""
        first = self.parts[0]
        start = first.start - first.place.first
        if any(part.bucket is not first.bucket or part.start - part.place.first != start for part in self.parts):
            return None
        return first.bucket[start : start + self.size]


class Gradients:
    """Of one model, whose backward passes come one after the other. Called by the thread that computes, but for what
    `ends` is given."""

    def __init__(
        self,
        tensors: TensorClient,
        named: Sequence[tuple[str, Any]],
        ends: Callable[[Callable[[], object], Any, Any], None],
    ) -> None:
        """`named`: parameters with a gradient; `ends(wait, gradients, future)`: as of `covey.torch.RoundEnds.end`."""
        self._tensors, self._ends = tensors, ends
        self._cut = cut_of([(name, each.numel(), each.element_size(), each.dtype) for name, each in named])
        self._names = {id(each): name for name, each in named}
        self._known: dict[tuple[int, ...], list[tuple[int, GradientPlace, int]]] = {}
        """Parts of each bucket that came by now."""
        self._rounds: dict[int, _Round] = {}
        """Of this step, by tensor."""
        self._waiting: list[tuple[list[_Round], Any, Any]] = []
        """Buckets that came, until all of their tensors are pushed."""

    def step_begins(self) -> None:
        self._rounds.clear()
        self._waiting.clear()

    def came(self, parameters: Sequence[Any], gradients: Any, future: Any) -> None:
        """A bucket; the future has its averages, or the error. CoveyError when one of these came before in this
        step."""
        flat: Array = bits(gradients).numpy()
        touched = dict[int, _Round]()
        for tensor, place, start in self._parts_of(parameters):
            found = self._rounds.get(tensor)
            if found is None:
                found = self._rounds[tensor] = _Round(self._cut.sizes[tensor])
            if found.is_pushed:
                why = "gradients were averaged twice before one step of the optimizer, or a scaler skipped it unseen"
                raise CoveyError(
                    CANNOT_HEAL, why, "use ddp.no_sync() for all passes but the last; attach(.., also=[scaler])"
                )
            found.add(_Part(place, flat, start))
            touched[tensor] = found
        for at, each in touched.items():
            if each.left <= 0:
                each.push(self._tensors, self._cut.names[at], TYPES[gradients.dtype])
        self._waiting.append((list(touched.values()), gradients, future))
        while self._waiting and all(each.is_pushed for each in self._waiting[0][0]):
            rounds, whole, done = self._waiting.pop(0)
            self._ends(partial(_end_all, rounds), whole, done)

    def _parts_of(self, parameters: Sequence[Any]) -> list[tuple[int, GradientPlace, int]]:
        """Of a bucket with these: tensor, what of it, and where it lies; those that go on where others end as one."""
        key = tuple(map(id, parameters))
        if key not in self._known:
            found, start = list[tuple[int, GradientPlace, int]](), 0
            for each in key:
                place = self._cut.places[self._names[each]]
                last = found[-1][1] if found else None
                if last is not None and last.tensor == place.tensor and last.end == place.first:
                    found[-1] = place.tensor, last._replace(end=place.end), found[-1][2]
                else:
                    found.append((place.tensor, place, start))
                start += place.end - place.first
            self._known[key] = found
        return self._known[key]


def _end_all(rounds: Sequence[_Round]) -> None:
    for each in rounds:
        each.end()
