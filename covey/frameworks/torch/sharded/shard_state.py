"""The part of a divided training's state that one rank has: its shards of parameters and moments, whole buffers."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate

from covey.core.errors import CoveyError
from covey.frameworks.torch.devices import DeviceReads, Say, devices_of
from covey.frameworks.torch.state import Parts
from covey.frameworks.torch.types import array_of_tensor, tensor_of_array
from covey.frameworks.torch.values.plain_values import bytes_array, check_also, difference, plain, shapes, whole
from covey.healing.state_pieces import SAME
from covey.tensors.numbers.arrays import Array

REST, MADE = "covey/rest", "covey/made"
CANNOT = "this rank cannot go on with its shard"


def is_divided(model: Any) -> bool:
    """Whether the model is divided among ranks (`fully_shard`). CoveyError for FullyShardedDataParallel."""
    if not isinstance(model, torch.nn.Module):
        return False
    if any(isinstance(each, FullyShardedDataParallel) for each in model.modules()):
        why = "the model is in a FullyShardedDataParallel, whose parameters are parts of flat ones"
        raise CoveyError("the model was not attached", why, "divide it by torch.distributed.fsdp.fully_shard")
    return any(isinstance(each, FSDPModule) for each in model.modules())


def local(tensor: Any) -> Any:
    """This rank's part of a tensor; a tensor that is not divided itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ShardState:
    """One rank's part of the state of models and optimizers."""

    def __init__(self, models: Sequence[Any], optimizers: Sequence[Any], also: Sequence[Any], say: Say) -> None:
        """`say` gets lines for people. CoveyError when a part of the state cannot be saved."""
        check_also(also)
        self._models, self._optimizers, self._also, self._say = models, optimizers, also, say
        self.bfloats: dict[str, str] = {}
        """Arrays of bfloat16, by name, as in `covey.healing.checkpoint.TYPES`."""
        self.arrays(0)

    @property
    def devices(self) -> list[Any]:
        return list(dict.fromkeys(each for model in self._models for each in devices_of(model)))

    def arrays(self, step: int) -> dict[str, Array]:
        """This rank's part of the state at the beginning of this step. CoveyError when a part cannot be saved."""
        gathered_back(self._models)
        tensors: dict[str, Any] = {f"parameter/{name}": each for name, each in self._named("parameters")}
        tensors |= {f"buffer/{name}": each for name, each in self._named("buffers")}
        states = plain([each.state_dict() for each in self._optimizers], "optimizer", tensors)
        also = plain([each.state_dict() for each in self._also], "also", tensors)
        divided = [name for name, each in tensors.items() if isinstance(each, DTensor)]
        parts, reads = {name: local(each) for name, each in tensors.items()}, DeviceReads(self.devices, self._say)
        self.bfloats = {name: "BF16" for name, each in parts.items() if each.dtype == torch.bfloat16}
        found = {name: array_of_tensor(reads.read(f"the state ({name})", each)) for name, each in parts.items()}
        rest = {"step": step, "optimizers": states, "also": also, "divided": divided}
        return {**found, REST: bytes_array(json.dumps(rest)), MADE: bytes_array(json.dumps(self._made()))}

    def check(self, made: Array) -> None:
        """CoveyError where `made` describes another training. Says where bits may differ."""
        theirs = json.loads(made.tobytes())
        for what, own in self._made().items():
            if theirs.get(what) == own:
                continue
            why = f"{what} {difference(own, theirs.get(what))}"
            if what not in ("PyTorch", "devices"):
                raise CoveyError(CANNOT, why, SAME)
            self._say(f"continues what was computed elsewhere, so that last bits may differ: {why}")

    def load(self, arrays: Mapping[str, Array]) -> int:
        """Load this rank's part; returns the step."""
        rest = json.loads(arrays[REST].tobytes())
        divided = set(rest["divided"])
        with torch.no_grad():
            for kind in ("parameter", "buffer"):
                for name, each in self._named(f"{kind}s"):
                    local(each).copy_(tensor_of_array(arrays[f"{kind}/{name}"], each.dtype))
        for at, (optimizer, as_json) in enumerate(zip(self._optimizers, rest["optimizers"], strict=True)):
            state = whole(as_json, arrays)
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            for number, moments in state["state"].items():
                for name, value in moments.items():
                    if f"optimizer/{at}/state/{number}/{name}" in divided:
                        moments[name] = _divided(value, parameters[number])
            optimizer.load_state_dict(state)
            for number, moments in state["state"].items():  # with their own types, which PyTorch changes
                optimizer.state[parameters[number]].update(
                    {name: each for name, each in moments.items() if isinstance(each, DTensor)}
                )
            optimizer.zero_grad()
        for each, as_json in zip(self._also, rest["also"], strict=True):
            each.load_state_dict(whole(as_json, arrays))
        step: int = rest["step"]
        return step

    def _named(self, kind: str) -> list[tuple[str, Any]]:
        """Parameters or buffers of all models, by name."""
        heads = [""] if len(self._models) == 1 else [f"{at}/" for at in range(len(self._models))]
        return [
            (head + name, each)
            for head, model in zip(heads, self._models, strict=True)
            for name, each in getattr(model, f"named_{kind}")()
        ]

    def _made(self) -> dict[str, Any]:
        """A description of the training, in the order in which differences are reported."""
        parameters = self._named("parameters")
        return {
            "PyTorch": str(torch.__version__),
            "model": shapes(parameters),
            **_shards(parameters),
            "buffers": shapes(self._named("buffers")),
            "devices": [device.type for device in self.devices],
            "optimizers": [type(each).__qualname__ for each in self._optimizers],
            "also": [type(each).__qualname__ for each in self._also],
        }


def gathered_back(models: Sequence[Any]) -> None:
    """Have these models hold their shards alone: what is gathered for a pass is not the shard."""
    for model in models:
        for each in model.modules():
            if isinstance(each, FSDPModule):
                each.reshard()


def _shards(parameters: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A description of this rank's shards."""
    return {"shard": [f"{name} {tuple(local(each).shape)} {_placed(each)}" for name, each in parameters]}


def _placed(tensor: Any) -> str:
    """How a tensor is divided, and which part of it this rank has: equal on replicas of that part, and on no others."""
    if not isinstance(tensor, DTensor):
        return "whole"
    at = tensor.device_mesh.get_coordinate()
    part = None if at is None else [at[each] for each in divides(tensor.placements)]
    return f"{' '.join(map(str, tensor.placements))} part {part}"


def divides(placements: Sequence[Any]) -> list[int]:
    """The dimensions of a mesh along which a tensor with these placements is divided."""
    return [at for at, each in enumerate(placements) if not isinstance(each, Replicate)]


def _divided(value: Any, parameter: Any) -> Any:
    """A moment of a divided parameter, of which this rank has `value`."""
    part, mesh, placed = value.to(parameter.to_local().device), parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(part, mesh, placed, run_check=False, shape=shape, stride=stride)


PARTS = Parts(local, lambda tensor: isinstance(tensor, DTensor), _divided, _shards)
"""How a divided model's tensors are kept, by `covey.frameworks.torch.state.TrainingState`."""
