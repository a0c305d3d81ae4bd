"""GPT-2 small, 124 million parameters, from its configuration with random weights: a few steps on two ranks."""

import torch
import torch.distributed as dist
from points import keep, restored, say_digest
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

dist.init_process_group("gloo")
torch.manual_seed(1)
model = DistributedDataParallel(GPT2LMHeadModel(GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(restored(model=model), 40, 10):
    words = torch.randint(50257, (1, 8), generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
    loss = model(input_ids=words, labels=words).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step // 10}: loss {loss.item():.4f}", flush=True)
    keep(step + 10, model=model)
say_digest(*[each.detach() for each in model.parameters()])
dist.destroy_process_group()
