"""A DataLoader with two persistent workers, which read ahead; two ranks."""

import torch
import torch.distributed as dist
from points import BATCH, Points, keep, network, restored, say_digest
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = DistributedSampler(Points(), shuffle=True)
    loader = DataLoader(Points(), BATCH, sampler=sampler, num_workers=2, persistent_workers=True)
    step = restored(model=model, optimizer=optimizer)
    for epoch in range(step // len(loader), 12):
        sampler.set_epoch(epoch)
        for number, (points, sides) in enumerate(loader, epoch * len(loader)):
            if number >= step:
                optimizer.zero_grad()
                binary_cross_entropy_with_logits(model(points), sides).backward()
                optimizer.step()
                keep(number + 1, model=model, optimizer=optimizer)
    say_digest(*[each.detach() for each in model.parameters()])
    dist.destroy_process_group()
