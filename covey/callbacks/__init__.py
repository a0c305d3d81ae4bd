"""Callbacks of trainers, and of loops of one's own: `agentctl job` shows steps and losses, and the training is saved
when the job is asked to end.

    from transformers import Trainer
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[covey.callbacks.ForTrainer()])
    trainer.train(resume_from_checkpoint=covey.callbacks.last_of(arguments.output_dir))

    covey_callback = covey.callbacks.ForLightning()
    trainer = lightning.Trainer(callbacks=[covey_callback])
    trainer.fit(model, loader, ckpt_path=covey_callback.saved)

    covey_callback = covey.callbacks.ForAccelerator(accelerator)    # after accelerator.prepare
    step = covey_callback.resume()
    while step < steps:
        for batch in covey_callback.batches(loader):  # those of this epoch that are left
            ...
            step += 1
            covey_callback.step(loss=loss)

A loop of one's own tells its steps to the agent, and to TensorBoard or Weights & Biases (`ForWandb(project="bert")`):

    log = covey.callbacks.ForTensorBoard("runs", first=step)
    while step < steps:
        ...
        log.step(step, loss=loss)
        step += 1
        if log.stops():  # any rank has heard that the job is to end
            save(step, "last.pt")
            log.saved(step, "last.pt")
            log.again()
    log.close()

All ranks save after the same step, though each hears at another time that the job is to end, and exit with 75: the job
is queued again, and continues from there. Outside a job the callbacks do nothing. A name is imported at its first use,
with the library that it is for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.callbacks.for_accelerator import ForAccelerator as ForAccelerator
    from covey.callbacks.for_lightning import ForLightning as ForLightning
    from covey.callbacks.for_logs import ForTensorBoard as ForTensorBoard
    from covey.callbacks.for_logs import ForWandb as ForWandb
    from covey.callbacks.for_trainer import ForTrainer as ForTrainer
    from covey.callbacks.for_trainer import last_of as last_of

__all__ = ["ForAccelerator", "ForLightning", "ForTensorBoard", "ForTrainer", "ForWandb", "last_of"]
_FROM = {
    "ForAccelerator": "for_accelerator",
    "ForLightning": "for_lightning",
    "ForTensorBoard": "for_logs",
    "ForTrainer": "for_trainer",
    "ForWandb": "for_logs",
    "last_of": "for_trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module 'covey.callbacks' has no attribute {name!r}")
    return getattr(importlib.import_module(f"covey.callbacks.{_FROM[name]}"), name)
