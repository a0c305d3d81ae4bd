"""Ranks of a training whose model is divided among them, for `test_torch_sharded`.

    RANK RANKS STEPS STORE FOLDER KIND      STORE: a file by which ranks meet; FOLDER: the checkpoint is there

The file stop-RANK in FOLDER asks a rank to end. KIND: `model` with loops over epochs; `models`, two with an optimizer
each, in a loop over steps; `wide`: as `model`, and another model; `unwritten`: as `models`, with replicas,
and rank 1 cannot write.
"""

import hashlib
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import covey.torch
from tests.covey.torch_heal_script import Samples, told

BATCH, SLOW_S = 4, 0.01


class PlayedAgent:
    """The part of a JobClient that a divided training uses."""

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        self.rank, self.world_size, self._folder = rank, ranks, folder

    @property
    def stopping(self) -> bool:
        return (self._folder / f"stop-{self.rank}").exists()

    def defer_stop(self) -> None:
        """It always listens."""

    def tell(self, text: str) -> None:
        told("tells", text)

    def saved(self, step: int, path: Path) -> None:
        told("saved", step, path)


def model_of(width: int, replicas: int = 1) -> Any:
    """A model, of which parts of another size go to each rank of a replica."""
    torch.manual_seed(3)
    layers = [torch.nn.Linear(8, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.3), torch.nn.Linear(width, 1)]
    model = torch.nn.Sequential(*layers)
    names, ranks = ("replicate", "shard"), dist.get_world_size()
    mesh = init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=names) if replicas > 1 else None
    for each in layers[0], layers[3]:
        fully_shard(each, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def by_epochs(width: int, steps: int, job: Any, at: Path) -> list[Any]:
    model = model_of(width)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1])
    samples, sampler = Samples(), covey.torch.StepSampler(len(Samples()), BATCH, seed=3)
    torch.manual_seed(100 + job.rank)
    random.seed(job.rank)
    np.random.seed(job.rank)
    state = covey.torch.attach(model, optimizer, job, also=[scheduler], data=sampler, checkpoint=at)
    told("goes on", state.step)
    for _ in sampler.epochs(steps // sampler.steps_per_epoch):
        for inputs, _numbers in DataLoader(samples, batch_sampler=sampler):
            told("takes", state.next_step)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            time.sleep(SLOW_S)
        scheduler.step()
    return [model]


def by_steps(steps: int, job: Any, at: Path, kind: str) -> list[Any]:
    models = [model_of(width, 2 if kind == "unwritten" else 1) for width in (5, 6)]
    optimizers = [torch.optim.SGD(each.parameters(), 0.01, momentum=0.9) for each in models]
    torch.manual_seed(100 + job.rank)
    state = covey.torch.attach(models, optimizers, job, checkpoint=at)
    told("goes on", state.step)
    for step in state.steps(steps):
        told("takes", step)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.randn(BATCH, 8)).square().mean().backward()
            optimizer.step()
        if step == 4:
            if kind == "unwritten" and job.rank == 1:
                at = Path("/proc/nowhere/state.json")
            told("stopping", state.stopping)
            state.save(at)
        time.sleep(SLOW_S)
    return models


def main(words: list[str]) -> None:
    rank, ranks, steps, store, folder, kind = words
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks))
    job: Any = PlayedAgent(int(rank), int(ranks), Path(folder))
    at = Path(folder) / "state.json"
    if kind in ("model", "wide"):
        models = by_epochs(7 if kind == "wide" else 5, int(steps), job, at)
    else:
        models = by_steps(int(steps), job, at, kind)
    whole = hashlib.sha256()
    for model in models:
        for name, each in sorted(model.state_dict().items()):
            part = each.to_local() if hasattr(each, "to_local") else each
            whole.update(name.encode() + part.contiguous().numpy().tobytes())
    told("sha256", whole.hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
