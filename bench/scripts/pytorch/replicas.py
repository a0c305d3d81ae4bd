"""FSDP2 on a mesh of two replicas (HSDP), with Covey's state: a lost rank gets its shard from the other replica."""

import torch
from points import BATCH, Points, network, say_digest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader

import covey.torch

covey.torch.init_process_group()
model = network()
fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = covey.torch.StepSampler(len(Points()), BATCH)
loader = DataLoader(Points(), batch_sampler=sampler)
state = covey.torch.attach(model, optimizer, data=sampler, checkpoint=True)
if state.step:
    print(f"continues with step {state.step}", flush=True)

for _ in sampler.epochs(12):
    for points, sides in loader:
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(model(points), sides).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
say_digest(*[each.full_tensor().detach() for each in model.parameters()])
