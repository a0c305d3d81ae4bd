"""Models and optimizers of which ranks cannot be handed from process to process with the same bits, and why."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from covey.core.errors import CoveyError

CANNOT_CARRY = "ranks of this training cannot be carried by other processes"


def check_elastic(module: Any, optimizer: Any, also: Sequence[Any]) -> None:
    """CoveyError where `covey.torch.attach(.., elastic=True)` cannot keep its word."""
    why, next = _why_no_optimizer(optimizer, also) or _why_no_model(module) or ("", "")
    if why:
        raise CoveyError(CANNOT_CARRY, why, next)


def _why_no_optimizer(optimizer: Any, also: Sequence[Any]) -> tuple[str, str] | None:
    several = [each for each in also if isinstance(each, torch.optim.Optimizer)]
    if isinstance(optimizer, (list, tuple)) or several:
        return "it has several optimizers", "give all parameters to one optimizer, in groups (param_groups)"
    if not isinstance(optimizer, torch.optim.Optimizer):
        came = "it has no optimizer" if optimizer is None else f"its optimizer is a {type(optimizer).__qualname__}"
        return came, "call covey.torch.attach(model, optimizer, elastic=True) with one of torch.optim"
    return None


def _why_no_model(module: Any) -> tuple[str, str] | None:
    if isinstance(module, DistributedDataParallel):
        why = "a DistributedDataParallel sums in a process group of a fixed size, and processes come and go here"
        return why, "give attach the model itself, compute with it, and leave DistributedDataParallel out"
    if not isinstance(module, torch.nn.Module):
        return f"the model is a {type(module).__qualname__}", "give a torch.nn.Module"
    for name, each in module.named_modules():
        if found := _why_no_part(each):
            why, next = found
            return (f"{name!r} {why}" if name else f"the model {why}"), next
    for name, parameter in module.named_parameters():
        if type(parameter).__name__ == "DTensor" or type(parameter.data).__name__ == "DTensor":
            return (
                f"parameter {name!r} is divided among processes (DTensor)",
                "give a model that each process has whole",
            )
    return None


def _why_no_part(module: Any) -> tuple[str, str] | None:
    """The reason why a model with this part is refused."""
    kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__]
    if any(kind.startswith(("torch.distributed.fsdp", "torch.distributed._composable")) for kind in kinds):
        return "is divided among processes (FSDP)", "give a model that each process has whole"
    if isinstance(module, torch.nn.SyncBatchNorm):
        return "is a SyncBatchNorm, which sums in a process group of a fixed size", "use BatchNorm"
    if "graphed" in getattr(vars(module).get("forward"), "__qualname__", ""):
        return "plays a CUDA graph, which keeps its own random generator and buffers", "leave the graph out"
    is_compiled = module._compiled_call_impl is not None or "torch._dynamo.eval_frame.OptimizedModule" in kinds
    if is_compiled and not _is_static(module):
        why = (
            "is compiled by torch.compile, which chooses kernels by the shapes that a process has seen, so one that "
            "joins later could compute other bits"
        )
        return why, "leave torch.compile out, or give dynamic=False to it"
    return None


def _is_static(module: Any) -> bool:
    """Whether this module was compiled with dynamic=False: each shape has a kernel of its own, in every process."""
    cells = getattr(module._compiled_call_impl, "__closure__", None) or ()
    found = [vars(module).get("dynamo_ctx"), *(cell.cell_contents for cell in cells)]
    return any(getattr(each, "_dynamic", None) is False for each in found)
