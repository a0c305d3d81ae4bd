"""Gradients of a DistributedDataParallel as tensors that are the same in each of its processes.

The buckets of a DDP follow the order in which gradients came in its own first backward pass, so a process that takes
over first has other buckets than those that have trained. So parameters are divided once, by their order in the model
and their size alone: a large one is a tensor, small neighbours form one tensor together. A tensor is pushed once all of
it has come, in whichever buckets; a bucket is done when all tensors with a part in it are.

    model      a (2 MB), b (1 KB), c (40 KB), d (8 MB)
    tensors    "d"         "c .. b"         "a"               as gradients come, from the last one on
    buckets    d | c b a   or   d c | b a   or   any other

When the parts of a tensor follow one another in one bucket, it is pushed from there and its result is received there;
otherwise its parts are copied out and in.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from covey.core.errors import CoveyError
from covey.frameworks.torch.types import TYPES, bits
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.tensor_wire import Type

TOGETHER_BYTES = 1 << 20
"""Most bytes of a tensor of several parameters: where these are apart, its bytes are copied twice, which costs about
the same as another tensor."""
CANNOT_HEAL = "ranks of this training cannot be replaced when they are lost"
UNFREEZE = (
    "freeze before DistributedDataParallel(model) what is never trained, and after attach(..), with "
    "find_unused_parameters=True, what is trained later"
)
HEAD = "ddp"
NAME_CHARACTERS = 60
"""Most characters of a parameter's name in the name of a tensor."""


class AwaitsResult(Protocol):
    """A round that was begun."""

    def wait(self) -> Array:
        """The result, once it is here."""


class PushesTensors(Protocol):
    """The part of a TensorClient that begins rounds, or of `covey.frameworks.torch.steps.step_parts.StepParts`."""

    def push(
        self, name: str, array: Array, *, out: Array | None = None, mean: bool = False, type: Type | None = None
    ) -> AwaitsResult: ...


class GradientPlace(NamedTuple):
    """Place of one or several gradients in their tensor."""

    tensor: int
    first: int
    end: int
    """Number of the element after the last one."""


class Cut(NamedTuple):
    """The division of a model's gradients into tensors; the same for the same model."""

    names: list[str]
    """Names of the tensors."""
    places: dict[str, GradientPlace]
    """Place of each parameter, by its name."""
    sizes: list[int]
    """Number of elements of each tensor."""


def cut_of(parameters: Sequence[tuple[str, int, int, object]], head: str = HEAD) -> Cut:
    """The division of a model. `parameters` with a gradient, in its order: name, elements, bytes of an element, type.
    Names of tensors begin with `head`."""
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
    return Cut([_name(head, at, [name for name, _ in run]) for at, run in enumerate(runs)], places, sizes)


def _name(head: str, at: int, run: Sequence[str]) -> str:
    if len(run) == 1:
        return f"{head}/of {run[0]}"
    return f"{head}/{at} {run[0][:NAME_CHARACTERS]} .. {run[-1][:NAME_CHARACTERS]}"


class _Part(NamedTuple):
    """A part of a tensor in a bucket."""

    place: GradientPlace
    bucket: Array
    """All elements of the bucket, flat."""
    start: int
    """First element in the bucket."""

    @property
    def array(self) -> Array:
        return self.bucket[self.start : self.start + self.place.end - self.place.first]


class _Round:
    """A tensor in one backward pass."""

    def __init__(self, size: int) -> None:
        self.size, self.left = size, size
        self.parts: list[_Part] = []
        self._handle: AwaitsResult | None = None
        self._copied: Array | None = None
        """A copy of the tensor, when its parts are apart."""

    @property
    def is_pushed(self) -> bool:
        return self._handle is not None

    def add(self, part: _Part) -> None:
        self.parts.append(part)
        self.left -= part.place.end - part.place.first

    def push(self, tensors: PushesTensors, name: str, type: Type) -> None:
        """Push the tensor, once all of its parts have come."""
        array = self._together()
        if array is None:
            array = self._copied = np.empty(self.size, self.parts[0].bucket.dtype)
            for part in self.parts:
                array[part.place.first : part.place.end] = part.array
        self._handle = tensors.push(name, array, out=array, mean=True, type=type)

    def end(self) -> None:
        """Wait for the average and put it into the buckets; again is harmless. Errors as of `TensorHandle.wait`."""
        assert self._handle is not None, "buckets end once all of their tensors are pushed"
        found = self._handle.wait()
        copied, self._copied = self._copied, None
        if copied is not None:
            for part in self.parts:
                part.array[:] = found[part.place.first : part.place.end]

    def _together(self) -> Array | None:
        """The tensor in the bucket, if its parts follow one another there."""
        first = self.parts[0]
        start = first.start - first.place.first
        if any(part.bucket is not first.bucket or part.start - part.place.first != start for part in self.parts):
            return None
        return first.bucket[start : start + self.size]


class Gradients:
    """The gradients of one model, whose backward passes come one after the other. Called by the thread that computes,
    except for what `ends` is given."""

    def __init__(
        self,
        tensors: PushesTensors,
        named: Sequence[tuple[str, Any]],
        ends: Callable[[Callable[[], object], Any, Any], None],
        head: str = HEAD,
    ) -> None:
        """`named`: parameters with a gradient; `ends(wait, gradients, future)`: as `covey.torch.RoundEnds.end`; names
        of tensors begin with `head`."""
        self._tensors, self._ends = tensors, ends
        self._cut = cut_of([(name, each.numel(), each.element_size(), each.dtype) for name, each in named], head)
        self._names = {id(each): name for name, each in named}
        self._known: dict[tuple[int, ...], list[tuple[int, GradientPlace, int]]] = {}
        """Parts of each bucket that has come before, by the ids of its parameters."""
        self._rounds: dict[int, _Round] = {}
        """Rounds of this step, by tensor."""
        self._waiting: list[tuple[list[_Round], Any, Any]] = []
        """Buckets that have come and wait until all of their tensors are pushed."""
        self._come: set[int] = set()
        """Ids of the parameters that have come in this step."""

    def step_begins(self) -> None:
        self._rounds.clear()
        self._waiting.clear()
        self._come.clear()

    @property
    def averaged(self) -> Collection[int]:
        """Ids of the parameters whose gradients are averaged."""
        return self._names.keys()

    def came(self, parameters: Sequence[Any], gradients: Any, future: Any, is_last: bool = False) -> None:
        """Take a bucket; the future gets its averages, or the error. `is_last`: none follows in this pass. CoveyError
        when one of its tensors came before in this step, and where DDP averages other parameters."""
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
        self._come.update(map(id, parameters))
        if is_last and len(self._come) < len(self._names):
            name = next(name for key, name in self._names.items() if key not in self._come)
            why = (
                f"parameter {name!r} was frozen when DistributedDataParallel was made, and was not when it was attached"
            )
            raise CoveyError(CANNOT_HEAL, why, UNFREEZE)

    def _parts_of(self, parameters: Sequence[Any]) -> list[tuple[int, GradientPlace, int]]:
        """Parts of such a bucket: tensor, place in it, first element in the bucket. Consecutive parts are joined."""
        key = tuple(map(id, parameters))
        if key not in self._known:
            found, start = list[tuple[int, GradientPlace, int]](), 0
            for each in key:
                if each not in self._names:
                    raise CoveyError(CANNOT_HEAL, "a parameter was frozen between DDP(..) and attach(..)", UNFREEZE)
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
