"""What callbacks of every trainer do: they tell the agent of steps and metrics, and hear when the job is to end."""

import math
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from covey.core.errors import EXIT_AGAIN
from covey.hooks import rank_of
from covey.job import this_job
from covey.job.client import JobClient

OF_STEPS = frozenset({"self", "step", "step_s", "compute_s", "communicate_s", "input_s", "memory_bytes"})
"""What `JobClient.step` takes for something else than a metric."""


class ToldSteps:
    """The job of a trainer, if this process is a rank of one."""

    def __init__(self, job: JobClient | None = None) -> None:
        """`job`: this rank's job; without it, the one of this process, if `begins` finds any."""
        self._job = job

    def begins(self) -> None:
        """The training begins: from now on SIGTERM does not end this process, if that is the job's way to ask."""
        if self._job is None and not rank_of(os.environ):  # else a launcher's other process speaks for this rank
            self._job = this_job.of_process()
        if self._job is not None and threading.current_thread() is threading.main_thread():
            self._job.defer_stop()

    def step(self, number: int, metrics: Mapping[str, Any]) -> None:
        """Tell of a step that is done, the first has number 0. Of `metrics` those that are finite numbers count."""
        if self._job is not None:
            self._job.step(number, **finite(metrics))

    @property
    def stopping(self) -> bool:
        """Whether this rank has heard that the job is to end."""
        return self._job is not None and self._job.stopping

    def wrote(self, step: int, path: str | Path) -> None:
        """Tell of a complete checkpoint from which `step` would be the next one."""
        if self._job is not None:
            self._job.saved(step, Path(path))


def finite(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics that are finite numbers, or tensors of one number. A name that `JobClient.step` has for something
    else gets a `_` at its end."""
    found = dict[str, Any]()
    for name, value in metrics.items():
        try:
            number = float(value.detach() if hasattr(value, "detach") else value)  # PyTorch warns of a gradient's
        except (TypeError, ValueError, RuntimeError):
            continue
        if math.isfinite(number):
            found[f"{name}_" if name in OF_STEPS else name] = number
    return found


def again() -> NoReturn:
    """End this process, and have the job queued again."""
    sys.stdout.flush()
    sys.exit(EXIT_AGAIN)
