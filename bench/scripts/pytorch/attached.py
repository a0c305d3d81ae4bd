"""DistributedDataParallel with Covey's state: it may lose ranks, and is stopped and continued, with the same bits."""

import torch
from points import BATCH, Points, network, say_digest
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import covey.torch

covey.torch.init_process_group()
model = DistributedDataParallel(network())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = covey.torch.StepSampler(len(Points()), BATCH)
loader = DataLoader(Points(), batch_sampler=sampler)
state = covey.torch.attach(model, optimizer, data=sampler, checkpoint=True)
if state.step:
    print(f"continues with step {state.step}", flush=True)

for _ in sampler.epochs(6):
    for points, sides in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(points), sides)
        loss.backward()
        optimizer.step()
say_digest(*[each.detach() for each in model.parameters()])
