"""The steps that a script reports to its agent: numbers and times, counted here unless the script gives them."""

import time
from collections.abc import Callable, Mapping

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
        self.by_state = False
        """Whether `JobState` ends the steps, and what the script tells adds to the one under way."""
        self._added: ToldStep | None = None
        """What the script told of the step under way, which something else ends and counts."""
        self._seen: ToldStep | None = None
        """The newest step that hooks saw, where something else ends and counts steps."""

    def sees(self, seen: ToldStep) -> None:
        """Keep what hooks see, where the script or `JobState` tells the steps: which part of a step is a wait, and how
        much memory there is, counts for each step of which nothing else is told. Hooks tell of some steps only, and may
        take another piece of the script for one."""
        self._seen = seen if seen.step_s else self._seen

    def _with_seen(self, told: ToldStep, took_s: float, talked_s: float) -> ToldStep:
        """The step as told, with what hooks saw and nobody told. `talked_s`: seconds inside `tensors`, which are known
        better than hooks do."""
        seen = self._seen
        if seen is None or not seen.step_s or told.boundary != "script":
            return told
        part = took_s / seen.step_s
        return msgspec.structs.replace(
            told,
            input_s=told.input_s or seen.input_s * part,
            memory_bytes=told.memory_bytes or seen.memory_bytes,
            communicate_s=(seen.communicate_s or 0.0) * part
            if told.communicate_s is None and not talked_s
            else told.communicate_s,
        )

    def newest_step(self) -> int | None:
        """The number of the newest step; None when there was none."""
        return self._step - 1 if self._step else None

    def add(self, told: ToldStep) -> None:
        """Keep what the script tells of the step under way, until `stepped`."""
        self._added = told if self._added is None else _together(self._added, told)

    def tell_left(self, tell: Callable[[ToldStep], None]) -> None:
        """Tell what was added after the newest step ended, as that step's, if anything was."""
        step = self.newest_step()
        if self._added is not None and step is not None:
            tell(msgspec.structs.replace(of_state(step), step_s=0.0))

    def stepped(self, told: ToldStep, communicated_s: float, turns: TurnsSpent = NO_TURNS) -> Stepped:
        """The frame for a step that ends now. `communicated_s`: seconds inside `tensors` so far, all steps together;
        `turns`: seconds in turns so far. Hooks tell of some steps only: each since the last one counts as alike."""
        now_s = time.monotonic()
        if self._added is not None:
            told, self._added = msgspec.structs.replace(_together(self._added, told), step=told.step), None
        number = self._step if told.step is None else int(told.step)
        took_s = now_s - self._stepped_at_s if told.step_s is None else float(told.step_s)
        steps = 1 if told.boundary == "script" else max(1, number - self._step + 1)
        talked_s = (communicated_s - self._communicated_s) / steps
        told = self._with_seen(told, took_s, talked_s)
        if told.communicate_s is not None:
            talked_s = float(told.communicate_s)
        sent_s, turned_s, added_s = ((now - before) / steps for now, before in zip(turns, self._turns, strict=True))
        input_s = max(0.0, min(float(told.input_s), took_s))
        talked_s = max(0.0, min(talked_s, took_s - input_s))  # more was between steps, as an evaluation is
        left_s = max(0.0, took_s - talked_s - input_s - turned_s)
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
            input_s=input_s,
            sending_s=sent_s,
            turns_s=turned_s,
            added_s=added_s,
            memory_bytes=int(told.memory_bytes),
            boundary=told.boundary,
        )


def of_state(step: int) -> ToldStep:
    """The report of a step that a `JobState` ended."""
    return ToldStep(step, None, None, None, 0.0, 0, {}, "script")


def _together(one: ToldStep, other: ToldStep) -> ToldStep:
    """Two reports of one step: of what both say the later one counts, and waits for input add up."""
    return msgspec.structs.replace(
        other,
        step_s=one.step_s if other.step_s is None else other.step_s,
        compute_s=one.compute_s if other.compute_s is None else other.compute_s,
        communicate_s=one.communicate_s if other.communicate_s is None else other.communicate_s,
        input_s=one.input_s + other.input_s,
        memory_bytes=max(one.memory_bytes, other.memory_bytes),
        metrics={**one.metrics, **other.metrics},
    )
