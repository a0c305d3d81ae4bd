"""Trainings for `test_torch_elastic` in an elastic job, with what scripts do beside plain passes: KIND STEPS [FILE].

Until the file is there, steps after the first ones take LONG_S. The script prints a line for each step of each rank
with the samples it took, and at the end the checksum of what was learnt.
"""

import hashlib
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import covey
import covey.torch

SIZE, BATCH, PARTS = 192, 4, 2
SLOW_S, LONG_S = 0.001, 1.0


class Samples(Dataset):  # type: ignore[misc]
    """A data set whose samples are noise, each with its number; noise is added from all three generators."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, at: int) -> Any:
        whole = torch.randn(8, generator=torch.Generator().manual_seed(at))
        return whole + 0.01 * random.gauss(0, 1) + 0.01 * np.random.random(), at


class StillSamples(Samples):
    """A data set without the noise from generators, of which each worker process of a DataLoader has its own."""

    def __getitem__(self, at: int) -> Any:
        return torch.randn(8, generator=torch.Generator().manual_seed(at)), at


class Place:
    """A place in the data of a rank's own, which moves on with each batch."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def device_of(kind: str, rank: int) -> torch.device:
    """`lab` trains on the laboratory device and `cuda` on a GPU, each process on another one of the host."""
    device = kind.partition("-")[0]
    if device not in ("lab", "cuda"):
        return torch.device("cpu")
    return torch.device(device, rank % torch.get_device_module(device).device_count())


class Branching(torch.nn.Module):  # type: ignore[misc]
    """A model with BatchNorm and dropout; a part of it takes no part in some ranks' passes, and one in nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3)
        self.some, self.never, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 1)

    def forward(self, inputs: Any, with_some: bool) -> Any:
        found = self.drop(self.norm(self.first(inputs)).relu())
        return self.last(self.some(found) if with_some else found)


def checksum(model: Any) -> str:
    whole = hashlib.sha256()
    for name, each in sorted(model.state_dict().items()):
        whole.update(name.encode() + each.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def train(kind: str, steps: int, go_on: Path | None) -> None:
    job = covey.join()
    device = device_of(kind, job.rank)
    if not kind.endswith("unlike"):
        torch.manual_seed(7)  # otherwise all take the parameters and the seed of rank 0
    else:
        torch.manual_seed(job.rank)
    model = Branching().to(device)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9, weight_decay=0.01)
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0, growth_interval=3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    samples, data = StillSamples() if "still" in kind else Samples(), Place() if kind.endswith("place") else None
    distributed = DistributedSampler(samples, num_replicas=4, rank=0, seed=5)
    sampler = covey.torch.StepSampler.like(distributed, BATCH, per_step=PARTS)
    workers: dict[str, Any] = {"num_workers": 2, "persistent_workers": True} if kind.endswith("workers") else {}
    loader = DataLoader(samples, batch_sampler=sampler, **workers)
    training = covey.torch.attach(
        model, optimizer, also=[scheduler, scaler], data=sampler if data is None else data, elastic=True, job=job
    )
    print("goes on", training.next_step, flush=True)
    for step in training.steps(steps):
        end_s = time.monotonic() + LONG_S
        while go_on is not None and step > 1 and not go_on.exists() and time.monotonic() < end_s:
            time.sleep(0.005)
        for rank in training.carried():
            with rank:
                if data is None:
                    batches = list(loader)
                else:
                    order = [int(rank) + 4 * at for at in range(data.at, data.at + BATCH)]
                    batches = [(torch.stack([samples[at % SIZE][0] for at in order]), torch.tensor(order))]
                    data.at += BATCH
                print("takes", step, rank, *(number for _, each in batches for number in each.tolist()), flush=True)
                for inputs, _ in batches:
                    spoilt = float("inf") if step % 5 == 2 and rank == 1 else 1.0
                    loss = model(inputs.to(device), rank % 2 == 0).square().mean() * spoilt
                    scaler.scale(loss * (1 + torch.rand((), device=device))).backward()
                    time.sleep(SLOW_S)
        training.average()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert model.never.weight.grad is None, "no rank has used it"
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            model.last.bias += 0.01 * torch.rand((), device=device)  # drawn outside of ranks: the same everywhere
        scheduler.step()
        print("ends", step, flush=True)
    print(f"sha256={checksum(model)}", flush=True)


if __name__ == "__main__":
    if sys.argv[1].startswith("lab"):
        from tests.covey.device import lab

        lab.load()
    train(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]) if sys.argv[3:] else None)
