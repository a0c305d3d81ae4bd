"""FSDP2: parameters, gradients and moments lie in shards on two ranks; each rank saves its own by DCP."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from points import BATCH, Points, network, say_digest
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
model = network()
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = DistributedSampler(Points(), shuffle=True)
loader = DataLoader(Points(), BATCH, sampler=sampler)
done = sorted((name for name in os.listdir() if name.startswith("step-")), key=lambda name: int(name[5:]))
step = int(done[-1][5:]) if done else 0
if done:
    parameters, moments = get_state_dict(model, optimizer)
    dcp.load({"model": parameters, "optimizer": moments}, checkpoint_id=done[-1])
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=moments)
    print(f"continues with step {step}", flush=True)
for epoch in range(step // len(loader), 6):
    sampler.set_epoch(epoch)
    for number, (points, sides) in enumerate(loader, epoch * len(loader)):
        if number < step:
            continue
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(model(points), sides).backward()
        optimizer.step()
        if number % 20 == 19:
            parameters, moments = get_state_dict(model, optimizer)
            dcp.save({"model": parameters, "optimizer": moments}, checkpoint_id=f"new-{number + 1}")
            if dist.get_rank() == 0:
                os.rename(f"new-{number + 1}", f"step-{number + 1}")
say_digest(*[each.full_tensor().detach() for each in model.parameters()])
dist.destroy_process_group()
