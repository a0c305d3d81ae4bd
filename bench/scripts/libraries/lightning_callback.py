"""Lightning's Trainer with `covey.callbacks`: it saves when the job is asked to end, and only then."""

import os

import lightning
import torch
from points import BATCH, Points, network, say_digest
from torchdata.stateful_dataloader import StatefulDataLoader

import covey.callbacks


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


covey_callback = covey.callbacks.ForLightning()
trainer = lightning.Trainer(
    accelerator="cpu", strategy="ddp", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), max_epochs=4,
    callbacks=[covey_callback], logger=False, enable_checkpointing=False, enable_progress_bar=False,
)  # fmt: skip
if covey_callback.saved:
    print(f"continues with step {torch.load(covey_callback.saved, weights_only=False)['global_step']}", flush=True)
model = Spirals()
trainer.fit(model, StatefulDataLoader(Points(), BATCH, shuffle=False), ckpt_path=covey_callback.saved)
say_digest(*[each.detach() for each in model.parameters()])
