"""The callback of Hugging Face's `transformers.Trainer`."""

import os
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from covey.callbacks.agreed import any_rank
from covey.callbacks.told_steps import ToldSteps, again
from covey.job.client import JobClient


def last_of(folder: str) -> str | None:
    """The newest checkpoint in an `output_dir`, for `resume_from_checkpoint`; None where there is none."""
    return get_last_checkpoint(folder) if os.path.isdir(folder) else None


class ForTrainer(TrainerCallback):  # type: ignore[misc]
    """Tells of each step, with what was logged last, and has the Trainer save when the job is asked to end."""

    def __init__(self, job: JobClient | None = None) -> None:
        self._told = ToldSteps(job)
        self._logged: dict[str, Any] = {}
        self._ends = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The training begins: SIGTERM does not end this process any more."""
        self._told.begins()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Losses and rates were logged: the next steps are told with them."""
        self._logged = logs or {}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """A step is done: tell of it, and save if any rank has heard that the job is to end."""
        self._told.step(state.global_step - 1, self._logged)
        if any_rank(self._told.stopping, args.device):
            self._ends = control.should_save = True
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The Trainer has saved: this process ends, if that was for the end of the job."""
        if state.is_world_process_zero:
            self._told.wrote(state.global_step, os.path.join(args.output_dir, f"checkpoint-{state.global_step}"))
        if self._ends:
            any_rank(True, args.device)  # a barrier: no rank ends before all have written
            again()
