"""Ranks of a training for `test_torch_heal`: they do what a user's script does, with a client made by hand.

    RANK RANKS INCARNATION KIND STEPS EPOCH ADDRESS [FOLDER]       EPOCH, ADDRESS: of the aggregator

FOLDER: the checkpoint is there; the file stop-RANK there asks a rank to end.

It prints the samples that it takes in each step, and at the end the checksum of what was learnt.
"""

import contextlib
import hashlib
import math
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import covey.torch
from covey.core.ids import HostId, JobId
from covey.healing.neighbours import HealedRank
from covey.healing.owns import RANKS_MAX
from covey.job.job_state import ScriptState, begun, stops_of
from covey.job.tensors import TensorClient
from covey.wire.job import AggregatorAt

SIZE, BATCH, PARTS = 192, 4, 2
SLOW_S = 0.01


class RankOfTest(NamedTuple):
    rank: int
    ranks: int
    incarnation: int
    kind: str
    steps: int
    folder: Path | None = None

    @property
    def checkpoint(self) -> Path | bool:
        return False if self.folder is None else self.folder / "state.safetensors"

    @property
    def asked(self) -> bool:
        """Whether this rank has heard that the job is to stop."""
        return self.folder is not None and (self.folder / f"stop-{self.rank}").exists()

    @property
    def left_s(self) -> float:
        return math.inf

    def listens(self) -> None:
        """It always does."""


class PlayedJob:
    """The part of a JobClient that `attach` uses."""

    def __init__(self, of: RankOfTest, at: AggregatorAt) -> None:
        self.rank, self.world_size, self._of = of.rank, of.ranks, of
        self.tensors = TensorClient(
            JobId("j1"), of.rank, of.ranks, lambda epoch, why, table: None, incarnation=of.incarnation
        )
        self.tensors.moved(at)

    def shares_no_memory(self) -> None:
        """It never did."""

    def heals(self) -> None:
        told("heals no more")

    def state(self, get: Any, load: Any, *, own: Any, step: int, checkpoint: Any, stop: Any) -> Any:
        me = HealedRank(self.rank, self.tensors.world_size, self._of.incarnation, step=step)
        stop = stops_of(self._of, checkpoint, stop, leave=self.tensors.leave)
        most = 1 if "neighbours" in self._of.kind else RANKS_MAX
        return begun(self.tensors, me, ScriptState(get, load, own), gathers_max=most, stop=stop)


class Samples(Dataset):  # type: ignore[misc]
    """A data set whose samples are noise, each with its number; the noise that augments it is drawn anew each time."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, at: int) -> Any:
        whole = torch.randn(8, generator=torch.Generator().manual_seed(at))
        return whole + 0.01 * random.gauss(0, 1) + 0.01 * np.random.random(), at


def model_of(of: RankOfTest) -> Any:
    """The model of a rank. `unlike`: each rank begins with another one, and takes rank 0's."""
    torch.manual_seed(of.rank if of.kind == "unlike" else 7)
    layers = [torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3)]
    more = [torch.nn.Linear(16, 16) for _ in range(3)]
    last = torch.nn.Linear(16, 2 if of.kind == "other" and of.incarnation else 1)
    return torch.nn.Sequential(*layers, *more, last).to(device_of(of))


def device_of(of: RankOfTest) -> torch.device:
    """The device of a rank: `lab-..` kinds train on the laboratory device and `cuda-..` kinds on a GPU, a successor on
    another one of the host where there are several."""
    device = of.kind.partition("-")[0]
    if device not in ("lab", "cuda"):
        return torch.device("cpu")
    return torch.device(device, (of.rank + of.incarnation) % torch.get_device_module(device).device_count())


def told(*words: Any) -> None:
    print(*words, flush=True)


def checksum(model: Any) -> str:
    whole = hashlib.sha256()
    for name, each in sorted(model.state_dict().items()):
        whole.update(name.encode() + each.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def seeded(of: RankOfTest) -> None:
    torch.manual_seed(100 + of.rank)
    random.seed(of.rank)
    np.random.seed(of.rank)


def sampler_of(of: RankOfTest, samples: Samples) -> covey.torch.StepSampler:
    if of.kind == "unlike":
        return covey.torch.StepSampler.like(DistributedSampler(samples, seed=5), BATCH)
    return covey.torch.StepSampler(SIZE, BATCH, seed=3)


def by_epochs(of: RankOfTest, job: Any) -> Any:
    """A training with Adam, dropout, a schedule by epochs, and a stock loop over epochs and a DataLoader."""
    model, samples = model_of(of), Samples()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.002)
    optimizer: Any = torch.optim.Adam(ddp.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    seeded(of)
    sampler = sampler_of(of, samples)
    loader = DataLoader(samples, batch_sampler=sampler)
    state = covey.torch.attach(ddp, optimizer, job, also=[scheduler], data=sampler, checkpoint=of.checkpoint)
    told("goes on", state.step)
    for _ in sampler.epochs(of.steps // sampler.steps_per_epoch):
        for inputs, numbers in loader:
            told("takes", state.next_step, *numbers.tolist())
            optimizer.zero_grad()
            loss = ddp(inputs.to(device_of(of))).square().mean() * (1 + torch.rand(()))
            loss.backward()
            if of.kind == "draws":
                torch.rand(1)
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean, torch.distributed.ReduceOp.AVG)
            optimizer.step()
            time.sleep(SLOW_S)
        scheduler.step()
    return model


def by_steps(of: RankOfTest, job: Any) -> Any:
    """A training with momentum, several batches a step (no_sync but for the last), and a scaler that skips steps."""
    model, samples = model_of(of), Samples()
    ddp = DistributedDataParallel(model, find_unused_parameters=device_of(of).type != "cpu")
    optimizer: Any = torch.optim.SGD(ddp.parameters(), 0.02, momentum=0.9)
    scaler = torch.amp.GradScaler(device_of(of).type, init_scale=4.0, growth_interval=3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, of.steps)
    seeded(of)
    sampler = covey.torch.StepSampler(SIZE, BATCH, per_step=PARTS)
    state = covey.torch.attach(ddp, optimizer, job, also=[scheduler, scaler], checkpoint=of.checkpoint)
    told("goes on", state.step)
    for step in state.steps(of.steps):
        optimizer.zero_grad()
        chosen = [sampler.batch_of(step, part) for part in range(PARTS)]
        told("takes", step, *chosen[0], *chosen[1])
        for part in range(PARTS):
            inputs = torch.stack([samples[at][0] for at in chosen[part]])
            with contextlib.nullcontext() if part == PARTS - 1 else ddp.no_sync():
                spoilt = float("inf") if step % 5 == 2 and of.rank == 1 else 1.0
                scaler.scale(ddp(inputs.to(device_of(of))).square().mean() * spoilt).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        told("scale", step, scaler.get_scale())
        time.sleep(SLOW_S)
    return model


def train(of: RankOfTest, at: AggregatorAt) -> None:
    job: Any = PlayedJob(of, at)
    covey.torch.init_process_group(job)
    model = training_of(of.kind)(of, job)
    ranks = torch.tensor([of.rank + (5 << 40)], dtype=torch.int64)
    torch.distributed.all_reduce(ranks)
    told("sum", ranks.item())
    told("sha256", checksum(model))


def training_of(kind: str) -> Any:
    """The training of this kind."""
    if "models-" in kind:
        from tests.covey import torch_models_script

        return torch_models_script.TRAININGS[kind.rpartition("-")[2]]
    return by_steps if kind.endswith("steps") else by_epochs


def main(words: list[str]) -> None:
    rank, ranks, incarnation, kind, steps, epoch, address, *folder = words
    if kind.startswith("lab"):
        from tests.covey.device import lab

        lab.load()
    at = AggregatorAt(JobId("j1"), int(epoch), HostId("h1"), address, b"sixteen bytes !!")
    train(RankOfTest(int(rank), int(ranks), int(incarnation), kind, int(steps), *map(Path, folder)), at)


if __name__ == "__main__":
    main(sys.argv[1:])
