"""A loop of Hugging Face's accelerate with `covey.callbacks`: it saves when the job is asked to end, and only then."""

import torch
from accelerate import Accelerator
from points import BATCH, Points, network, say_digest
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader

import covey.callbacks

accelerator = Accelerator(cpu=True)
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(Points(), BATCH, shuffle=False)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
covey_callback = covey.callbacks.ForAccelerator(accelerator)
step = covey_callback.resume()
if step:
    print(f"continues with step {step}", flush=True)
while step < 6 * len(loader):
    for points, sides in covey_callback.batches(loader):
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(points), sides)
        accelerator.backward(loss)
        optimizer.step()
        step += 1
        covey_callback.step(loss=loss)
say_digest(*[each.detach() for each in model.parameters()])
accelerator.end_training()
