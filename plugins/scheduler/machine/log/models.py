"""What the log remembers of models after their jobs: how skewed they are, what a gang lost when it was spread, and
which ones do not pair on shared GPUs.

A job is known by its tenant and name, so the second run of `resnet` is placed by what the first one showed. PACKLIMIT
is fitted anew from the gangs that ran both on one host and on several (Gu 2021 §3.3.3).
"""

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from plugins.scheduler.messages.spec import JobSpec
from plugins.scheduler.policy.packing import SpreadLoss, loss, refit, share, shown

MODELS_MAX = 1024
"""Models whose tensors are remembered; the longest unseen goes first."""
GANGS_MAX = 256
"""Gangs whose step times are remembered; the longest unseen goes first."""
PAIRS_MAX = 256
"""Models that harmed others on a GPU that are remembered; the longest unseen goes first."""
HARMED_MAX = 16
"""The number of models, the newest, that one model is remembered to have harmed."""
PAIR_S = 86_400.0
"""Seconds after which a pair may be tried again (ours: a day), since scripts change under their names."""


T = TypeVar("T")


class StepHistory(msgspec.Struct, frozen=True):
    """Median step times of one gang in seconds: the newest on one host, and the newest on several."""

    packed_s: float | None = None
    spread_s: float | None = None

    @property
    def slowdown(self) -> float | None:
        """Step time spread over step time packed, minus 1, as in `packing.SpreadLoss`; None: it did not run both
        ways."""
        return self.spread_s / self.packed_s - 1 if self.packed_s and self.spread_s else None


class Models:
    """What is remembered of models. It is part of the replicated state; only commands of the log change it
    (`machine/log/queue.py`)."""

    def __init__(
        self,
        tensors: Mapping[str, tuple[int, int]] = {},
        steps: Mapping[str, StepHistory] = {},
        pairs: Mapping[str, Mapping[str, float]] = {},
    ) -> None:
        self.pairs = {guest: dict(harmed) for guest, harmed in pairs.items()}
        """Tenant and name of an opportunistic job -> those of guaranteed jobs that it harmed on a GPU -> when it did
        last, as the log has it (wall clock, s)."""
        self.tensors = dict(tensors)
        """Tenant and name -> (bytes of the largest tensor, bytes of all)."""
        self.steps = dict(steps)
        """Tenant, name, workers and GPUs of each -> the gang's step times."""
        self._spreads: list[SpreadLoss] | None = None

    def saw_tensors(self, spec: JobSpec, largest_bytes: int, total_bytes: int) -> None:
        _newest(self.tensors, model_of(spec), (largest_bytes, total_bytes), MODELS_MAX)
        self._spreads = None

    def saw_steps(self, spec: JobSpec, hosts: int, step_s: float) -> None:
        """Note that a start is over that made steps of `step_s` seconds on `hosts` hosts."""
        if spec.workers < 2 or step_s <= 0:
            return
        known = self.steps.get(gang_of(spec), StepHistory())
        news = StepHistory(step_s, known.spread_s) if hosts == 1 else StepHistory(known.packed_s, step_s)
        _newest(self.steps, gang_of(spec), news, GANGS_MAX)
        self._spreads = None

    def saw_harm(self, guest: JobSpec, guaranteed: JobSpec, wall_s: float) -> None:
        """Note that `guest`, an opportunistic job, harmed `guaranteed` on a GPU."""
        harmed = dict(self.pairs.get(model_of(guest), {}))
        _newest(harmed, model_of(guaranteed), wall_s, HARMED_MAX)
        _newest(self.pairs, model_of(guest), harmed, PAIRS_MAX)

    def time_passed(self, wall_s: float) -> None:
        """Forget pairs of long ago."""
        if self.pairs:
            left = {guest: _since(harmed, wall_s - PAIR_S) for guest, harmed in self.pairs.items()}
            self.pairs = {guest: harmed for guest, harmed in left.items() if harmed}

    def harmed_by(self, guest: JobSpec) -> Mapping[str, float]:
        """Models beside which this job must not be, and when it last harmed each."""
        return self.pairs.get(model_of(guest), {})

    def skew(self, spec: JobSpec, seen: tuple[int, int] = (0, 0)) -> float | None:
        """The skew that the job states, or that was seen of it, or of the last one of its name; None: nothing yet."""
        largest, total = seen if seen[1] else self.tensors.get(model_of(spec), (0, 0))
        return spec.skew or (share(largest, total) if total else None)

    def shown_skew(self, spec: JobSpec, seen: tuple[int, int] = (0, 0)) -> float | None:
        """The skew that placement goes by: None until tensors were seen, and such a gang ran on one host and on
        several."""
        known = self.steps.get(gang_of(spec))
        was_seen = seen[1] or model_of(spec) in self.tensors
        return shown(self.skew(spec, seen), known.slowdown) if known is not None and was_seen else None

    def spread_loss(self, spec: JobSpec, seen: tuple[int, int], packlimit: float) -> float:
        """The part of a step that such a gang loses when it is spread (`packing.loss`)."""
        known = self.steps.get(gang_of(spec), StepHistory())
        return loss(self.skew(spec, seen), known.slowdown, packlimit)

    def packlimit(self, now: float) -> float:
        """PACKLIMIT as fitted to what gangs lost; `now`, the one that was set, as long as nothing separates better."""
        if self._spreads is None:
            self._spreads = [
                SpreadLoss(share(*self.tensors[gang.rsplit("/", 1)[0]]), steps.slowdown)
                for gang, steps in self.steps.items()
                if steps.slowdown is not None and gang.rsplit("/", 1)[0] in self.tensors
            ]
        return refit(self._spreads, now)


def model_of(spec: JobSpec) -> str:
    return f"{spec.tenant}/{spec.name}"


def gang_of(spec: JobSpec) -> str:
    return f"{model_of(spec)}/{spec.workers}x{spec.gpus_per_worker}"


def _since(times: Mapping[str, float], wall_s: float) -> dict[str, float]:
    return {name: at for name, at in times.items() if at > wall_s}


def _newest(known: dict[str, T], name: str, value: T, most: int) -> None:
    known.pop(name, None)
    known[name] = value
    while len(known) > most:
        del known[next(iter(known))]
