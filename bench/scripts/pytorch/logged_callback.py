"""DistributedDataParallel whose losses go to TensorBoard's files or to Weights & Biases, offline, by `covey.callbacks`:
it saves when the job is asked to end, and only then."""

import sys

import torch
import torch.distributed as dist
from points import BATCH, Points, keep, network, restored, say_digest
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import covey.callbacks

dist.init_process_group("gloo")
model = DistributedDataParallel(network())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(Points(), BATCH, sampler=DistributedSampler(Points(), shuffle=False))
step = restored(model=model, optimizer=optimizer)
if sys.argv[1] == "tensorboard":
    log = covey.callbacks.ForTensorBoard("runs", first=step)
else:
    log = covey.callbacks.ForWandb(project="spirals", dir=".")
for epoch in range(step // len(loader), 6):
    for number, (points, sides) in enumerate(loader, epoch * len(loader)):
        if number < step:
            continue
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(points), sides)
        loss.backward()
        optimizer.step()
        log.step(number, loss=loss)
        if log.stops():
            keep(number + 1, every=1, model=model, optimizer=optimizer)
            dist.barrier()
            log.saved(number + 1, "checkpoint.pt")
            log.again()
say_digest(*[each.detach() for each in model.parameters()])
log.close()
dist.destroy_process_group()
