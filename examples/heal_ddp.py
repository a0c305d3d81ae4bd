#!/usr/bin/env python3
"""A PyTorch training whose workers may be killed, one or some at a time, and which ends as if nothing had been lost.

    agentctl submit --workers 4 -- python examples/heal_ddp.py
    kill -9 PID            # of one of the four, meanwhile: the other three wait, and do not begin again

A small network learns which of two spirals a point is on, with DistributedDataParallel. Four lines are Covey's: the
process group (one of gloo spans the process that dies), the sampler that knows its place by the number of the step, the
loop over epochs, and `attach`. Seeds are set, since a worker that is lost before its first step begins anew.
"""

import argparse
import hashlib
import math
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import covey.torch

POINTS = 4096


def spirals() -> TensorDataset:
    """Points of two spirals in each other, shape (POINTS, 2), and 0 or 1."""
    drawn = torch.Generator().manual_seed(0)
    side = torch.arange(POINTS) % 2
    turn = 3 * math.pi * torch.rand(POINTS, generator=drawn).sqrt()
    angle = turn + math.pi * side
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], 1) / 10
    return TensorDataset(points + 0.02 * torch.randn(POINTS, 2, generator=drawn), side.float())


def network() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(2, 64),
        torch.nn.BatchNorm1d(64),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(64, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 1),
    )


def checksum(model: Any) -> str:
    """Checksum of all that was learnt; it does not depend on how often a worker was lost."""
    learnt = torch.cat([each.detach().reshape(-1).double() for each in model.state_dict().values()])
    return hashlib.sha256(learnt.numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=32, help="points of one worker in each step")
    args = parser.parse_args()

    torch.set_num_threads(1)  # one thread adds in one order
    covey.torch.init_process_group()
    rank, data, loss_of = torch.distributed.get_rank(), spirals(), torch.nn.BCEWithLogitsLoss()
    ddp = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(ddp.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    torch.manual_seed(100 + rank)  # for dropout, which is each worker's own

    sampler = covey.torch.StepSampler(len(data), args.batch)
    loader = DataLoader(data, batch_sampler=sampler)
    state = covey.torch.attach(ddp, optimizer, also=[scheduler], data=sampler, checkpoint=True)
    if state.step:
        print(f"rank {rank}: took over from one that was lost, and goes on with step {state.step}", flush=True)
    mean = torch.zeros(())  # a worker that takes over between two epochs has no points left of the first one
    for epoch in sampler.epochs(args.epochs):
        for points, side in loader:
            optimizer.zero_grad()
            loss = loss_of(ddp(points).squeeze(1), side)
            loss.backward()
            mean = loss.detach()
            torch.distributed.all_reduce(mean, torch.distributed.ReduceOp.AVG)
            optimizer.step()
        scheduler.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {mean.item():.4f}", flush=True)
    print(f"rank {rank}: parameters {checksum(ddp.module)}", flush=True)


if __name__ == "__main__":
    main()
