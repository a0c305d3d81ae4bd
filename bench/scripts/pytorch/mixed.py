"""bfloat16 by autocast, and a GradScaler, as its manual has both; two ranks."""

import torch
import torch.distributed as dist
from points import BATCH, Points, keep, network, restored, say_digest
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
model = DistributedDataParallel(network())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu")
sampler = DistributedSampler(Points(), shuffle=True)
loader = DataLoader(Points(), BATCH, sampler=sampler)
parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
step = restored(**parts)
for epoch in range(step // len(loader), 6):
    sampler.set_epoch(epoch)
    for number, (points, sides) in enumerate(loader, epoch * len(loader)):
        if number >= step:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = binary_cross_entropy_with_logits(model(points), sides)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            keep(number + 1, **parts)
say_digest(*[each.detach() for each in model.parameters()])
dist.destroy_process_group()
