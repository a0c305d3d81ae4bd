"""SyncBatchNorm, whose averages are over the batches of all ranks."""

import torch
import torch.distributed as dist
from points import BATCH, Points, say_digest
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(1)
layers = torch.nn.Linear(2, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 1), torch.nn.Flatten(0)
model = DistributedDataParallel(torch.nn.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(*layers)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(Points(), BATCH, sampler=DistributedSampler(Points(), shuffle=False))
for _ in range(6):
    for points, sides in loader:
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(model(points), sides).backward()
        optimizer.step()
say_digest(*[each.detach() for each in model.parameters()])
dist.destroy_process_group()
