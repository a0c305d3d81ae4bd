"""`with ddp.join():`, by which ranks of a DistributedDataParallel may have unequal numbers of batches.

    rank 0    batch  batch  batch  done: zeros  zeros
    rank 1    batch  batch  batch  batch        batch       each average is the sum divided by two

A rank that has no batches left gives zeros for each bucket until all are done. Where Covey averages the gradients it
does so through the same communication hook, so the average is that of DDP itself, divided by all ranks. Two things
cannot be: a division by the ranks that still have batches, since the hook divides; and ranks that may be replaced,
since a successor does not pass through the collectives with which DDP counts who is done.

A forward pass is where it is seen: `submit --aggregate` attaches a model in its first one, which may be in `join()`
already, and a model that is attached earlier enters it later.
"""

from typing import Any

from covey.core.errors import CoveyError

HEALS = "ranks of this training may be replaced, and a process that takes over is alone in what join() counts"
EVEN = "give all ranks equally many batches, as covey.torch.StepSampler does; or attach without the optimizer"
"""Why it is refused where ranks heal, and what to do."""
DIVIDES = "it divides by the ranks that still have batches, and Covey averages over all ranks"
BY_ALL = "use ddp.join(), which divides by all ranks; or submit without --aggregate"
"""Why another division is refused, and what to do."""


def refuse_uneven(ddp: Any, heals: bool) -> None:
    """From now on the first forward pass in `ddp.join()` raises CoveyError where the averages would be wrong.
    `heals`: its ranks may be replaced. Outside of `join()`, and in one that is not enabled, nothing changes."""

    def before_forward(module: Any, _inputs: Any) -> None:
        joins = getattr(module, "_join_config", None)
        if joins is None or not joins.enable:
            return
        if heals:
            raise CoveyError("ddp.join() was refused", HEALS, EVEN)
        if not module._divide_by_initial_world_size:
            raise CoveyError("ddp.join(divide_by_initial_world_size=False) was refused", DIVIDES, BY_ALL)

    ddp.register_forward_pre_hook(before_forward)
