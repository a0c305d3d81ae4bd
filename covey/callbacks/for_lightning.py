"""The callback of Lightning's `Trainer`."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from covey.callbacks.told_steps import ToldSteps, again
from covey.frameworks.torch.random_state import generators, set_generators
from covey.job.client import JobClient

NAME = "lightning.ckpt"


class ForLightning(Callback):  # type: ignore[misc]
    """Tells of each step of the optimizer, with the metrics that the module logs, and saves when the job is asked to
    end, with the random generators of all ranks. `path`: where; without it `lightning.ckpt` in the job's folder for
    checkpoints (COVEY_CHECKPOINT_DIR)."""

    def __init__(self, path: str | Path | None = None, job: JobClient | None = None) -> None:
        self._told = ToldSteps(job)
        self.path = Path(path or os.path.join(os.environ.get("COVEY_CHECKPOINT_DIR", "checkpoints"), NAME))
        self._step = 0
        self._drawn: list[str] = []
        """The random generators of each rank as they were saved, until the first batch since then."""
        self._devices: list[Any] = []

    @property
    def saved(self) -> str | None:
        """The checkpoint to continue from, for `ckpt_path`; None where there is none."""
        return str(self.path) if self.path.is_file() else None

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """The training begins: SIGTERM does not end this process any more."""
        self._told.begins()
        self._step = trainer.global_step
        device = trainer.strategy.root_device
        self._devices = [device] if device.type != "cpu" else []

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of this callback: the random generators of each rank. All ranks call it."""
        here = str(generators(self._devices).as_json())
        group = torch.distributed
        if not (group.is_available() and group.is_initialized()):
            return {"drawn": [here]}
        drawn = [here] * group.get_world_size()
        group.all_gather_object(drawn, here)
        return {"drawn": drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the random generators until the first batch: what Lightning prepares before draws from them, too."""
        self._drawn = state_dict.get("drawn", [])

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        """A batch begins: after a start from a checkpoint the random generators are those that were saved."""
        if self._drawn and len(self._drawn) == trainer.world_size:
            set_generators(json.loads(self._drawn[trainer.global_rank]), self._devices)
        self._drawn = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        """A batch is done: tell of the step that it ended, and save if any rank has heard that the job is to end."""
        if trainer.global_step > self._step:  # else gradients are gathered for a later step
            self._step = trainer.global_step
            self._told.step(self._step - 1, trainer.callback_metrics)
        if trainer.is_last_batch and hasattr(trainer.train_dataloader, "load_state_dict"):
            return  # saved at its end, it would have no batch for a new epoch: save after the next one
        if trainer.strategy.reduce_boolean_decision(self._told.stopping, all=False):
            new = self.path.with_suffix(".new")
            trainer.save_checkpoint(new)
            if trainer.is_global_zero:
                new.replace(self.path)
                self._told.wrote(self._step, self.path)
            trainer.strategy.barrier()
            again()
