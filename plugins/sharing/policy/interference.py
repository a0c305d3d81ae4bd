"""Is the guaranteed job slower than alone, and how certain is that?

The measure is the duration of a mini-batch (AntMan §2.3: mini-batches repeat the same work, so their rate says how a
job fares). One mini-batch proves nothing: it varies by itself. So durations are collected, and a decision waits until
the measured slowdown, give or take its error, lies on one side of the tolerance. AntMan calls any difference under 10
ms zero (§5.3), which hides a doubling of a 10 ms mini-batch; Covey compares relative to the job's own duration.
"""

import math

import msgspec

TOLERANCE = 0.05
"""How much slower a guaranteed job may get, as a share of its own mini-batch duration. AntMan promises consistency with
running alone (§3.2) and names no number; 5 % is ours."""
CONFIDENCE = 1.3
"""The number of standard errors on either side of a measured slowdown before it is believed: 90 % one-sided."""
STEPS_MIN = 6
"""The number of mini-batches before anything is concluded."""
STEPS_SETTLING = 32
"""The number of mini-batches of a job that just started that are compared with one another; then the next ones are. The
first one of a script of 1 ms takes half a second: compared with it, none would ever be even."""
STEPS_SETTLING_MAX = 512
"""The number of mini-batches after which a job that is still uneven is taken as it is: a baseline knows its own
error."""
STEPS_BASELINE = 32
"""The least number of mini-batches of a baseline: its error is in every later comparison. With 24, and a baseline known
only half as well, single runs of the sharing experiment were up to 5.5 % slower."""
STEPS_BASELINE_MAX = 64
"""The number of mini-batches at which a baseline ends even when the job is so noisy that it is still uncertain: the
others are stopped meanwhile."""
STEPS_WINDOW_MAX = 256
"""The number of mini-batches at which a window ends even when nothing can be concluded."""
CLIP = 4.0
"""A mini-batch longer than this many baselines counts as this many: a checkpoint is no interference."""
STEPS_POOLED_MAX = 512
"""The most mini-batches that an old baseline counts as when a new measurement confirms it."""


class StepSamples(msgspec.Struct, frozen=True):
    """Durations of mini-batches, summed up: how many, their mean (s), their sum of squared deviations (s²)."""

    count: int = 0
    mean_s: float = 0.0
    squares: float = 0.0

    def plus(self, step_s: float) -> "StepSamples":
        """The samples with one more mini-batch (Welford's update, which does not lose digits)."""
        count = self.count + 1
        mean_s = self.mean_s + (step_s - self.mean_s) / count
        return StepSamples(count, mean_s, self.squares + (step_s - self.mean_s) * (step_s - mean_s))

    def joined(self, other: "StepSamples") -> "StepSamples":
        """Both samples together, as if they had been collected at once; never heavier than `STEPS_POOLED_MAX`."""
        count = self.count + other.count
        if count == 0:
            return self
        between = other.mean_s - self.mean_s
        both = StepSamples(
            count,
            self.mean_s + between * other.count / count,
            self.squares + other.squares + between * between * self.count * other.count / count,
        )
        if count <= STEPS_POOLED_MAX:
            return both
        return StepSamples(STEPS_POOLED_MAX, both.mean_s, both.squares * STEPS_POOLED_MAX / count)

    @property
    def error_s(self) -> float:
        """Standard error of the mean, s; infinite while there are fewer than two."""
        if self.count < 2:
            return math.inf
        return math.sqrt(self.squares / (self.count - 1) / self.count)

    @property
    def variation(self) -> float:
        """Coefficient of variation of single mini-batches; infinite while unknown."""
        if self.count < 2 or self.mean_s <= 0:
            return math.inf
        return math.sqrt(self.squares / (self.count - 1)) / self.mean_s


class Slowdown(msgspec.Struct, frozen=True):
    """Measured slowdown as a share of the baseline (0.05: 5 % slower, negative: faster), and its standard error."""

    excess: float
    error: float

    @property
    def least(self) -> float:
        """The least slowdown, at the confidence used here."""
        return self.excess - CONFIDENCE * self.error

    @property
    def most(self) -> float:
        """The most slowdown, at the confidence used here."""
        return self.excess + CONFIDENCE * self.error

    def __str__(self) -> str:
        return f"{100 * self.excess:+.1f} % ± {100 * CONFIDENCE * self.error:.1f}"


def slowdown(baseline: StepSamples, window: StepSamples) -> Slowdown:
    """How much slower than its baseline the job runs; both errors count. Infinitely uncertain without a baseline."""
    if baseline.mean_s <= 0:
        return Slowdown(0.0, math.inf)
    error = math.hypot(baseline.error_s, window.error_s) / baseline.mean_s
    return Slowdown(window.mean_s / baseline.mean_s - 1, error)


def clipped(baseline: StepSamples, step_s: float) -> float:
    """The duration that counts, s: a single long mini-batch (a checkpoint, an evaluation) does not drown the rest."""
    return step_s if baseline.count == 0 else min(step_s, CLIP * baseline.mean_s)


def is_precise(baseline: StepSamples, tolerance: float = TOLERANCE) -> bool:
    """Whether this suffices for a baseline: known to a twentieth of the tolerance, or measured for the longest time
    allowed."""
    if baseline.count < STEPS_BASELINE:
        return False
    return baseline.count >= STEPS_BASELINE_MAX or baseline.error_s < tolerance / 20 * baseline.mean_s


def is_known(baseline: StepSamples, tolerance: float = TOLERANCE) -> bool:
    """Whether this baseline is known to a third of the tolerance. Without that no busy time should be shared: in idle
    phases an opportunistic job can do little harm, whatever is measured."""
    return baseline.error_s < tolerance / 3 * baseline.mean_s


def is_look(count: int) -> bool:
    """Whether a window of this many mini-batches is looked at: at counts that grow by half, since whoever looks after
    each one and stops at the first extreme believes too much."""
    look = STEPS_MIN
    while look < count:
        look = look * 3 // 2
    return look == count


def is_stable(steps: StepSamples) -> bool:
    """Whether a job that just started runs steadily: ten mini-batches that differ by less than a fifth."""
    return steps.count >= 10 and steps.variation < 0.2
