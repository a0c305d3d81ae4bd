"""The callback of a loop that uses Hugging Face's `accelerate.Accelerator`."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from covey.callbacks.agreed import any_rank
from covey.callbacks.told_steps import ToldSteps, again
from covey.frameworks.torch.random_state import generators, set_generators
from covey.job.client import JobClient

NAMED = re.compile(r"step-(\d+)")


class ForAccelerator:
    """Tells of each step, and has the Accelerator save all that it prepared when the job is asked to end.

    `folder`: where; without it `accelerate` in the job's folder for checkpoints (COVEY_CHECKPOINT_DIR). All ranks must
    see it, as all ranks write there."""

    def __init__(self, accelerator: Any, folder: str | Path | None = None, job: JobClient | None = None) -> None:
        """Begin, after `accelerator.prepare`: from now on SIGTERM does not end this process, if it is a rank's."""
        self._accelerator, self._told = accelerator, ToldSteps(job)
        beside = os.path.join(os.environ.get("COVEY_CHECKPOINT_DIR", "checkpoints"), "accelerate")
        self.folder = Path(folder or beside)
        self._step = 0
        self._devices = [accelerator.device] if accelerator.device.type != "cpu" else []
        self._drawn: Any = None
        """The random generators as they were saved, until the first batch since then."""
        self._told.begins()

    def resume(self) -> int:
        """Load what was saved last, if anything was: the number of the next step, 0 at first."""
        found = self._saved()
        if found:
            self._step = max(found)
            self._accelerator.load_state(str(found[self._step]))
            self._drawn = json.loads(generators(self._devices).as_json())
        return self._step

    def batches(self, loader: Any) -> Iterator[Any]:
        """The batches of this epoch that are left. A loader that begins draws random numbers, which this start of the
        job would draw once more than one that was not stopped: they are given back. A loader that shuffles needs
        `use_seedable_sampler` of accelerate's DataLoaderConfiguration."""
        at_once = self._accelerator.gradient_accumulation_steps
        epoch, done = divmod(self._step, -(-len(loader) // at_once))
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        rest = self._accelerator.skip_first_batches(loader, done * at_once) if done else loader
        for batch in rest:
            if done and self._drawn is not None:
                set_generators(self._drawn, self._devices)
            self._drawn = None
            yield batch

    def step(self, **metrics: Any) -> None:
        """A step is done: tell of it, save if any rank has heard that the job is to end, and then end, to be started
        again. All ranks call it after each step."""
        self._told.step(self._step, metrics)
        self._step += 1
        if any_rank(self._told.stopping, self._accelerator.device):
            self._save()
            again()

    def _save(self) -> None:
        new, whole = self.folder / f"new-{self._step}", self.folder / f"step-{self._step}"
        if self._accelerator.is_main_process:
            shutil.rmtree(new, ignore_errors=True)  # of a save that was cut off
        self._accelerator.wait_for_everyone()
        self._accelerator.save_state(str(new))
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            before = self._saved()
            new.replace(whole)
            self._told.wrote(self._step, whole)
            for step, path in before.items():
                if step != self._step:
                    shutil.rmtree(path)
        self._accelerator.wait_for_everyone()

    def _saved(self) -> dict[int, Path]:
        """Whole checkpoints by their steps."""
        entries = self.folder.iterdir() if self.folder.is_dir() else ()
        return {int(found[1]): path for path in entries if (found := NAMED.fullmatch(path.name))}
