"""GPT-2 small with Covey's state: a rank is lost, and the others give its successor 124 million parameters."""

import torch
from points import say_digest
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

import covey.torch

covey.torch.init_process_group()
rank = torch.distributed.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(GPT2LMHeadModel(GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = covey.torch.attach(model, optimizer, checkpoint=True)
if state.step:
    print(f"continues with step {state.step}", flush=True)
for step in state.steps(16):
    words = torch.randint(50257, (1, 8), generator=torch.Generator().manual_seed(2 * step + rank))
    loss = model(input_ids=words, labels=words).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}", flush=True)
say_digest(*[each.detach() for each in model.parameters()])
