"""DistributedDataParallel whose losses go to TensorBoard's files and to Weights & Biases, offline."""

import torch
import torch.distributed as dist
import wandb
from points import BATCH, Points, keep, network, restored, say_digest
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.tensorboard import SummaryWriter

dist.init_process_group("gloo")
model = DistributedDataParallel(network())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(Points(), BATCH, sampler=DistributedSampler(Points(), shuffle=False))
step = restored(model=model, optimizer=optimizer)
first = dist.get_rank() == 0
writer = SummaryWriter("runs") if first else None
run = wandb.init(project="spirals", mode="offline", dir=".") if first else None
for epoch in range(step // len(loader), 6):
    for number, (points, sides) in enumerate(loader, epoch * len(loader)):
        if number < step:
            continue
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(points), sides)
        loss.backward()
        optimizer.step()
        if first:
            writer.add_scalar("loss", loss.item(), number)
            run.log({"loss": loss.item()})
        keep(number + 1, model=model, optimizer=optimizer)
say_digest(*[each.detach() for each in model.parameters()])
if first:
    writer.close()
    run.finish()
dist.destroy_process_group()
