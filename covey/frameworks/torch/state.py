"""The state of a training (model, optimizer, scheduler, scaler) as named arrays, which are equal on all ranks.

parameter/0.weight                 in the parameter's own memory
buffer/1.running_mean              a copy, on its device: a forward pass changes it before the step's sums are here
optimizer/state/0/exp_avg          in the optimizer's own memory, like parameters: read only when asked for
also/0/..                          tensors of other objects with a state_dict
covey/rest                         everything but tensors, as JSON
covey/made                         which model, optimizer, PyTorch; compared before anything is loaded

Tensors on accelerators come to host memory when somebody reads them, after an event at the beginning of the step.
"""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from covey.core.errors import CoveyError
from covey.frameworks.torch.devices import DeviceReads, Say, devices_of, why_not
from covey.frameworks.torch.types import array_of_tensor, bytes_of_tensor, tensor_of_array
from covey.healing.state_pieces import CANNOT, FROM_CHECKPOINT, SAME
from covey.tensors.numbers.arrays import Array

REST, MADE = "covey/rest", "covey/made"
COPIED_BYTES_MAX = 64 << 20
"""Most bytes of tensors of other objects that are copied where the script may change them between two steps."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes."""


class TrainingState:
    """The state of one model and its optimizer; equal on all ranks."""

    def __init__(self, module: Any, optimizer: Any, also: Sequence[Any], say: Say = lambda text: None) -> None:
        """`say` gets lines for people. CoveyError when a part of the state cannot be given to another process."""
        self.module, self._optimizer, self._also, self.say = module, optimizer, also, say
        self.first: int | None = None
        """First step of the training; None until all ranks hold the same parameters."""
        self.place: dict[str, Any] = {}
        """Where in its script the training is, as JSON (`covey.frameworks.torch.heal`)."""
        self.restarts: Callable[[], str] = lambda: ""
        """Returns why nobody takes this state over any more; empty: somebody may."""
        self.devices = devices_of(module)
        self._made = self._as_made()
        self._made_array = _bytes(json.dumps(self._made))
        self._buffers_of = [(f"{path}." if path else "", each._buffers) for path, each in module.named_modules()]
        """Buffers of each module, with its path. A module may put another tensor there at any time; to search for
        modules would take longer than all else here."""
        for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
            for name, tensor in tensors:
                _check_place(f"{kind} {name!r}", tensor)
        self.bfloats: dict[str, str] = {}
        """Arrays of bfloat16, which numpy does not have, by name, as in `covey.healing.checkpoint.TYPES`."""
        self._moments = -1
        """Number of parts of the optimizer's state when all of them were looked at."""
        self._now()

    @property
    def tensors(self) -> list[Any]:
        """Parameters, then buffers."""
        return [*self.module.parameters(), *self.buffers]

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
        """A digest of parameters and buffers, 16 bytes."""
        found = hashlib.blake2b(digest_size=16)
        for tensor in self.tensors:
            found.update(bytes_of_tensor(tensor))
        return found.digest()

    def arrays(self) -> Mapping[str, Array]:
        """The state now. Memory that does not change before the step's sums are here is read only when these arrays
        are. Before the first step, nothing of the model is included."""
        if self.first is None:
            rest = {"first": None, "place": self.place, "restarts": self.restarts()}
            return {REST: _bytes(json.dumps(rest)), MADE: self._made_array}
        return self._now()

    def guarded(self) -> "_LaterArrays":
        """The state now, like `arrays`, for a time in which the script may change large tensors: each reading tells
        whether it did."""
        return self._now(True)

    def _now(self, guards: bool = False) -> "_LaterArrays":
        """The state of the model and its optimizer. CoveyError when a part of it cannot be given to another process."""
        also_tensors: dict[str, Any] = {}
        also = [_plain(each.state_dict(), f"also/{at}", also_tensors) for at, each in enumerate(self._also)]
        groups = [{key: _frozen(value) for key, value in group.items()} for group in self._optimizer.param_groups]
        buffers = {f"buffer/{name}": at.detach().clone() for name, at in self._named_buffers().items()}
        about, moments = (self.first, dict(self.place)), sum(map(len, self._optimizer.state.values()))
        reads = DeviceReads(self.devices, self.say)
        if moments != self._moments:
            optimizer_tensors: dict[str, Any] = {}
            _plain(self._optimizer.state_dict(), "optimizer", optimizer_tensors)
            for path, tensor in {**also_tensors, **optimizer_tensors}.items():
                reads.check(path, tensor)
            self._moments = moments
        if guards and sum(each.nbytes for each in also_tensors.values()) <= COPIED_BYTES_MAX:
            also_tensors = {name: each.detach().clone() for name, each in also_tensors.items()}
        others = {**buffers, **also_tensors}
        were = {name: bits_sum(each) for name, each in self._tensors_with(others).items()} if guards else {}
        return _LaterArrays(lambda: self._all_arrays(about, groups, also, others, reads, were), guards)

    def _tensors_with(self, others: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters and moments as they are now, and `others`."""
        tensors: dict[str, Any] = {f"parameter/{name}": each for name, each in self.module.named_parameters()}
        tensors |= others
        _plain(self._optimizer.state_dict(), "optimizer", tensors)
        return tensors

    def _all_arrays(
        self,
        about: tuple[int | None, dict[str, Any]],
        groups: Sequence[Mapping[str, Any]],
        also: Sequence[Any],
        others: Mapping[str, Any],
        reads: DeviceReads,
        were: Mapping[str, int],
    ) -> dict[str, Array]:
        """All arrays of the state. `about`: the first step, and the place, then; `groups`: the optimizer's parameter
        groups, as they were; `others`: buffers as they were, and tensors of other objects; `reads` says when tensors on
        devices can be read; `were`: sums of tensors that are to be unchanged."""
        tensors: dict[str, Any] = {f"parameter/{name}": each for name, each in self.module.named_parameters()}
        tensors |= others
        state = self._optimizer.state_dict()
        for group, then in zip(state["param_groups"], groups, strict=True):
            group.update({key: then[key] for key in group if key in then and key != "params"})
        rest = {"first": about[0], "optimizer": _plain(state, "optimizer", tensors), "also": also, "place": about[1]}
        rest["restarts"] = self.restarts()
        rest["changed"] = [each for each, was in were.items() if each not in tensors or bits_sum(tensors[each]) != was]
        self.bfloats = {name: "BF16" for name, each in tensors.items() if each.dtype == torch.bfloat16}
        found = {name: array_of_tensor(reads.read(f"the state ({name})", each)) for name, each in tensors.items()}
        return {**found, REST: _bytes(json.dumps(rest)), MADE: self._made_array}

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
        with torch.no_grad():
            for name, each in self.module.named_parameters():
                _copy(arrays[f"parameter/{name}"], each)
            for name, each in self.module.named_buffers():
                _copy(arrays[f"buffer/{name}"], each)
        self._load_optimizer(_whole(rest["optimizer"], arrays))
        for each, plain in zip(self._also, rest["also"], strict=True):
            each.load_state_dict(_whole(plain, arrays))

    def _load_optimizer(self, state: Any) -> None:
        """Load the optimizer's state; its moments keep their types, which `load_state_dict` would change."""
        self._optimizer.load_state_dict(state)
        parameters = [each for group in self._optimizer.param_groups for each in group["params"]]
        for at, each in state["state"].items():
            kept = self._optimizer.state[parameters[at]]
            kept.update({name: _moved(value, kept.get(name)) for name, value in each.items()})
        self._optimizer.zero_grad()

    def _as_made(self) -> dict[str, Any]:
        """A description of model and optimizer, in the order in which differences are reported."""
        return {
            "PyTorch": str(torch.__version__),
            "model": _shapes(self.module.named_parameters()),
            "buffers": _shapes(self.module.named_buffers()),
            "devices": [device.type for device in self.devices],
            "optimizer": type(self._optimizer).__qualname__,
            "also": [type(each).__qualname__ for each in self._also],
        }

    def _compare(self, theirs: Mapping[str, Any], may_differ: Collection[str]) -> None:
        for what, own in self._made.items():
            if theirs.get(what) == own:
                continue
            why = f"{what} {_difference(own, theirs.get(what))}"
            if what not in may_differ:
                raise CoveyError(CANNOT, why, SAME)
            self.say(f"continues what was computed elsewhere, so that last bits may differ: {why}")


class _LaterArrays(Mapping[str, Array]):
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


def _frozen(value: Any) -> Any:
    """A copy of a list or tensor, which the script may change; any other value itself."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def _difference(own: Any, theirs: Any) -> str:
    """The first difference, for people."""
    if isinstance(own, list) and isinstance(theirs, list):
        for mine, other in zip(own, theirs, strict=False):
            if mine != other:
                return f"here has {mine}, and there {other}"
        return f"here has {len(own)} parts, and there {len(theirs)}"
    return f"here is {own}, and there {theirs}"


def _shapes(named: Any) -> list[str]:
    return [f"{name} {tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}" for name, each in named]


def _check_place(what: str, tensor: Any) -> None:
    if (why := why_not(tensor.device)) or tensor.layout != torch.strided:
        came = f"{what} is a {tensor.layout} tensor on {tensor.device}".replace("torch.", "")
        raise CoveyError(
            "the state of this training cannot be sent to another process",
            f"{came}; {why}" if why else came,
            "keep it in dense tensors, in host memory or on the model's accelerators, or attach(ddp)",
        )


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


def _bytes(text: str) -> Array:
    return np.frombuffer(text.encode(), np.uint8)


def _plain(value: Any, path: str, tensors: dict[str, Any]) -> Any:
    """The value as JSON, the same for equal values; its tensors go to `tensors`. Pickle would depend on which parts are
    one object, which differs once a rank has loaded it."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case torch.Tensor():
            _check_place(path, value)
            tensors[path] = value
            return {"tensor": [path, str(value.dtype).removeprefix("torch.")]}
        case list():
            return [_plain(each, f"{path}/{at}", tensors) for at, each in enumerate(value)]
        case tuple():
            return {"tuple": _plain(list(value), path, tensors)}
        case Counter():
            return {"counter": [[key, count] for key, count in value.items()]}
        case Mapping():
            return {"dict": [[_key(key, path), _plain(each, f"{path}/{key}", tensors)] for key, each in value.items()]}
        case _:
            what, why = (
                "the state of this training cannot be sent to another process",
                f"{path} is a {type(value).__qualname__}",
            )
            raise CoveyError(what, why, "keep numbers, texts, lists, dicts and tensors in its state_dict")


def _key(key: Any, path: str) -> Any:
    if not isinstance(key, (int, str)):
        why = f"{path} has a {type(key).__qualname__} as a key"
        raise CoveyError(
            "the state of this training cannot be sent to another process", why, "name it by a text or a number"
        )
    return key


def _whole(plain: Any, arrays: Mapping[str, Array]) -> Any:
    """The value that `_plain` was given."""
    match plain:
        case list():
            return [_whole(each, arrays) for each in plain]
        case {"tensor": [path, dtype]}:
            return tensor_of_array(arrays[path], getattr(torch, dtype))
        case {"tuple": parts}:
            return tuple(_whole(parts, arrays))
        case {"counter": pairs}:
            return Counter(dict(pairs))
        case {"dict": pairs}:
            return {key: _whole(each, arrays) for key, each in pairs}
        case _:
            return plain
