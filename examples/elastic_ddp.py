#!/usr/bin/env python3
"""A PyTorch training whose number of processes changes while it runs: a small network learns digits, with 8 ranks.

    agentctl submit --workers 2..8 -- python examples/elastic_ddp.py
    agentctl scale JOB 6        (and kill -9 a process, or a host, whenever you like)

The job has 8 ranks for ever: each has its own batches, and its own random generators for dropout and noise. How many
processes compute for them changes, and every run prints the same digest. Compared with a training on one GPU, three
lines are new: `attach`, the loop over the ranks that this process carries, and `training.step()` in place of
`optimizer.step()`. (The digest depends on the kind of processor, as sums in PyTorch do.)
"""

import argparse
import hashlib
import time
from pathlib import Path
from typing import Any

import torch
from digits import load
from torch.utils.data import DataLoader, TensorDataset

import covey.torch


def network(width: int) -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(64, width),
        torch.nn.BatchNorm1d(width),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(width, 10),
    )


def digest(model: Any) -> str:
    """Checksum of all that was learnt; it does not depend on which processes there were."""
    learnt = torch.cat([each.detach().reshape(-1).double() for each in model.state_dict().values()])
    return hashlib.sha256(learnt.numpy().tobytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30, help="(default %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="images of one rank in each step (default %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="width of the network (default %(default)s)")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="each rank takes at least so long in each step")
    parser.add_argument("--out", type=Path, help="the process of rank 0 writes the digest here")
    args = parser.parse_args()

    torch.set_num_threads(1)  # one thread adds in one order
    images, labels, test_images, test_labels = map(torch.from_numpy, load())
    model = network(args.width)
    optimizer = torch.optim.Adam(model.parameters(), 0.003)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    data = TensorDataset(images, labels.long())
    sampler = covey.torch.StepSampler(len(data), args.batch)
    loader = DataLoader(data, batch_sampler=sampler)
    training = covey.torch.attach(model, optimizer, also=[scheduler], data=sampler, checkpoint=True, elastic=True)
    for epoch in sampler.epochs(args.epochs):
        for _ in training.steps((epoch + 1) * sampler.steps_per_epoch):
            for rank in training.carried():
                with rank:
                    for seen, wanted in loader:
                        noisy = seen + 0.1 * torch.randn_like(seen)
                        loss = torch.nn.functional.cross_entropy(model(noisy), wanted)
                        loss.backward()
                        mean = rank.mean("loss", loss)
                    time.sleep(args.step_seconds)
            training.step()
        scheduler.step()
        print(f"epoch {epoch}: loss {mean.value:.4f}", flush=True)

    model.eval()
    right = (model(test_images).argmax(1) == test_labels).float().mean().item()
    print(f"state sha256={digest(model)}  accuracy={right:.4f}", flush=True)
    if args.out is not None and covey.join().rank == 0:
        args.out.write_text(digest(model))


if __name__ == "__main__":
    main()
