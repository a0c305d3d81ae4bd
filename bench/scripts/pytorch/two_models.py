"""Two networks that learn against each other, each in a DistributedDataParallel with an optimizer of its own."""

import torch
import torch.distributed as dist
from points import BATCH, Points, keep, network, restored, say_digest
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
critic = DistributedDataParallel(network())
maker = DistributedDataParallel(torch.nn.Linear(2, 2))
optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (critic, maker)]
sampler = DistributedSampler(Points(), shuffle=False)
loader = DataLoader(Points(), BATCH, sampler=sampler)
parts = {"critic": critic, "maker": maker, "of critic": optimizers[0], "of maker": optimizers[1]}
step = restored(**parts)
ones, zeros = torch.ones(BATCH), torch.zeros(BATCH)
for epoch in range(step // len(loader), 6):
    for number, (points, _) in enumerate(loader, epoch * len(loader)):
        if number >= step:
            noise = torch.randn(BATCH, 2, generator=torch.Generator().manual_seed(number))
            made = maker(noise)
            loss = binary_cross_entropy_with_logits(
                critic(torch.cat([points, made.detach()])), torch.cat([ones, zeros])
            )
            optimizers[0].zero_grad()
            loss.backward()
            optimizers[0].step()
            for each in critic.parameters():
                each.requires_grad_(False)
            optimizers[1].zero_grad()
            binary_cross_entropy_with_logits(critic.module(made), ones).backward()
            optimizers[1].step()
            for each in critic.parameters():
                each.requires_grad_(True)
            keep(number + 1, **parts)
say_digest(*[each.detach() for one in (critic, maker) for each in one.parameters()])
dist.destroy_process_group()
