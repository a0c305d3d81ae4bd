"""Two processes by torch.multiprocessing.spawn in a job of one worker, as its manual writes it."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from points import BATCH, Points, network, say_digest
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def train(rank: int, world_size: int) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "29511"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = DistributedSampler(Points(), shuffle=True)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for points, sides in DataLoader(Points(), BATCH, sampler=sampler):
            optimizer.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(model(points), sides).backward()
            optimizer.step()
    say_digest(*[each.detach() for each in model.parameters()])
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, args=(2,), nprocs=2)
