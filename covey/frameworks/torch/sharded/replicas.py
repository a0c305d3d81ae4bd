"""Trainings whose model is divided among ranks, with replicas (HSDP): lost ranks are replaced.

    covey.torch.init_process_group()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(model, mesh=mesh)
    state = covey.torch.attach(model, optimizer, data=sampler, checkpoint=True)

    ranks 0 and 2 hold one shard of parameters and moments, ranks 1 and 3 the other: rank 3 is lost, rank 1 gives

It is `covey.frameworks.torch.heal` with other collectives: parameters are gathered in forward and backward passes,
gradients are added in the groups of the mesh, all of them rounds of all ranks
(`covey.frameworks.torch.calls.mesh_groups`). Since the first of them is before the forward pass, whose random numbers
are drawn later, a rank's own state is sent in a round of its own, before the optimizer's step. That round brings rank
0's buffers, too, which all ranks have at the end of a step.

When all ranks that hold a shard are lost at once, the job begins again from its last checkpoint, to which each rank
writes its part (`covey.frameworks.torch.sharded.shard_set`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from covey.core.errors import CoveyError
from covey.frameworks.torch.devices import DeviceReads
from covey.frameworks.torch.gradients import CANNOT_HEAL
from covey.frameworks.torch.group import TensorsGroup
from covey.frameworks.torch.heal import HealedTraining, Phase, late_draws
from covey.frameworks.torch.healed_ddp import check_alone, follows
from covey.frameworks.torch.random_state import generators
from covey.frameworks.torch.sharded.shard_set import MADE_SHARDS, opened_part, save_together, write_shard
from covey.frameworks.torch.sharded.shard_state import PARTS, divides, gathered_back
from covey.frameworks.torch.state import TrainingState
from covey.frameworks.torch.steps.held_words import held_words
from covey.healing.checkpoint import Checkpoint
from covey.healing.owns import JsonText
from covey.tensors.numbers.arrays import Array

if TYPE_CHECKING:
    from covey.job.client import JobClient
    from covey.job.job_state import Place

ALIKE_NEXT = "make the model from one seed on every rank, or load it before fully_shard"


def replicas_of(parameters: Sequence[Any], ranks: int) -> list[tuple[int, ...]]:
    """By rank: the ranks that hold the same parts of these parameters, itself among them."""
    keys: list[list[Any]] = [[] for _ in range(ranks)]
    for mesh, placed in {(each.device_mesh, each.placements): None for each in parameters if isinstance(each, DTensor)}:
        dimensions = divides(placed)
        places = {int(rank): tuple(at) for rank, *at in _places(mesh.mesh)}
        for rank, key in enumerate(keys):
            at = places.get(rank)
            key.append((rank,) if at is None else tuple(at[each] for each in dimensions))
    return [tuple(other for other in range(ranks) if keys[other] == key) for key in keys]


def _places(mesh: Any) -> list[list[int]]:
    """Each rank of a mesh, with its coordinates."""
    return [[int(mesh[tuple(at)]), *at] for at in torch.ones_like(mesh).nonzero().tolist()]


class HealedShards(HealedTraining):
    """The training that `covey.torch.attach(model, optimizer)` returns for a divided model that has replicas."""

    def __init__(
        self,
        job: "JobClient",
        optimizer: Any,
        state: TrainingState,
        data: Any,
        place: Path | None,
        replicas: Sequence[tuple[int, ...]],
    ) -> None:
        """`place`: where the manifest of its checkpoints is; None: it has none. `replicas`: by rank, who holds the
        same."""
        group = dist.group.WORLD
        assert isinstance(group, TensorsGroup), "checked by `why_not_healed`"
        super().__init__(job, (), [optimizer], state, group, data)
        self._replicas, self._to = replicas, place

    # ---- for the script ----

    def save(self, path: "Place | None" = None) -> Path:
        """Save all ranks' shards, and return where the manifest is; each rank must call it, in the same place of its
        step. CoveyError as of `HealedTraining.save`, and on all ranks when one cannot write."""
        if self._at is Phase.STEPPED:
            self.enters("state.save")
        return super().save(self._to if path is None else path)

    def _own_to_save(self, is_last: bool) -> JsonText | None:
        """All ranks save together, so what each has drawn after its step is known."""
        is_anew = self._at is Phase.BETWEEN and self._held is None
        return super()._own_to_save(is_last) if is_last or not is_anew else self._own_now()

    def _check_draws(self) -> None:
        """They are saved."""

    # ---- how it begins ----

    def start(self, job: "JobClient", step: int) -> None:
        """Begin, as `begin` does."""
        rank, ranks = self._tensors.rank, self._tensors.world_size
        self.begin(
            job,
            step,
            False if self._to is None else self._to,
            made=MADE_SHARDS,
            alike=self._replicas[rank],
            opened=lambda place: opened_part(place, rank, ranks),
            write=self._write,
        )

    def _write(
        self,
        place: Path,
        about: Checkpoint,
        arrays: Mapping[str, Array],
        gathered: Callable[[bytes], Sequence[bytes]],
    ) -> None:
        def all_say(mine: Any) -> list[Any]:
            return [json.loads(each) for each in gathered(json.dumps(mine).encode())]

        types = self._contents.bfloats
        save_together(
            place, about.step, self._tensors.rank, lambda file: write_shard(file, about, arrays, types), all_say
        )

    def _agree_on_parameters(self) -> None:
        """Compare parameters with those of the ranks that hold the same. CoveyError on all ranks where two differ."""
        found = self._digests()
        for ranks in self._replicas:
            for other in ranks[1:]:
                if (found[other] != found[ranks[0]]).any():
                    why = f"ranks {ranks[0]} and {other} have the same shard of the model, with other parameters in it"
                    raise CoveyError(CANNOT_HEAL, why, ALIKE_NEXT)

    # ---- in a step ----

    def _be(self, phase: Phase) -> None:
        super()._be(phase)
        self._tensors.own_later = True

    def before_optimizer(self, optimizer: Any, *_: Any) -> None:
        """All sums are here: tell all ranks what is this one's own, once a step. CoveyError when random numbers were
        drawn after that."""
        if self._drawn is None:
            self._tensors.own_later = False
            self._push_buffers(DeviceReads(self._devices))
            if self._buffers is None:
                self._tensors.push_pull("ddp/step", np.zeros(1, np.float32))
            self._finish_buffers()
        elif generators(self._devices) != self._drawn:
            raise late_draws("an optimizer's step in this step")
        self._is_stepping = True

    # ---- for people ----

    def words(self) -> str:
        """One line on what happens when a rank is lost."""
        alike = list(dict.fromkeys(self._replicas))
        pairs = ", ".join(" = ".join(map(str, each)) for each in alike)
        place = "and it has no checkpoint (checkpoint=True)" if self._to is None else f"from its last one, {self._to}"
        buffers = "; buffers are rank 0's at the end of each step" if self._contents.buffers else ""
        return (
            f"has a model that is divided in {len(alike)} parts, with replicas (HSDP): a rank that is lost is "
            f"replaced, and gets its part from a rank that holds the same ({pairs}); when all that hold a part are "
            f"lost at once, the job begins again (--retries), {place}{buffers}"
        )


def why_not_healed(optimizers: Sequence[Any]) -> str:
    """Why lost ranks of a divided model are not replaced from their replicas; empty: they are."""
    group = dist.group.WORLD
    if not isinstance(group, TensorsGroup):
        return f"the process group ({dist.get_backend()}) spans the processes that may be lost; next: " + INIT
    return "it has several optimizers" if len(optimizers) > 1 else ""


INIT = "covey.torch.init_process_group() in place of torch.distributed.init_process_group()"


def healed_shards(
    models: Sequence[Any],
    optimizer: Any,
    also: Sequence[Any],
    data: Any,
    job: "JobClient",
    step: int,
    place: Path | None,
    replicas: Sequence[tuple[int, ...]],
) -> HealedShards:
    """The training of `covey.torch.attach` with divided models that have replicas."""
    check_alone(job)
    gathered_back(models)
    state = TrainingState(models, [optimizer], also, job.tensors.tell, PARTS)
    training = HealedShards(job, optimizer, state, data, place, replicas)
    training.start(job, step)
    for model in models:
        model.register_forward_pre_hook(training.before_forward, prepend=True)  # before it gathers its parameters
    follows(training, job, [optimizer], also, data, state)
    if job.tensors.rank == 0:
        job.tensors.tell(training.words())
        job.tensors.tell(held_words(state, [optimizer], also, False))
    return training
