"""Callbacks for trainers that have a loop of their own: `agentctl job` shows steps and losses, and the training is
saved when the job is asked to end.

    from transformers import Trainer
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[covey.callbacks.ForTrainer()])
    trainer.train(resume_from_checkpoint=covey.callbacks.last_of(arguments.output_dir))

    covey_callback = covey.callbacks.ForLightning()
    trainer = lightning.Trainer(callbacks=[covey_callback])
    trainer.fit(model, loader, ckpt_path=covey_callback.saved)

All ranks save after the same step, though each hears at another time that the job is to end, and exit with 75: the job
is queued again, and continues from there. Outside a job the callbacks do nothing. A name is imported at its first use,
with the library that it is for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.callbacks.for_lightning import ForLightning as ForLightning
    from covey.callbacks.for_trainer import ForTrainer as ForTrainer
    from covey.callbacks.for_trainer import last_of as last_of

__all__ = ["ForLightning", "ForTrainer", "last_of"]
_FROM = {"ForLightning": "for_lightning", "ForTrainer": "for_trainer", "last_of": "for_trainer"}


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module 'covey.callbacks' has no attribute {name!r}")
    return getattr(importlib.import_module(f"covey.callbacks.{_FROM[name]}"), name)
