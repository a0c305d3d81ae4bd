"""`covey.torch.attach` of DistributedDataParallel models with their optimizers: what is refused, and hooks.

The hooks tell a training where its script is (`covey.frameworks.torch.heal`): before and after a forward pass, before
and after an optimizer's step, and with each bucket of gradients.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from covey.core.errors import CoveyError
from covey.frameworks.torch.gradients import CANNOT_HEAL
from covey.frameworks.torch.group import TensorsGroup
from covey.frameworks.torch.heal import EndsRounds, HealedTraining
from covey.frameworks.torch.state import TrainingState
from covey.frameworks.torch.steps.held_words import held_words
from covey.job.tensors import TensorClient

if TYPE_CHECKING:
    from covey.job.client import JobClient
    from covey.job.job_state import Place

_attached: weakref.WeakSet[TensorClient] = weakref.WeakSet()
"""Clients whose ranks have the state of a training."""


def healed(
    ddps: Sequence[Any],
    optimizers: Sequence[Any],
    also: Sequence[Any],
    data: Any,
    job: "JobClient",
    step: int,
    ends: EndsRounds,
    checkpoint: "Place | bool" = False,
) -> HealedTraining:
    """The training of `covey.torch.attach` with optimizers."""
    if job.world_size < 2:
        why = "this job has one rank, so no other rank has its state"
        raise CoveyError(CANNOT_HEAL, why, "submit it with --workers 2 or more, or train without Covey")
    group = ddps[0].process_group
    for ddp in ddps:
        if not isinstance(ddp.process_group, TensorsGroup):
            why = f"its process group ({ddp.process_group.name()}) spans the processes that may be lost"
            next_ = "call covey.torch.init_process_group() instead of torch.distributed.init_process_group()"
            raise CoveyError(CANNOT_HEAL, why, next_)
    check_alone(job)
    state = TrainingState([ddp.module for ddp in ddps], optimizers, also, job.tensors.tell)
    training = HealedTraining(job, ddps, optimizers, state, group, data, ends)
    for at, ddp in enumerate(ddps):
        ddp.broadcast_buffers = False
        ddp.register_comm_hook(None, _hook(training, at))
    training.begin(job, step, checkpoint)
    for ddp in ddps:
        ddp.register_forward_pre_hook(training.before_forward)
        ddp.register_forward_hook(training.after_forward)
    follows(training, job, optimizers, also, data, state)
    if job.tensors.rank == 0:
        job.tensors.tell(held_words(state, optimizers, also, len(optimizers) > 1 and len(ddps) > 1))
    return training


def check_alone(job: "JobClient") -> None:
    """CoveyError where a training was attached before."""
    if job.tensors in _attached:
        why = "a training was attached before, and a rank that replaces a lost one gets one state"
        raise CoveyError(CANNOT_HEAL, why, "give all of it at once: attach([ddp, ..], [optimizer, ..])")


def follows(
    training: HealedTraining,
    job: "JobClient",
    optimizers: Sequence[Any],
    also: Sequence[Any],
    data: Any,
    state: TrainingState,
) -> None:
    """Have a training that has begun follow its optimizers, scalers and data."""
    _attached.add(job.tensors)
    if hasattr(data, "follow"):
        data.follow(training)
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(training.before_optimizer)
        optimizer.register_step_post_hook(training.after_optimizer)
    for each in also:
        if isinstance(each, torch.amp.GradScaler):
            training.scales(each)
    state.groups.follow()


def _hook(training: HealedTraining, model: int) -> Callable[[Any, Any], Any]:
    def average(_: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return training.average(model, bucket)

    return average
