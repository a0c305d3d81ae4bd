"""Decide what a mini-batch is when the script does not report it. Pure: times and identities are arguments.

    the first optimizer of a period steps again   -> a step ended      (boundary "optimizer")
    no optimizer ever stepped, a jitted function was called again      (boundary "jitted call": `jitted.py` says which)
    neither of both, batches are fetched with gradients on             (boundary "data loader")

A script may step several optimizers per mini-batch (two networks, or one optimizer per parameter): only the one that
stepped first counts. When that one is silent while another steps three times, the other takes its place. A loss scaler
that skips an update has still computed a mini-batch. Gradient accumulation needs no rule: an optimizer that steps after
every fourth batch ends a step then.
"""

from dataclasses import dataclass, field

OPTIMIZER, JITTED_CALL, DATA_LOADER = "optimizer", "jitted call", "data loader"
BATCHES_ENOUGH = 8
"""Number of batches fetched without an optimizer before they count as steps: an optimizer may be made late."""
REPLACED_AFTER = 3
"""Number of steps of another optimizer, without one of the first, after which the other counts."""


@dataclass
class Step:
    """One mini-batch that ended; times in seconds."""

    number: int
    step_s: float
    """Duration; 0 when not known, since its beginning was not seen."""
    input_s: float
    """Part of `step_s` spent waiting for the data loader."""
    boundary: str
    device_s: float = 0.0
    """Part of `step_s` spent waiting for the device."""
    ended_s: float = 0.0
    """Time of its end (CLOCK_MONOTONIC)."""


@dataclass
class StepCounter:
    boundary: str = ""
    """The event by which the newest step was counted; empty: there was no step."""
    count: int = 0
    _first: int | None = None
    """Identity of the optimizer that counts."""
    _others: dict[int, int] = field(default_factory=dict)
    """Number of steps of the other optimizers since it stepped."""
    _batches: int = 0
    _input_s: float = 0.0
    _device_s: float = 0.0
    _since_s: float | None = None
    """Time at which the step under way began."""

    def optimizer_stepped(self, optimizer: int, now_s: float) -> Step | None:
        """An optimizer stepped. `optimizer` is an identity that is not used again while the optimizer lives."""
        if self._first is None:
            self._first = optimizer
        if optimizer != self._first:
            self._others[optimizer] = self._others.get(optimizer, 0) + 1
            if self._others[optimizer] < REPLACED_AFTER:
                return None
            self._first = optimizer
        self._others.clear()
        return self._end(OPTIMIZER, now_s)

    def optimizer_gone(self, optimizer: int) -> None:
        """The optimizer was collected: its identity may be used again."""
        self._others.pop(optimizer, None)
        if self._first == optimizer:
            self._first = None

    def jit_called(self, count: int, now_s: float) -> Step | None:
        """The training step was called for the `count`-th time, and may still be at work on the device."""
        if self.boundary == OPTIMIZER:
            return None
        if self.boundary != JITTED_CALL:
            self.count = max(self.count, count - 1)
        return self._end(JITTED_CALL, now_s)

    def device_waited(self, waited_s: float) -> None:
        """The script waited `waited_s` seconds for what it had computed."""
        self._device_s += max(0.0, waited_s)

    def batch_fetched(self, waited_s: float, with_gradients: bool, now_s: float) -> Step | None:
        """The script waited `waited_s` seconds for its next batch. An evaluation fetches batches without gradients."""
        ended = None
        if self.boundary in ("", DATA_LOADER) and self._first is None and with_gradients:
            self._batches += 1
            if self._batches > BATCHES_ENOUGH:
                ended = self._end(DATA_LOADER, now_s - waited_s)
            elif self._batches == BATCHES_ENOUGH:
                self._since_s, self._input_s = now_s - waited_s, 0.0
        if self._since_s is None:
            self._since_s = now_s - waited_s
        self._input_s += max(0.0, waited_s)
        return ended

    def _end(self, boundary: str, now_s: float) -> Step:
        step_s = max(0.0, now_s - self._since_s) if self._since_s is not None else 0.0
        input_s, device_s = min(self._input_s, step_s), min(self._device_s, step_s)
        ended = Step(self.count, step_s, input_s, boundary, device_s, now_s)
        self.count += 1
        self.boundary, self._since_s, self._input_s, self._device_s = boundary, now_s, 0.0, 0.0
        return ended
