"""The state of a training (models, optimizers, scheduler, scaler) as named arrays, which are equal on all ranks.

parameter/0.weight                 in the parameter's own memory
buffer/1.running_mean              a copy, on its device: a forward pass changes it before the step's sums are here
optimizer/state/0/exp_avg          in the optimizer's own memory, like parameters: read only when asked for
also/0/..                          tensors of other objects with a state_dict
covey/rest                         everything but tensors, as JSON
covey/made                         which model, optimizer, PyTorch; compared before anything is loaded

With several models and optimizers, names have the number of theirs: parameter/1/0.weight, optimizer/1/state/0/exp_avg.
Tensors on accelerators come to host memory when somebody reads them, after an event at the beginning of the step.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from covey.core.errors import CoveyError
from covey.frameworks.torch.devices import DeviceReads, Say, devices_of
from covey.frameworks.torch.types import array_of_tensor, bytes_of_tensor, tensor_of_array
from covey.frameworks.torch.values.param_groups import ParameterGroups
from covey.frameworks.torch.values.plain_values import (
    bytes_array,
    check_also,
    check_place,
    difference,
    plain,
    shapes,
    whole,
)
from covey.healing.state_pieces import CANNOT, FROM_CHECKPOINT, SAME
from covey.tensors.numbers.arrays import Array

REST, MADE = "covey/rest", "covey/made"
COPIED_BYTES_MAX = 64 << 20
"""Most bytes of tensors of other objects that are copied where the script may change them between two steps."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes."""


class BegunState(NamedTuple):
    """What is kept of the state at the beginning of a step, since the script may change it before its sums are here."""

    first: int | None
    groups: list[list[dict[str, Any]]]
    """By optimizer: its parameter groups."""
    places: list[list[list[int]]]
    """By optimizer and group: numbers of the parameters."""
    trains: list[bool]
    """By parameter: whether it needs a gradient."""
    also: list[Any]
    """State dicts of other objects, as JSON."""
    others: dict[str, Any]
    """Copies of buffers, and tensors of other objects."""
    reads: DeviceReads
    """When tensors on devices can be read."""
    place: dict[str, Any]
    """Where in its script the training was."""
    were: Mapping[str, int]
    """Sums of the tensors that are to be unchanged when somebody reads them."""


class WholeState(NamedTuple):
    """The state at one moment."""

    rest: dict[str, Any]
    tensors: dict[str, Any]
    reads: DeviceReads


class Parts(NamedTuple):
    """How a tensor of which each rank has a part is kept; without it each rank has the whole."""

    local: Callable[[Any], Any] = lambda tensor: tensor
    """Returns the part of this rank, in its own memory; a whole tensor itself."""
    is_part: Callable[[Any], bool] = lambda tensor: False
    joined: Callable[[Any, Any], Any] = lambda part, parameter: part
    """Returns the tensor that is divided like this parameter, and of which this rank has this part."""
    described: Callable[[Sequence[tuple[str, Any]]], dict[str, Any]] = lambda parameters: {}
    """Returns more of what two processes compare before one takes the other's state over."""


class TrainingState:
    """The state of models and their optimizers; equal on all ranks, or on those that have the same parts of it."""

    def __init__(
        self,
        models: Any,
        optimizers: Any,
        also: Sequence[Any],
        say: Say = lambda text: None,
        parts: Parts = Parts(),
    ) -> None:
        """`models`, `optimizers`: one or several. `say` gets lines for people. CoveyError when a part of the state
        cannot be given to another process."""
        self.modules, self._optimizers, self._also, self.say = several(models), several(optimizers), also, say
        self._parts = parts
        check_also(also)
        self.first: int | None = None
        """First step of the training; None until all ranks hold the same parameters."""
        self.place: dict[str, Any] = {}
        """Where in its script the training is, as JSON (`covey.frameworks.torch.heal`)."""
        self.restarts: Callable[[], str] = lambda: ""
        """Returns why nobody takes this state over any more; empty: somebody may."""
        self.devices = list(dict.fromkeys(each for module in self.modules for each in devices_of(module)))
        heads = [""] if len(self.modules) == 1 else [f"{at}/" for at in range(len(self.modules))]
        self.parameters = [
            (head + name, each)
            for head, module in zip(heads, self.modules, strict=True)
            for name, each in module.named_parameters()
        ]
        """Parameters of all models by name."""
        self.groups = ParameterGroups(self._optimizers, self.parameters, say)
        self._buffers_of = [
            (f"{head}{path}." if path else head, each._buffers)
            for head, module in zip(heads, self.modules, strict=True)
            for path, each in module.named_modules()
        ]
        """Buffers of each module, with its path. A module may put another tensor there at any time; to search for
        modules would take longer than all else here."""
        self._made = self._as_made()
        self.made_array = bytes_array(json.dumps(self._made))
        """The description of this training, as an array."""
        for kind, tensors in (("parameter", self.parameters), ("buffer", self._named_buffers().items())):
            for name, tensor in tensors:
                check_place(f"{kind} {name!r}", tensor)
        self.bfloats: dict[str, str] = {}
        """Arrays of bfloat16, which numpy does not have, by name, as in `covey.healing.checkpoint.TYPES`."""
        self._moments = -1
        """Number of parts of the optimizers' states when all of them were looked at."""
        self.look()

    @property
    def tensors(self) -> list[Any]:
        """Parameters, then buffers, then tensors of other objects."""
        also: dict[str, Any] = {}
        for at, each in enumerate(self._also):
            plain(each.state_dict(), f"also/{at}", also)
        return [*(self._parts.local(each) for _, each in self.parameters), *self.buffers, *also.values()]

    @property
    def buffers(self) -> list[Any]:
        return list(self._named_buffers().values())

    def _named_buffers(self) -> dict[str, Any]:
        """Buffers by name, like `named_buffers` of the module: each tensor once."""
        each = ((path + name, at) for path, of in self._buffers_of if of for name, at in of.items() if at is not None)
        found: dict[int, tuple[str, Any]] = {}
        for name, tensor in each:
            found.setdefault(id(tensor), (name, tensor))
        return dict(found.values())

    def digest(self) -> bytes:
        """A digest of parameters, buffers and tensors of other objects, 16 bytes."""
        found = hashlib.blake2b(digest_size=16)
        for tensor in self.tensors:
            found.update(bytes_of_tensor(tensor))
        return found.digest()

    def arrays(self) -> Mapping[str, Array]:
        """The state now. Memory that does not change before the step's sums are here is read only when these arrays
        are. Before the first step, nothing of the model is included."""
        if self.first is None:
            rest = {"first": None, "place": self.place, "restarts": self.restarts()}
            return {REST: bytes_array(json.dumps(rest)), MADE: self.made_array}
        begun = self.look()
        return LaterArrays(lambda: self.arrays_of(self.whole(begun)))

    def guarded(self) -> "LaterArrays":
        """The state now, like `arrays`, for a time in which the script may change large tensors: each reading tells
        whether it did."""
        begun = self.look(True)
        return LaterArrays(lambda: self.arrays_of(self.whole(begun)), True)

    def look(self, guards: bool = False) -> BegunState:
        """What must be kept of the state now; `guards`: so that changes of tensors are told. CoveyError when a part of
        it cannot be given to another process."""
        also_tensors: dict[str, Any] = {}
        also = [plain(each.state_dict(), f"also/{at}", also_tensors) for at, each in enumerate(self._also)]
        groups = [
            [{key: _frozen(value) for key, value in group.items()} for group in optimizer.param_groups]
            for optimizer in self._optimizers
        ]
        places, trains = self.groups.places(), [each.requires_grad for _, each in self.parameters]
        buffers = {f"buffer/{name}": at.detach().clone() for name, at in self._named_buffers().items()}
        moments = sum(sum(map(len, optimizer.state.values())) for optimizer in self._optimizers)
        reads = DeviceReads(self.devices, self.say)
        if moments != self._moments:
            optimizer_tensors: dict[str, Any] = {}
            plain(_one_or_all([each.state_dict() for each in self._optimizers]), "optimizer", optimizer_tensors)
            for path, tensor in {**also_tensors, **optimizer_tensors}.items():
                reads.check(path, self._parts.local(tensor))
            self._moments = moments
        if guards and sum(each.nbytes for each in also_tensors.values()) <= COPIED_BYTES_MAX:
            also_tensors = {name: each.detach().clone() for name, each in also_tensors.items()}
        others = {**buffers, **also_tensors}
        were = {name: bits_sum(each) for name, each in self._tensors_with(others).items()} if guards else {}
        return BegunState(self.first, groups, places, trains, also, others, reads, dict(self.place), were)

    def _tensors_with(self, others: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters and moments as they are now, and `others`."""
        tensors: dict[str, Any] = {f"parameter/{name}": each for name, each in self.parameters}
        tensors |= others
        plain(_one_or_all([each.state_dict() for each in self._optimizers]), "optimizer", tensors)
        return {name: self._parts.local(each) for name, each in tensors.items()}

    def whole(self, begun: BegunState) -> WholeState:
        """The whole state as it was when `begun` was looked at, in memory that nobody has changed since."""
        tensors: dict[str, Any] = {f"parameter/{name}": each for name, each in self.parameters}
        tensors |= begun.others
        states = [
            _as_begun(each.state_dict(), groups) for each, groups in zip(self._optimizers, begun.groups, strict=True)
        ]
        rest = {"first": begun.first, "optimizer": plain(_one_or_all(states), "optimizer", tensors), "also": begun.also}
        rest |= {"groups": begun.places, "trains": "".join("01"[each] for each in begun.trains), "place": begun.place}
        rest["divided"] = [name for name, each in tensors.items() if self._parts.is_part(each)]
        tensors = {name: self._parts.local(each) for name, each in tensors.items()}
        rest["changed"] = [
            each for each, was in begun.were.items() if each not in tensors or bits_sum(tensors[each]) != was
        ]
        return WholeState(rest, tensors, begun.reads)

    def copied(self, begun: BegunState, into: Mapping[str, Any]) -> WholeState:
        """A copy of the whole state, in memory of the earlier copy `into` where that fits."""
        rest, tensors, _ = self.whole(begun)
        copies = {
            name: each if name.startswith("buffer/") else _copied(each, into.get(name))
            for name, each in tensors.items()
        }
        return WholeState(rest, copies, DeviceReads(self.devices, self.say))

    def arrays_of(self, state: WholeState) -> dict[str, Array]:
        """All arrays of the state."""
        rest, tensors, reads = state
        self.bfloats = {name: "BF16" for name, each in tensors.items() if each.dtype == torch.bfloat16}
        found = {name: array_of_tensor(reads.read(f"the state ({name})", each)) for name, each in tensors.items()}
        rest = {**rest, "restarts": self.restarts()}
        return {**found, REST: bytes_array(json.dumps(rest)), MADE: self.made_array}

    def load(self, arrays: Mapping[str, Array], elsewhere: bool = False) -> None:
        """Load another rank's `arrays`. Before the first step the state stays as the script made it. `elsewhere`: they
        may come from another version of PyTorch, and from devices of another kind. CoveyError when they belong to
        another training."""
        self._compare(json.loads(arrays[MADE].tobytes()), ("PyTorch", "devices") if elsewhere else ())
        rest = json.loads(arrays[REST].tobytes())
        if not elsewhere:
            _check_heals(rest)
        self.first, self.place = rest["first"], rest.get("place", {})
        if self.first is None:
            return
        states = several(whole(rest["optimizer"], arrays))
        self.groups.restore(states, rest.get("groups"))
        with torch.no_grad():
            for (name, each), trains in zip(self.parameters, _flags(rest, len(self.parameters)), strict=True):
                _copy(arrays[f"parameter/{name}"], self._parts.local(each))
                each.requires_grad_(each.requires_grad if trains is None else trains)
            for name, each in self._named_buffers().items():
                _copy(arrays[f"buffer/{name}"], each)
        divided = set(rest.get("divided", ()))
        for at, (optimizer, state) in enumerate(zip(self._optimizers, states, strict=True)):
            head = "optimizer/state" if len(states) == 1 else f"optimizer/{at}/state"
            _load_optimizer(optimizer, self._joined(optimizer, state, head, divided))
        for each, as_json in zip(self._also, rest["also"], strict=True):
            each.load_state_dict(whole(as_json, arrays))

    def _joined(self, optimizer: Any, state: Any, head: str, divided: Collection[str]) -> Any:
        """An optimizer's state, with its moments divided as those were whose names are in `divided`."""
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        for number, moments in state["state"].items():
            for name, value in moments.items():
                if f"{head}/{number}/{name}" in divided:
                    moments[name] = self._parts.joined(value, parameters[number])
        return state

    def _as_made(self) -> dict[str, Any]:
        """A description of models and optimizers, in the order in which differences are reported."""
        return {
            **self._parts.described(self.parameters),
            "PyTorch": str(torch.__version__),
            "model": shapes(self.parameters),
            "buffers": shapes(self._named_buffers().items()),
            "devices": [device.type for device in self.devices],
            "optimizer": _one_or_all([type(each).__qualname__ for each in self._optimizers]),
            "also": [type(each).__qualname__ for each in self._also],
        }

    def _compare(self, theirs: Mapping[str, Any], may_differ: Collection[str]) -> None:
        for what, own in self._made.items():
            if theirs.get(what) == own:
                continue
            why = f"{what} {difference(own, theirs.get(what))}"
            if what not in may_differ:
                raise CoveyError(CANNOT, why, SAME)
            self.say(f"continues what was computed elsewhere, so that last bits may differ: {why}")


class LaterArrays(Mapping[str, Array]):
    """Arrays that are made once something reads them; by any thread."""

    def __init__(self, make: Callable[[], dict[str, Array]], again: bool = False) -> None:
        """`again`: they are made anew whenever somebody reads them all."""
        self._make, self._again = make, again
        self._making = threading.Lock()
        self._made: dict[str, Array] | None = None

    @property
    def _arrays(self) -> dict[str, Array]:
        with self._making:
            if self._made is None:
                self._made = self._make()
            return self._made

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        if self._again:
            with self._making:
                self._made = None
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def changed_in(arrays: Mapping[str, Array]) -> list[str]:
    """Names of tensors that a script has changed since `TrainingState.guarded` gave these."""
    found: list[str] = json.loads(dict(arrays)[REST].tobytes())["changed"]
    return found


def bits_sum(tensor: Any) -> int:
    """The sum of a tensor's elements, taken as integers: another one where it was changed."""
    flat = (torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()).contiguous().reshape(-1)
    return int(flat.view(INTEGERS[flat.element_size()]).sum(dtype=torch.int64))


def _check_heals(rest: Mapping[str, Any]) -> None:
    """CoveyError where this state is not one with which a successor can begin."""
    place = rest.get("place", {})
    if why := rest.get("restarts"):
        raise CoveyError(CANNOT, f"lost ranks of this job are not replaced any more: {why}", FROM_CHECKPOINT)
    if place.get("between", 0) < 0:
        why = f"the others are after optimizer.step(), in {place.get('call')}, where this process does not pass"
        raise CoveyError(CANNOT, why, f"call it before optimizer.step(), or after an epoch's steps; {FROM_CHECKPOINT}")
    if names := rest.get("changed"):
        why = f"{names[0]} was changed after an epoch's steps, where this process is to begin"
        raise CoveyError(CANNOT, why, f"change it before the first collective that follows a step; {FROM_CHECKPOINT}")


def several(given: Any) -> list[Any]:
    """The objects in a list or tuple; an object that is neither stands alone."""
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _one_or_all(found: list[Any]) -> Any:
    return found[0] if len(found) == 1 else found


def _frozen(value: Any) -> Any:
    """A copy of a list or tensor, which the script may change; any other value itself."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def _as_begun(state: dict[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An optimizer's state with these parameter groups, which it had before the script added others, or set rates."""
    kept = state["param_groups"][: len(groups)]
    for group, then in zip(kept, groups, strict=True):
        group.update({key: then[key] for key in group if key in then and key != "params"})
    count = sum(len(group["params"]) for group in groups)
    moments = {at: each for at, each in state["state"].items() if at < count}
    return {**state, "param_groups": kept, "state": moments}


def _load_optimizer(optimizer: Any, state: Any) -> None:
    """Load an optimizer's state; its moments keep their types, which `load_state_dict` would change."""
    optimizer.load_state_dict(state)
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for at, each in state["state"].items():
        kept = optimizer.state[parameters[at]]
        kept.update({name: _moved(value, kept.get(name)) for name, value in each.items()})
    optimizer.zero_grad()


def _flags(rest: Mapping[str, Any], count: int) -> list[bool | None]:
    """Whether each parameter needs a gradient; None: as here."""
    found = rest.get("trains")
    return [None] * count if found is None else [each == "1" for each in found]


def _moved(value: Any, like: Any) -> Any:
    """The value, where it is a tensor, on the device that PyTorch chose for it."""
    if isinstance(value, torch.Tensor) and isinstance(like, torch.Tensor):
        return value.to(like.device)
    return value


def _copy(array: Array, tensor: Any) -> None:
    """Copy the array into the tensor; nothing is copied when the array is the tensor's own memory."""
    found = tensor_of_array(array, tensor.dtype)
    if found.data_ptr() != tensor.data_ptr() or found.stride() != tensor.stride():
        tensor.copy_(found)


def _copied(tensor: Any, into: Any) -> Any:
    """A copy of the tensor, in this memory where it fits."""
    now = tensor.detach()
    if into is None or into.shape != now.shape or into.dtype != now.dtype or into.device != now.device:
        return now.clone()
    return into.copy_(now)
