"""What a loop of one's own tells of its steps, with the same in TensorBoard's files or at Weights & Biases.

Rank 0 writes. Over all starts of a job it is one log: TensorBoard's leaves out what a start before wrote of steps that
are made again, and the run at Weights & Biases is the job's own, which is resumed. Both have `covey/attempt`, the
number of the start, and `covey/saved`, the step of the newest checkpoint, so a curve shows where the job had to stop.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from covey.callbacks.agreed import any_rank, attempt, is_first
from covey.callbacks.told_steps import ToldSteps, again, finite
from covey.job.client import JobClient


class LoopLog:
    """A loop's steps, told to the agent. Subclasses write them elsewhere, too."""

    def __init__(self, job: JobClient | None = None) -> None:
        """From now on SIGTERM does not end this process, if it is a rank's."""
        self._told = ToldSteps(job)
        self._told.begins()

    def step(self, number: int, **metrics: Any) -> None:
        """Step `number` is done, the first is 0: tell of it, with these metrics. Of them finite numbers count."""
        found = finite(metrics)
        self._told.step(number, found)
        self._write(number, {**found, "covey/attempt": float(attempt())})

    def stops(self) -> bool:
        """Whether any rank has heard that the job is to end: all ranks ask after each step, and then save."""
        return any_rank(self._told.stopping)

    def saved(self, step: int, path: str | Path) -> None:
        """A checkpoint is complete, from which `step` would be the next one."""
        self._told.wrote(step, path)
        self._write(max(0, step - 1), {"covey/saved": float(step)})

    def again(self) -> NoReturn:
        """End this process, and have the job queued again."""
        self.close(again=True)
        again()

    def close(self, again: bool = False) -> None:
        """Write what is left. `again`: the job is started again."""

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics of a step elsewhere."""


class ForTensorBoard(LoopLog):
    """Writes to TensorBoard's files in `folder`, by PyTorch's `SummaryWriter`. `first`: the step that this start of the
    job begins with."""

    def __init__(self, folder: str | Path = "runs", first: int = 0, job: JobClient | None = None) -> None:
        super().__init__(job)
        self._writer: Any = None
        if is_first():
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder), purge_step=first if attempt() > 1 or first else None)

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is not None:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)

    def close(self, again: bool = False) -> None:
        """Write what is left to the files."""
        if self._writer is not None:
            self._writer.close()


class ForWandb(LoopLog):
    """Writes to a run of Weights & Biases, which all starts of the job share. `options`: those of `wandb.init`."""

    def __init__(self, job: JobClient | None = None, **options: Any) -> None:
        super().__init__(job)
        self._run: Any = None
        if is_first():
            import wandb

            self._run = wandb.init(**(same_run(os.environ) | options))

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._run is not None:
            self._run.log(dict(metrics), step=step)

    def close(self, again: bool = False) -> None:
        """Send what is left. A run whose job is started again is marked as preempting."""
        if self._run is not None:
            if again:
                self._run.mark_preempting()
            self._run.finish(exit_code=1 if again else 0)


def same_run(environ: Mapping[str, str]) -> dict[str, Any]:
    """Options of `wandb.init` by which each start of a job resumes the run of the first one; none outside a job. The id
    is the name of the job's folder for checkpoints, which no other job has, also of a rack that was made anew."""
    folder = environ.get("COVEY_CHECKPOINT_DIR", "")
    if "COVEY_JOB_ID" not in environ or not folder:
        return {}
    return {"id": os.path.basename(folder), "name": environ.get("COVEY_JOB_NAME") or None, "resume": "allow"}
