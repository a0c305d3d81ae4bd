"""The callback of Lightning's `Trainer`."""

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from covey.callbacks.told_steps import ToldSteps, again
from covey.job.client import JobClient

NAME = "lightning.ckpt"


class ForLightning(Callback):  # type: ignore[misc]
    """Tells of each step of the optimizer, with the metrics that the module logs, and saves when the job is asked to
    end. `path`: where; without it `lightning.ckpt` in the job's folder for checkpoints (COVEY_CHECKPOINT_DIR)."""

    def __init__(self, path: str | Path | None = None, job: JobClient | None = None) -> None:
        self._told = ToldSteps(job)
        self.path = Path(path or os.path.join(os.environ.get("COVEY_CHECKPOINT_DIR", "checkpoints"), NAME))
        self._step = 0

    @property
    def saved(self) -> str | None:
        """The checkpoint to continue from, for `ckpt_path`; None where there is none."""
        return str(self.path) if self.path.is_file() else None

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """The training begins: SIGTERM does not end this process any more."""
        self._told.begins()
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        """A batch is done: tell of the step that it ended, and save if any rank has heard that the job is to end."""
        if trainer.global_step > self._step:  # else gradients are gathered for a later step
            self._step = trainer.global_step
            self._told.step(self._step - 1, trainer.callback_metrics)
        if trainer.strategy.reduce_boolean_decision(self._told.stopping, all=False):
            new = self.path.with_suffix(".new")
            trainer.save_checkpoint(new)
            if trainer.is_global_zero:
                new.replace(self.path)
                self._told.wrote(self._step, self.path)
            trainer.strategy.barrier()
            again()
