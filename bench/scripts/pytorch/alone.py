"""PyTorch in one process, without a process group; it saves each ten steps, and shows its progress with tqdm."""

import torch
from points import BATCH, Points, keep, network, restored, say_digest
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, Subset
from tqdm import tqdm

model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.5)
parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
step = restored(**parts)
rest = Subset(Points(), [index % 512 for index in range(step * BATCH, 200 * BATCH)])
for points, sides in tqdm(DataLoader(rest, BATCH)):
    optimizer.zero_grad()
    binary_cross_entropy_with_logits(model(points), sides).backward()
    optimizer.step()
    scheduler.step()
    step += 1
    keep(step, **parts)
say_digest(*[each.detach() for each in model.parameters()])
