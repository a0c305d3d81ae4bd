"""What a rank that replaces a lost one gets, and what it does not get, in one line for people."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from covey.frameworks.torch.state import TrainingState


def held_words(state: TrainingState, optimizers: Sequence[Any], also: Sequence[Any], keeps_copy: bool) -> str:
    """The line. `keeps_copy`: each rank keeps a copy of the state at the beginning of each step."""
    models, frozen = len(state.modules), sum(not each.requires_grad for _, each in state.parameters)
    of_models = f" of {models} models" if models > 1 else ""
    some_frozen = f" ({frozen} of them frozen)" if frozen else ""
    held = [f"{len(state.parameters)} parameters{of_models}{some_frozen}"]
    held += [f"{len(state.buffers)} buffers"] * bool(state.buffers)
    held += [f"moments of {_names(optimizers)}"]
    held += [_names(also)] * bool(also)
    copy = "; each rank keeps a copy of it, as of the step's beginning" if keeps_copy else ""
    return f"holds for successors: {', '.join(held)}, random generators{copy}; not held: {_not_held(optimizers, also)}"


def _not_held(optimizers: Sequence[Any], also: Sequence[Any]) -> str:
    """What is known to be missing, and what is not held in any training."""
    scheduled = {id(getattr(each, "optimizer", None)) for each in also}
    missing = [
        f"the scheduler of {type(each).__name__} (not in also=)"
        for each in optimizers
        if id(each) not in scheduled and _has_scheduler(each)
    ]
    return ", ".join([*missing, "other objects of the script that are not in also="])


def _has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scheduler of PyTorch counts the steps of this optimizer."""
    return bool(getattr(optimizer.step, "_wrapped_by_lr_sched", False))


def _names(each: Iterable[Any]) -> str:
    """The kinds of these objects: `Adam`, `2 Adam`."""
    counts = Counter(type(one).__name__ for one in each)
    return " and ".join(f"{count} {name}" if count > 1 else name for name, count in counts.items())
