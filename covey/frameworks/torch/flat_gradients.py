"""Gradients of one rank after all of its passes in a step, for a process that computes for several ranks.

DistributedDataParallel pushes buckets while the backward pass computes (`covey.frameworks.torch.gradients`). Where a
process carries several ranks, each rank's passes add to the same `.grad`, so a rank's gradients are taken once its
passes are over, and `.grad` is empty for the next one. They are divided into the same tensors as those of a
DistributedDataParallel.

    take        .grad of each parameter  -- joined on its device, copied to host memory -->  one array for each tensor
    put         averages in host memory  -- copied to the parameters' devices -->  .grad of each parameter
"""

from typing import Any

import torch

from covey.core.errors import CoveyError
from covey.frameworks.torch.devices import (
    NOT_AVERAGED,
    Say,
    check_gradients,
    is_captured,
    page_locked,
    side_stream,
    wait_until,
)
from covey.frameworks.torch.gradients import GradientPlace, cut_of
from covey.frameworks.torch.types import TYPES, bits
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.tensor_wire import Type


class FlatTensor:
    """One tensor, made of the gradients of neighbouring parameters of one type."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self.parts: list[tuple[str, Any, GradientPlace]] = []
        """Name, parameter, place of its gradient."""
        self._taken: list[Any] = []
        """Host memory for the gradients of the first rank of a step, of the second, and so on."""
        self._averages: Any = None

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.parts[0][1].dtype
        return found

    @property
    def type(self) -> Type:
        return TYPES[self.dtype]

    @property
    def devices(self) -> list[Any]:
        return list(dict.fromkeys(parameter.device for _, parameter, _ in self.parts))

    def taken(self, slot: int) -> Any:
        """Host memory for the gradients of the rank that is `slot`th in its step."""
        while len(self._taken) <= slot:
            self._taken.append(self._memory())
        return self._taken[slot]

    @property
    def averages(self) -> Any:
        """Host memory for the averages."""
        if self._averages is None:
            self._averages = self._memory()
        return self._averages

    def _memory(self) -> Any:
        if any(device.type != "cpu" for device in self.devices):
            return page_locked(f"a copy of the gradients {self.name!r}", self.size, self.dtype)
        return torch.empty(self.size, dtype=self.dtype)


class FlatGradients:
    """The gradients of one model."""

    def __init__(self, module: Any, say: Say) -> None:
        """`say` gets lines for people."""
        self._say = say
        named = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        self._frozen = [(name, each) for name, each in module.named_parameters() if not each.requires_grad]
        self.names = [name for name, _ in named]
        cut = cut_of([(name, each.numel(), each.element_size(), each.dtype) for name, each in named])
        self.tensors = [FlatTensor(name, size) for name, size in zip(cut.names, cut.sizes, strict=True)]
        for name, each in named:
            self.tensors[cut.places[name].tensor].parts.insert(0, (name, each, cut.places[name]))  # as they lie
        self._streams: dict[Any, Any] = {}
        """A stream for copies to host memory, by device."""

    def clear(self) -> None:
        """Empty `.grad` of every parameter, before the passes of a rank."""
        for tensor in self.tensors:
            for _, parameter, _ in tensor.parts:
                parameter.grad = None

    def take(self, slot: int) -> tuple[list[Array], list[str]]:
        """The gradients of a rank, an array for each tensor, and the names of the parameters that got one. `.grad` is
        empty afterwards. The arrays stay as they are until the same slot is taken again; this thread waits for the
        copies from devices. CoveyError or TypeError for gradients that cannot be averaged."""
        for name, each in self._frozen:
            if each.grad is not None:
                why = f"{name!r} has a gradient, and had requires_grad=False when covey.torch.attach was called"
                raise CoveyError(NOT_AVERAGED, why, "set requires_grad before attach, and leave it so")
        copied, kept = dict[Any, Any](), list[Any]()
        for tensor in self.tensors:
            for device in tensor.devices:
                kept.append(self._take_from(tensor, device, tensor.taken(slot)))
                if device.type != "cpu":
                    copied[device] = torch.Event(device=device)
        for device, event in copied.items():
            event.record(self._streams[device])
        for device, event in copied.items():
            wait_until(event, f"the copy of a rank's gradients from {device}", self._say)
        given = [name for tensor in self.tensors for name, each, _ in tensor.parts if each.grad is not None]
        self.clear()
        return [bits(tensor.taken(slot)).numpy() for tensor in self.tensors], given

    def _take_from(self, tensor: FlatTensor, device: Any, memory: Any) -> Any:
        """Begin to copy the gradients on this device to host memory; returns what must live until that is done."""
        parts = [part for part in tensor.parts if part[1].device == device]
        for name, parameter, _ in parts:
            if parameter.grad is not None:
                check_gradients(name, parameter.grad)
        if device.type == "cpu":
            for _, parameter, place in parts:
                piece = memory[place.first : place.end]
                if parameter.grad is None:
                    piece.zero_()
                else:
                    piece.view(parameter.shape).copy_(parameter.grad)
            return None
        if is_captured(device):
            why = "a device graph is being recorded, and a graph that is played again pushes nothing"
            raise CoveyError(NOT_AVERAGED, why, "record no graph inside `with rank:`")
        if device not in self._streams:
            self._streams[device] = torch.Stream(device=device)
        with torch.no_grad(), side_stream(device, self._streams[device]):
            each = [
                torch.zeros(parameter.numel(), dtype=tensor.dtype, device=device)
                if parameter.grad is None
                else parameter.grad.reshape(-1)
                for _, parameter, _ in parts
            ]
            if len(parts) == len(tensor.parts):  # neighbours in memory, too
                each = [torch.cat(each)] if len(each) > 1 else each
                memory.copy_(each[0], non_blocking=True)
            else:
                for (_, _, place), one in zip(parts, each, strict=True):
                    memory[place.first : place.end].copy_(one, non_blocking=True)
        return each

    def put(self, given: set[str]) -> None:
        """Set `.grad` of each parameter to the average that is in `averages` of its tensor. Parameters to which no rank
        gave a gradient, all but those in `given`, keep none, as they do without Covey."""
        with torch.no_grad():
            for tensor in self.tensors:
                there = {
                    device: tensor.averages.to(device, non_blocking=True)
                    for device in tensor.devices
                    if device.type != "cpu"
                }
                for name, parameter, place in tensor.parts:
                    if name not in given:
                        parameter.grad = None
                        continue
                    flat = there.get(parameter.device, tensor.averages)[place.first : place.end]
                    parameter.grad = torch.empty_like(parameter, requires_grad=False)
                    parameter.grad.copy_(flat.view(parameter.shape))
