"""DistributedDataParallel that gathers the gradients of four batches by no_sync, and steps once for them."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from points import BATCH, Points, keep, network, restored, say_digest
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
model = DistributedDataParallel(network())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(Points(), BATCH, sampler=DistributedSampler(Points(), shuffle=False))
step = restored(model=model, optimizer=optimizer)
for epoch in range(step // (len(loader) // 4), 12):
    for number, (points, sides) in enumerate(loader):
        now = epoch * (len(loader) // 4) + number // 4
        if now < step:
            continue
        with model.no_sync() if number % 4 != 3 else nullcontext():
            (binary_cross_entropy_with_logits(model(points), sides) / 4).backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
            keep(now + 1, model=model, optimizer=optimizer)
say_digest(*[each.detach() for each in model.parameters()])
dist.destroy_process_group()
