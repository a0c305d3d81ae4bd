"""The steps that a script reports to its agent: numbers and times, counted here unless the script gives them."""

import time
from collections.abc import Mapping

import msgspec

from covey.tensors.turns.spent import NO_TURNS, TurnsSpent
from covey.wire.job import Stepped


class ToldStep(msgspec.Struct, frozen=True):
    """What a script, or `covey.hooks`, reports of one mini-batch; times in seconds, None: not given."""

    step: int | None
    step_s: float | None
    compute_s: float | None
    communicate_s: float | None
    input_s: float
    memory_bytes: int
    metrics: Mapping[str, float]
    boundary: str


class StepClock:
    """Measures steps from its creation on, and numbers them from 0."""

    def __init__(self) -> None:
        self._step, self._stepped_at_s, self._communicated_s = 0, time.monotonic(), 0.0
        self._turns = NO_TURNS

    def newest_step(self) -> int | None:
        """The number of the newest step; None when there was none."""
        return self._step - 1 if self._step else None

    def stepped(self, told: ToldStep, communicated_s: float, turns: TurnsSpent = NO_TURNS) -> Stepped:
        """The frame for a step that ends now. `communicated_s`: seconds inside `tensors` so far, all steps together;
        `turns`: seconds in turns so far. Hooks tell of some steps only: each since the last one counts as alike."""
        now_s = time.monotonic()
        number = self._step if told.step is None else int(told.step)
        took_s = now_s - self._stepped_at_s if told.step_s is None else float(told.step_s)
        steps = 1 if told.boundary == "script" else max(1, number - self._step + 1)
        talked_s = (communicated_s - self._communicated_s) / steps
        if told.communicate_s is not None:
            talked_s = float(told.communicate_s)
        sent_s, turned_s, added_s = ((now - before) / steps for now, before in zip(turns, self._turns, strict=True))
        left_s = max(0.0, took_s - talked_s - told.input_s - turned_s)
        computed_s = left_s if told.compute_s is None else float(told.compute_s)
        self._step, self._stepped_at_s, self._communicated_s = number + 1, now_s, communicated_s
        self._turns = turns
        shown = {name: float(value) for name, value in told.metrics.items()}
        return Stepped(
            number,
            took_s,
            computed_s,
            talked_s,
            shown,
            input_s=float(told.input_s),
            sending_s=sent_s,
            turns_s=turned_s,
            added_s=added_s,
            memory_bytes=int(told.memory_bytes),
            boundary=told.boundary,
        )
