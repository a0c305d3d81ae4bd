"""Lightning's Trainer with strategy "ddp", one process a rank; it saves after each epoch, and continues from there."""

import argparse
import os

import lightning
import torch
from points import BATCH, Points, network, say_digest
from torch.utils.data import DataLoader


class Spirals(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = network()

    def training_step(self, batch, _):
        points, sides = batch
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self.network(points), sides)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
parser.add_argument("--nodes", type=int, default=int(os.environ.get("GROUP_WORLD_SIZE", "1")))
options = parser.parse_args()
saves = lightning.pytorch.callbacks.ModelCheckpoint("saved", save_last=True)
trainer = lightning.Trainer(
    accelerator="cpu", strategy="ddp", devices=options.devices, num_nodes=options.nodes, max_epochs=4,
    callbacks=[saves], logger=False, enable_progress_bar=False,
)  # fmt: skip
last = "saved/last.ckpt" if os.path.exists("saved/last.ckpt") else None
if last:
    print(f"continues with step {torch.load(last, weights_only=False)['global_step']}", flush=True)
model = Spirals()
trainer.fit(model, DataLoader(Points(), BATCH, shuffle=False), ckpt_path=last)
say_digest(*[each.detach() for each in model.parameters()])
