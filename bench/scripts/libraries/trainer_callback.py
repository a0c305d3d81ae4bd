"""Hugging Face's Trainer with `covey.callbacks`: it saves when the job is asked to end, and only then."""

import os
import time

import torch
from points import say_digest
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import covey.callbacks


class Words(torch.utils.data.Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        time.sleep(0.003)
        words = torch.randint(100, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


torch.manual_seed(1)
model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=16, n_embd=32, n_layer=2, n_head=2))
arguments = TrainingArguments(
    "out", max_steps=100, per_device_train_batch_size=4, save_strategy="no", logging_steps=10,
    report_to=[], use_cpu=True, disable_tqdm=True,
)  # fmt: skip
last = get_last_checkpoint("out") if os.path.isdir("out") else None
if last:
    print(f"continues with step {last.rpartition('-')[2]}", flush=True)
trainer = Trainer(model, arguments, train_dataset=Words(), callbacks=[covey.callbacks.ForTrainer()])
trainer.train(resume_from_checkpoint=last)
say_digest(*[each.detach() for each in model.parameters()])
